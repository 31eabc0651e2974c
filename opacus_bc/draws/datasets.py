"""Which rows of which objects a data set consists of, seen through the usual wrappers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

Data = Dataset[object]
Indices = npt.NDArray[np.int64]
Rows = dict[tuple[str, int], Indices]


def length(dataset: Data) -> int:
    """The number of samples of a map-style data set."""
    return len(dataset)  # type: ignore[arg-type]  # torch types data sets as unsized


def parts(dataset: Data, indices: Indices | None = None) -> list[tuple[Data, Indices]]:
    """The innermost data sets that ``dataset`` reads, and which of their rows, in order and with repetitions.

    It looks through ``Subset``, ``ConcatDataset`` and wrappers with an attribute ``dataset`` of equal length.
    """
    if isinstance(dataset, IterableDataset):
        return [(dataset, np.zeros(1, dtype=np.int64))]
    if indices is None:
        indices = np.arange(length(dataset), dtype=np.int64)
    if isinstance(dataset, Subset):
        chosen = np.asarray(dataset.indices, dtype=np.int64)[indices]
        if not isinstance(dataset.dataset, IterableDataset):
            chosen = chosen % length(dataset.dataset)  # -1 is the last one
        return parts(dataset.dataset, chosen)
    if isinstance(dataset, ConcatDataset):
        found = []
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            start = end - length(part)
            found += parts(part, indices[(indices >= start) & (indices < end)] - start)
        return found
    inner: Any = getattr(dataset, "dataset", None)
    if isinstance(inner, Dataset) and hasattr(inner, "__len__") and length(inner) == length(dataset):
        return parts(inner, indices)
    return [(dataset, indices)]


def rows(dataset: Data) -> Rows:
    """Which rows of which underlying objects (or of which memory) a data set consists of."""
    found: Rows = {}
    for part, indices in parts(dataset):
        key, where = _place(part, indices)
        found[key] = np.concatenate([found[key], where]) if key in found else where
    return found


def _place(dataset: Data, indices: Indices) -> tuple[tuple[str, int], Indices]:
    if isinstance(dataset, IterableDataset):
        return ("stream", id(dataset)), indices
    if isinstance(dataset, TensorDataset):
        first = dataset.tensors[0]
        step = first.stride(0) * first.element_size()
        if step > 0 and first.numel() > 0:
            return ("memory", hash(first.device)), first.data_ptr() + step * indices
    return ("object", id(dataset)), indices


def check_distinct(dataset: Data) -> None:
    """Refuse private data in which a row occurs twice, where indices or memory show it; reads no sample.

    Epsilon is about one sample. A person with K samples is protected K times less, and the more often the
    same row may be drawn into one step, the further it moves the sum.

    Raises:
        ValueError: Says how many rows occur more than once.
    """
    repeated = sum(len(where) - len(np.unique(where)) for where in rows(dataset).values())
    if repeated:
        raise ValueError(
            f"data_loader's data set repeats {repeated} of its {length(dataset)} samples (a Subset with "
            "equal indices, or a ConcatDataset of the same data): epsilon would hold for one copy, and not "
            "for the person behind all of them. List every sample once; weights of samples go into "
            "the loss of each"
        )
