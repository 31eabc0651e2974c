"""The un-noised release of neighbouring data sets never differs by more than the claimed sensitivity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Inner, inner_loss, release
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus_bc.mechanism.blocks import sensitivity

C = 0.7
CLAIM = sensitivity(C, unit="mini-set", adjacency="add/remove one")
FEATURES = 3


def bn_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 2)
    ).double()


def dataset(x: Tensor) -> TensorDataset:
    return TensorDataset(x, (torch.arange(len(x)) % 2))


def bins(n: int, k: int, generator: torch.Generator) -> list[list[int]]:
    where = torch.randint(0, k, (n,), generator=generator)
    return [torch.nonzero(where == j).flatten().tolist() for j in range(k)]


def add_one_shift(x: Tensor, canary: Tensor, k: int, draw: list[list[int]], j: int, make, loss) -> float:
    """Distance between the releases with and without the canary in bin j, all else equal."""
    bigger = dataset(torch.cat([x, canary[None]]))
    with_canary = [part + ([len(x)] if i == j else []) for i, part in enumerate(draw)]
    one = release(make, bigger, draw, mini_sets=k, clip_bound=C, loss=loss)
    two = release(make, bigger, with_canary, mini_sets=k, clip_bound=C, loss=loss)
    return float((one - two).norm())


def replace_one_shift(x: Tensor, canary: Tensor, k: int, draw: list[list[int]], at: int, make, loss) -> float:
    """Distance between the releases when one sample's value is replaced (partition and shuffle)."""
    other = x.clone()
    other[at] = canary
    one = release(make, dataset(x), draw, mini_sets=k, clip_bound=C, loss=loss)
    two = release(make, dataset(other), draw, mini_sets=k, clip_bound=C, loss=loss)
    return float((one - two).norm())


def bn_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    k=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(0, 30),
    scale=st.sampled_from([1e-3, 1.0, 1e3, 1e30]),
    shift=st.sampled_from([add_one_shift, replace_one_shift]),
)
def test_releases_of_neighbours_differ_by_at_most_the_claimed_sensitivity(seed, k, size, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size + 2, FEATURES, generator=generator, dtype=torch.float64)
    canary = scale * torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    draw = bins(size, k, generator)
    at = int(torch.randint(0, k, (), generator=generator)) if shift is add_one_shift else 0
    assert shift(x, canary, k, draw, at, bn_model, bn_loss) <= CLAIM * (1 + 1e-9)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("shift", [add_one_shift, replace_one_shift])
def test_hill_climbing_over_the_canary_never_beats_the_claim(k, shift):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(24, FEATURES, generator=generator, dtype=torch.float64)
    draw = bins(len(x), k, generator)
    at = 0

    def score(candidate: Tensor) -> float:
        return shift(x, candidate, k, draw, at, bn_model, bn_loss)

    best = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    first = value = score(best)
    for _ in range(60):
        size = 10 ** float(torch.empty(()).uniform_(-1, 2, generator=generator))
        candidate = best + size * torch.randn(FEATURES, generator=generator, dtype=torch.float64)
        if (new := score(candidate)) > value:
            best, value = candidate, new
    assert first < value <= CLAIM * (1 + 1e-9)


def worst_case(k: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Copies of -u in every bin and one canary +2n u."""
    u = torch.zeros(FEATURES, dtype=torch.float64)
    u[0] = 10 * C
    n = 4
    x = (-u).repeat(n * k, 1)
    return x, 2 * n * u, [list(range(j * n, (j + 1) * n)) for j in range(k)]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_worst_case_reaches_the_claimed_sensitivity(k):
    x, canary, draw = worst_case(k)
    reached = add_one_shift(x, canary, k, draw, 0, lambda: Inner(FEATURES), inner_loss)
    assert 0.95 * CLAIM <= reached <= CLAIM * (1 + 1e-9)


def contiguous_chunks(indices: list[int], size: int) -> list[list[int]]:
    """The classic mistake: cut a Poisson batch into consecutive pieces, as Opacus's BatchSplittingSampler."""
    return [part.tolist() for part in np.array_split(indices, -(-len(indices) // size))]


def test_cutting_a_poisson_batch_into_contiguous_chunks_would_shift_by_fifteen_bounds():
    """Magnitudes fall, signs alternate: the first of a pair wins; one sample in front re-pairs them all."""
    k = 8
    u = torch.zeros(FEATURES, dtype=torch.float64)
    u[0] = 1e18
    falling = torch.stack([(-1.0) ** i * 0.1**i * u for i in range(2 * k - 1)])
    data = dataset(torch.cat([falling, -10 * u[None]]))
    drawn = list(range(2 * k - 1))

    def shift(before: list[list[int]], after: list[list[int]]) -> float:
        one, two = (
            release(lambda: Inner(FEATURES), data, draw, mini_sets=k, clip_bound=C, loss=inner_loss)
            for draw in (before, after)
        )
        return float((one - two).norm())

    canary = 2 * k - 1
    mistake = shift(contiguous_chunks(drawn, 2), contiguous_chunks([canary, *drawn], 2))
    assert mistake == pytest.approx(15 * C, rel=1e-4)
    bins_before = contiguous_chunks(drawn, 2)
    ours = shift(bins_before, [[canary, *bins_before[0]], *bins_before[1:]])
    assert ours <= CLAIM * (1 + 1e-9)


def test_batch_statistics_shared_between_mini_sets_would_exceed_the_claim():
    """One forward for all mini-sets: the canary moves everybody's normalised values, so all k clips move."""
    k, n = 8, 4
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n * k, FEATURES, generator=generator, dtype=torch.float64)
    canary = torch.full((FEATURES,), 1e6, dtype=torch.float64)

    def shared(inputs: Tensor, members: list[list[int]]) -> Tensor:
        model = bn_model()
        total: Tensor | float = 0.0
        for part in members:
            model.zero_grad()
            out = model(inputs)[part]  # statistics of the whole batch
            nn.functional.cross_entropy(100 * out, torch.tensor(part) % 2).backward()
            g = torch.cat([p.grad.flatten() for p in model.parameters()])
            total = total + g * min(1.0, C / float(g.norm()))
        return total

    draw = [list(range(j * n, (j + 1) * n)) for j in range(k)]
    bigger = torch.cat([x, canary[None]])
    with_canary = [*draw[:-1], [*draw[-1], n * k]]
    assert float((shared(x, draw) - shared(bigger, with_canary)).norm()) > 1.5 * CLAIM
    # Our loop over the same draw, where every mini-set has a forward of its own, keeps to the claim.
    assert add_one_shift(x, canary, k, draw, k - 1, bn_model, bn_loss) <= CLAIM * (1 + 1e-9)
