"""Training as the paper's experiments describe it. NOT PRIVATE: nothing here has an accountant or an epsilon.

Batches are drawn with replacement at the start of each epoch, BatchNorm is PyTorch's own (its running
statistics leak), and the update is

    U = n + sum_j [g(w; S_j)]_(C_1..C_L),   n_h ~ N(0, (2 C_h sigma)^2 I),   w := w - eta U / k,

with k = 1 mini-set of m samples (batch clipping) or k = m mini-sets of one sample each (individual clipping,
forward passes one by one). It exists to compare our numbers with published ones; `opacus_bc.PrivacyEngine`
refuses such draws and cannot be made to use this module.

Two other readings of the description can be tried: bounds that a model trained on public data alone gives
once and for all, and noise that is added to one update of each epoch only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler

from opacus_bc import ALC
from opacus_bc.alc.adaptive import AdaptiveClipping
from opacus_bc.alc.measuring import PublicNorms
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data
from opacus_bc.mechanism.blocks import Block
from opacus_bc.mechanism.clipping import add_scaled_, clip_coefficients
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.mechanism.rules import ClipRule, FlatClipping

PUBLIC_EPOCHS = 5  # of the model whose norms are the bounds, in that reading


class WithReplacement(Sampler[list[int]]):
    """ceil(N/m) times m independent uniform indices, handed out in mini-sets of ``mini_set`` indices."""

    def __init__(self, size: int, batch_size: int, mini_set: int, generator: torch.Generator) -> None:
        self.size, self.batch_size, self.mini_set = size, batch_size, mini_set
        self.generator = generator

    @property
    def steps(self) -> int:
        """Updates in an epoch."""
        return math.ceil(self.size / self.batch_size)

    def __len__(self) -> int:
        return self.steps * (self.batch_size // self.mini_set)

    def __iter__(self) -> Iterator[list[int]]:
        shape = (len(self), self.mini_set)
        drawn: list[list[int]] = torch.randint(0, self.size, shape, generator=self.generator).tolist()
        return iter(drawn)


class PublishedOptimizer:
    """The update above: one call of `step` for each mini-set, every k-th of which moves the weights.

    Attributes:
        max_grad_norm: The master clip bound C; a clip schedule sets it.
        noise_multiplier: sigma.
        adaptive: The layerwise rule, if there is one.
    """

    def __init__(
        self,
        plain: optim.Optimizer,
        named: list[tuple[str, nn.Parameter]],
        rule: ClipRule,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        mini_sets: int,
        noise: TorchNoise,
        noise_every: int = 1,
    ) -> None:
        self.plain, self.named, self.rule = plain, named, rule
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, max_grad_norm
        self.mini_sets, self.noise = mini_sets, noise
        self.adaptive = rule if isinstance(rule, AdaptiveClipping) else None
        self._noise_every = noise_every  # updates; the first of so many is noised
        self._updates = 0
        self._seen = 0
        self._blocks: list[Block] = []
        self._sums: list[Tensor] = []

    def blocks(self) -> list[Block]:
        """What the next update clips and noises; the paper's sensitivity of a mini-set is 2C throughout."""
        return self.rule.blocks(
            self.named, noise_multiplier=self.noise_multiplier, max_grad_norm=self.max_grad_norm
        )

    def zero_grad(self) -> None:
        """Forget the gradients of the last mini-set."""
        self.plain.zero_grad()

    def step(self) -> None:
        """Clip the mini-set's gradient; after k of them add noise and move the weights."""
        if self._seen == 0:
            if self.adaptive is not None:
                self.adaptive.begin_draw()
            self._blocks = self.blocks()
        by_name = dict(self.named)
        parameters = [by_name[name] for block in self._blocks for name in block.names]
        if self._seen == 0:
            self._sums = [torch.zeros_like(p) for p in parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        coefficients = clip_coefficients(grads, self._blocks)
        if coefficients is not None:  # a gradient that is not finite counts as zero
            with torch.no_grad():
                add_scaled_(self._sums, grads, coefficients)
        self._seen += 1
        if self._seen == self.mini_sets:
            self._seen = 0
            self._update(parameters)

    def _update(self, parameters: list[nn.Parameter]) -> None:
        stds = [block.noise_std for block in self._blocks for _ in block.names]
        noised = self._updates % self._noise_every == 0
        self._updates += 1
        for p, total, std in zip(parameters, self._sums, stds, strict=True):
            if noised:
                self.noise.add_(total.detach(), std)
            p.grad = total.detach() / self.mini_sets
        self.plain.step()
        if self.adaptive is not None:
            self.adaptive.end_step(dict(self.named), {})


def published(
    cell: Cell, data: Data, model: nn.Module, plain: optim.Optimizer, streams: dict[str, torch.Generator]
) -> tuple[PublishedOptimizer, DataLoader[Any]]:
    """The optimizer and the loader of a cell with ``published=True``."""
    assert cell.noise_multiplier is not None  # Cell has seen to it
    sampler = WithReplacement(len(data.private), cell.batch_size, cell.unit, streams["sampling"])
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rule: ClipRule = FlatClipping(unit="mini-set", adjacency="replace one")
    if cell.method.alc is not None:
        public = DataLoader(data.public, batch_size=min(256, len(data.public)))
        fixed = cell.reading == "bounds of a public model"
        rule = AdaptiveClipping(
            ALC(public, **asdict(cell.method.alc), refresh="once" if fixed else "epoch"),
            PublicNorms(trained_on_public_data(cell, data, model) if fixed else model),
            [name for name, _ in named],
            unit="mini-set",
            adjacency="replace one",
            mini_set_size=cell.unit,
            steps_per_epoch=sampler.steps,
            gradients_per_step=cell.batch_size // cell.unit,
        )
    optimizer = PublishedOptimizer(
        plain,
        named,
        rule,
        noise_multiplier=cell.noise_multiplier,
        max_grad_norm=cell.clip,
        mini_sets=cell.batch_size // cell.unit,
        noise=TorchNoise(streams["noise"]),
        noise_every=sampler.steps if cell.reading == "noise once an epoch" else 1,
    )
    return optimizer, DataLoader(data.private, batch_sampler=sampler)


def trained_on_public_data(cell: Cell, data: Data, model: nn.Module) -> nn.Module:
    """A copy of the model after some epochs of plain SGD on the public data, from the cell's seed."""
    trained = copy.deepcopy(model).train()
    optimizer = optim.SGD(trained.parameters(), lr=cell.lr)
    order = torch.Generator().manual_seed(cell.seed)
    loader = DataLoader(data.public, batch_size=cell.batch_size, shuffle=True, generator=order)
    for _ in range(PUBLIC_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(trained(x), y))
            optimizer.step()
    return trained
