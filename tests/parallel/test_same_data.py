"""Ranks compare which rows their data sets have; tests/parallel/test_ddp.py does so with real processes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from support import blobs
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from opacus_bc.parallel.same_data import row_contents, row_numbers


def fingerprint(dataset: Dataset[Any]) -> tuple[str, list[str | None]]:
    loader = DataLoader(dataset, batch_size=4)
    streams = isinstance(dataset, IterableDataset)
    return row_numbers(loader), [] if streams else row_contents(loader, reads=2)


class Hidden(Dataset[Any]):
    """Hands out the rows of another data set in an order that nothing shows."""

    def __init__(self, dataset: Dataset[Any], order: list[int]) -> None:
        self.dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self._order[index]]


@dataclass
class Person:
    age: int
    image: torch.Tensor


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Coloured:
    colour: Colour
    number: int


class Ring:
    """Holds itself."""

    def __init__(self) -> None:
        self.next = self


KINDS: dict[str, list[Any]] = {
    "a label first": [{"label": i % 3, "pixels": [i, i + 1]} for i in range(40)],
    "lists of numbers": [[i, 2 * i] for i in range(40)],
    "text": [f"person {i}" for i in range(40)],
    "objects": [Person(i, torch.full((2,), float(i))) for i in range(40)],
    "objects that hold enumerations": [Coloured(Colour(1 + i % 2), i) for i in range(40)],
    "equal inputs": [(torch.zeros(3), i) for i in range(40)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_inside_a_wrapper_shows_in_the_samples(kind: str) -> None:
    rows = KINDS[kind]
    same, other = (Hidden(rows, [*order]) for order in (range(40), range(39, -1, -1)))  # type: ignore[arg-type]
    assert fingerprint(same) == fingerprint(Hidden([*rows], [*range(40)]))  # type: ignore[arg-type]
    assert None not in fingerprint(same)[1]
    assert fingerprint(same)[0] == fingerprint(other)[0]  # from outside nothing shows
    assert fingerprint(same)[1] != fingerprint(other)[1]


def test_samples_without_content_are_left_out() -> None:
    for rows in ([object() for _ in range(9)], [Ring() for _ in range(9)], [len for _ in range(9)]):
        assert set(fingerprint(Hidden(rows, [*range(9)]))[1]) == {None}  # type: ignore[arg-type]


class Noisy(Dataset[Any]):
    """Augments with a stream of its own, which nobody can seed."""

    def __init__(self) -> None:
        self.own = torch.Generator()
        self.own.seed()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(8, generator=self.own)


class Augmented(Dataset[Any]):
    """Augments with torch's stream."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(8)


def changed(row: int) -> TensorDataset:
    x, y = blobs(20).tensors
    x = x.clone()
    x[row] += 1
    return TensorDataset(x, y)


def test_equal_data_read_twice_have_one_fingerprint() -> None:
    assert fingerprint(blobs(20)) == fingerprint(blobs(20))
    assert fingerprint(Noisy()) == fingerprint(Noisy())
    assert set(fingerprint(Noisy())[1]) == {None}
    torch.manual_seed(1)
    first = fingerprint(Augmented())
    torch.manual_seed(2)
    assert fingerprint(Augmented()) == first


@pytest.mark.parametrize("row", [0, 7, 19])
def test_another_row_shows(row: int) -> None:
    assert fingerprint(changed(row)) != fingerprint(blobs(20))


@pytest.mark.parametrize(
    "other",
    [
        Subset(blobs(2000), [*range(1999, -1, -1)]),
        Subset(blobs(2000), [0, 1, 2, 4, 3, *range(5, 2000)]),  # beside the samples that are looked at
        Subset(blobs(2000), range(1999)),
        ConcatDataset([Subset(blobs(2000), range(500, 1000)), Subset(blobs(2000), range(1500))]),
    ],
)
def test_another_order_shows_in_every_row(other: Dataset[Any]) -> None:
    assert fingerprint(other) != fingerprint(Subset(blobs(2000), range(2000)))


def test_reading_moves_no_stream() -> None:
    before = torch.get_rng_state()
    fingerprint(Augmented())
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_are_told_apart_by_their_type_alone() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("a stream can be read once")

    assert fingerprint(Stream()) == fingerprint(Stream())
