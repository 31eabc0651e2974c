"""Whether all processes read the same data sets in the same order: their draws are of row numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from opacus_bc.draws.datasets import parts
from opacus_bc.mechanism.fingerprint import fingerprint
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.mechanism.types import Loader
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.public.contents import sample_bytes
from opacus_bc.public.data import SEEDED_SPLIT

_LOOKED_AT = 32  # samples of each data set


def check_same_data(ranks: Ranks, what: str, loader: Loader | None) -> None:
    """Refuse, on every rank, a data set that is another one elsewhere; no sample leaves its process.

    **Formal guarantee**: where ranks go on, row i is the same row of the same number of rows on all of them,
    as far as ``Subset``, ``ConcatDataset`` and wrappers of equal length show it. Otherwise one sample could
    be drawn on two ranks and count twice, or be public on one rank and private on another.

    **Edge cases**: of what is in the rows a few dozen samples' inputs are compared, where a data set returns
    the same bytes twice; streams are not compared.

    Raises:
        ValueError: The ranks' data sets differ.
    """
    if not ranks.same(None if loader is None else rows_fingerprint(loader)):
        raise ValueError(
            f"the data set of {what} must be the same on every rank, in the same order: a sample could be "
            f"drawn on two ranks and count twice, or be public on one and private on another. {SEEDED_SPLIT}"
        )


def rows_fingerprint(loader: Loader) -> str:
    """A fingerprint of which rows a loader's data set consists of, and of a few of them."""
    found: list[Any] = []
    for dataset, indices in parts(loader.dataset):
        if isinstance(dataset, IterableDataset):
            found.append((type_name(dataset),))
            continue
        spaced = np.unique(np.linspace(0, len(indices) - 1, min(len(indices), _LOOKED_AT)).astype(np.int64))
        first, second = (_contents(loader, dataset, indices[spaced].tolist()) for _ in range(2))
        found.append((type_name(dataset), indices, first if first == second else None))
    return fingerprint(found)


def _contents(loader: Loader, dataset: Any, rows: list[int]) -> list[str | None]:
    found = []
    for row in rows:
        with isolated_randomness(0, loader):
            held = sample_bytes(dataset[row])
        found.append(None if held is None else hashlib.sha256(held).hexdigest())
    return found
