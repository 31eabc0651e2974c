"""Rows that make up one clipped vector stand where the draw put them: nobody may move them on the way.

A unit with several rows (a user's samples, a sample's views) is found in a batch by its place. A data set or
a collate function that sorts the rows would give a unit's rows to others, each of which is clipped by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from opacus_bc.mechanism.names import type_name

MOVED = (
    "the collate function does not leave row {row} of a batch in its place, or makes something else of a "
    "sample beside others than alone. With unit= or views= the rows of one user, or of one sample, are found "
    "by their place: do not sort rows in the collate function, and put random augmentation into the data set"
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
            "place: pass a data set with __getitem__ alone"
        )


def check_order(batch: Any, samples: list[Any], collate: Callable[[list[Any]], Any]) -> None:
    """Refuse a batch whose rows are not those of the samples, one after the other.

    **Formal guarantee**: every tensor with a row for each sample has, at row i, what the collate function
    makes of sample i alone; what padding adds behind it is not looked at.

    Raises:
        ValueError: A row is another sample's.
    """
    whole = [t for t in _tensors(batch) if t.dim() and len(t) == len(samples)]
    for row, sample in enumerate(samples):
        alone = [t for t in _tensors(collate([sample])) if t.dim() and len(t) == 1]
        if len(alone) != len(whole) or not all(
            _begins_with(many[row], one[0]) for many, one in zip(whole, alone, strict=True)
        ):
            raise ValueError(MOVED.format(row=row))


def _begins_with(padded: Tensor, plain: Tensor) -> bool:
    if padded.dim() != plain.dim():
        return False
    part = padded[tuple(slice(size) for size in plain.shape)]
    return part.shape == plain.shape and torch.equal(part.nan_to_num(), plain.nan_to_num())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
