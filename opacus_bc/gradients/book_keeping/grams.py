"""Gram matrices, squared norms of products B Aᵀ from them, and how far rounding can take these down."""

from __future__ import annotations

import torch
from torch import Tensor

# Entries of Gram matrices are float32 sums of products. Relative to the lengths of the two columns they are
# off by a few units in the last place (measured and tested); this many are allowed for.
_UNITS = 32.0


def gram(columns: Tensor) -> Tensor:
    """The inner products of all pairs of columns, matrix by matrix."""
    return torch.bmm(columns.transpose(1, 2), columns)


def gram_squares(a: Tensor, b: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Squared norms of B Aᵀ from AᵀA and BᵀB, a row's groups one after the other.

    Returns:
        The squares, and the squares of ``sum_t |a_t| |b_t|``: the terms are signed and may cancel, and this
        is at least the sum of their absolute values.
    """
    values = (a * b).sum((1, 2), dtype=torch.float64)
    lengths = (_diagonal(a) * _diagonal(b)).sqrt().sum(1).square()
    return values.view(rows, -1).sum(1), lengths.view(rows, -1).sum(1)


def _diagonal(grams: Tensor) -> Tensor:
    return grams.diagonal(dim1=1, dim2=2).double().clamp(min=0.0)


def margin(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """By how much a squared norm may be too small whose terms' absolute values add up to ``lengths``."""
    return _UNITS * torch.finfo(dtype).eps * lengths
