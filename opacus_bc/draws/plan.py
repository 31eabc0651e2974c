"""The public description of the draws, made from the user's loader; the accountant reads nothing else."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from opacus_bc.draws.units import UserIndex
from opacus_bc.mechanism.names import (
    SAMPLINGS,
    Adjacency,
    Sampling,
    Unit,
    adjacency_of,
    event_kind,
    neighbours,
    type_name,
)
from opacus_bc.mechanism.numbers import check_count
from opacus_bc.mechanism.types import Loader
from opacus_bc.mechanism.warn import users_level

# A mini-set of one sample has no batch statistics. Below this size it is not delivered and contributes zero.
SMALLEST_MINI_SET = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """What the accountant may assume about the draws: public constants, fixed before training."""

    kind: Sampling
    dataset_size: int  # N, the number of samples, or of users where users are protected
    steps_per_epoch: int  # the length of the user's loader, or what it would be if users were samples
    mini_sets: int  # k, delivered one by one in a step; 1 for individual clipping: one batch of units
    mini_set_size: int  # s, the (expected) number of samples in a mini-set, or of units in a batch
    unit: Unit = "mini-set"  # what is clipped by itself: a mini-set, a user or (individual clipping) a sample
    individual: bool = False  # whether a draw is one batch, in which the units are clipped one by one
    views: int = 1  # how often a drawn sample is delivered; the mean of its views is clipped
    cap: int = 1  # the most samples of one user in a draw

    @property
    def sample_rate(self) -> float:
        """Q, the probability with which a given sample, mini-set or user takes part in a step."""
        return 1.0 / self.steps_per_epoch

    @property
    def clipped_together(self) -> int:
        """Samples whose gradients are clipped as one vector (in expectation; of a user, at most)."""
        return {"sample": 1, "user": self.cap, "mini-set": self.mini_set_size}[self.unit]

    @property
    def rows_of_unit(self) -> int:
        """The most rows of a batch that individual clipping clips as one vector."""
        return self.cap * self.views

    @property
    def vectors(self) -> int:
        """How many vectors a step clips (in expectation)."""
        return self.mini_set_size if self.individual else self.mini_sets

    @property
    def one_by_one(self) -> bool:
        """Whether a draw may consist of several mini-sets, so that nothing may be shared between them."""
        return self.mini_sets > 1 or self.unit == "user"

    @property
    def event(self) -> str:
        """What an accountant calls the sampling."""
        return event_kind(self.kind, self.unit)

    @property
    def neighbours(self) -> str:
        """The adjacency with the name of who is protected."""
        return neighbours(self.adjacency, self.unit)

    @property
    def protected(self) -> str:
        """One of those whom the guarantee is about."""
        return "user" if self.unit == "user" else "sample"

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation under which the guarantee is stated."""
        return adjacency_of(self.kind)


def resolve_sampling(sampling: str | None, *, poisson_sampling: bool) -> Sampling:
    """Reconcile ``sampling`` with Opacus's ``poisson_sampling``, or raise if they contradict each other."""
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


def check_loader(data_loader: Loader) -> int:
    """Refuse loaders whose draws no row of the sampling table describes; return the data set's size."""
    if not isinstance(data_loader, DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, got {type_name(data_loader)}")
    dataset = data_loader.dataset
    check_indexed(dataset)
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"the data set {type_name(dataset)} has no __len__: sampling needs its size")
    size = len(dataset)
    if size < SMALLEST_MINI_SET:
        raise ValueError(f"the data set has {size} samples, at least {SMALLEST_MINI_SET} are needed")
    if data_loader.batch_size is None or type(data_loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "data_loader must make its batches from batch_size: got "
            f"batch_sampler={type_name(data_loader.batch_sampler)}, whose draws cannot be accounted"
        )
    check_sampler(data_loader.sampler, size)
    if len(data_loader) == 0:
        raise ValueError(
            f"data_loader is empty: batch_size={data_loader.batch_size} with drop_last=True and "
            f"{size} samples"
        )
    return size


def check_indexed(dataset: object) -> None:
    """Refuse streams, of which nobody can say how likely a sample is drawn."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"data_loader is over an IterableDataset ({type_name(dataset)}), which has neither length nor "
            "index, so nobody can say how likely a sample is drawn: read it into a list, "
            "DataLoader(list(dataset), batch_size=...), or write a Dataset with __len__ and __getitem__"
        )


def check_data_loader(data_loader: object) -> None:
    """Refuse private data in anything but a DataLoader, whose data set and batch size can be asked."""
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"data_loader must be a torch.utils.data.DataLoader, got {type_name(data_loader)}: wrap the "
            "data set, DataLoader(dataset, batch_size=..., shuffle=True)"
        )


def check_sampler(sampler: object, size: int, *, also: tuple[type, ...] = ()) -> None:
    """Refuse a sampler that weighs samples or leaves some out, unless its type is in ``also``."""
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != size:
            raise ValueError(
                "data_loader draws with RandomSampler(replacement="
                f"{sampler.replacement}, num_samples={sampler.num_samples}): only a plain shuffle of all "
                f"{size} samples can be accounted (shuffle=True)"
            )
    elif type(sampler) not in (SequentialSampler, *also):
        raise ValueError(
            f"data_loader draws with {type_name(sampler)}, which no accountant here describes: use "
            "shuffle=True. Subset leaves samples out; weights of samples go into the loss of each"
        )


def make_plan(data_loader: Loader, *, sampling: Sampling, mini_batch_size: int | None) -> SamplingPlan:
    """Derive the public constants q, k and s from the user's loader; refuse one that cannot be accounted."""
    size = check_loader(data_loader)
    batch_size = data_loader.batch_size
    assert batch_size is not None  # check_loader has seen to it
    if mini_batch_size is None:
        mini_batch_size = batch_size
    check_count("mini_batch_size", mini_batch_size, wanted="a whole number >= 2 or None")
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
            stacklevel=users_level(),
        )
    return SamplingPlan(
        kind=sampling,
        dataset_size=size,
        steps_per_epoch=len(data_loader),
        mini_sets=batch_size // mini_batch_size,
        mini_set_size=mini_batch_size,
    )


def users_plan(
    data_loader: Loader, users: UserIndex, *, sampling: Sampling, cap: int, individual: bool, views: int = 1
) -> SamplingPlan:
    """The public constants where users are protected: the loader's ``batch_size`` counts users.

    A step has ``U // ceil(U / batch_size)`` users (in expectation), so that nobody is drawn more often than
    the sample rate says, also where their number is fixed.

    Args:
        data_loader: The user's loader.
        users: Whose samples are which.
        sampling: How users are drawn.
        cap: The most samples of a user in a step.
        individual: Whether all users of a draw come in one batch.
        views: How often each of the samples is delivered.
    """
    check_loader(data_loader)
    batch_size = data_loader.batch_size
    assert batch_size is not None  # check_loader has seen to it
    if batch_size > users.users:
        raise ValueError(
            f"data_loader has batch_size={batch_size}, which with unit= counts users, and there are "
            f"{users.users} of them: take a smaller one"
        )
    steps = math.ceil(users.users / batch_size)
    drawn = users.users // steps
    return SamplingPlan(
        kind=sampling,
        unit="user",
        dataset_size=users.users,
        steps_per_epoch=steps,
        mini_sets=1 if individual else drawn,
        mini_set_size=drawn if individual else cap,
        individual=individual,
        views=views,
        cap=cap,
    )


def individual_plan(data_loader: Loader, *, sampling: Sampling, views: int = 1) -> SamplingPlan:
    """The public constants of individual clipping, where a draw is one batch of single samples."""
    if sampling == "partition":
        raise ValueError("sampling='partition' goes with clipping='batch', where mini-sets are clipped")
    size = check_loader(data_loader) if sampling == "shuffle" else _check_poisson(data_loader)
    steps = len(data_loader)
    return SamplingPlan(
        kind=sampling,
        unit="sample",
        individual=True,
        views=views,
        dataset_size=size,
        steps_per_epoch=steps,
        mini_sets=1,
        mini_set_size=data_loader.batch_size or max(1, round(size / steps)),
    )


def _check_poisson(data_loader: Loader) -> int:
    """Poisson sampling replaces the loader's own sampler, also one that leaves samples out on purpose."""
    if data_loader.batch_size is None and data_loader.batch_sampler is None:
        raise ValueError("data_loader has batch_size=None, so it makes no batches: pass a batch_size")
    dataset = data_loader.dataset
    check_indexed(dataset)
    size = len(dataset)  # type: ignore[arg-type]  # torch types data sets as unsized
    if size == 0:
        raise ValueError("the data set has 0 samples, at least 1 is needed")
    check_sampler(data_loader.sampler, size, also=(DistributedSampler,))
    return size
