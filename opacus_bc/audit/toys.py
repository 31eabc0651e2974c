"""The worst case: a loss <w, x> on data where one sample turns a whole mini-set around.

n copies of -u give a mini-set the clipped vector -C u; a canary +2n u makes it +C u, a shift of 2C, the whole
sensitivity. Under individual clipping the copies are 0 and the canary adds C u. With layers, every layer sees
the same in proportion to its bound, so that all of them move at once.

*Repetitions side by side.* The model has R entries in every layer and u = (1, ..., 1) / sqrt(R). The release
then moves every entry by 1/sqrt(R) of the sensitivity and puts independent noise on each, so that one real
step at noise multiplier sigma / sqrt(R) is R independent repetitions of a one-dimensional step at sigma, as
an adversary sees it who looks at one entry only. With BatchNorm a repetition is one channel, whose weights,
gain and shift are all looked at.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.alc.config import ALC
from opacus_bc.audit.models import InnerProduct, Normalised, Wide
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.draws.plan import SMALLEST_MINI_SET
from opacus_bc.engine.privacy_engine import PrivacyEngine
from opacus_bc.mechanism.names import Sampling
from opacus_bc.mechanism.randomness import fresh_seed

Method = Literal["BC", "GBC", "IC", "ALC", "ALC scale", "IC + ALC", "IC + BatchNorm"]
Floats = npt.NDArray[np.float64]

_SIZE = 100.0  # of a gradient over its bound: everything is clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Toy:
    """A worst case: how it is clipped, drawn and noised.

    Attributes:
        method: Which clipping.
        noise_multiplier: sigma.
        steps_per_epoch: 1/q.
        steps: T of a repetition; passes for ``sampling="shuffle"``.
        sampling: How mini-sets are drawn.
        mini_sets: k.
        layers: L, clip groups of ALC.
        max_grad_norm: C.
    """

    method: Method
    noise_multiplier: float = 1.0
    steps_per_epoch: int = 1
    steps: int = 1
    sampling: Sampling = "poisson"
    mini_sets: int = 1
    layers: int = 1
    max_grad_norm: float = 0.5

    @property
    def individual(self) -> bool:
        """Whether samples are clipped one by one."""
        return self.method.startswith("IC")

    @property
    def replaces(self) -> bool:
        """Whether the neighbour has an opposite sample in the canary's place (individual clipping: 2C)."""
        return self.individual and self.sampling != "poisson"

    @property
    def proportions(self) -> tuple[float, ...]:
        """Relative size of the layers' gradients: halves from layer to layer."""
        return tuple(0.5**h for h in range(self.layers))


@dataclass(kw_only=True)
class PrivateToy:
    """A toy that ``PrivacyEngine.make_private`` has made private: everything in it is the real thing."""

    toy: Toy
    engine: PrivacyEngine
    inner: Wide
    model: nn.Module
    optimizer: Any
    loader: Any
    data: Tensor
    copies: int
    # Every step's movement of the weights, which go back to the start before anything else looks at them.
    movements: list[Tensor] = field(default_factory=list)
    sign: float = 1.0  # of the loss, and undone in what is released

    @property
    def canary(self) -> int:
        """Index of the first canary; before it come the copies."""
        return self.copies

    def contents(self, *, with_canary: bool, each: int = SMALLEST_MINI_SET) -> list[list[int]]:
        """A draw of a few copies in every mini-set, with or without a canary in the first one."""
        draw = [list(range(j * each, (j + 1) * each)) for j in range(self.toy.mini_sets)]
        if with_canary:
            draw[0] = [*draw[0], self.canary]
        elif self.toy.replaces:
            draw[0] = [*draw[0], self.canary - 1]
        return draw

    def step(self, x: Tensor) -> None:
        """What the user's loop does with a delivered batch."""
        self.optimizer.zero_grad()
        (self.sign * self.model(x)).mean().backward()
        self.optimizer.step()

    def released(self, start: int = 0) -> Floats:
        """The noised sums of the steps from number ``start`` on, shape ``(steps, width, features)``."""
        moved = torch.stack(self.movements[start:])  # in the model's precision, which halves the memory
        return np.asarray(moved.mul_(self.sign * float(self.optimizer.expected_batch_size)).numpy())

    def noise_stds(self) -> Floats:
        """Noise that the optimizer says it adds to every feature of the sum."""
        by_name = {
            name: block.noise_std / factor
            for block in self.optimizer.blocks()
            for name, factor in zip(block.names, block.factors, strict=True)
        }
        if len(set(by_name.values())) == 1:
            return np.full(self.inner.moved().shape[1], next(iter(by_name.values())))
        return np.array([by_name[name] for name, _ in self.inner.named_parameters()])


def _noise_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(2**20 + seed)  # apart from the draws' seeds


def repeat_noise(optimizer: Any, seed: int) -> None:
    """Seed the noise of an optimizer whose streams the operating system has seeded."""
    optimizer.noise.reseed(fresh_seed(_noise_generator(seed)))


def _gradient(module: nn.Module, batch: Any) -> None:
    module(batch[0]).mean().backward()


def _public(toy: Toy) -> DataLoader[Any]:
    x = torch.tensor([toy.proportions]).repeat(8, 1)
    return DataLoader(TensorDataset(x, torch.zeros(8)), batch_size=4)


def _public_statistics() -> PublicStatistics:
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([x, torch.ones(32, 1, dtype=torch.float64)], dim=1)
    return PublicStatistics(loader=DataLoader(TensorDataset(rows), batch_size=32), differentiate=True)


def samples(toy: Toy, copies: int, canaries: int) -> Tensor:
    """The copies and after them the canaries, one column for each layer.

    With BatchNorm copies are of ordinary size and the canary is not: it would turn all of them around if
    statistics were the batch's, and its loss outweighs theirs.
    """
    if toy.method == "IC + BatchNorm":
        size = _SIZE * toy.max_grad_norm
        ordinary, canary = torch.tensor([[[3, 1, size]], [[-1e3, 2e3, 1e3 * size]]], dtype=torch.float64)
        return torch.cat([ordinary.repeat(copies, 1), canary.repeat(canaries, 1)])
    base = _SIZE * toy.max_grad_norm * torch.tensor([toy.proportions])
    if toy.individual:
        opposite = -base if toy.replaces else 0.0 * base
        return torch.cat([0.0 * base.repeat(copies - 1, 1), opposite, base.repeat(canaries, 1)])
    return torch.cat([-base.repeat(copies, 1), 2.0 * copies * base.repeat(canaries, 1)])


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def make_toy(
    toy: Toy,
    *,
    canaries: int,
    width: int = 1,
    copies: int | None = None,
    seed: int = 0,
    data: Tensor | None = None,
    wrap: Callable[[nn.Module], nn.Module] = _as_it_is,
) -> PrivateToy:
    """Make a toy private.

    Args:
        toy: Which.
        canaries: Canaries in the data set, each in a repetition of its own.
        width: R.
        copies: n; None takes so many that a mini-set without copies practically never occurs.
        seed: Of everything random.
        data: Other samples instead of the worst case's.
        wrap: What the model is put into before it is made private.
    """
    torch.manual_seed(seed)
    if copies is None:
        copies = 40 * toy.mini_sets * toy.steps_per_epoch
    values = samples(toy, copies, canaries) if data is None else data
    normalised = toy.method == "IC + BatchNorm"
    inner: Wide = Normalised(width) if normalised else InnerProduct(toy.layers, width)
    size = len(values)
    batch = math.ceil(size / toy.steps_per_epoch)
    batch += -batch % toy.mini_sets
    loader = DataLoader(
        TensorDataset(values, torch.zeros(size)),
        batch_size=batch,
        generator=torch.Generator().manual_seed(seed),
    )
    extra: dict[str, Any] = {}
    if not toy.individual:
        extra["mini_batch_size"] = batch // toy.mini_sets
    if normalised:
        extra["batch_norm"] = _public_statistics()
    if "ALC" in toy.method:
        apply: Any = "scale" if toy.method == "ALC scale" else "clip"
        extra["alc"] = ALC(_public(toy), layers="parameter", apply=apply, refresh="once", gradient=_gradient)
    movements: list[Tensor] = []

    def record(*_: Any) -> None:
        movements.append(inner.moved())
        inner.reset()

    descent = torch.optim.SGD(inner.parameters(), lr=1.0)
    descent.register_step_post_hook(record)
    engine = PrivacyEngine()
    with warnings.catch_warnings():
        for message in ("noise_multiplier=0", "the public data has"):
            warnings.filterwarnings("ignore", message=message)
        model, optimizer, private = engine.make_private(
            module=wrap(inner),
            optimizer=descent,
            data_loader=loader,
            noise_multiplier=toy.noise_multiplier / math.sqrt(width),
            max_grad_norm=toy.max_grad_norm,
            clipping="flat" if toy.individual else "batch",
            sampling=toy.sampling,
            noise_generator=None if toy.individual else _noise_generator(seed),
            **extra,
        )
    if toy.individual:
        repeat_noise(optimizer, seed)
    return PrivateToy(
        toy=toy,
        engine=engine,
        inner=inner,
        model=model,
        optimizer=optimizer,
        loader=private,
        data=values,
        copies=copies,
        movements=movements,
    )
