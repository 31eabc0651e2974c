"""How a step's mini-sets are drawn out of the private data, and the public description of it.

A *draw* is a list of mini-sets, each a list of sample indices. Every sampler below yields one draw for each
step of a pass. :class:`SamplingPlan` says the same in public constants; the accountant reads nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.random import Generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from opacus_bc.clipping import Adjacency

Sampling = Literal["poisson", "partition", "shuffle"]
SAMPLINGS: tuple[Sampling, ...] = ("poisson", "partition", "shuffle")
Draw = list[list[int]]

# A mini-set of one sample has no batch statistics. Below this size it is not delivered and contributes zero.
SMALLEST_MINI_SET = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """What the accountant may assume about the draws: public constants, fixed before training.

    Attributes:
        kind: ``"poisson"``, ``"partition"`` or ``"shuffle"``.
        dataset_size: N.
        steps_per_epoch: The length of the user's loader; one pass makes this many steps.
        mini_sets: k, the number of mini-sets that a step clips one by one.
        mini_set_size: s, the (expected) number of samples in a mini-set.
    """

    kind: Sampling
    dataset_size: int
    steps_per_epoch: int
    mini_sets: int
    mini_set_size: int

    @property
    def sample_rate(self) -> float:
        """Q, the probability with which a given sample (or its mini-set) takes part in a step."""
        return 1.0 / self.steps_per_epoch

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation under which the guarantee is stated."""
        return "add/remove one" if self.kind == "poisson" else "replace one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a process does of a draw.

    Attributes:
        mini_sets: What it delivers, one after the other; never empty.
        placeholder: Whether it stands for nothing and its gradient is discarded.
        shares: This process's share of each mini-set, where several processes work on one together.
    """

    mini_sets: Draw
    placeholder: bool
    shares: tuple[float, ...]


def placeholder() -> list[int]:
    """Indices that keep a loop going where nothing is deliverable; what they compute is discarded."""
    return list(range(SMALLEST_MINI_SET))


def whole_draw(draw: Draw) -> Part:
    """The mini-sets large enough to be delivered, or a placeholder if there is none.

    A mini-set that is too small contributes zero, which is a function of that mini-set alone, so the
    sensitivity stays what it was. The placeholder only keeps the user's loop going: its gradient is
    discarded, and the step is noised, taken and accounted.
    """
    kept = [mini_set for mini_set in draw if len(mini_set) >= SMALLEST_MINI_SET]
    return Part(mini_sets=kept or [placeholder()], placeholder=not kept, shares=(1.0,) * max(1, len(kept)))


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


class ShuffledPass:
    """The user's own batches, each cut into consecutive mini-sets; a sample is in a pass at most once.

    **Formal guarantee**: positions do not depend on the samples' values, so replacing a sample changes one
    mini-set of one step in every pass.
    """

    def __init__(self, plan: SamplingPlan, batches: Iterable[Sequence[int]]) -> None:
        self.plan = plan
        self.batches = batches

    def __iter__(self) -> Iterator[Draw]:
        s = self.plan.mini_set_size
        for batch in self.batches:
            indices = [int(i) for i in batch]
            yield [indices[i : i + s] for i in range(0, len(indices), s)]


def resolve_sampling(sampling: str | None, *, poisson_sampling: bool) -> Sampling:
    """Reconcile ``sampling`` with Opacus's ``poisson_sampling``.

    Raises:
        ValueError: The name is unknown, or the two contradict each other.
    """
    if sampling is None:
        return "poisson" if poisson_sampling else "shuffle"
    for known in SAMPLINGS:
        if sampling == known:
            if not poisson_sampling and known != "shuffle":
                raise ValueError(
                    f"sampling={sampling!r} contradicts poisson_sampling=False (which means 'shuffle'): "
                    "leave one of them out"
                )
            return known
    raise ValueError(f"sampling must be one of {', '.join(map(repr, SAMPLINGS))} or None, got {sampling!r}")


def check_loader(data_loader: DataLoader[Any]) -> int:
    """Refuse loaders whose draws no row of the sampling table describes; return the data set's size.

    Raises:
        ValueError: Says what is wrong with the loader and what would be right.
    """
    if not isinstance(data_loader, DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, got {type(data_loader).__name__}")
    dataset = data_loader.dataset
    if isinstance(dataset, IterableDataset):
        raise ValueError("data_loader is over an IterableDataset: sampling needs a data set with an index")
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"the data set {type(dataset).__name__} has no __len__: sampling needs its size")
    size = len(dataset)
    if size < SMALLEST_MINI_SET:
        raise ValueError(f"the data set has {size} samples, at least {SMALLEST_MINI_SET} are needed")
    if data_loader.batch_size is None or type(data_loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "data_loader must make its batches from batch_size: got "
            f"batch_sampler={type(data_loader.batch_sampler).__name__}, whose draws cannot be accounted"
        )
    check_sampler(data_loader.sampler, size)
    if len(data_loader) == 0:
        raise ValueError(
            f"data_loader is empty: batch_size={data_loader.batch_size} with drop_last=True and "
            f"{size} samples"
        )
    return size


def check_data_loader(data_loader: object) -> None:
    """Refuse private data in anything but a DataLoader, whose data set and batch size can be asked.

    Raises:
        TypeError: Says what it is.
    """
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"data_loader must be a torch.utils.data.DataLoader, got {type(data_loader).__name__}: wrap the "
            "data set, DataLoader(dataset, batch_size=..., shuffle=True)"
        )


def check_sampler(sampler: object, size: int, *, also: tuple[type, ...] = ()) -> None:
    """Refuse a sampler that weighs samples or leaves some out: what is drawn instead of it would not.

    Raises:
        ValueError: It is neither a plain shuffle, nor sequential, nor of a type in ``also``.
    """
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != size:
            raise ValueError(
                "data_loader draws with RandomSampler(replacement="
                f"{sampler.replacement}, num_samples={sampler.num_samples}): only a plain shuffle of all "
                f"{size} samples can be accounted (shuffle=True)"
            )
    elif type(sampler) not in (SequentialSampler, *also):
        raise ValueError(
            f"data_loader draws with {type(sampler).__name__}, which no accountant here describes: use "
            "shuffle=True. Subset leaves samples out; weights of samples go into the loss of each"
        )


def make_plan(
    data_loader: DataLoader[Any], *, sampling: Sampling, mini_batch_size: int | None
) -> SamplingPlan:
    """Derive the public constants q, k and s from the user's loader.

    Raises:
        ValueError: ``mini_batch_size`` does not fit the batch size, or the loader cannot be accounted.
    """
    size = check_loader(data_loader)
    batch_size = data_loader.batch_size
    assert batch_size is not None  # check_loader has seen to it
    if mini_batch_size is None:
        mini_batch_size = batch_size
    if isinstance(mini_batch_size, bool) or not isinstance(mini_batch_size, int) or mini_batch_size < 1:
        raise ValueError(f"mini_batch_size must be a whole number >= 2 or None, got {mini_batch_size!r}")
    if mini_batch_size == 1:
        raise ValueError(
            "mini_batch_size=1 clips every sample by itself, which is individual clipping at half the "
            "sensitivity: use clipping='flat'"
        )
    if batch_size % mini_batch_size:
        raise ValueError(
            f"mini_batch_size={mini_batch_size} does not divide the loader's batch_size={batch_size}: take "
            f"batch_size={max(mini_batch_size, batch_size - batch_size % mini_batch_size)}"
        )
    if 2 * size < batch_size:
        warnings.warn(
            f"batch_size={batch_size} is more than twice the data set's {size} samples: mini-sets stay far "
            f"below {mini_batch_size} samples; take a smaller batch",
            stacklevel=6,
        )
    return SamplingPlan(
        kind=sampling,
        dataset_size=size,
        steps_per_epoch=len(data_loader),
        mini_sets=batch_size // mini_batch_size,
        mini_set_size=mini_batch_size,
    )


def make_draws(plan: SamplingPlan, data_loader: DataLoader[Any], generator: Generator) -> DrawSource:
    """The draw source that does what ``plan`` says."""
    if plan.kind == "poisson":
        return PoissonBins(plan, generator)
    if plan.kind == "partition":
        return FixedPartition(plan, generator)
    assert data_loader.batch_sampler is not None
    return ShuffledPass(plan, data_loader.batch_sampler)
