"""The worst case: a loss <w, x> on data where one sample turns a whole mini-set around.

n copies of -u give a mini-set the clipped vector -C u; a canary +2n u makes it +C u, a shift of 2C, the whole
sensitivity. Under individual clipping the copies are 0 and the canary adds C u. With layers, every layer sees
the same in proportion to its bound, so that all of them move at once.

*Repetitions side by side.* The model has R entries in every layer and u = (1, ..., 1) / sqrt(R). The release
then moves every entry by 1/sqrt(R) of the sensitivity and puts independent noise on each, so that one real
step at noise multiplier sigma / sqrt(R) is R independent repetitions of a one-dimensional step at sigma, as
an adversary sees it who looks at one entry only. With BatchNorm a repetition is one channel, whose weights,
gain and shift are all looked at; a mini-set's copies are pairs that cancel and the canary is their mean, so
that whatever the statistics are, only the shifts have a gradient, and the canary turns that one around.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.audit.models import NORMALISED_LAYERS, InnerProduct, Mean, Normalised, Wide
from opacus_bc.audit.modes import MODES, Mode
from opacus_bc.draws.plan import SMALLEST_MINI_SET
from opacus_bc.engine.privacy_engine import PrivacyEngine
from opacus_bc.mechanism.names import Sampling
from opacus_bc.mechanism.randomness import fresh_seed

Floats = npt.NDArray[np.float64]

_SIZE = 100.0  # of a gradient over its bound: everything is clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Toy:
    """A worst case: how it is clipped, drawn and noised.

    Attributes:
        method: A row of :data:`opacus_bc.audit.modes.MODES`.
        noise_multiplier: sigma.
        steps_per_epoch: 1/q.
        steps: T of a repetition; passes for ``sampling="shuffle"``.
        sampling: How mini-sets are drawn.
        mini_sets: k.
        layers: L, clip groups of ALC.
        max_grad_norm: C.
        through_statistics: With BatchNorm and individual clipping: most of the canary's gradient goes through
            the public statistics. Otherwise the canary would turn the batch's own statistics around.
    """

    method: str
    noise_multiplier: float = 1.0
    steps_per_epoch: int = 1
    steps: int = 1
    sampling: Sampling = "poisson"
    mini_sets: int = 1
    layers: int = 1
    max_grad_norm: float = 0.5
    through_statistics: bool = False

    @property
    def mode(self) -> Mode:
        """The row of the table that ``method`` names."""
        return MODES[self.method]

    @property
    def individual(self) -> bool:
        """Whether samples are clipped one by one."""
        return self.mode.individual

    @property
    def replaces(self) -> bool:
        """Whether the neighbour has an opposite sample in the canary's place (individual clipping: 2C)."""
        return self.individual and self.sampling != "poisson"

    @property
    def proportions(self) -> tuple[float, ...]:
        """Relative size of the layers' gradients: halves from layer to layer."""
        return tuple(0.5**h for h in range(self.layers))


def single_round(method: str, *, through_statistics: bool = False) -> Toy:
    """A row of the table at mu = 1 without sampling: one step, or with BatchNorm four."""
    mode = MODES[method]
    rounds = 1 if mode.batch_norm is None else 4
    by_layers = mode.alc is not None or mode.clipping == "per_layer"
    layers = (4 if rounds == 1 else NORMALISED_LAYERS) if by_layers else 1
    root = math.sqrt(layers) if mode.alc == "clip" else 1.0  # what sigma_eff loses
    return Toy(
        method=method,
        noise_multiplier=math.sqrt(rounds) * root,
        steps=rounds,
        mini_sets=mode.mini_sets,
        layers=layers,
        through_statistics=through_statistics,
    )


@dataclass(kw_only=True)
class PrivateToy:
    """A toy that ``PrivacyEngine.make_private`` has made private: everything in it is the real thing."""

    toy: Toy
    engine: PrivacyEngine
    inner: Wide
    model: nn.Module
    optimizer: Any
    loader: Any
    criterion: Callable[[Tensor, Tensor], Any]
    data: Tensor
    copies: int
    parts: int = 1  # what Opacus divides the batch size by, and its sum of several ranks' releases
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
        self.criterion(self.model(x), x.new_full((len(x),), self.sign)).backward()
        self.optimizer.step()

    def released(self, start: int = 0) -> Floats:
        """The noised sums of the steps from number ``start`` on, shape ``(steps, width, features)``."""
        moved = torch.stack(self.movements[start:])  # in the model's precision, which halves the memory
        divisor = self.parts * float(self.optimizer.expected_batch_size)
        return np.asarray(moved.mul_(self.sign * divisor).numpy())

    def noise_stds(self) -> Floats:
        """Noise that the optimizer says it adds to every feature of the sum."""
        return stated_noise(self.optimizer, self.inner)


def stated_noise(optimizer: Any, inner: Wide) -> Floats:
    """Standard deviation that an optimizer states for every feature of a repetition."""
    by_name = {
        name: block.noise_std / factor
        for block in optimizer.blocks()
        for name, factor in zip(block.names, block.factors, strict=True)
    }
    stds = {
        p: by_name[name] for name, p in optimizer.named_parameters()
    }  # whatever wraps the model names them
    return np.concatenate([np.full(p.numel() // inner.width, stds[p]) for p in inner.parameters()])


def _noise_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(2**20 + seed)  # apart from the draws' seeds


def repeat_noise(optimizer: Any, seed: int) -> None:
    """Seed the noise of an optimizer whose streams the operating system has seeded."""
    optimizer.noise.reseed(fresh_seed(_noise_generator(seed)))


def samples(toy: Toy, copies: int, canaries: int) -> Tensor:
    """The copies and after them the canaries, one column for each layer.

    With BatchNorm and individual clipping the canary's loss outweighs those of the copies, and either its
    features are extreme, or they are zero and the public means are not.
    """
    if toy.mode.batch_norm is not None:
        size = _SIZE * toy.max_grad_norm
        canary = [0, 0, 1e3 * size] if toy.through_statistics else [-1e3, 2e3, 1e3 * size]
        rows = [[[3, 1, size]] * 2, [canary]]
        if not toy.individual:
            rows = [[[3, 1, -size], [-3, -1, -size]], [[0, 0, 2 * copies * size]]]
        ordinary, last = (torch.tensor(row, dtype=torch.float64) for row in rows)
        return torch.cat([ordinary.repeat(-(-copies // 2), 1)[:copies], last.repeat(canaries, 1)])
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
    parts: int = 1,
) -> PrivateToy:
    """Make a toy private.

    Args:
        toy: Which.
        canaries: Canaries in the data set, each in a repetition of its own.
        width: R.
        copies: n; None takes so many that a mini-set without copies practically never occurs.
        seed: Of everything random.
        data: Other samples instead of the worst case's.
        wrap: What the model is put into before it is made private: several ranks then agree on the noise of
            the first one's generator.
        parts: See :class:`PrivateToy`.
    """
    torch.manual_seed(seed)
    if copies is None:
        copies = 40 * toy.mini_sets * toy.steps_per_epoch
    values = samples(toy, copies, canaries) if data is None else data
    mode = toy.mode
    given = mode.seeded_by_generator or wrap is not _as_it_is
    inner: Wide = Normalised(width) if mode.batch_norm is not None else InnerProduct(toy.layers, width)
    size = len(values)
    batch = math.ceil(size / toy.steps_per_epoch)
    batch += -batch % toy.mini_sets
    loader = DataLoader(
        TensorDataset(values, torch.zeros(size)),
        batch_size=batch,
        generator=torch.Generator().manual_seed(seed),
    )
    # Ghost clipping asks for the criterion, the others leave it to the loop.
    extra: dict[str, Any] = {"criterion": Mean()} if mode.gradients == "ghost" else {}
    if not toy.individual:
        extra["mini_batch_size"] = batch // toy.mini_sets
    movements: list[Tensor] = []

    def record(*_: Any) -> None:
        movements.append(inner.moved())
        inner.reset()

    descent = torch.optim.SGD(inner.parameters(), lr=1.0)
    descent.register_step_post_hook(record)
    engine = PrivacyEngine()
    with warnings.catch_warnings():
        for message in ("noise_multiplier=0", "the public data has", "batch_norm=", "Full backward hook"):
            warnings.filterwarnings("ignore", message=message)
        model, optimizer, *criterion, private = engine.make_private(
            module=wrap(inner),
            optimizer=descent,
            data_loader=loader,
            noise_multiplier=toy.noise_multiplier / math.sqrt(width),
            sampling=toy.sampling,
            noise_generator=_noise_generator(seed) if given else None,
            **mode.arguments(
                size=size,
                bound=toy.max_grad_norm,
                proportions=toy.proportions,
                public_mean=30.0 if toy.through_statistics else 0.0,
            ),
            **extra,
        )
    if not given:
        repeat_noise(optimizer, seed)
    return PrivateToy(
        toy=toy,
        engine=engine,
        inner=inner,
        model=model,
        optimizer=optimizer,
        loader=private,
        criterion=criterion[0] if criterion else Mean(),
        data=values,
        copies=copies,
        parts=parts,
        movements=movements,
    )
