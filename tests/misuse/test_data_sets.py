"""One person, one row; and public data that are the private data in other clothes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import blobs, engine, mlp, weights
from torch import nn, optim
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from opacus_bc import ALC
from opacus_bc.public.contents import check_contents
from opacus_bc.public.data import PublicDataError

DATA, OTHER = blobs(32), blobs(32, seed=1)
X, Y = DATA.tensors
both = pytest.mark.parametrize("clipping", ["batch", "flat"])


def make(data: Any, clipping: str = "flat", model: nn.Module | None = None, **kwargs: Any) -> nn.Module:
    model = mlp() if model is None else model
    engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=clipping,
        **kwargs,
    )
    return model


class Wrapped(Dataset[Any]):
    """A data set around another one, as transforms are often added."""

    def __init__(self, dataset: Dataset[Any], scale: float = 1.0, times: int = 1) -> None:
        self.dataset, self.scale, self.times = dataset, scale, times

    def __len__(self) -> int:
        return self.times * len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index // self.times]
        return self.scale * x, y


REPEATED: dict[str, tuple[Dataset[Any], int]] = {
    "equal indices": (Subset(DATA, [0, 1, 2, 2, 3, 3, 3, 4]), 3),
    "the same set twice": (ConcatDataset([DATA, DATA]), 32),
    "subsets that overlap": (ConcatDataset([Subset(DATA, range(20)), Subset(DATA, range(15, 32))]), 5),
    "tensors in one memory": (ConcatDataset([TensorDataset(X, Y), TensorDataset(X[:4], Y[:4])]), 4),
    "behind a wrapper": (Wrapped(Subset(DATA, [0, 0, 1, 2])), 1),
    "negative indices": (Subset(DATA, [31, -1, 0, 1]), 1),
}


@both
@pytest.mark.parametrize("name", REPEATED)
def test_a_sample_that_is_listed_twice_is_refused_before_anything_changes(name: str, clipping: str) -> None:
    data, count = REPEATED[name]
    model = mlp()
    before = weights(model)
    with pytest.raises(ValueError, match=f"repeats {count} of its {len(data)} samples"):  # type: ignore[arg-type]
        make(data, clipping, model)
    assert torch.equal(weights(model), before)
    assert not any(vars(p) or p.grad is not None for p in model.parameters())


@both
def test_data_sets_without_repetition_are_accepted(clipping: str) -> None:
    make(ConcatDataset([Subset(DATA, range(16)), Subset(DATA, range(16, 32)), OTHER]), clipping)


class Arrays(Dataset[Any]):
    """Keeps its samples in a numpy array and transforms them on the way, as torchvision's data sets do."""

    def __init__(self, data: Any, transform: Any = lambda x: x) -> None:
        self.data, self.transform = data, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.as_tensor(self.data[index])), int(index) % 2


class Made(Dataset[Any]):
    """Makes its samples when asked, with random noise; nothing shows where they come from."""

    def __init__(self, seed: int, size: int = 300) -> None:
        self._seed, self._size = seed, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * self._seed + index)
        return torch.randn(4, generator=generator) + torch.rand(4), index % 2


SHARED: dict[str, tuple[Any, Any]] = {
    "a copy": (TensorDataset(X.clone(), Y), DATA),
    "a copy of one sample": (TensorDataset(torch.cat([OTHER.tensors[0], X[7:8]])), DATA),
    "a transformed copy": (Wrapped(TensorDataset(X.clone(), Y), scale=2.0), DATA),
    "arrays that share memory": (Arrays(X.numpy(), lambda x: x + 1), Arrays(X.numpy()[4:])),
    "an array and a tensor": (Arrays(X.numpy().copy()), Subset(DATA, range(9))),
    "other labels": (TensorDataset(X.clone(), 1 - Y), DATA),
    "samples made twice": (Made(0), Made(0)),
    "a longer set made twice": (Made(0, 250), Made(0, 5000)),
    "a list of files": (
        Arrays([f"train/dogs/{i:04}.png" for i in range(3)]),
        Arrays(["train/dogs/0002.png"]),
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_public_samples_that_are_equal_to_private_ones_are_refused(name: str) -> None:
    public, private = (DataLoader(data, batch_size=2) for data in SHARED[name])
    with pytest.raises(PublicDataError, match="equal to private ones, byte by byte"):
        check_contents(public, private)


APART: dict[str, tuple[Any, Any]] = {
    "other data": (OTHER, DATA),
    "halves of a set": (Subset(DATA, range(16)), Subset(DATA, range(16, 32))),
    "made apart": (Made(0), Made(1)),
    "constant samples": (TensorDataset(torch.zeros(4, 20)), TensorDataset(torch.zeros(4, 20))),
    "short records": (TensorDataset(torch.ones(4, 3)), TensorDataset(torch.ones(4, 3))),
    "custom split": (Wrapped(Subset(DATA, range(8)), times=2), Wrapped(Subset(DATA, range(8, 32)), times=2)),
    "half precision": (TensorDataset(X.bfloat16()), TensorDataset(OTHER.tensors[0].bfloat16())),
}


@pytest.mark.parametrize("name", APART)
def test_public_samples_that_are_not_private_ones_are_accepted(name: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    check_contents(*(DataLoader(data, batch_size=2) for data in APART[name]))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


@both
@pytest.mark.parametrize("argument", ["alc", "batch_norm"])
def test_make_private_compares_public_with_private_samples_unless_told_otherwise(
    argument: str, clipping: str
) -> None:
    copied = DataLoader(TensorDataset(X.clone(), Y), batch_size=8)
    given: Any = ALC(copied) if argument == "alc" else copied
    model = mlp(norm=argument == "batch_norm")
    with pytest.raises(PublicDataError, match="compare_public=False"):
        make(DATA, clipping, model, **{argument: given})
    make(DATA, clipping, model, compare_public=False, **{argument: given})


def test_a_large_private_set_is_compared_without_reading_all_of_it() -> None:
    class Counting(Made):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            Counting.reads += 1
            return super().__getitem__(index)

    check_contents(DataLoader(Made(1), batch_size=2), DataLoader(Counting(0, 10**6), batch_size=2))
    assert 0 < Counting.reads <= 192
