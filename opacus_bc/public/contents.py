"""Whether public samples are private ones behind another object: their contents are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from opacus_bc.draws.datasets import Data, Indices, length, parts
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.mechanism.types import Loader
from opacus_bc.public.data import SEEDED_SPLIT, PublicDataError

# Samples that are looked at: rows of arrays are cheap, samples that a data set must make are not.
_PUBLIC_ROWS, _PRIVATE_ROWS = 4096, 200_000
_PUBLIC_ITEMS, _PRIVATE_ITEMS = 64, 192
_ARRAYS = ("data", "samples", "imgs", "images", "inputs", "features", "x", "X")  # where data sets keep theirs
_SHORTEST = 16  # bytes: two people may well share a shorter record


def check_contents(public_loader: Loader, private_loader: Loader) -> None:
    """Refuse public data whose samples are equal to private ones, byte by byte; labels are not compared.

    It reads what data sets keep in arrays (``TensorDataset``, ``.data``, ``.samples`` and the like), behind
    ``Subset``, ``ConcatDataset`` and wrappers that transform. Of other data sets it reads a few dozen
    samples, with every random stream seeded, so that equal samples are augmented equally.

    **Edge cases**: at most 4,096 public and 200,000 private rows are compared (64 and 192 samples where a
    data set has to make them). Samples that were changed, streams, records shorter than 16 bytes and constant
    ones are not found: that the data are public is the user's word.

    Raises:
        PublicDataError: Says how many of the public samples looked at are private ones.
    """
    shared, looked_at = count_shared(public_loader, private_loader)
    if shared:
        raise PublicDataError(
            f"{shared} of {looked_at} public samples that were looked at are equal to private ones, byte "
            f"by byte: looking at them without noise would not be covered. Split the data first: "
            f"{SEEDED_SPLIT}. If they are different people with equal records, pass compare_public=False to "
            "make_private"
        )


def count_shared(public_loader: Loader, private_loader: Loader) -> tuple[int, int]:
    """How many of the public samples that are looked at are private ones, and how many are looked at."""
    if isinstance(public_loader.dataset, IterableDataset):
        return 0, 0
    public = list(_contents(public_loader, rows=_PUBLIC_ROWS, items=_PUBLIC_ITEMS))
    if not public:
        return 0, 0
    private = set(_contents(private_loader, rows=_PRIVATE_ROWS, items=_PRIVATE_ITEMS))
    return sum(content in private for content in public), len(public)


def _contents(loader: Loader, *, rows: int, items: int) -> Iterator[int]:
    """Hashes of the samples' inputs."""
    with isolated_randomness(0, loader):
        for dataset, indices in parts(loader.dataset):
            if isinstance(dataset, IterableDataset):
                continue
            kept = _array(dataset)
            if kept is not None:
                yield from _hashes(kept[int(i)] for i in _spread(indices, rows))
            else:
                yield from _hashes(_item(dataset, int(i)) for i in _spread(indices, items))


def _spread(indices: Indices, most: int) -> Indices:
    """At most so many of them: the first ones, as a copy in the same order has them, and evenly spaced."""
    if len(indices) <= most:
        return indices
    first, spaced = np.arange(most // 2), np.linspace(0, len(indices) - 1, most - most // 2)
    chosen: Indices = indices[np.unique(np.concatenate([first, spaced.astype(np.int64)]))]
    return chosen


def _array(dataset: Data) -> Any:
    """What a data set keeps its samples in, if it keeps them in something with a row for each."""
    held: list[Any] = [dataset.tensors[0]] if isinstance(dataset, TensorDataset) else []
    held += [getattr(dataset, name, None) for name in _ARRAYS]
    for array in held:
        if isinstance(array, (Tensor, np.ndarray, list)) and len(array) == length(dataset):
            return array
    return None


def _item(dataset: Data, index: int) -> object:
    with isolated_randomness(index):
        return dataset[index]


def _hashes(samples: Iterable[object]) -> Iterator[int]:
    for sample in samples:
        content = sample_bytes(sample)
        if content is not None and len(content) >= _SHORTEST and len(set(content)) > 1:
            yield hash(content)


def sample_bytes(sample: Any) -> bytes | None:
    """The sample's input: the first entry of a tuple, list or mapping."""
    if isinstance(sample, Mapping):
        sample = tuple(sample.values())
    if isinstance(sample, (tuple, list)):
        return sample_bytes(sample[0]) if sample else None
    if isinstance(sample, Tensor):
        sample = sample.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(sample, str):
        return sample.encode()
    return bytes(sample.tobytes()) if hasattr(sample, "tobytes") else None
