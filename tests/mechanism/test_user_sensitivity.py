"""A user with all their samples moves the un-noised release by at most C, whatever the samples are."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine, local_update
from opacus_bc.mechanism.blocks import sensitivity

C = 0.7
CLAIM = sensitivity(C, unit="user", adjacency="add/remove one")
FEATURES, CAP, USERS = 3, 4, 5


def linear() -> nn.Module:
    """The loss <w, x>: a user's gradient is the mean of their inputs."""
    model = nn.Sequential(nn.Linear(FEATURES, 1, bias=False)).double()
    nn.init.zeros_(model[0].weight)
    return model


def normalised() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 1)
    ).double()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def user_release(
    x: Tensor, ids: Any, *, make: Any, local: bool = False, cap: int = CAP, **options: Any
) -> Tensor:
    """The un-noised sum of clipped vectors of a step that draws everybody (batch_size counts users)."""
    users = len(set(np.asarray(ids).tolist()))
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x), batch_size=users),
            noise_multiplier=1e-12,
            max_grad_norm=C,
            unit=ids,
            mini_batch_size=cap,
            **options,
        )
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    for (inputs,) in loader:
        if local:
            steps = [lambda part=inputs: loss(private, part)] * 3
            local_update(private, lambda params: torch.optim.SGD(params, lr=1.0), steps)
        else:
            loss(private, inputs).backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (before - after) * optimizer.expected_batch_size


MODES: dict[str, dict[str, Any]] = {
    "flat, hooks": {"clipping": "flat", "make": network},
    "flat, bk": {"clipping": "flat", "make": network, "grad_sample_mode": "bk"},
    "GBC with batch statistics": {"clipping": "batch", "make": normalised},
    "GBC with local steps": {"clipping": "batch", "make": normalised, "local": True},
}


def crowd(seed: int) -> tuple[Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    ids = np.repeat(np.arange(USERS), [2, 3, 4, 4, 2])
    return torch.randn(len(ids), FEATURES, generator=generator, dtype=torch.float64), ids


@pytest.mark.parametrize("mode", MODES)
def test_adding_a_user_moves_the_release_by_at_most_the_bound(mode):
    """Random users and then the best of a hill climb: all samples of the user are the adversary's."""
    generator = torch.Generator().manual_seed(3)
    x, ids = crowd(0)
    without = user_release(x, ids, **MODES[mode])

    def shift(added: Tensor) -> float:
        with_user = user_release(torch.cat([x, added]), np.append(ids, [USERS] * len(added)), **MODES[mode])
        return float((with_user - without).norm())

    best, value = torch.zeros(3, FEATURES, dtype=torch.float64), 0.0
    for round_ in range(12):
        size = 10.0 ** float(torch.empty(()).uniform_(-1, 3, generator=generator))
        start = best if round_ % 2 else torch.zeros_like(best)
        candidate = start + size * torch.randn(3, FEATURES, generator=generator, dtype=torch.float64)
        found = shift(candidate)
        assert found <= CLAIM * (1 + 1e-6)
        if found > value:
            best, value = candidate, found
    assert value > 0


WORST: dict[str, dict[str, Any]] = {
    "flat, hooks": {"clipping": "flat"},
    "flat, bk": {"clipping": "flat", "grad_sample_mode": "bk"},
    "GBC": {"clipping": "batch"},
}


@pytest.mark.parametrize("mode", WORST)
def test_the_worst_user_reaches_the_bound_and_one_sample_of_a_user_twice_the_bound(mode):
    """All samples of the user point one way: C. One huge sample turns another user's vector round: 2C."""
    u = torch.zeros(1, FEATURES, dtype=torch.float64)
    u[0, 0] = 10 * C
    x, ids = torch.cat([-u] * 6), np.array([0, 0, 1, 1, 2, 2])
    options = {"make": linear, **WORST[mode]}
    without = user_release(x, ids, **options)
    user = user_release(torch.cat([x, u, u]), np.append(ids, [3, 3]), **options)
    assert 0.95 * C <= float((user - without).norm()) <= C * (1 + 1e-6)
    sample = user_release(torch.cat([x, 9 * u]), np.append(ids, [0]), **options)
    assert 1.9 * C <= float((sample - without).norm()) <= 2 * C * (1 + 1e-6)


@pytest.mark.parametrize("mode", WORST)
def test_a_user_of_many_samples_counts_as_one_vector_of_at_most_cap_samples(mode):
    """Forty samples at a cap of four: one vector, so C and not ten times C."""
    x, ids = crowd(0)
    many = torch.full((40, FEATURES), 50.0, dtype=torch.float64)
    options = {"make": linear, **WORST[mode]}
    without = user_release(x, ids, **options)
    with_user = user_release(torch.cat([x, many]), np.append(ids, [USERS] * 40), **options)
    assert float((with_user - without).norm()) == pytest.approx(C, rel=1e-4)


@pytest.mark.parametrize("grad_sample_mode", ["hooks", "bk"])
def test_a_sample_with_many_views_moves_the_release_by_at_most_the_bound(grad_sample_mode):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, FEATURES, generator=generator, dtype=torch.float64)

    def views_release(data: Tensor) -> Tensor:
        model = linear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                data_loader=DataLoader(TensorDataset(data), batch_size=len(data)),
                noise_multiplier=1e-12,
                max_grad_norm=C,
                views=8,
                grad_sample_mode=grad_sample_mode,
            )
        for (inputs,) in loader:
            assert len(inputs) == 8 * len(data)
            loss(private, inputs).backward()
            optimizer.step()
        return -model[0].weight.detach().flatten() * optimizer.expected_batch_size

    added = torch.cat([x, torch.full((1, FEATURES), 1e3, dtype=torch.float64)])
    assert float((views_release(added) - views_release(x)).norm()) == pytest.approx(C, rel=1e-4)
