"""Fingerprints of nested values: of checkpoints, and of public data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def fingerprint(value: Any) -> str:
    """SHA-256 of nested mappings, sequences, tensors, arrays and plain values.

    >>> fingerprint({"a": torch.zeros(2)}) == fingerprint({"a": torch.zeros(2)})
    True
    >>> fingerprint({"a": torch.zeros(2)}) == fingerprint({"a": torch.zeros(2, 1)})
    False
    """
    digest = hashlib.sha256()
    feed(digest.update, value)
    return digest.hexdigest()


def feed(update: Callable[[Any], None], value: Any) -> None:
    """Give a nested value to a hash function, types and lengths included, so that no two share a stream."""
    if isinstance(value, Tensor):
        update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        update(f"array {value.dtype} {value.shape} ".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        update(f"mapping {len(value)} ".encode())
        for key, entry in value.items():
            feed(update, key)
            feed(update, entry)
    elif isinstance(value, (list, tuple)):
        update(f"{'list' if isinstance(value, list) else 'tuple'} {len(value)} ".encode())
        for entry in value:
            feed(update, entry)
    elif isinstance(value, (set, frozenset)):
        feed(update, sorted(value, key=repr))
    elif hasattr(value, "tobytes"):  # PIL images, numpy scalars
        update(f"{type(value).__name__} ".encode() + value.tobytes())
    else:
        update(f"{type(value).__name__} {value!r} ".encode())
