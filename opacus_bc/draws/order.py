"""Rows that make up one clipped vector stand where the draw put them: nobody may move them on the way.

A unit with several rows (a user's samples, a sample's views) is found in a batch by its place. A data set or
a collate function that sorts the rows would give a unit's rows to others, each of which is clipped by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import Subset

from opacus_bc.mechanism.names import type_name

MOVED = (
    "the collate function does not leave row {row} of a batch in its place, or makes something else of a "
    "sample beside others than alone. With unit= or views= the rows of one user, or of one sample, are found "
    "by their place: do not sort rows in the collate function, and put random augmentation into the data set"
)
UNSEEN = (
    "the collate function returns a {kind} in which no tensor with a row for each sample is found. With "
    "unit= or views= the rows of one user, or of one sample, are found by their place, and nothing tells "
    "whether they are in it: return a tensor, or a tuple, list or dict of tensors"
)


def check_reads_in_order(dataset: Any) -> None:
    """Refuse a data set that reads several samples at once by a method of its own, in an order of its own.

    Raises:
        ValueError: It, or the data set inside of a ``Subset``, has ``__getitems__``.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if hasattr(dataset, "__getitems__"):
        raise ValueError(
            f"{type_name(dataset)} has __getitems__, which may return samples in another order than it "
            "was asked for. With unit= or views= the rows of one user, or of one sample, are found by their "
            "place (in releases of batch_norm='private' too): pass a data set with __getitem__ alone"
        )


def check_order(batch: Any, samples: list[Any], collate: Callable[[list[Any]], Any]) -> None:
    """Refuse a batch whose rows are not those of the samples, one after the other.

    **Formal guarantee**: every tensor or array with a place for each sample, along whichever dimension, has
    at place i what the collate function makes of sample i alone; what padding adds behind it is not looked
    at. A batch of several samples in which there is no such tensor is refused: nothing tells its order.

    Raises:
        ValueError: A row is another sample's, or no tensor with a row for each sample is found.
    """
    whole, seen = list(_tensors(batch)), len(samples) < 2
    for row, sample in enumerate(samples):
        alone = list(_tensors(collate([sample])))
        if len(alone) != len(whole):
            raise ValueError(MOVED.format(row=row))
        for many, one in zip(whole, alone, strict=True):
            along = _dimensions_of_rows(many, one, len(samples))
            seen = seen or bool(along)
            if along and not any(_begins_with(many.select(d, row), one.select(d, 0)) for d in along):
                raise ValueError(MOVED.format(row=row))
    if not seen:
        raise ValueError(UNSEEN.format(kind=type(batch).__name__))


def _dimensions_of_rows(many: Tensor, one: Tensor, samples: int) -> list[int]:
    """Along which dimensions there may be a place for each sample."""
    if many.dim() != one.dim():
        return []
    return [d for d in range(many.dim()) if many.shape[d] == samples and one.shape[d] == 1]


def _begins_with(padded: Tensor, plain: Tensor) -> bool:
    if padded.dim() != plain.dim():
        return False
    part = padded[tuple(slice(size) for size in plain.shape)]
    return part.shape == plain.shape and torch.equal(part.nan_to_num(), plain.nan_to_num())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch; numpy's arrays of numbers, and packed sequences with a row for each."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield torch.as_tensor(value)
    elif isinstance(value, PackedSequence):
        yield pad_packed_sequence(value, batch_first=True)[0]
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
