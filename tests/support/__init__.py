"""What several tests share: toy data, one-step releases through the real loader and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import BatchClippingOptimizer, PrivacyEngine, PrivateDataLoader
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.draws.sources import Draw
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.mechanism.rules import FlatClipping

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def engine(**kwargs: Any) -> PrivacyEngine:
    """An engine."""
    return PrivacyEngine(**kwargs)


def reseed(optimizer: Any, loader: Any, seed: int) -> None:
    """Seed the noise and the draws that the operating system has seeded, to repeat a run in a test."""
    if not optimizer.noise.secure:
        optimizer.noise.reseed(seed)
    draws = loader.draws
    if isinstance(getattr(getattr(draws, "generator", None), "bit_generator", None), np.random.Philox):
        draws.__init__(draws.plan, np.random.Generator(np.random.Philox(seed)))


def blobs(n: int = 200, features: int = 4, seed: int = 0) -> TensorDataset:
    """Two classes told apart by the first feature."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def mlp(norm: bool = False, features: int = 4, seed: int = 0) -> nn.Module:
    """A small classifier, with BatchNorm if asked for."""
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(features, 8), *middle, nn.Tanh(), nn.Linear(8, 2))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The usual loss."""
    return nn.functional.cross_entropy(model(x), y)


class GivenDraws:
    """A draw source that replays the draws it was given."""

    def __init__(self, plan: SamplingPlan, draws: list[Draw]) -> None:
        self.plan = plan
        self.draws = draws

    def __iter__(self) -> Iterator[Draw]:
        return iter(self.draws)


def given(loader: Any, *draws: list[int]) -> PrivateDataLoader:
    """The private loader of individual clipping over draws that a test chooses."""
    source = GivenDraws(loader.plan, [[draw] for draw in draws])
    return PrivateDataLoader(loader, draws=source, ledger=loader.ledger, part=loader.part)


def private_parts(
    model: nn.Module,
    dataset: TensorDataset,
    draws: list[Draw],
    *,
    clip_bound: float = 1.0,
    noise_multiplier: float = 0.0,
    mini_sets: int = 1,
    lr: float = 1.0,
    seed: int = 0,
    loss_reduction: str = "mean",
    **loader_kwargs: Any,
) -> tuple[BatchClippingOptimizer, PrivateDataLoader]:
    """The real optimizer and loader over given draws."""
    plan = SamplingPlan(
        kind="poisson",
        dataset_size=len(dataset),
        steps_per_epoch=len(draws),
        mini_sets=mini_sets,
        mini_set_size=8,
    )
    loader = PrivateDataLoader(
        DataLoader(dataset, batch_size=8, **loader_kwargs), draws=GivenDraws(plan, draws)
    )
    optimizer = BatchClippingOptimizer(
        optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr),
        noise_multiplier=noise_multiplier,
        max_grad_norm=clip_bound,
        clip_rule=FlatClipping(unit="mini-set", adjacency="add/remove one"),
        ledger=loader.ledger,
        mini_sets=mini_sets,
        noise=TorchNoise(torch.Generator().manual_seed(seed)),
        parameter_names={p: name for name, p in model.named_parameters()},
        loss_reduction=loss_reduction,
    )
    return optimizer, loader


class Recorder:
    """Stands for the noise: keeps what would have been noised, and adds nothing."""

    secure = False

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.stds: list[float] = []

    def reseed(self, seed: int) -> None:
        """There is no stream."""

    def add_(self, tensor: Tensor, std: float) -> None:
        """See :meth:`opacus_bc.mechanism.noise.NoiseSource.add_`."""
        self.sums.append(tensor.clone())
        self.stds.append(std)

    def steps(self, count: int) -> list[Tensor]:
        """What each of ``count`` steps would have noised, in one vector."""
        width = len(self.sums) // count
        return [torch.cat([t.flatten() for t in self.sums[i * width :][:width]]) for i in range(count)]


def weights(model: nn.Module) -> Tensor:
    """All trainable entries in one vector, in float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def release(
    make_model: Callable[[], nn.Module],
    dataset: TensorDataset,
    draw: Draw,
    *,
    mini_sets: int,
    clip_bound: float = 1.0,
    loss: Loss = cross_entropy,
) -> Tensor:
    """The un-noised sum of clipped vectors that one step over ``draw`` would release."""
    model = make_model()
    optimizer, loader = private_parts(
        model, dataset, [draw], clip_bound=clip_bound, mini_sets=mini_sets, lr=float(mini_sets)
    )
    before = weights(model)
    for x, y in loader:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
    return before - weights(model)


class Inner(nn.Module):
    """The loss <w, x> of the worst case: its gradient is the mean of the inputs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def inner_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean of <w, x>."""
    out: Tensor = model(x).mean()
    return out
