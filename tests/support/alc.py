"""What ALC's tests share: a three-layer model, known noise, one step through the real optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.alc.adaptive import AdaptiveClipping
from opacus_bc.alc.config import ALC
from opacus_bc.alc.measuring import PublicNorms
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.draws.sources import whole_batch
from opacus_bc.mechanism.names import Adjacency, Unit
from opacus_bc.mechanism.rules import ClipRule
from opacus_bc.optimizers.private import PrivateOptimizer
from opacus_bc.optimizers.samples import IndividualClippingOptimizer
from support import GivenDraws, private_parts

UNITS: list[tuple[Unit, Adjacency]] = [
    ("mini-set", "add/remove one"),
    ("mini-set", "replace one"),
    ("sample", "add/remove one"),
    ("sample", "replace one"),
]


class KnownNoise:
    """Instead of noise, its standard deviation times ``size``."""

    secure = False

    def __init__(self, size: float) -> None:
        self.size = size

    def normal(self, like: Tensor, std: float) -> Tensor:
        return torch.full_like(
            like, self.size * std, dtype=torch.float64 if like.is_floating_point() else None
        )

    def add_(self, tensor: Tensor, std: float) -> None:
        tensor.add_(self.normal(tensor, std))


def three_layers(seed: int = 0) -> nn.Module:
    """Layers of different size and gradient norm."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        model[4].weight.mul_(0.2)
    return model


def data(n: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long())


def adaptive(
    model: nn.Module, public: TensorDataset, *, unit: Unit, adjacency: Adjacency, **alc: Any
) -> AdaptiveClipping:
    """ALC that looks at every public sample: one mini-set of all, or each by itself."""
    settings: dict[str, Any] = {"max_batches": 1 if unit == "mini-set" else len(public)} | alc
    return AdaptiveClipping(
        ALC(DataLoader(public, batch_size=4), **settings),
        PublicNorms(model),
        [name for name, p in model.named_parameters() if p.requires_grad],
        unit=unit,
        adjacency=adjacency,
        mini_set_size=len(public) if unit == "mini-set" else 1,
        steps_per_epoch=10,
        gradients_per_step=2 if unit == "mini-set" else 16,
    )


def one_step(
    model: nn.Module,
    dataset: TensorDataset,
    draw: list[list[int]],
    rule: ClipRule,
    *,
    unit: Unit,
    sigma: float,
    clip_bound: float,
    noise: float,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
) -> tuple[dict[str, Tensor], PrivateOptimizer]:
    """The released sum by parameter name (noise is ``noise`` times its std), and the optimizer after it."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = loss or (lambda net, x, y: nn.functional.cross_entropy(net(x), y))
    optimizer: PrivateOptimizer
    if unit == "mini-set":
        optimizer, loader = private_parts(
            model,
            dataset,
            [draw],
            clip_bound=clip_bound,
            noise_multiplier=sigma,
            mini_sets=len(draw),
            lr=float(len(draw)),
        )
        optimizer.clip_rule = rule
        optimizer.noise = KnownNoise(noise)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            wrapped = GradSampleModule(model, strict=False)
            if isinstance(rule, AdaptiveClipping):
                rule.meter = replace(rule.meter, hooks=wrapped)  # silent while public data pass through
            batch = [i for part in draw for i in part]
            plan = SamplingPlan(
                kind="poisson",
                unit="sample",
                dataset_size=len(dataset),
                steps_per_epoch=1,
                mini_sets=1,
                mini_set_size=len(batch),
            )
            given = GivenDraws(plan, [[batch]])
            loader = PrivateDataLoader(DataLoader(dataset), draws=given, part=whole_batch)
            optimizer = IndividualClippingOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0),
                noise_multiplier=sigma,
                max_grad_norm=clip_bound,
                expected_batch_size=1,
                clip_rule=rule,
                ledger=loader.ledger,
                noise=KnownNoise(noise),
                parameter_names={p: name for name, p in model.named_parameters()},
                loss_reduction="sum",
            )
            for x, y in loader:
                optimizer.zero_grad()
                loss(wrapped, x, y).backward()
                optimizer.step()
        wrapped.to_standard_module()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, optimizer
