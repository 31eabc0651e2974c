"""Public data: what may be looked at without noise, and the checks that it is not the private data.

BatchNorm's public statistics and adaptive layerwise clipping both read a public loader. Everything here
leaves the loader and every random stream as it found them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from opacus_bc.noise import global_randomness

# Larger data sets are fingerprinted on this many evenly spaced samples.
_HASHED_SAMPLES = 4096
_Rows = dict[tuple[str, int], npt.NDArray[np.int64]]


WRAP_IT = ": wrap it, DataLoader(public, batch_size=256)"


class PublicDataError(ValueError):
    """The public data is not what it must be: disjoint from the private data, and readable twice."""


def check_disjoint(public_loader: DataLoader[Any], private_loader: DataLoader[Any]) -> None:
    """Refuse public data of which the private loader has a sample as well; changes and reads nothing.

    **Formal guarantee**: if both loaders reach the same data set object through ``Subset``,
    ``ConcatDataset`` and wrappers of equal length, or tensors in the same memory, they reach different rows.

    **Edge cases**: two *copies* of the same data (a file read twice) cannot be told apart from two data sets;
    that the data are public is the user's word, which the statement repeats. A sampler that leaves samples
    out is not looked at: use ``Subset``.

    Raises:
        PublicDataError: The loaders share samples, or ``public_loader`` is no DataLoader.
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


def _length(dataset: Dataset[Any]) -> range:
    return range(len(dataset))  # type: ignore[arg-type]  # map-style data sets have a length


def _rows(dataset: Dataset[Any], indices: npt.NDArray[np.int64] | None = None) -> _Rows:
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


def _concatenated_rows(dataset: ConcatDataset[Any], indices: npt.NDArray[np.int64]) -> _Rows:
    ends = np.asarray(dataset.cumulative_sizes)
    found: _Rows = {}
    for part, end in zip(dataset.datasets, ends, strict=True):
        start = end - len(_length(part))
        inside = indices[(indices >= start) & (indices < end)] - start
        for key, rows in _rows(part, inside).items():
            found[key] = np.concatenate([found[key], rows]) if key in found else rows
    return found


@contextmanager
def isolated_randomness(seed: int, *loaders: DataLoader[Any]) -> Iterator[None]:
    """Run the body with every random stream seeded, and put the streams back afterwards.

    Covers torch (and CUDA devices in use), numpy's global state, Python's ``random`` and the generators of
    ``loaders`` and of their samplers. Other threads get no private randomness from these streams meanwhile.

    >>> before = torch.get_rng_state()
    >>> with isolated_randomness(7):
    ...     first = torch.rand(3)
    >>> with isolated_randomness(7):
    ...     assert torch.equal(first, torch.rand(3))
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    with global_randomness(), _seeded(seed, loaders):
        yield


@contextmanager
def _seeded(seed: int, loaders: Sequence[DataLoader[Any]]) -> Iterator[None]:
    candidates = [loader.generator for loader in loaders] + [
        getattr(loader.sampler, "generator", None) for loader in loaders
    ]
    generators = [g for g in candidates if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in generators]
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (user transforms may use it)
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's stub has no types
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices=devices):
        try:
            # torch.manual_seed would format a stack trace for every backend that is not in use (2 ms).
            torch.default_generator.manual_seed(seed)
            if in_use:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def public_batches(loader: DataLoader[Any], *, limit: int) -> Iterator[Any]:
    """The first ``limit`` batches of a new pass; call it inside :func:`isolated_randomness`."""
    yield from islice(iter(loader), limit)


def batch_input(batch: Any) -> Any:
    """What a model reads of a batch: the first element of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def forward(module: nn.Module, batch: Any) -> Any:
    """``module`` of a batch's input: a tensor is passed on, a mapping becomes keyword arguments.

    Inputs go to the device of the module's parameters, floating-point ones take their dtype.
    """
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    inputs = batch_input(batch) if like is None else _to(batch_input(batch), like)
    return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


def _to(value: Any, like: Tensor) -> Any:
    if isinstance(value, Mapping):
        return {key: _to(entry, like) for key, entry in value.items()}
    if not isinstance(value, Tensor):
        return value
    return value.to(like) if value.is_floating_point() else value.to(like.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataDescription:
    """What a statement says about public data.

    Attributes:
        size: Number of samples; None for an iterable data set.
        sha256: Fingerprint of the samples as the data set returns them, random streams seeded.
        hashed: How many (evenly spaced) samples went into the fingerprint.
    """

    size: int | None
    sha256: str
    hashed: int


def describe(loader: DataLoader[Any]) -> PublicDataDescription:
    """Size and fingerprint of a public loader's data set."""
    dataset = loader.dataset
    digest = hashlib.sha256()
    with isolated_randomness(0, loader):
        if isinstance(dataset, IterableDataset):
            samples: Iterator[Any] = islice(iter(dataset), _HASHED_SAMPLES)
            size = None
        else:
            size = len(_length(dataset))
            chosen = np.unique(np.linspace(0, size - 1, min(size, _HASHED_SAMPLES)).astype(np.int64))
            samples = (dataset[int(i)] for i in chosen)
        hashed = 0
        for hashed, sample in enumerate(samples, start=1):  # noqa: B007 (the count outlives the loop)
            _digest(digest, sample)
    return PublicDataDescription(size=size, sha256=digest.hexdigest(), hashed=hashed)


def _digest(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        digest.update(f"{array.dtype}{tuple(array.shape)}".encode())
        digest.update(array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _digest(digest, value[key])
    elif isinstance(value, (tuple, list)):
        digest.update(f"sequence of {len(value)}".encode())
        for entry in value:
            _digest(digest, entry)
    elif hasattr(value, "tobytes"):  # PIL images, numpy scalars
        digest.update(value.tobytes())
    else:
        digest.update(repr(value).encode())
