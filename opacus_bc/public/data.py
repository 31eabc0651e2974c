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
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from opacus_bc.mechanism.fingerprint import feed
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.mechanism.types import Loader

# Larger data sets are fingerprinted on this many evenly spaced samples.
_HASHED_SAMPLES = 4096
Data = Dataset[object]
_Rows = dict[tuple[str, int], npt.NDArray[np.int64]]
WRAP_IT = ": wrap it, DataLoader(public, batch_size=256)"


class PublicDataError(ValueError):
    """The public data is not what it must be: disjoint from the private data, and readable twice."""


def check_disjoint(public_loader: Loader, private_loader: Loader) -> None:
    """Refuse public data of which the private loader has a sample as well; changes and reads nothing.

    **Formal guarantee**: if both loaders reach the same data set object through ``Subset``,
    ``ConcatDataset`` and wrappers of equal length, or tensors in the same memory, they reach different rows.

    **Edge cases**: two *copies* of the same data (a file read twice) cannot be told apart from two data sets;
    that the data are public is the user's word, which the statement repeats. A sampler that leaves samples
    out is not looked at: use ``Subset``.
    """
    check_public_loader(public_loader)
    public, private = _rows(public_loader.dataset), _rows(private_loader.dataset)
    for key in public.keys() & private.keys():
        if key[0] == "stream":
            raise PublicDataError("public and private loader read the same iterable data set object")
        shared = np.intersect1d(public[key], private[key])
        if len(shared):
            raise PublicDataError(
                f"{len(shared)} of the {len(_length(public_loader.dataset))} public samples belong to the "
                "private data as well, so looking at them without noise would not be covered: split the data "
                "first, for instance with torch.utils.data.random_split, and pass the private part as "
                "data_loader"
            )


def check_public_loader(loader: object) -> None:
    """Refuse what is not a non-empty torch DataLoader."""
    if not isinstance(loader, DataLoader):
        hint = WRAP_IT if isinstance(loader, (Dataset, Tensor, Sequence)) else ""
        raise PublicDataError(
            f"public data must come as a torch DataLoader, got {type(loader).__name__}{hint}"
        )
    if not isinstance(loader.dataset, IterableDataset) and len(loader) == 0:
        raise PublicDataError(f"the public loader is empty ({len(_length(loader.dataset))} samples)")


def _length(dataset: Data) -> range:
    return range(len(dataset))  # type: ignore[arg-type]  # map-style data sets have a length


def _rows(dataset: Data, indices: npt.NDArray[np.int64] | None = None) -> _Rows:
    """Which rows of which underlying objects (or of which memory) a data set consists of."""
    if isinstance(dataset, IterableDataset):
        return {("stream", id(dataset)): np.zeros(1, dtype=np.int64)}
    if indices is None:
        indices = np.asarray(_length(dataset), dtype=np.int64)
    if isinstance(dataset, Subset):
        chosen = np.asarray(dataset.indices, dtype=np.int64)[indices]
        if not isinstance(dataset.dataset, IterableDataset):
            chosen = chosen % len(_length(dataset.dataset))  # -1 is the last one
        return _rows(dataset.dataset, chosen)
    if isinstance(dataset, ConcatDataset):
        return _concatenated_rows(dataset, indices)
    inner = getattr(dataset, "dataset", None)
    if isinstance(inner, Dataset) and hasattr(inner, "__len__") and _length(inner) == _length(dataset):
        return _rows(inner, indices)
    if isinstance(dataset, TensorDataset):
        first = dataset.tensors[0]
        step = first.stride(0) * first.element_size()
        if step > 0 and first.numel() > 0:
            return {("memory", hash(first.device)): first.data_ptr() + step * indices}
    return {("object", id(dataset)): indices}


def _concatenated_rows(dataset: ConcatDataset[Data], indices: npt.NDArray[np.int64]) -> _Rows:
    ends = np.asarray(dataset.cumulative_sizes)
    found: _Rows = {}
    for part, end in zip(dataset.datasets, ends, strict=True):
        start = end - len(_length(part))
        inside = indices[(indices >= start) & (indices < end)] - start
        for key, rows in _rows(part, inside).items():
            found[key] = np.concatenate([found[key], rows]) if key in found else rows
    return found


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
            size = len(_length(dataset))
            chosen = np.unique(np.linspace(0, size - 1, min(size, _HASHED_SAMPLES)).astype(np.int64))
            samples = (dataset[int(i)] for i in chosen)
        hashed = 0
        for hashed, sample in enumerate(samples, start=1):  # noqa: B007 (the count outlives the loop)
            feed(digest.update, sample)
    return PublicDataDescription(size=size, sha256=digest.hexdigest(), hashed=hashed)
