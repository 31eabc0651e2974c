"""Clipping in float32, whatever precision a training loop has chosen for its own arithmetic.

Norms and clipped sums are products of matrices. Autocast computes these in half precision, and so do graphics
cards in TF32, which is torch's default for convolutions there: a sum of 600 clipped vectors is then rounded
to multiples of 4 C, and one sample more moves it by 4 C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

Answer = TypeVar("Answer")
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def without_autocast(function: Callable[..., Answer], *args: Any) -> Answer:
    """Call ``function`` with autocast off on every device."""
    if not torch._C._is_any_autocast_enabled():
        return function(*args)
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return function(*args)


def in_full_precision(function: Callable[..., Answer], *args: Any) -> Answer:
    """Call ``function`` so that products of float32 are products of float32: no autocast, TF32 or bfloat16.

    **Formal guarantee**: the loop's own settings are as they were afterwards.
    """
    coarse = [setting for setting in settings() if getattr(*setting[:2]) not in setting[2]]
    if not coarse:
        return without_autocast(function, *args)
    with ExitStack() as stack:
        for holder, name, exact in coarse:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, exact[0])
        return without_autocast(function, *args)


def settings() -> Iterator[tuple[Any, str, tuple[object, ...]]]:
    """What decides on the precision of float32 products: the holder, its attribute and the exact values."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        yield backends.cuda.matmul, "allow_tf32", (False,)  # bfloat16 on the CPU too
        yield backends.cudnn, "allow_tf32", (False,)
        return
    for part in (backends.mkldnn.matmul, backends.mkldnn.conv):
        yield part, "fp32_precision", ("ieee", "none")  # "none": nobody has asked for less
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        for part in (backends.cuda.matmul, backends.cudnn.conv):
            yield part, "fp32_precision", ("ieee",)
