"""Norms are never too small: not where terms cancel, not where squares vanish, and not for what is summed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.grams import gram, gram_squares, margin_units
from opacus_bc.gradients.book_keeping.products import ConvolutionProduct, LinearProduct, Product
from opacus_bc.gradients.book_keeping.window_grams import Box
from opacus_bc.mechanism.clipping import _NORM_MARGIN

MARGIN = 1 + _NORM_MARGIN  # what is taken off every clip bound
EPS = torch.finfo(torch.float32).eps
Make = Callable[[Tensor, Tensor], Product]


def linear(inputs: Tensor, grads: Tensor) -> LinearProduct:
    return LinearProduct(inputs, grads, torch.Size((grads.shape[2], inputs.shape[2])))


def pointwise(inputs: Tensor, grads: Tensor) -> ConvolutionProduct:
    """The same product, as a convolution over a line."""
    shape = Convolution(kernel=(1,), stride=(1,), padding=(0,), dilation=(1,), groups=1)
    x, g = inputs.transpose(1, 2), grads.transpose(1, 2)
    return ConvolutionProduct(shape, x, g, torch.zeros(g.shape[1], x.shape[1], 1))


def windows(inputs: Tensor, grads: Tensor) -> ConvolutionProduct:
    """Windows of three: the ends are padded, so that terms cancel but for those."""
    shape = Convolution(kernel=(3,), stride=(1,), padding=(1,), dilation=(1,), groups=2)
    x, g = inputs.transpose(1, 2), grads.transpose(1, 2)
    return ConvolutionProduct(shape, x, g, torch.zeros(g.shape[1], x.shape[1] // 2, 3))


PRODUCTS: dict[str, Make] = {"linear": linear, "convolution": pointwise, "windows in groups": windows}


def wide(entry: Product) -> Product:
    """The same in float64."""
    if isinstance(entry, LinearProduct):
        return LinearProduct(entry.inputs.double(), entry.grads.double(), entry.shape)
    assert isinstance(entry, ConvolutionProduct)
    inputs, grads, weight = (t.double() for t in (entry.inputs, entry.grads, entry.weight))
    return ConvolutionProduct(entry.convolution, inputs, grads, weight)


def truth(entry: Product) -> Tensor:
    return wide(entry).rows().flatten(1).norm(dim=1)


def cancelling(
    seed: int, *, positions: int, size: float, spread: float, halves: bool
) -> tuple[Tensor, Tensor]:
    """Inputs that are almost the same everywhere, and gradients that add up to 0, as before GroupNorm."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 1, 16, generator=generator).expand(-1, positions, -1)
    x = size * (x + spread * torch.randn(4, positions, 16, generator=generator))
    g = torch.randn(4, positions, 24, generator=generator)
    if halves:  # partial sums grow before they shrink
        g = g[:, :1].repeat(1, positions, 1)
        g[:, positions // 2 :] *= -1
    return x, g - g.mean(1, keepdim=True)


cases = {
    "seed": st.integers(0, 2**16),
    "positions": st.sampled_from([2, 3, 8, 50]),
    "size": st.sampled_from([1e-3, 1.0, 1e4, 1e9]),
    "spread": st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 1e-2, 1.0]),
    "halves": st.booleans(),
    "kind": st.sampled_from(list(PRODUCTS)),
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(**cases)
def test_norms_of_terms_that_cancel_are_not_below_the_truth(
    seed: int, positions: int, size: float, spread: float, halves: bool, kind: str
) -> None:
    entry = PRODUCTS[kind](*cancelling(seed, positions=positions, size=size, spread=spread, halves=halves))
    exact, found = truth(entry), entry.norms()
    assert bool((found >= exact / (1 + 2e-6)).all())
    lengths = entry.squares()[1].sqrt()
    assert bool((found <= 1.011 * exact + (positions + 10) * EPS * lengths).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(**cases)
def test_what_is_added_up_of_a_sample_whose_terms_cancel_stays_in_its_ball(
    seed: int, positions: int, size: float, spread: float, halves: bool, kind: str
) -> None:
    """Alone, and in a batch with others, whose sum it must not move by more than the bound either."""
    x, g = cancelling(seed, positions=positions, size=size, spread=spread, halves=halves)
    others = torch.randn(3, *x.shape[1:]), torch.randn(3, *g.shape[1:])
    for i in range(len(x)):
        alone = PRODUCTS[kind](x[i : i + 1], g[i : i + 1])
        together = PRODUCTS[kind](torch.cat([others[0], x[i : i + 1]]), torch.cat([others[1], g[i : i + 1]]))
        without = together.only(torch.tensor([True, True, True, False]))
        clip = 1 / (together.norms() * MARGIN)
        assert float(alone.weighted_sum(clip[3:]).double().norm()) <= 1
        moved = together.weighted_sum(clip).double() - without.weighted_sum(clip[:3]).double()
        assert float(moved.norm()) <= 1 + 1e-5  # rounding of the others' own sum


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    huge=st.sampled_from([1e10, 1e15, 1e18]),
    tiny=st.sampled_from([1e-30, 2.5e-23, 1e-20, 1e-18, 1e-10]),
    positions=st.sampled_from([1, 2, 5]),
    swapped=st.booleans(),
    kind=st.sampled_from(list(PRODUCTS)),
)
def test_a_huge_input_meets_a_gradient_whose_squares_vanish(
    seed: int, huge: float, tiny: float, positions: int, swapped: bool, kind: str
) -> None:
    """Float32 squares below 1e-45 are zero; 1e18 times 1e-23 is not."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (tiny, huge) if swapped else (huge, tiny)
    x, g = (
        s * torch.randn(3, positions, n, generator=generator) for s, n in zip(sizes, (16, 24), strict=True)
    )
    entry = PRODUCTS[kind](x, g)
    exact, found = truth(entry), entry.norms()
    assert bool((found >= exact * (1 - 4e-6)).all())


@pytest.mark.parametrize("kind", PRODUCTS)
def test_nothing_is_instantiated_for_samples_without_a_gradient(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
    entry = PRODUCTS[kind](x, torch.zeros(3, 4, 24))
    monkeypatch.setattr(type(entry), "only", lambda *_: pytest.fail("instantiated"))
    assert float(entry.norms().max()) < 1e-9


@pytest.mark.parametrize("count", [1, 2, 6, 31, 32, 64])
@pytest.mark.parametrize("channels", [1, 7, 64, 130, 512, 4099, 25088])
def test_gram_matrices_are_within_their_margin_of_the_truth(channels: int, count: int) -> None:
    """Equal products are the worst: their rounding errors all have one sign."""
    generator = torch.Generator().manual_seed(channels)
    random = torch.randn(2, channels, count, generator=generator)
    falling = random * torch.logspace(0, -6, channels)[None, :, None]
    equal = torch.full((2, channels, count), 0.1)
    for columns in (random, falling, equal, equal.transpose(1, 2).contiguous().transpose(1, 2)):
        found, exact = gram(columns).double(), gram(columns.double())
        lengths = exact.diagonal(dim1=1, dim2=2).sqrt()
        off = (found - exact).abs() / (EPS * lengths[:, :, None] * lengths[:, None])
        count = columns.shape[1]
        assert float(off.max()) <= margin_units(count, count) / 2  # two of them are multiplied


@pytest.mark.parametrize("features", [512, 4096])
def test_a_sample_of_equal_numbers_is_not_found_too_short(features: int) -> None:
    for positions in (2, 3, 5):
        entry = linear(torch.full((1, positions, features), 0.1), torch.full((1, positions, features), 0.3))
        assert float(entry.norms()) >= float(truth(entry)) * (1 - 2e-6)


@pytest.mark.parametrize("side", [2, 6, 12])
@pytest.mark.parametrize("channels", [3, 64, 256])
def test_gram_matrices_of_windows_are_within_their_margin_of_the_truth(channels: int, side: int) -> None:
    generator = torch.Generator().manual_seed(side)
    x = torch.rand(1, channels, side, side, generator=generator) + 1  # all of one sign: rounding adds up
    shape = Convolution(kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    box = Box((side, side), (side, side), (1, 1))
    found, exact = shape.window_grams(x, box).double(), shape.window_grams(x.double(), box)
    lengths = exact.diagonal(dim1=1, dim2=2).sqrt()
    allowed = margin_units(channels, channels) / 2 * EPS
    assert bool(((found - exact).abs() <= allowed * lengths[:, :, None] * lengths[:, None]).all())


def test_the_sum_of_lengths_is_at_least_that_of_the_terms() -> None:
    a, b = (gram(torch.randn(4, 5, 7, dtype=torch.float64)) for _ in range(2))
    assert bool((gram_squares(a, b, rows=4)[1] >= (a * b).abs().sum((1, 2))).all())
