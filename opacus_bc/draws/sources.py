"""Where a step's samples come from.

A *draw* is a list of mini-sets, each a list of sample indices. Every source yields one draw for each step of
a pass. :class:`~opacus_bc.draws.plan.SamplingPlan` says the same in public constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.random import Generator

from opacus_bc.draws.plan import SMALLEST_MINI_SET, SamplingPlan
from opacus_bc.draws.units import UserIndex
from opacus_bc.mechanism.types import Loader

Draw = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a process does of a draw."""

    mini_sets: Draw  # delivered one after the other; never empty
    placeholder: bool  # whether it stands for nothing and its gradient is discarded
    shares: tuple[float, ...]  # of each mini-set, where several processes work on one together
    counts: tuple[int, ...] | None = None  # rows of each unit, where a batch's units have several


def placeholder() -> list[int]:
    """Indices that keep a loop going where nothing is deliverable; what they compute is discarded."""
    return list(range(SMALLEST_MINI_SET))


def whole_draw(draw: Draw, smallest: int = SMALLEST_MINI_SET) -> Part:
    """The mini-sets large enough to be delivered, or a placeholder if there is none.

    A mini-set that is too small contributes zero, which is a function of that mini-set alone, so the
    sensitivity stays what it was. A step on a placeholder is noised, taken and accounted.
    """
    kept = [mini_set for mini_set in draw if len(mini_set) >= smallest]
    return Part(mini_sets=kept or [placeholder()], placeholder=not kept, shares=(1.0,) * max(1, len(kept)))


def every_mini_set(draw: Draw) -> Part:
    """All mini-sets, also those of one sample: nothing in the model needs the statistics of several."""
    return whole_draw(draw, smallest=1)


def whole_batch(draw: Draw) -> Part:
    """A draw in one batch, as individual clipping takes it; an empty one's gradient is discarded."""
    (batch,) = draw
    return Part(mini_sets=[batch], placeholder=not batch, shares=(1.0,))


def whole_units(draw: Draw) -> Part:
    """A draw of units in one batch, unit after unit, as individual clipping takes it."""
    rows = [index for unit in draw for index in unit]
    counts = tuple(map(len, draw))
    return Part(mini_sets=[rows], placeholder=not rows, shares=(1.0,), counts=counts)


class DrawSource(Protocol):
    """Yields the draws of one pass each time it is iterated."""

    plan: SamplingPlan

    def __iter__(self) -> Iterator[Draw]: ...


class PoissonBins:
    """Poisson sampling, each drawn sample thrown into one of k bins, uniformly and independently.

    **Formal guarantee**: every sample is in the draw with probability q, independently of all others, and in
    at most one bin; adding or removing a sample changes no other sample's bin. (Cutting a Poisson batch into
    contiguous chunks does not have this property: one more sample moves the border of every chunk.)

    The batch size is Binomial(N, q) and given its size a Poisson batch is a uniform subset, so a step costs
    O(qN) instead of O(N).
    """

    def __init__(self, plan: SamplingPlan, generator: Generator) -> None:
        self.plan = plan
        self.generator = generator

    def draw(self) -> Draw:
        """One step's bins, empty ones included."""
        n, k = self.plan.dataset_size, self.plan.mini_sets
        size = int(self.generator.binomial(n, self.plan.sample_rate))
        indices = self.generator.choice(n, size=size, replace=False)  # in uniform order: g may depend on it
        if k == 1:
            return [indices.tolist()]
        bins = self.generator.integers(0, k, size=size)
        return [indices[bins == j].tolist() for j in range(k)]

    def __iter__(self) -> Iterator[Draw]:
        for _ in range(self.plan.steps_per_epoch):
            yield self.draw()


class FixedPartition:
    """The data are cut once into ``k * steps_per_epoch`` mini-sets; every step draws k of them.

    **Formal guarantee**: a sample belongs to one mini-set for ever; that mini-set is in a draw with
    probability k/M = q, drawn without replacement, independently from step to step (the paper's theory).
    """

    def __init__(self, plan: SamplingPlan, generator: Generator) -> None:
        self.plan = plan
        self.generator = generator
        total = plan.mini_sets * plan.steps_per_epoch
        if plan.dataset_size < SMALLEST_MINI_SET * total:
            raise ValueError(
                f"sampling='partition' cuts {plan.dataset_size} samples into {total} mini-sets, fewer than "
                f"{SMALLEST_MINI_SET} in each: use a larger mini_batch_size"
            )
        order = generator.permutation(plan.dataset_size)
        self.mini_sets: Draw = [part.tolist() for part in np.array_split(order, total)]

    def __iter__(self) -> Iterator[Draw]:
        for _ in range(self.plan.steps_per_epoch):
            chosen = self.generator.choice(len(self.mini_sets), size=self.plan.mini_sets, replace=False)
            yield [self.mini_sets[j] for j in chosen]


class WholeBatches:
    """The batches of another sampler, each one draw: Opacus's Poisson sampler, or the user's own order.

    **Formal guarantee**: what is drawn is what that sampler draws, bit by bit.
    """

    def __init__(self, plan: SamplingPlan, batches: Iterable[Sequence[int]]) -> None:
        self.plan = plan
        self.batches = batches

    def __iter__(self) -> Iterator[Draw]:
        for batch in self.batches:
            yield [[int(i) for i in batch]]


class ShuffledPass(WholeBatches):
    """The user's own batches, each cut into consecutive mini-sets; a sample is in a pass at most once.

    **Formal guarantee**: positions do not depend on the samples' values, so replacing a sample changes one
    mini-set of one step in every pass.
    """

    def __iter__(self) -> Iterator[Draw]:
        s = self.plan.mini_set_size
        for (batch,) in super().__iter__():
            yield [batch[i : i + s] for i in range(0, len(batch), s)]


class FixedNumber:
    """As many units in every step, drawn without replacement and anew for each step: k of N.

    **Formal guarantee**: a unit is in a draw with probability k/N, at most the plan's sample rate; which
    units are drawn does not depend on what they hold.
    """

    def __init__(self, plan: SamplingPlan, generator: Generator) -> None:
        self.plan = plan
        self.generator = generator

    def __iter__(self) -> Iterator[Draw]:
        for _ in range(self.plan.steps_per_epoch):
            drawn = self.generator.choice(self.plan.dataset_size, size=self.plan.vectors, replace=False)
            yield [drawn.tolist()]


class UnitPass:
    """Every unit once in a pass, in a new random order.

    **Formal guarantee**: positions do not depend on what units hold, so replacing a unit changes one clipped
    vector of one step in every pass.
    """

    def __init__(self, plan: SamplingPlan, generator: Generator) -> None:
        self.plan = plan
        self.generator = generator

    def __iter__(self) -> Iterator[Draw]:
        order = self.generator.permutation(self.plan.dataset_size)
        for part in np.array_split(order, self.plan.steps_per_epoch):
            yield [part.tolist()]


class Spelled:
    """The draws of another source, in which every drawn unit stands for its rows.

    **Formal guarantee**: what is drawn is what that source draws; a unit's rows do not depend on which other
    units are drawn, and each drawn unit is one list of the draw.

    Args:
        plan: What is drawn, in public constants.
        source: Draws units, one batch of them a step.
        rows: The rows of a unit in this draw.
    """

    def __init__(self, plan: SamplingPlan, source: DrawSource, rows: Callable[[int], list[int]]) -> None:
        self.plan = plan
        self.source = source
        self.rows = rows

    @property
    def generator(self) -> Generator | None:
        """What the units are drawn with."""
        found: Generator | None = getattr(self.source, "generator", None)
        return found

    def __iter__(self) -> Iterator[Draw]:
        for (units,) in self.source:
            yield [self.rows(unit) for unit in units]


def with_views(source: DrawSource) -> DrawSource:
    """The same draws of samples, each sample as often as the plan has views."""
    plan = source.plan
    return source if plan.views == 1 else Spelled(plan, source, lambda index: [index] * plan.views)


def draws_of_users(plan: SamplingPlan, users: UserIndex, generator: Generator) -> DrawSource:
    """Draws of users as ``plan`` says; each drawn user is a list of at most ``plan.cap`` samples."""
    source: DrawSource
    if plan.kind == "poisson":
        source = PoissonBins(replace(plan, mini_sets=1), generator)
    elif plan.kind == "partition":
        source = FixedNumber(plan, generator)
    else:
        source = UnitPass(plan, generator)
    return Spelled(plan, source, partial(rows_of_user, users, plan.cap, plan.views, generator))


def rows_of_user(users: UserIndex, cap: int, views: int, generator: Generator, user: int) -> list[int]:
    """A user's samples in one draw: all of them, or ``cap`` that are chosen anew each time."""
    own = users.samples_of(user)
    if len(own) > cap:
        own = own[generator.choice(len(own), size=cap, replace=False)]
    return np.repeat(own, views).tolist()


def make_draws(plan: SamplingPlan, data_loader: Loader, generator: Generator) -> DrawSource:
    """The draw source that does what ``plan`` says."""
    if plan.kind == "poisson":
        return PoissonBins(plan, generator)
    if plan.kind == "partition":
        return FixedPartition(plan, generator)
    assert data_loader.batch_sampler is not None
    return ShuffledPass(plan, data_loader.batch_sampler)
