"""Rows of one user, or of one sample, are found by their place: whoever moves them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset, Subset

from opacus_bc import PrivacyEngine, Units
from opacus_bc.draws.order import check_order

IDS = [0, 0, 1, 1, 2, 2, 3, 3]


class Texts(Dataset[Tensor]):
    """Sequences of different lengths."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1 + (5 * index) % 7, 2), float(index + 1))


class AtOnce(Texts):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[i] for i in sorted(indices)]


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def sorted_by_length(samples: list[Tensor]) -> Tensor:
    return padded(sorted(samples, key=len))


def delivered(dataset: Dataset[Any], collate: Any, **unit: Any) -> list[Tensor]:
    model = nn.Linear(2, 1)
    _, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=4, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **unit,
    )
    return list(loader)


UNITS: list[dict[str, Any]] = [{"unit": IDS, "mini_batch_size": 2}, {"views": 3}]


@pytest.mark.parametrize("unit", UNITS, ids=["users", "views"])
def test_a_collate_function_that_sorts_rows_is_refused_and_one_that_pads_is_not(unit: dict[str, Any]) -> None:
    assert delivered(Texts(), padded, **unit)
    with pytest.raises(ValueError, match="in its place"):
        [delivered(Texts(), sorted_by_length, **unit) for _ in range(20)]  # all sorted by chance: below 1e-6


class Held:
    """A batch that is no collection."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def time_first(samples: list[Tensor]) -> Tensor:
    return padded(samples).transpose(0, 1)


@pytest.mark.parametrize(
    "collate",
    [
        time_first,
        lambda samples: padded(samples).numpy(),
        lambda samples: {"x": time_first(samples)},
        lambda samples: nn.utils.rnn.pack_sequence(samples, enforce_sorted=False),
    ],
    ids=["another dimension", "numpy", "a dict of another dimension", "packed"],
)
def test_rows_that_are_sorted_in_whatever_form_are_refused(collate: Callable[[list[Tensor]], Any]) -> None:
    def by_length(samples: list[Tensor]) -> Any:
        return collate(sorted(samples, key=len))

    samples = [Texts()[i] for i in range(4)]
    check_order(collate(samples), samples, collate)
    with pytest.raises(ValueError, match="in its place"):
        check_order(by_length(samples), samples, by_length)


def test_batches_whose_order_nobody_can_tell_are_refused() -> None:
    samples = [Texts()[i] for i in range(4)]
    for collate in (lambda rows: Held(padded(rows)), lambda rows: [str(row) for row in rows]):
        with pytest.raises(ValueError, match="no tensor with a row for each sample"):
            check_order(collate(samples), samples, collate)
        check_order(collate(samples[:1]), samples[:1], collate)


@pytest.mark.parametrize("unit", UNITS, ids=["users", "views"])
def test_a_data_set_that_reads_in_its_own_order_is_refused(unit: dict[str, Any]) -> None:
    for dataset in (AtOnce(), Subset(AtOnce(), range(len(IDS)))):
        with pytest.raises(ValueError, match="__getitems__"):
            delivered(dataset, padded, **unit)


class PairsAtOnce(AtOnce):
    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index)), 0


@pytest.mark.filterwarnings("ignore:batch_norm='private'")
def test_private_statistics_of_users_refuse_a_data_set_that_reads_in_its_own_order() -> None:
    """A release takes many users at once, and clips the mean of the rows that stand where a user's should."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="__getitems__"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(PairsAtOnce(), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            batch_norm="private",
            unit=IDS,
            mini_batch_size=2,
        )
    assert type(model[1]) is nn.BatchNorm1d


class Person:
    """Equals only itself."""


@pytest.mark.parametrize(
    "ids",
    [
        Units(lambda i: (torch.ones(2), i // 4)),
        [Person() for _ in IDS],
        [(1, torch.ones(3)) for _ in IDS],
    ],
    ids=["tensors in tuples", "objects", "several numbers"],
)
def test_ids_that_equal_only_themselves_are_refused(ids: Any) -> None:
    with pytest.raises(TypeError, match="equal only themselves"):
        delivered(Texts(), padded, unit=ids, mini_batch_size=2)


def test_tuples_of_tensors_are_compared_by_value_and_may_not_hold_nan() -> None:
    site, patient = torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 5, 5])
    assert Units(lambda i: (site[i], patient[i])).index(4).users == 2
    with pytest.raises(ValueError, match="no id"):
        Units([(1, float("nan")), (1, 2.0), (2, 3.0)]).index(3)
