"""Gram matrices, and squared norms of products B Aᵀ from them: never too small."""

from __future__ import annotations

import torch
from torch import Tensor

# Entries of Gram matrices are float32 sums of products. Relative to the lengths of the two columns they are
# off by a few units in the last place (measured and tested); this many are allowed for.
_UNITS = 32.0


def gram(columns: Tensor) -> Tensor:
    """The inner products of all pairs of columns, matrix by matrix."""
    return torch.bmm(columns.transpose(1, 2), columns)


def gram_norms(a: Tensor, b: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Squared norms of B Aᵀ from AᵀA and BᵀB (a row's groups one after the other), and their margins.

    **Formal guarantee**: value + margin is at least the exact squared norm. The terms are signed and may
    cancel; the margin is ``_UNITS`` roundings of ``(sum_t |a_t| |b_t|)²``, which is at least the sum of their
    absolute values.
    """
    values = (a * b).sum((1, 2), dtype=torch.float64)
    lengths = (_squares(a) * _squares(b)).sqrt().sum(1)
    margins = _UNITS * torch.finfo(a.dtype).eps * lengths.square()
    return values.view(rows, -1).sum(1), margins.view(rows, -1).sum(1)


def _squares(grams: Tensor) -> Tensor:
    return grams.diagonal(dim1=1, dim2=2).double().clamp(min=0.0)
