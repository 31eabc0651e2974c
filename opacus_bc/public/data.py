"""Public data: what may be looked at without noise, and the checks that it is not the private data.

BatchNorm's public statistics and adaptive layerwise clipping both read a public loader. Everything here
leaves the loader and every random stream as it found them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from opacus_bc.draws.datasets import length, rows
from opacus_bc.mechanism.fingerprint import feed
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.mechanism.types import Loader

# Larger data sets are fingerprinted on this many evenly spaced samples.
_HASHED_SAMPLES = 4096
SEEDED_SPLIT = (
    "torch.utils.data.random_split(data, lengths, generator=torch.Generator().manual_seed(0)) makes the same "
    "split on every rank and after every start"
)
WRAP_IT = ": wrap it, DataLoader(public, batch_size=256)"


class PublicDataError(ValueError):
    """The public data is not what it must be: disjoint from the private data, and readable twice."""


def check_disjoint(public_loader: Loader, private_loader: Loader) -> None:
    """Refuse public data of which the private loader has a sample as well; changes and reads nothing.

    **Formal guarantee**: if both loaders reach the same data set object through ``Subset``,
    ``ConcatDataset`` and wrappers of equal length, or tensors in the same memory, they reach different rows.

    **Edge cases**: two *copies* of the same data (a file read twice) are two data sets here;
    :func:`~opacus_bc.public.contents.check_contents` compares what is in them. A sampler that leaves samples
    out is not looked at: use ``Subset``.
    """
    check_public_loader(public_loader)
    public, private = rows(public_loader.dataset), rows(private_loader.dataset)
    for key in public.keys() & private.keys():
        if key[0] == "stream":
            raise PublicDataError("public and private loader read the same iterable data set object")
        shared = np.intersect1d(public[key], private[key])
        if len(shared):
            raise PublicDataError(
                f"{len(shared)} of the {length(public_loader.dataset)} public samples belong to the "
                "private data as well, so looking at them without noise would not be covered: split the data "
                f"first ({SEEDED_SPLIT}), and pass the private part as data_loader"
            )


def check_public_loader(loader: object) -> None:
    """Refuse what is not a non-empty torch DataLoader."""
    if not isinstance(loader, DataLoader):
        hint = WRAP_IT if isinstance(loader, (Dataset, Tensor, Sequence)) else ""
        raise PublicDataError(
            f"public data must come as a torch DataLoader, got {type(loader).__name__}{hint}"
        )
    if not isinstance(loader.dataset, IterableDataset) and len(loader) == 0:
        raise PublicDataError(f"the public loader is empty ({length(loader.dataset)} samples)")


def check_yields_samples(loader: Loader) -> None:
    """Refuse a loader that is no DataLoader, or whose data set yields whole batches: samples are chosen."""
    check_public_loader(loader)
    if loader.batch_size is None:
        raise PublicDataError("the public loader has batch_size=None: its data set must yield samples")


def public_batches(loader: Loader, *, limit: int) -> Iterator[object]:
    """The first ``limit`` batches of a new pass; call it inside :func:`isolated_randomness`."""
    yield from islice(iter(loader), limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataDescription:
    """What a statement says about public data."""

    size: int | None  # number of samples; None for an iterable data set
    sha256: str  # fingerprint of the samples as the data set returns them, random streams seeded
    hashed: int  # how many (evenly spaced) samples went into the fingerprint


def describe(loader: Loader) -> PublicDataDescription:
    """Size and fingerprint of a public loader's data set."""
    dataset = loader.dataset
    digest = hashlib.sha256()
    with isolated_randomness(0, loader):
        if isinstance(dataset, IterableDataset):
            samples: Iterator[object] = islice(iter(dataset), _HASHED_SAMPLES)
            size = None
        else:
            size = length(dataset)
            chosen = np.unique(np.linspace(0, size - 1, min(size, _HASHED_SAMPLES)).astype(np.int64))
            samples = (dataset[int(i)] for i in chosen)
        hashed = 0
        for hashed, sample in enumerate(samples, start=1):  # noqa: B007 (the count outlives the loop)
            feed(digest.update, sample)
    return PublicDataDescription(size=size, sha256=digest.hexdigest(), hashed=hashed)
