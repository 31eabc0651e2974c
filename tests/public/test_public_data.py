"""Public data must not be private data, and reading it must leave no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    random_split,
)

from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.public.data import PublicDataError, check_disjoint, describe, public_batches
from opacus_bc.public.running import forward


def tensors(n: int = 20, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 3, generator=generator), torch.arange(n))


def loader(dataset: Any, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, **kwargs)


class Plain(Dataset[Any]):
    """A map-style data set that is no TensorDataset."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index


class Augmented(Dataset[Any]):
    """A wrapper with random noise, as augmentation does it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index]
        return x + torch.rand(()) + np.random.rand() + random.random(), y  # noqa: NPY002


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(3), 0)] * 8)


BASE, PLAIN, STREAM = tensors(), Plain(), Stream()
OVERLAPPING = {
    "same object": (BASE, BASE),
    "same object of an unknown kind": (PLAIN, PLAIN),
    "subset of the private set": (Subset(PLAIN, [3]), PLAIN),
    "subsets that share one sample": (Subset(PLAIN, range(11)), Subset(PLAIN, range(10, 20))),
    "nested subsets": (Subset(Subset(PLAIN, range(10, 20)), [0]), Subset(PLAIN, [10])),
    "inside a concatenation": (ConcatDataset([tensors(), Subset(PLAIN, [5])]), Subset(PLAIN, [5, 6])),
    "behind a wrapper": (Augmented(Subset(PLAIN, [1, 2])), Augmented(Subset(PLAIN, [2, 3]))),
    "tensors in the same memory": (TensorDataset(BASE.tensors[0][5:8]), TensorDataset(BASE.tensors[0][:6])),
    "one stream": (STREAM, STREAM),
}
DISJOINT = {
    "two data sets": (tensors(), tensors()),
    "halves": tuple(random_split(PLAIN, [10, 10], generator=torch.Generator().manual_seed(1))),
    "slices of one tensor": (TensorDataset(BASE.tensors[0][::2]), TensorDataset(BASE.tensors[0][1::2])),
    "nested halves": (Subset(Subset(PLAIN, range(10, 20)), [0]), Subset(PLAIN, [11, 19])),
    "concatenated halves": (
        ConcatDataset([Subset(PLAIN, [0]), Subset(PLAIN, [7])]),
        ConcatDataset([Subset(PLAIN, [1]), Subset(PLAIN, [6])]),
    ),
    "two streams": (Stream(), STREAM),
}


@pytest.mark.parametrize(("public", "private"), OVERLAPPING.values(), ids=OVERLAPPING)
def test_public_data_that_shares_a_sample_with_the_private_data_is_refused(public: Any, private: Any) -> None:
    with pytest.raises(PublicDataError):
        check_disjoint(loader(public), loader(private))


@pytest.mark.parametrize(("public", "private"), DISJOINT.values(), ids=DISJOINT)
def test_disjoint_public_data_is_accepted(public: Any, private: Any) -> None:
    check_disjoint(loader(public), loader(private))


def test_the_refusal_says_how_many_samples_are_shared_and_how_to_split() -> None:
    with pytest.raises(PublicDataError, match=r"3 of the 5 public samples .*random_split"):
        check_disjoint(loader(Subset(PLAIN, range(5))), loader(Subset(PLAIN, range(2, 20))))


@pytest.mark.parametrize("wrong", [None, "public", [1, 2], tensors()])
def test_what_is_no_loader_is_refused(wrong: Any) -> None:
    with pytest.raises(PublicDataError, match="DataLoader"):
        check_disjoint(wrong, loader(PLAIN))


def test_an_empty_public_loader_is_refused() -> None:
    with pytest.raises(PublicDataError, match="empty"):
        check_disjoint(DataLoader(PLAIN, batch_size=64, drop_last=True), loader(tensors()))


def streams(generator: torch.Generator) -> list[Any]:
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return [
        torch.get_rng_state().tolist(),
        legacy[1].tolist(),
        random.getstate(),
        generator.get_state().tolist(),
    ]


def test_reading_public_batches_is_repeatable_and_leaves_every_random_stream_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    noisy = DataLoader(Augmented(PLAIN), batch_size=4, shuffle=True, generator=generator)
    sampled = DataLoader(PLAIN, batch_size=4, sampler=RandomSampler(PLAIN, generator=torch.Generator()))
    before = streams(generator)
    for public in (noisy, sampled):
        runs = []
        for _ in range(2):
            with isolated_randomness(5, public):
                runs.append([x for x, _ in public_batches(public, limit=2)])
        assert len(runs[0]) == 2
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert streams(generator) == before


def test_the_description_changes_with_one_entry_and_repeats_for_augmented_data() -> None:
    first, second = describe(loader(BASE)), describe(loader(tensors()))
    assert first == second
    assert first.size == first.hashed == 20
    changed = TensorDataset(BASE.tensors[0].clone(), BASE.tensors[1])
    changed.tensors[0][7, 1] += 1e-6
    assert describe(loader(changed)).sha256 != first.sha256
    assert describe(loader(Augmented(PLAIN))) == describe(loader(Augmented(PLAIN)))
    assert describe(loader(STREAM)).size is None


def test_a_batch_reaches_the_model_as_tensor_pair_or_mapping() -> None:
    model = torch.nn.Linear(3, 2)
    x = torch.randn(4, 3)
    expected = model(x)
    for batch in (x, (x, torch.zeros(4)), [x, None], {"input": x}):
        assert torch.equal(forward(model, batch), expected)


def test_negative_indices_do_not_hide_an_overlap() -> None:
    data = TensorDataset(torch.arange(10.0))
    private = DataLoader(Subset(data, [8, 9]), batch_size=2)
    with pytest.raises(PublicDataError):
        check_disjoint(DataLoader(Subset(data, [-1]), batch_size=1), private)
    check_disjoint(DataLoader(Subset(data, [-3]), batch_size=1), private)
