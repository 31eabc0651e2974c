"""Clipping in float32, whatever precision a training loop has chosen for its own arithmetic.

Norms and clipped sums are products of matrices. Autocast computes these in half precision, and so do graphics
cards in TF32, which is torch's default for convolutions there: a sum of 600 clipped vectors is then rounded
to multiples of 4 C, and one sample more moves it by 4 C.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")
_BACKENDS = ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")


@contextmanager
def no_autocast() -> Iterator[None]:
    """While it is open, autocast is off on every device."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """While it is open, products of float32 are products of float32: no autocast, no TF32, no bfloat16.

    **Formal guarantee**: the loop's own settings are as they were afterwards.
    """
    with no_autocast(), ExitStack() as stack:
        for holder, name, exact in _settings():
            before = getattr(holder, name)
            if before != exact:
                stack.callback(setattr, holder, name, before)
                setattr(holder, name, exact)
        yield


def _settings() -> Iterator[tuple[Any, str, object]]:
    """What decides on the precision of float32 products: the holder, its attribute and the exact value."""
    backends: Any = torch.backends
    for path in _BACKENDS:
        room, part = path.split(".")
        holder = getattr(getattr(backends, room), part, None)
        if hasattr(holder, "fp32_precision"):  # since torch 2.9
            yield holder, "fp32_precision", "ieee"
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        yield backends.cuda.matmul, "allow_tf32", False
        yield backends.cudnn, "allow_tf32", False
