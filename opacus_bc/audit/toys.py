"""The worst case: a loss <w, x> on data where one sample turns a whole mini-set around.

n copies of -u give a mini-set the clipped vector -C u; a canary +2n u makes it +C u, a shift of 2C, the whole
sensitivity. Under individual clipping the copies are 0 and the canary adds C u. With layers, every layer sees
the same in proportion to its bound, so that all of them move at once.

*Repetitions side by side.* The model has R entries in every layer and u = (1, ..., 1) / sqrt(R). The release
then moves every entry by 1/sqrt(R) of the sensitivity and puts independent noise on each, so that one real
step at noise multiplier sigma / sqrt(R) is R independent repetitions of a one-dimensional step at sigma, as
an adversary sees it who looks at one entry only.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.alc import ALC
from opacus_bc.block_optimizer import BlockOptimizer
from opacus_bc.privacy_engine import PrivacyEngine
from opacus_bc.sampling import SMALLEST_MINI_SET, Sampling

Method = Literal["BC", "GBC", "IC", "ALC", "ALC scale", "IC + ALC"]
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
        return self.method in ("IC", "IC + ALC")

    @property
    def replaces(self) -> bool:
        """Whether the neighbour has an opposite sample in the canary's place (individual clipping: 2C)."""
        return self.individual and self.sampling != "poisson"

    @property
    def proportions(self) -> tuple[float, ...]:
        """Relative size of the layers' gradients: halves from layer to layer."""
        return tuple(0.5**h for h in range(self.layers))


class InnerProduct(nn.Module):
    """The sum over layers and entries of w times x; its gradient is x itself, whatever w is."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, width, bias=False) for _ in range(layers))
        self.reset()

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row of ``x``, which has one column for each layer."""
        columns = [layer(x[:, h : h + 1]).sum(1) for h, layer in enumerate(self.layers)]
        return torch.stack(columns).sum(0)

    @torch.no_grad()
    def reset(self) -> None:
        """Put all weights to zero, so that the next step's movement can be read off."""
        for p in self.parameters():
            p.zero_()

    def moved(self) -> Tensor:
        """What the steps since :meth:`reset` have subtracted: shape ``(width, layers)``."""
        return -torch.stack([p.detach().flatten() for p in self.parameters()], dim=1)


@dataclass(kw_only=True)
class PrivateToy:
    """A toy that ``PrivacyEngine.make_private`` has made private: everything in it is the real thing."""

    toy: Toy
    engine: PrivacyEngine
    inner: InnerProduct
    model: nn.Module
    optimizer: Any
    loader: Any
    data: Tensor
    copies: int
    width: int

    @property
    def canary(self) -> int:
        """Index of the first canary; before it come the copies."""
        return self.copies

    def contents(self, *, with_canary: bool) -> list[list[int]]:
        """A draw of a few copies in every mini-set, with or without a canary in the first one."""
        each = SMALLEST_MINI_SET
        draw = [list(range(j * each, (j + 1) * each)) for j in range(self.toy.mini_sets)]
        if with_canary:
            draw[0] = [*draw[0], self.canary]
        elif self.toy.replaces:
            draw[0] = [*draw[0], self.canary - 1]
        return draw

    def backward(self, x: Tensor) -> None:
        """What the user's loop does with a delivered batch, up to the step."""
        self.optimizer.zero_grad()
        self.model(x).mean().backward()

    def released(self) -> Floats:
        """The noised sum of the last step, shape ``(width, layers)``; the weights go back to zero."""
        moved = self.inner.moved().double().numpy() * float(self.optimizer.expected_batch_size)
        self.inner.reset()
        return np.asarray(moved)

    def noise_stds(self) -> Floats:
        """Noise that the optimizer says it adds to every entry of each layer's sum."""
        if not isinstance(self.optimizer, BlockOptimizer):  # Opacus's own: one bound, one scale
            return np.full(self.toy.layers, self.optimizer.noise_multiplier * self.optimizer.max_grad_norm)
        by_name = {
            name: block.noise_std / factor
            for block in self.optimizer.blocks()
            for name, factor in zip(block.names, block.factors, strict=True)
        }
        return np.array([by_name[name] for name, _ in self.inner.named_parameters()])


def _gradient(module: nn.Module, batch: Any) -> None:
    module(batch[0]).mean().backward()


def _public(toy: Toy) -> DataLoader[Any]:
    x = torch.tensor([toy.proportions]).repeat(8, 1)
    return DataLoader(TensorDataset(x, torch.zeros(8)), batch_size=4)


def samples(toy: Toy, copies: int, canaries: int) -> Tensor:
    """The copies and after them the canaries, one column for each layer."""
    base = _SIZE * toy.max_grad_norm * torch.tensor([toy.proportions])
    if toy.individual:
        opposite = -base if toy.replaces else 0.0 * base
        return torch.cat([0.0 * base.repeat(copies - 1, 1), opposite, base.repeat(canaries, 1)])
    return torch.cat([-base.repeat(copies, 1), 2.0 * copies * base.repeat(canaries, 1)])


def make_toy(
    toy: Toy,
    *,
    canaries: int,
    width: int = 1,
    copies: int | None = None,
    seed: int = 0,
    data: Tensor | None = None,
) -> PrivateToy:
    """Make a toy private.

    Args:
        toy: Which.
        canaries: Canaries in the data set, each in a repetition of its own.
        width: R.
        copies: n; None takes so many that a mini-set without copies practically never occurs.
        seed: Of everything random.
        data: Other samples instead of the worst case's.
    """
    torch.manual_seed(seed)
    if copies is None:
        copies = 40 * toy.mini_sets * toy.steps_per_epoch
    values = samples(toy, copies, canaries) if data is None else data
    inner = InnerProduct(toy.layers, width)
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
    if "ALC" in toy.method:
        apply: Any = "scale" if toy.method == "ALC scale" else "clip"
        extra["alc"] = ALC(_public(toy), layers="parameter", apply=apply, refresh="once", gradient=_gradient)
    with warnings.catch_warnings():
        for message in ("Secure RNG turned off", "noise_multiplier=0", "the public data has"):
            warnings.filterwarnings("ignore", message=message)
        engine = PrivacyEngine()
        model, optimizer, private = engine.make_private(
            module=inner,
            optimizer=torch.optim.SGD(inner.parameters(), lr=1.0),
            data_loader=loader,
            noise_multiplier=toy.noise_multiplier / math.sqrt(width),
            max_grad_norm=toy.max_grad_norm,
            clipping="flat" if toy.individual else "batch",
            sampling=toy.sampling,
            **extra,
        )
    return PrivateToy(
        toy=toy,
        engine=engine,
        inner=inner,
        model=model,
        optimizer=optimizer,
        loader=private,
        data=values,
        copies=copies,
        width=width,
    )
