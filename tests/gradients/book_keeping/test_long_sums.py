"""What is released of units with thousands of rows, or of samples with thousands of positions, is at most C.

Float32 that adds n numbers one after the other may be off by n/2 units in the last place of their sum. The
patterns here make it so: equal numbers, and a large one with many that are a little more than half a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.products import (
    ConvolutionProduct,
    Entry,
    LinearProduct,
    Rows,
    Term,
    WithTerms,
)
from opacus_bc.gradients.book_keeping.sums import (
    LONG,
    SHORT,
    length_of_sums,
    short_products,
    short_sum,
    units_of_sums,
)
from opacus_bc.gradients.book_keeping.units import summable, unit_norms
from opacus_bc.mechanism.clipping import _NORM_MARGIN

EPS = torch.finfo(torch.float32).eps
HALF_UNIT = EPS / 2 * 1.01


def equal(count: int, size: float) -> Tensor:
    return torch.full((count,), size)


def creeping(count: int, size: float) -> Tensor:
    """Every further number is a little more than half a unit of the first one, and is rounded up to one."""
    values = torch.full((count,), HALF_UNIT * size)
    values[0] = size
    return values


def creeping_in_pieces(count: int, size: float) -> Tensor:
    """The same in every short sum: the worst that is allowed for."""
    values = torch.full((count,), HALF_UNIT * size)
    values[::SHORT] = size
    return values


def vanishing(count: int, size: float) -> Tensor:
    """Every further number is a little less than half a unit of the first one, and is lost."""
    values = torch.full((count,), EPS / 2 * 0.99 * size)
    values[0] = size
    return values


def cancelling(count: int, size: float) -> Tensor:
    """Partial sums grow to half of all lengths before they shrink to nothing."""
    values = torch.full((count,), size)
    values[count // 2 :] *= -1
    return values


def random(count: int, size: float) -> Tensor:
    return size * torch.randn(count, generator=torch.Generator().manual_seed(count))


Pattern = Callable[[int, float], Tensor]
PATTERNS: dict[str, Pattern] = {
    f.__name__: f for f in (equal, creeping, creeping_in_pieces, vanishing, cancelling, random)
}


def column(values: Tensor, positions: int, size: int) -> Tensor:
    """Rows whose positions all have these values, of shape (rows, positions, size)."""
    return values[:, None, None].expand(-1, positions, size).contiguous()


def linear(values: Tensor, positions: int, into: int, out: int) -> LinearProduct:
    inputs = torch.full((len(values), positions, into), 1.0)
    return LinearProduct(inputs, column(values, positions, out), torch.Size((out, into)))


def convolution(values: Tensor, groups: int) -> ConvolutionProduct:
    shape = Convolution(kernel=(1,), stride=(1,), padding=(0,), dilation=(1,), groups=groups)
    grads = values[:, None, None].expand(-1, 2, 1).contiguous()
    return ConvolutionProduct(shape, torch.ones(len(values), 2, 1), grads, torch.zeros(2, 2 // groups, 1))


def with_terms(product: LinearProduct | ConvolutionProduct, values: Tensor) -> WithTerms:
    shape = product.rows().shape[1:]
    return WithTerms(product, (Term(values[:, None].expand(-1, shape[0]).contiguous(), torch.ones(shape)),))


ENTRIES: dict[str, Callable[[Tensor], Entry]] = {
    "rows": lambda v: Rows(v[:, None].expand(-1, 3).contiguous()),
    "numbers": lambda v: Rows(v),
    "linear, one column": lambda v: linear(v, 1, 1, 3),
    "linear, few columns": lambda v: linear(v, 1, 3, 5),
    "linear, many columns": lambda v: linear(v, 1, 40, 33),
    "linear, two positions": lambda v: linear(v, 2, 2, 1),
    "convolution": lambda v: convolution(v, 1),
    "grouped convolution": lambda v: convolution(v, 2),
    "linear with terms": lambda v: with_terms(linear(v, 1, 1, 2), v),
    "grouped convolution with terms": lambda v: with_terms(convolution(v, 2), v),
}


def released(entry: Entry, counts: Sequence[int]) -> Tensor:
    """What each unit adds alone, clipped to 1 as the optimizer does."""
    entry = summable(entry)
    norms = unit_norms(entry, counts)
    found, start = [], 0
    for norm, count in zip(norms.tolist(), counts, strict=True):
        keep = torch.zeros(sum(counts), dtype=torch.bool)
        keep[start : start + count] = True
        weights = torch.full((count,), min(1.0, (1 - _NORM_MARGIN) / norm), dtype=torch.float64)
        found.append(entry.only(keep).weighted_sum(weights).double().norm())
        start += count
    return torch.stack(found)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(ENTRIES)),
    pattern=st.sampled_from(list(PATTERNS)),
    count=st.sampled_from([63, 64, 65, 300, 4096, 16_384, 20_001]),
    size=st.floats(1.0, 2.0, width=32),
)
def test_what_is_released_of_a_unit_with_many_rows_is_at_most_its_bound(
    name: str, pattern: str, count: int, size: float
) -> None:
    assert float(released(ENTRIES[name](PATTERNS[pattern](count, size)), [count])) <= 1.0


@pytest.mark.parametrize("name", ENTRIES)
def test_equal_rows_that_rounding_would_take_over_the_bound(name: str) -> None:
    """Sizes at which sums of 16,384 equal rows, added one after the other, are too large."""
    for size in (1.137, 1.29, 1.43) if "grouped" not in name else (1.29,):
        found = released(ENTRIES[name](equal(16_384, size)), [16_384])
        assert 0.999 < float(found) <= 1.0


@pytest.mark.parametrize("name", ENTRIES)
def test_units_of_different_sizes_side_by_side(name: str) -> None:
    counts = [70, 1, 3000, 64]
    values = torch.cat([equal(n, 1.0 + i / 7) for i, n in enumerate(counts)])
    entry = ENTRIES[name](values)
    exact = [part.double().sum(0).norm() for part in entry.rows().split(counts)]
    torch.testing.assert_close(unit_norms(summable(entry), counts), torch.stack(exact), rtol=1e-4, atol=0.0)
    assert float(released(entry, counts).max()) <= 1.0


@pytest.mark.parametrize("name", ["rows", "numbers", "grouped convolution", "linear with terms"])
def test_rows_that_a_running_sum_would_lose_are_in_the_norm(name: str) -> None:
    """A thousandth of the vector: 16,383 rows beside a large one, in a batch with a shorter unit."""
    counts = [16_384, 1]
    entry = ENTRIES[name](torch.cat([vanishing(16_384, 1.0), torch.ones(1)]))
    exact = entry.rows()[:16_384].double().sum(0).norm()
    assert float(unit_norms(summable(entry), counts)[0]) >= float(exact)


def test_a_convolution_adds_few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = Convolution.weight_gradient

    def seen(self: Convolution, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        sizes.append(len(x))
        return whole(self, x, grad, weight)

    monkeypatch.setattr(Convolution, "weight_gradient", seen)
    entry = convolution(equal(150, 1.29), 1)
    weights = torch.linspace(0.5, 1.0, 150)
    found = summable(entry).weighted_sum(weights)
    assert sizes == [SHORT, SHORT, 150 - 2 * SHORT]
    torch.testing.assert_close(found, entry.weighted_sum(weights))


@pytest.mark.parametrize("positions", [2, 60, 300, 1000])
def test_norms_allow_for_kernels_that_add_hundreds_of_products_in_turn(positions: int) -> None:
    """Many columns: half a unit for each product, up to 512 of them, also where the terms cancel."""
    units = min(positions, 512) / 2
    for pattern in (equal, cancelling):
        entry = linear(pattern(positions, 1.0), 1, 40, 33)
        sample = LinearProduct(
            entry.inputs.view(1, positions, 40), entry.grads.view(1, positions, 33), entry.shape
        )
        length = positions * (40 * 33) ** 0.5
        exact = float(wide_sum(sample).norm())
        found = float(sample.norms()[0]) / (1 - _NORM_MARGIN)
        assert found >= exact + units * EPS * length
        assert found <= exact * (1 + 2e-5) + (2 * units + 24) * EPS * length


def wide_sum(entry: LinearProduct) -> Tensor:
    return entry.grads[0].double().T @ entry.inputs[0].double()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("into", "out"), [(1, 1), (1, 8), (3, 2), (20, 40), (40, 33)])
def test_samples_with_thousands_of_positions_stay_in_their_balls(pattern: str, into: int, out: int) -> None:
    """Each is its own unit: ``"bk-ghost"`` takes such norms from Gram matrices."""
    for count, size in ((700, 1.3), (2000, 1.137), (2000, 1.83)):
        values = PATTERNS[pattern](count, size)
        inputs, grads = torch.ones(1, count, into), values[None, :, None].expand(-1, -1, out).contiguous()
        entry = LinearProduct(inputs, grads, torch.Size((out, into)))
        weight = ((1 - _NORM_MARGIN) / entry.norms()).clamp(max=1.0)
        assert float(entry.weighted_sum(weight).double().norm()) <= 1.0


@pytest.mark.parametrize("count", [1, 64, 65, 256, 257, 1000, 16_384])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (31, 40), (33, 40)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_short_sums_are_within_what_is_claimed_of_them(
    pattern: str, rows: int, columns: int, count: int
) -> None:
    values = PATTERNS[pattern](count, 1.371)
    left, right = values[None, :, None].expand(2, -1, rows), torch.full((2, count, columns), 1.29)
    exact = left.double().transpose(1, 2) @ right.double()
    lengths = left.double().abs().transpose(1, 2) @ right.double().abs()
    allowed = units_of_sums(count, length_of_sums(rows, columns)) * EPS * lengths
    assert bool(((short_products(left, right).double() - exact).abs() <= allowed).all())
    if rows == 1:
        found = short_sum(values, right[0])
        assert bool(((found.double() - exact[0, 0]).abs() <= allowed[0, 0]).all())


def test_short_sums_are_short() -> None:
    assert LONG / 2 * EPS < 2e-5
    assert SHORT / 2 * EPS < 4e-6
    assert short_products(torch.ones(0, 100, 1), torch.ones(0, 100, 2)).shape == (0, 1, 2)


@pytest.mark.parametrize(("places", "channels"), [((784,), 64), ((4096,), 16), ((28, 28), 64)])
def test_a_sample_whose_positions_cancel_in_a_convolution_stays_in_its_ball(
    places: tuple[int, ...], channels: int
) -> None:
    """Kernels add thousands of positions in turn: 4096 were off by 1013 units, and 18 C were released."""
    count, n = math.prod(places), len(places)
    values = creeping(count, 1.0)
    values[-1] = -(1 + HALF_UNIT * (count - 2))  # nothing is left but rounding
    shape = Convolution(kernel=(3,) * n, stride=(1,) * n, padding=(0,) * n, dilation=(1,) * n, groups=1)
    inputs = torch.ones(1, channels, *(size + 2 for size in places))
    grads = values.view(places).expand(1, channels, *places).contiguous()
    entry = ConvolutionProduct(shape, inputs, grads, torch.zeros(channels, channels, *(3,) * n))
    assert float(entry.weighted_sum(torch.ones(1)).double().norm()) <= float(entry.norms()[0])


@pytest.mark.parametrize("kind", ["linear", "rows"])
def test_one_sample_more_among_thousands_moves_the_sum_by_its_own_length(kind: str) -> None:
    """At 8192 the last place doubles: what was added there in turn took two sums twice as far apart."""
    unit = 2.0**-10
    values = torch.cat([torch.ones(8192), torch.full((2048,), 0.6 * unit)])

    def total(some: Tensor) -> float:
        entry = linear(some, 1, 1, 1) if kind == "linear" else Rows(some[:, None])
        return float(entry.weighted_sum(torch.ones(len(some))))

    assert total(values) - total(values[1:]) <= 1 + unit


@pytest.mark.parametrize(
    ("positions", "channels", "step"), [(32, 1000, 0.05), (40, 1000, 0.027), (64, 4096, 0.03)]
)
def test_norms_from_gram_matrices_are_not_too_small_where_channels_are_many(
    positions: int, channels: int, step: float
) -> None:
    """Two columns that nearly cancel: in a sum of all channels each product is rounded the same way."""
    eps = torch.finfo(torch.float32).eps
    columns = []
    for size, last in ((0.175, step), (1.49, 0.0)):
        column = torch.full((channels,), (size * eps) ** 0.5)
        column[0], column[-1] = 1.0, last
        columns.append(column)
    out = max(16, 4 * positions**2 // channels + 1)
    grads = torch.zeros(1, positions, out)
    grads[0, :, 0] = torch.tensor([1.0, -1.0]).repeat(positions // 2)
    inputs = torch.stack(columns).repeat(positions // 2, 1)[None]
    entry = LinearProduct(inputs, grads, torch.Size((out, channels)))
    true = float((grads[0].double().T @ inputs[0].double()).norm())
    assert float(entry.norms()) >= true
