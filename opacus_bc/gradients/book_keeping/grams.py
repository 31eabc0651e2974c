"""Gram matrices, squared norms of products B Aᵀ from them, and how far rounding can take these down."""

from __future__ import annotations

import torch
from torch import Tensor

from opacus_bc.gradients.book_keeping.sums import LONG, short_products, units_of_sums

# Of a product of two entries, and of the few Gram matrices that a convolution adds along its kernel.
_FURTHER_UNITS = 8.0
_PRODUCTS = 2.0**14  # in one sum; each may be smaller than the smallest float and vanish


def gram(columns: Tensor) -> Tensor:
    """The inner products of all pairs of columns, matrix by matrix."""
    return short_products(columns, columns)


def gram_squares(a: Tensor, b: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Squared norms of B Aᵀ from AᵀA and BᵀB, a row's groups one after the other.

    Returns:
        The squares, and the squares of ``sum_t |a_t| |b_t|``: the terms are signed and may cancel, and this
        is at least the sum of their absolute values. Columns count as no shorter than what vanishes beside
        a rounding: the product of a huge and a tiny column need not be small.
    """
    values = (a * b).sum((1, 2), dtype=torch.float64)
    lengths = (_diagonal(a) * _diagonal(b)).sqrt().sum(1).square()
    return values.view(rows, -1).sum(1), lengths.view(rows, -1).sum(1)


def _diagonal(grams: Tensor) -> Tensor:
    limits = torch.finfo(grams.dtype)
    least = _PRODUCTS * limits.smallest_normal / limits.eps
    return grams.diagonal(dim1=1, dim2=2).double().clamp(min=0.0) + least


def margin_units(left: int, right: int) -> float:
    """By how many eps of ``sum_t |a_t| |b_t|``, squared, a squared norm may be off: columns of so many rows.

    >>> margin_units(33, 40), margin_units(512, 512)
    (48.5, 268.0)
    """
    return units_of_sums(left, LONG) + units_of_sums(right, LONG) + _FURTHER_UNITS
