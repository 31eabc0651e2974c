"""Norms of units that have several rows: the views of a sample, or the samples of a user.

The vector of a unit is the sum of its rows' gradients (their mean, up to a factor). Its norm has cross terms
between the rows, so a unit is looked at as one sample with the positions of all its rows. The weighted sum
needs nothing new: every row has its unit's weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from opacus_bc.gradients.book_keeping.products import (
    ConvolutionProduct,
    Entry,
    LinearProduct,
    Product,
    Rows,
    Term,
    WithTerms,
    with_terms,
)
from opacus_bc.gradients.book_keeping.sums import SHORT, units_of_sums
from opacus_bc.mechanism.clipping import row_norms
from opacus_bc.mechanism.segments import owners, segment_sums

_PIECE = 2**22  # floats that are laid out anew at once
_KEEP = 4  # a unit's weight gradient is instantiated if it has at most so many times positions² entries


def unit_norms(entry: Entry, counts: Sequence[int]) -> Tensor:
    """The norm of every unit's sum of gradients, in float64.

    **Formal guarantee**: no norm is too small: neither for the sum of the unit's rows nor for what
    ``weighted_sum`` makes of it, which adds the rows in another order. Where a unit's rows cancel, what
    rounding can leave of them counts.

    Args:
        entry: Every row's gradient; the rows of a unit stand one after the other.
        counts: How many rows each unit has.
    """
    product, terms = (entry.product, entry.terms) if isinstance(entry, WithTerms) else (entry, ())
    if isinstance(product, (LinearProduct, ConvolutionProduct)):
        return _product_norms(product, terms, counts)
    rows = entry.rows()
    return row_norms(_sums(rows, counts)) + _rounding(row_norms(rows), rows.dtype, counts)


def summable(entry: Entry) -> Entry:
    """The entry with sums that :func:`unit_norms` knows the rounding of, however many rows a unit has.

    Where it would take norms of other numbers than the entry adds up, these are the entry's rows.
    """
    if isinstance(entry, WithTerms) and isinstance(entry.product, (LinearProduct, ConvolutionProduct)):
        return replace(entry, product=replace(entry.product, short=True))
    if isinstance(entry, (LinearProduct, ConvolutionProduct)):
        return replace(entry, short=True)
    return entry if isinstance(entry, Rows) else Rows(entry.rows())


def _rounding(lengths: Tensor, dtype: torch.dtype, counts: Sequence[int]) -> Tensor:
    """What rounding may make of a unit's terms of these lengths, in :func:`_sums` and in the weighted sum."""
    units = torch.tensor([2 * units_of_sums(count, SHORT) for count in counts], dtype=torch.float64)
    return units.to(lengths.device) * torch.finfo(dtype).eps * segment_sums(lengths.double(), counts)


def _sums(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Every unit's sum of its rows; of many in float64."""
    if max(counts, default=0) <= SHORT or rows.dtype == torch.float64:
        return segment_sums(rows, counts)
    return torch.stack([part.sum(0, dtype=torch.float64) for part in torch.split(rows, list(counts))])


def _product_norms(
    product: LinearProduct | ConvolutionProduct, terms: Sequence[Term], counts: Sequence[int]
) -> Tensor:
    floats = max(1, product.grads[:1].numel() + product.inputs[:1].numel() * _windows(product))
    found = [torch.zeros(0, dtype=torch.float64, device=product.grads.device)]
    for units, rows in _pieces(counts, floats):
        part = replace(product, inputs=product.inputs[rows], grads=product.grads[rows])
        few = counts[units]
        kept = [Term(term.factors[rows], term.direction) for term in terms]
        whole = [Term(_sums(term.factors, few).to(term.factors.dtype), term.direction) for term in kept]
        norms = _part_norms(part, tuple(whole), few)
        for term in kept:
            norms += _rounding(term.inner(term).sqrt(), product.grads.dtype, few)
        found.append(norms)
    return torch.cat(found)


def _part_norms(
    product: LinearProduct | ConvolutionProduct, terms: tuple[Term, ...], counts: Sequence[int]
) -> Tensor:
    if isinstance(product, ConvolutionProduct) and product.convolution.groups > 1:
        sums = with_terms(_sums(product.rows(), counts), terms)
        return row_norms(sums) + _rounding(_grouped_lengths(product), product.grads.dtype, counts)
    joined = _joined(product, counts)
    positions = joined.inputs.shape[1]
    if positions == 1 or math.prod(joined.shape) > _KEEP * positions**2:
        whole: Product | WithTerms = WithTerms(joined, terms) if terms else joined
        return whole.norms()
    lengths = _norms_of_last(joined.inputs) * _norms_of_last(joined.grads)
    rounding = 2 * joined.rounding * torch.finfo(joined.grads.dtype).eps * lengths.sum(1)
    return row_norms(with_terms(joined.rows(), terms)) + rounding


def _joined(product: LinearProduct | ConvolutionProduct, counts: Sequence[int]) -> LinearProduct:
    """Units as samples of a linear layer, with the positions of all their rows; missing rows are zeros."""
    if isinstance(product, LinearProduct):
        return LinearProduct(
            _side_by_side(product.inputs, counts), _side_by_side(product.grads, counts), product.shape, True
        )
    shape, out = product.convolution, product.grads.shape[2:]
    windows = shape.windows(shape.padded(product.inputs), out)
    inputs = windows.reshape(len(product.inputs), product.weight[0].numel(), -1)
    grads = product.grads.flatten(2)
    return LinearProduct(
        _side_by_side(inputs.transpose(1, 2), counts),
        _side_by_side(grads.transpose(1, 2), counts),
        product.weight.shape,
        True,
    )


def _side_by_side(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """From (rows, positions, entries) to (units, most rows of a unit times positions, entries)."""
    most = max(counts)
    if min(counts) == most:
        return rows.reshape(len(counts), most * rows.shape[1], rows.shape[2])
    owner = owners(counts, rows.device)
    starts = torch.tensor([0, *counts[:-1]], device=rows.device).cumsum(0)
    place = torch.arange(len(rows), device=rows.device) - starts[owner]
    laid = rows.new_zeros((len(counts), most, *rows.shape[1:]))
    laid[owner, place] = rows
    return laid.flatten(1, 2)


def _norms_of_last(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values.double(), dim=-1)
    return norms


def _grouped_lengths(product: ConvolutionProduct) -> Tensor:
    """For every row the sum of the lengths of the terms that its weight gradient is made of."""
    shape, out, rows = product.convolution, product.grads.shape[2:], len(product.inputs)
    windows = shape.windows(shape.padded(product.inputs), out)
    inputs = windows.reshape(rows, shape.groups, product.weight[0].numel(), -1).transpose(2, 3)
    grads = product.grads.reshape(rows, shape.groups, -1, math.prod(out)).transpose(2, 3)
    return (_norms_of_last(inputs) * _norms_of_last(grads)).sum((1, 2))


def _windows(product: LinearProduct | ConvolutionProduct) -> int:
    """How often an input is copied when windows are laid out."""
    return 1 if isinstance(product, LinearProduct) else math.prod(product.convolution.kernel)


def _pieces(counts: Sequence[int], floats: int) -> Iterator[tuple[slice, slice]]:
    """Units and their rows in pieces of about ``_PIECE`` floats; a piece is padded to its largest unit."""
    unit = row = 0
    while unit < len(counts):
        end, most = unit, 0
        while end < len(counts):
            most = max(most, counts[end])
            if end > unit and (end + 1 - unit) * most * floats > _PIECE:
                break
            end += 1
        rows = sum(counts[unit:end])
        yield slice(unit, end), slice(row, row + rows)
        unit, row = end, row + rows
