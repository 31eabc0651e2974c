"""Every sample's gradients of BatchNorm's weight and bias, from one pass over the memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from opacus_bc.batch_norm import gradients
from opacus_bc.batch_norm.gradients import affine_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(), (1,), (7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("longest", [4096, 6, 2])
def test_rows_are_autograds(
    dtype: torch.dtype, size: tuple[int, ...], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where positions are cut into pieces, and where they cannot be (7 positions, 2 at most)."""
    monkeypatch.setattr(gradients, "_POSITIONS", longest)
    generator = torch.Generator().manual_seed(len(size))
    x, grad = (torch.randn(4, 3, *size, generator=generator, dtype=dtype) for _ in range(2))
    mean, var = torch.randn(3, generator=generator, dtype=dtype), torch.rand(3, dtype=dtype) + 0.5
    with torch.no_grad():
        found = affine_gradients(x, grad, mean, torch.rsqrt(var + 1e-5))
    for row, (one, g) in enumerate(zip(x, grad, strict=True)):
        weight, bias = torch.ones(3, dtype=dtype, requires_grad=True), torch.zeros(3, dtype=dtype)
        bias.requires_grad_()
        normal = F.batch_norm(one[None], mean, var, weight, bias, False, 0.0, 1e-5)
        expected = torch.autograd.grad(normal, (weight, bias), g[None])
        for ours, autograds in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[row], autograds)


def test_sums_over_large_images_keep_their_digits() -> None:
    """Equal products are the worst: torch's kernel is off by 3e-5 at 50,176 of them in one piece."""
    x, grad = torch.full((1, 2, 224, 224), 0.1), torch.full((1, 2, 224, 224), 0.3)
    mean, inverse = torch.zeros(2), torch.ones(2)
    with torch.no_grad():
        found = affine_gradients(x, grad, mean, inverse)
    exact = (x.double() * grad.double()).sum((2, 3)), grad.double().sum((2, 3))
    for ours, truth in zip(found, exact, strict=True):
        assert float(((ours - truth) / truth).abs().max()) < 5e-6


def test_an_empty_batch_has_no_rows() -> None:
    with torch.no_grad():
        found = affine_gradients(torch.zeros(0, 3, 4), torch.zeros(0, 3, 4), torch.zeros(3), torch.ones(3))
    assert [each.shape for each in found] == [(0, 3), (0, 3)]
