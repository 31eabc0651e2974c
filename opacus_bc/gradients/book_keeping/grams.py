"""Gram matrices, squared norms of products B Aᵀ from them, and how far rounding can take these down."""

from __future__ import annotations

import torch
from torch import Tensor

from opacus_bc.gradients.book_keeping.sums import SHORT, short_products

# Relative to the lengths of the two columns, entries of a Gram matrix are off by 34 eps at most: float32 sums
# of SHORT products, and two roundings. A convolution adds such matrices along each dimension of its kernel.
# Both matrices, their product and its sums along rows, which torch adds in a tree, stay within this many.
_UNITS = 112.0
_PRODUCTS = 2.0**14  # in one sum; each may be smaller than the smallest float and vanish


def gram(columns: Tensor) -> Tensor:
    """The inner products of all pairs of columns, matrix by matrix."""
    return short_products(columns, columns, length=SHORT)


def gram_squares(a: Tensor, b: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Squared norms of B Aᵀ from AᵀA and BᵀB, a row's groups one after the other.

    Returns:
        The squares, and the squares of ``sum_t |a_t| |b_t|``: the terms are signed and may cancel, and this
        is at least the sum of their absolute values. Columns count as no shorter than what vanishes beside
        a rounding: the product of a huge and a tiny column need not be small.
    """
    values = (a * b).sum(2).sum(1, dtype=torch.float64)  # float32 sums of a row are within the margin
    lengths = (_diagonal(a) * _diagonal(b)).sqrt().sum(1).square()
    return values.view(rows, -1).sum(1), lengths.view(rows, -1).sum(1)


def _diagonal(grams: Tensor) -> Tensor:
    limits = torch.finfo(grams.dtype)
    least = _PRODUCTS * limits.smallest_normal / limits.eps
    return grams.diagonal(dim1=1, dim2=2).double().clamp(min=0.0) + least


def margin(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """By how much a squared norm may be too small whose terms' absolute values add up to ``lengths``."""
    return _UNITS * torch.finfo(dtype).eps * lengths
