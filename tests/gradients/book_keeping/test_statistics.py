"""Gradients that follow public statistics in one backward: those of instantiated rows, never too short."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import engine
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PublicStatistics
from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.products import (
    ConvolutionProduct,
    LinearProduct,
    Term,
    WithTerms,
    with_terms,
)
from opacus_bc.mechanism.clipping import row_norms

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def network() -> nn.Module:
    """Layers that are kept, layers that are not, groups, an activation and pooling before BatchNorm."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.BatchNorm2d(8),
        nn.Conv2d(8, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(inplace=True),
        nn.Conv2d(48, 48, 3, padding=1, groups=4), nn.Tanh(), nn.BatchNorm2d(48),
        nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10),
    ).double()  # fmt: skip


def released(mode: str, *, differentiate: bool | None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 10, (12,), generator=generator)
    public = torch.randn(20, 3, 8, 8, generator=generator, dtype=torch.float64)
    model = network()
    wrapper, optimizer, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=12),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
        grad_sample_mode=mode,
        batch_norm=PublicStatistics(
            loader=DataLoader(TensorDataset(public), batch_size=20), differentiate=differentiate
        ),
    )
    before = [p.detach().clone() for p in model.parameters()]
    for a, b in loader:
        nn.functional.cross_entropy(wrapper(a), b).backward()
        optimizer.step()
    return torch.cat([(w - p.detach()).flatten() for w, p in zip(before, model.parameters(), strict=True)])


def test_one_backward_follows_public_statistics_as_hooks_do() -> None:
    constants = released("bk", differentiate=False)
    followed, hooked = (released(mode, differentiate=True) for mode in ("bk", "hooks"))
    assert torch.linalg.vector_norm(followed - constants) > 0.01 * torch.linalg.vector_norm(constants)
    torch.testing.assert_close(followed, hooked, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["bk", "hooks"])
def test_public_statistics_are_followed_unless_told_otherwise(mode: str) -> None:
    by_default, followed, constants = (released(mode, differentiate=how) for how in (None, True, False))
    assert torch.equal(by_default, followed)
    assert not torch.allclose(by_default, constants)


def released_of(x: Tensor, public: Tensor, layer: nn.Module, **kwargs: Any) -> Tensor:
    """The noise-free sum of clipped gradients (C = 1) of a layer in front of BatchNorm, for a linear loss."""
    torch.manual_seed(0)
    width = next(layer.parameters()).shape[0]
    norm = (nn.BatchNorm1d if x.dim() == 2 else nn.BatchNorm2d)(width)
    model = nn.Sequential(deepcopy(layer), norm).to(x.dtype)
    module, optimizer, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        batch_norm=DataLoader(TensorDataset(public), batch_size=len(public)),
        loss_reduction="sum",
        compare_public=False,
        **kwargs,
    )
    direction = torch.randn(width)
    for (rows,) in loader:
        output = module(rows).float()
        output = output.flatten(2).mean(2) if output.dim() > 2 else output
        (output @ direction).sum().backward()
        optimizer.step()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("layer", "shape", "offset", "samples"),
    [
        (nn.Linear(16, 16, bias=False), (16,), 5e3, 2048),
        (nn.Linear(16, 16, bias=False), (16,), 30.0, 2048),
        (nn.Conv2d(8, 16, 3, bias=False), (8, 5, 5), 5e3, 512),
    ],
)
def test_a_sample_more_moves_a_sum_that_cancels_by_its_bound_alone(
    layer: nn.Module, shape: tuple[int, ...], offset: float, samples: int
) -> None:
    """Far from zero own gradients and terms cancel: rounded before that, their sums moved by 1.13 C."""
    generator = torch.Generator().manual_seed(2)
    one = torch.randn(1, *shape, generator=generator) + offset
    public = torch.randn(256, *shape, generator=generator) + offset
    x = one.expand(samples + 1, *shape).clone()
    moved = released_of(x, public, layer) - released_of(x[:-1], public, layer)
    assert 0.5 < float(moved.norm()) <= 1.0 + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", [nn.Linear(4, 8), nn.Conv2d(2, 8, 3)])
def test_half_precision_follows_public_statistics_of_a_summed_loss(
    layer: nn.Module, dtype: torch.dtype
) -> None:
    shape = (4,) if isinstance(layer, nn.Linear) else (2, 5, 5)
    generator = torch.Generator().manual_seed(3)
    x, public = (torch.randn(n, *shape, generator=generator) for n in (9, 32))
    exact = released_of(x, public, layer.float())
    found = released_of(x.to(dtype), public.to(dtype), layer.to(dtype))
    assert float((exact - found).norm()) <= 0.05 * float(exact.norm())


def products(seed: int, rows: int) -> list[WithTerms]:
    """A linear and a convolution product with two terms each, in float32."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = Convolution(kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=2)
    weight = random(6, 2, 3, 3)
    convolution = ConvolutionProduct(shape, random(rows, 4, 7, 7), random(rows, 6, 4, 4), weight)
    linear = LinearProduct(random(rows, 5, 3), random(rows, 5, 4), torch.Size((4, 3)))
    return [
        WithTerms(linear, tuple(Term(random(rows, 4), random(4, 3)) for _ in range(2))),
        WithTerms(convolution, tuple(Term(random(rows, 6), random(*weight.shape)) for _ in range(2))),
    ]


@given(seed=st.integers(0, 2**20), cancel=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 1.0]))
@settings(max_examples=30, deadline=None)
def test_norms_with_statistics_are_never_too_small_where_terms_cancel(seed: int, cancel: float) -> None:
    """The last term takes all of sample 0's gradient back but for a fraction ``cancel``."""
    for entry in products(seed, rows=3):
        own = with_terms(entry.product.rows(), entry.terms)[0]
        spread = torch.zeros(3, len(own))
        spread[0] = cancel - 1.0
        whole = WithTerms(entry.product, (*entry.terms, Term(spread, own)))
        double = [t.rows().double() for t in whole.terms]
        exact = row_norms(sum(double, whole.product.rows().double()))
        found = whole.norms()
        scale = row_norms(whole.product.rows()) + sum(row_norms(t.rows()) for t in whole.terms)
        assert bool((found >= exact - 3e-7 * scale).all())  # float32 rows differ from their float64 sum
        assert bool((found <= 1.011 * exact + 1e-5 * scale).all())


def test_weighted_sums_with_statistics_are_those_of_the_rows() -> None:
    for entry in products(7, rows=5):
        weights = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.1])
        expected = torch.einsum("n,n...->...", weights, entry.rows())
        torch.testing.assert_close(entry.weighted_sum(weights), expected, rtol=1e-4, atol=1e-4)
        keep = torch.tensor([True, False, True, True, False])
        torch.testing.assert_close(entry.only(keep).rows(), entry.rows()[keep])


def test_samples_whose_terms_are_much_longer_than_their_gradients_are_added_up_by_themselves() -> None:
    """A piece of 64 float32 sums would be off by many times what is left of a sample."""
    generator = torch.Generator().manual_seed(4)
    mean = 1e6 + torch.rand(1, 24, generator=generator)
    inputs = (mean + torch.randn(64, 24, generator=generator))[:, None]
    grads = torch.randn(64, 1, 12, generator=generator)
    product = LinearProduct(inputs, grads, torch.Size((12, 24)))
    entry = WithTerms(product, (Term(-grads[:, 0], mean.expand(12, 24)),))
    weights = 1.0 / entry.norms()
    found = entry.weighted_sum(weights, 1.0).double()
    assert bool((weights * row_norms(entry.rows()) <= 1.0).all())
    exact = torch.einsum("n,n...->...", weights, entry.rows().double())
    assert float((found - exact).norm()) <= 1e-4
    for left_out in range(0, 64, 9):
        keep = torch.arange(64) != left_out
        moved = found - entry.only(keep).weighted_sum(weights[keep], 1.0).double()
        assert float(moved.norm()) <= 1.0 + 1e-4
    torch.testing.assert_close(entry.weighted_sum(weights).double(), found)  # without a bound: by the norms


@pytest.mark.parametrize("one_row", [True, False])
def test_norms_with_statistics_are_not_too_small_for_long_rows_of_equal_inputs(one_row: bool) -> None:
    """A float32 sum of 65,536 equal products is off by hundreds of eps, and own gradient and term cancel."""
    entries, rows = 2**16, 6
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(3, 1, rows, generator=generator)
    inputs = torch.full((3, 1, entries), 0.7310585)
    direction = torch.full((1, entries), 0.3678794).expand(rows, entries)
    direction = direction if one_row else direction.contiguous()
    factors = -0.86 * grads[:, 0] * (0.7310585 / 0.3678794)
    entry = WithTerms(LinearProduct(inputs, grads, torch.Size((rows, entries))), (Term(factors, direction),))
    exact = row_norms(entry.product.rows().double() + entry.terms[0].rows().double())
    assert bool((entry.norms() >= exact * (1 - 1e-6)).all())
    assert bool((entry.norms() <= exact * 1.02).all())
