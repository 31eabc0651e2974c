"""Gram matrices of windows are those of the windows themselves, whatever the shape of the convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from opacus_bc.gradients.book_keeping import convolution
from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.grams import gram, gram_squares
from opacus_bc.gradients.book_keeping.window_grams import Box, shifts

EPS = torch.finfo(torch.float32).eps


def per_sample(shape: Convolution, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Autograd, one sample after the other."""
    found = []
    for one, g in zip(x, grad, strict=True):
        w = weight.clone().requires_grad_()
        found += torch.autograd.grad(shape.forward(one[None], w), w, g[None])
    return torch.stack(found)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Convolution, tuple[int, ...]]:
    n = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    shape = Convolution(
        kernel=each(1, 4),
        stride=each(1, 3),
        padding=each(0, 3),
        dilation=each(1, 2),
        groups=draw(st.integers(1, 2)),
    )
    return shape, each(1, 6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shapes())
def test_squared_norms_are_those_of_autograds_gradients(made: tuple[Convolution, tuple[int, ...]]) -> None:
    """Strides larger than the image, padding larger than the kernel, images of one pixel and all between."""
    shape, size = made
    reach = [d * (k - 1) + 1 for k, d in zip(shape.kernel, shape.dilation, strict=True)]
    assume(all(s + 2 * p >= r for s, p, r in zip(size, shape.padding, reach, strict=True)))
    generator = torch.Generator().manual_seed(sum(size))
    x = torch.randn(2, 2 * shape.groups, *size, generator=generator, dtype=torch.float64)
    weight = torch.randn(3 * shape.groups, 2, *shape.kernel, generator=generator, dtype=torch.float64)
    out = shape.forward(x, weight)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    rows = per_sample(shape, x, grad, weight)
    torch.testing.assert_close(shape.squares(x, grad)[0], rows.flatten(1).square().sum(1))
    ways = [shape.sample_gradients, shape._by_windows, shape._by_groups]
    for way in [*ways, shape._by_pixels] if shape.groups == 1 else ways:
        torch.testing.assert_close(way(x, grad, weight), rows)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_windows_are_copied_along_what_lies_side_by_side_in_memory(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Convolution(kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    used: list[str] = []
    for name in ("_by_windows", "_by_pixels"):
        monkeypatch.setattr(Convolution, name, lambda *_, name=name: used.append(name))
    images = torch.randn(2, 8, 16, 16).to(memory_format=layout)
    shape.sample_gradients(images, torch.randn(2, 4, 16, 16), torch.randn(4, 8, 3, 3))
    assert used == ["_by_windows" if layout is torch.contiguous_format else "_by_pixels"]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("changed", [{}, {"stride": (2, 1)}, {"padding": (0, 1)}])
def test_pointwise_convolutions_need_no_windows(layout: torch.memory_format, changed: dict[str, Any]) -> None:
    """A stride or padding makes windows of other pixels."""
    ones, none = (1, 1), (0, 0)
    options: dict[str, Any] = {"kernel": ones, "stride": ones, "padding": none, "dilation": ones, "groups": 1}
    shape = Convolution(**options | changed)
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64).to(memory_format=layout)
    weight = torch.randn(2, 4, 1, 1, dtype=torch.float64)
    grad = torch.randn_like(shape.forward(x, weight))
    rows = per_sample(shape, x, grad, weight)
    torch.testing.assert_close(shape.sample_gradients(x, grad, weight), rows)


@pytest.mark.parametrize("most", [1, 400, 2**18])
def test_pieces_make_no_difference(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is used again for every piece, the last of which is shorter."""
    monkeypatch.setitem(convolution._pieces.__kwdefaults__, "most", most)
    generator = torch.Generator().manual_seed(0)
    shape = Convolution(kernel=(3, 2), stride=(1, 2), padding=(1, 0), dilation=(1, 1), groups=2)
    x = torch.randn(5, 4, 5, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 2, 3, 2, generator=generator, dtype=torch.float64)
    grad = torch.randn(shape.forward(x, weight).shape, generator=generator, dtype=torch.float64)
    rows = per_sample(shape, x, grad, weight)
    torch.testing.assert_close(shape.sample_gradients(x, grad, weight), rows)
    torch.testing.assert_close(shape.squares(x, grad)[0], rows.flatten(1).square().sum(1))


def test_shifts_are_whole_pixels_of_one_remainder() -> None:
    assert shifts(3, 1, 1, 1) == {0: [-1, 0, 1]}
    assert shifts(3, 2, 1, 1) == {1: [-1, 0], 0: [0]}
    assert shifts(2, 3, 0, 2) == {0: [0], 2: [0]}


def test_nothing_comes_from_beyond_the_box() -> None:
    """Shifted matrices of ones count the windows' pixels that are in the image."""
    box = Box((3, 4), (3, 4), (1, 1))
    ones = torch.ones(2, 12, 12)
    found = box.moved(box.moved(ones, 0, [-1, 0, 1]), 1, [-1, 0, 1]).diagonal(dim1=1, dim2=2)
    expected = torch.tensor([2.0, 3, 2])[:, None] * torch.tensor([2.0, 3, 3, 2])
    torch.testing.assert_close(found, expected.flatten().expand(2, 12))
    assert bool((box.moved(ones, 1, [4, -5]) == 0).all())


@pytest.mark.parametrize("positions", [16, 64, 100, 256, 1024])
def test_sums_of_rows_in_float32_are_within_the_margin(positions: int) -> None:
    """Terms of one sign are the worst; rows of 1024 are longer than any that a rule asks for."""
    for a in (torch.full((1, 8, positions), 0.1), torch.rand(1, 8, positions)):
        grams = gram(a)
        exact = (grams.double() * grams.double()).sum((1, 2))
        off = float(((gram_squares(grams, grams, rows=1)[0] - exact).abs() / exact).max())
        assert off <= EPS  # of each product


def test_an_empty_batch_has_no_norms() -> None:
    shape = Convolution(kernel=(3,), stride=(1,), padding=(1,), dilation=(1,), groups=1)
    x, grad, weight = torch.zeros(0, 2, 5), torch.zeros(0, 3, 5), torch.zeros(3, 2, 3)
    assert shape.squares(x, grad)[0].shape == (0,)
    assert shape.sample_gradients(x, grad, weight).shape == (0, 3, 2, 3)


def test_weight_gradients_of_groups_do_not_depend_on_how_inputs_lie_in_memory() -> None:
    """Torch 2.15 is wrong for this layout in float64: norms were right, and what was released was not."""
    shape = Convolution(kernel=(2, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=2)
    x = torch.randn(3, 5, 6, dtype=torch.float64).transpose(1, 2).unsqueeze(-1)
    weight = torch.randn(6, 3, 2, 1, dtype=torch.float64).to(memory_format=torch.channels_last)
    grad = torch.randn_like(shape.forward(x.contiguous(), weight.contiguous()))
    expected = per_sample(shape, x.contiguous(), grad, weight.contiguous()).sum(0)
    torch.testing.assert_close(shape.weight_gradient(x, grad, weight), expected, check_stride=False)
