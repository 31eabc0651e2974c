"""Norms of units with several rows: exact, with cross terms, and never too small where the rows cancel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opacus_bc.gradients.book_keeping import units
from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.products import (
    ConvolutionProduct,
    Entry,
    LinearProduct,
    Rows,
    Term,
    WithTerms,
)
from opacus_bc.mechanism.clipping import _NORM_MARGIN

COUNTS = ([1, 1, 1], [3, 3], [4, 1, 2], [1, 5], [6])
Make = Callable[[torch.Generator, int], Entry]


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def linear(generator: torch.Generator, rows: int, positions: int, size: int) -> LinearProduct:
    """A small weight is instantiated, a large one has Gram matrices."""
    inputs, grads = randn(generator, rows, positions, size), randn(generator, rows, positions, size + 1)
    return LinearProduct(inputs, grads, torch.Size((size + 1, size)))


def convolution(generator: torch.Generator, rows: int, channels: int, groups: int) -> ConvolutionProduct:
    shape = Convolution(kernel=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 1), groups=groups)
    x, weight = randn(generator, rows, channels, 5, 3), randn(generator, 2 * groups, channels // groups, 3, 2)
    return ConvolutionProduct(shape, x, randn(generator, rows, 2 * groups, 3, 2), weight)


def terms(
    product: LinearProduct | ConvolutionProduct, generator: torch.Generator, size: float = 1.0
) -> WithTerms:
    shape = product.rows().shape
    made = [Term(randn(generator, *shape[:2]), size * randn(generator, *shape[1:])) for _ in range(2)]
    return WithTerms(product, tuple(made))


ENTRIES: dict[str, Make] = {
    "rows": lambda g, n: Rows(randn(g, n, 5, 3)),
    "numbers": lambda g, n: Rows(randn(g, n)),
    "linear, one position": lambda g, n: linear(g, n, 1, 40),
    "linear, few positions": lambda g, n: linear(g, n, 3, 60),
    "linear, many positions": lambda g, n: linear(g, n, 9, 4),
    "convolution": lambda g, n: convolution(g, n, 4, 1),
    "wide convolution": lambda g, n: convolution(g, n, 400, 1),
    "grouped convolution": lambda g, n: convolution(g, n, 6, 3),
    "linear with terms": lambda g, n: terms(linear(g, n, 2, 40), g),
    "small linear with terms": lambda g, n: terms(linear(g, n, 9, 4), g),
    "linear with large terms": lambda g, n: terms(linear(g, n, 2, 40), g, 1e5),
    "small linear with large terms": lambda g, n: terms(linear(g, n, 9, 4), g, 1e5),
    "convolution with terms": lambda g, n: terms(convolution(g, n, 400, 1), g),
    "grouped convolution with terms": lambda g, n: terms(convolution(g, n, 6, 3), g),
}


def summed(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The oracle: rows of a unit added up, one by one, in float64."""
    return torch.stack([part.double().sum(0).flatten() for part in torch.split(rows, list(counts))])


@pytest.mark.parametrize("piece", [units._PIECE, 1], ids=["at once", "in pieces"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", ENTRIES)
def test_norms_of_units_are_those_of_the_sum_of_their_rows(name, counts, piece, monkeypatch):
    monkeypatch.setattr(units, "_PIECE", piece)
    entry = ENTRIES[name](torch.Generator().manual_seed(1), sum(counts))
    exact = summed(entry.rows(), counts).norm(dim=1)
    found = units.unit_norms(entry, counts)
    assert found.dtype == torch.float64
    # Norms carry their margin: of 400 channels and some positions it is this much.
    torch.testing.assert_close(found, exact, rtol=5e-3 if "large" in name else 3e-4, atol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    name=st.sampled_from(list(ENTRIES)),
    left=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2]),
    size=st.sampled_from([1e-3, 1.0, 1e6]),
)
def test_what_is_added_up_of_a_unit_whose_rows_cancel_stays_in_its_ball(seed, name, left, size):
    """The second half of a unit's rows takes back all of the first but for a fraction ``left``."""
    generator = torch.Generator().manual_seed(seed)
    entry = ENTRIES[name](generator, 6)
    factor = torch.tensor([1.0, 1.0, 1.0, left - 1.0, left - 1.0, left - 1.0]) * size
    entry = cancelled(entry, factor)
    norms = units.unit_norms(entry, [6])
    coefficient = min(1.0, (1 - _NORM_MARGIN) / float(norms[0]))
    added = entry.weighted_sum(torch.full((6,), coefficient, dtype=torch.float64))
    assert float(added.double().norm()) <= 1.0


def cancelled(entry: Entry, factor: Tensor) -> Entry:
    """The first half of the rows once more in the second, each times its factor."""

    def again(values: Tensor, times: Tensor | None = None) -> Tensor:
        twice = torch.cat([values[:3], values[:3]])
        return twice if times is None else twice * times.view(-1, *(1 for _ in values.shape[1:]))

    if isinstance(entry, WithTerms):
        made = [Term(again(term.factors, factor), term.direction) for term in entry.terms]
        return WithTerms(cancelled(entry.product, factor), tuple(made))
    if isinstance(entry, LinearProduct):
        return LinearProduct(again(entry.inputs), again(entry.grads, factor), entry.shape)
    if isinstance(entry, ConvolutionProduct):
        return ConvolutionProduct(
            entry.convolution, again(entry.inputs), again(entry.grads, factor), entry.weight
        )
    return Rows(again(entry.rows(), factor))
