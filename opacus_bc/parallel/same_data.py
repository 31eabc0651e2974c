"""Whether all processes read the same data sets in the same order: their draws are of row numbers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from opacus_bc.draws.datasets import length, parts
from opacus_bc.mechanism.fingerprint import fingerprint
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.mechanism.types import Loader
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.public.data import SEEDED_SPLIT

_LOOKED_AT = 32  # samples of each data set
_READ = 8  # times, where some samples are not what they were when they are read again
_FEWEST = 4  # samples that tell two data sets apart where others change
_PLAIN = (Tensor, np.ndarray, np.generic, str, bytes, bool, int, float, complex, type(None))


def check_same_data(ranks: Ranks, what: str, loader: Loader | None) -> None:
    """Refuse, on every rank, a data set that is another one elsewhere; no sample leaves its process.

    **Formal guarantee**: where ranks go on, row i is the same row of the same number of rows on all of them,
    as far as ``Subset``, ``ConcatDataset`` and wrappers of equal length show it. Otherwise one sample could
    be drawn on two ranks and count twice, or be public on one rank and private on another.

    **Edge cases**: of what is in the rows a few dozen are compared, labels included: those in which every
    rank finds the same bytes whenever it reads them. Where some are not of that kind (augmentation by a
    stream of the data set's own), half of the others must agree. Where few or none are, and in streams,
    nothing is compared.

    Raises:
        ValueError: The ranks' data sets differ.
    """
    stream = loader is not None and isinstance(loader.dataset, IterableDataset)
    size = 0 if loader is None or stream else length(loader.dataset)
    if not ranks.same(None if loader is None else row_numbers(loader), stream, size):
        raise ValueError(_differs(what))
    if loader is None or stream:
        return
    found = row_contents(loader, reads=2)
    if not ranks.all(None not in found):
        found = row_contents(loader, reads=_READ)
    known = ranks.each([content is not None for content in found])
    agreeing = [same for same, always in zip(ranks.same_each(found), known, strict=True) if always]
    if all(known):
        differ = not all(agreeing)
    else:
        differ = len(agreeing) >= _FEWEST and sum(agreeing) < len(agreeing) / 2
    if differ:
        raise ValueError(_differs(what))


def _differs(what: str) -> str:
    return (
        f"the data set of {what} must be the same on every rank, in the same order: a sample could be "
        f"drawn on two ranks and count twice, or be public on one and private on another. {SEEDED_SPLIT}"
    )


def row_numbers(loader: Loader) -> str:
    """A fingerprint of which rows of which data sets a loader's data set consists of."""
    return fingerprint([(type_name(dataset), indices) for dataset, indices in parts(loader.dataset)])


def row_contents(loader: Loader, *, reads: int) -> list[str | None]:
    """Fingerprints of some evenly spaced samples; None of one that is another in one of so many reads."""
    size = length(loader.dataset)
    rows = np.unique(np.linspace(0, size - 1, min(size, _LOOKED_AT)).astype(np.int64)).tolist()
    found = ({_content(loader, row) for _ in range(reads)} for row in rows)
    return [one.pop() if len(one) == 1 else None for one in found]


def _content(loader: Loader, row: int) -> str | None:
    with isolated_randomness(0, loader):
        held = loader.dataset[row]
    try:
        sample = _plain(held)
    except RecursionError:  # objects that hold one another
        return None
    return None if sample is NotImplemented else fingerprint(sample)


def _plain(value: Any) -> Any:
    """The same in tensors, arrays, numbers and text; NotImplemented where something shows no content."""
    if isinstance(value, _PLAIN) or hasattr(value, "tobytes"):
        return value
    if isinstance(value, Enum):
        return [type_name(value), value.name]
    if isinstance(value, Mapping):
        value = list(value.items())
    elif callable(value):
        return NotImplemented
    elif not isinstance(value, (list, tuple)):
        if not hasattr(value, "__dict__"):
            return NotImplemented
        value = [type_name(value), *vars(value).items()]
    found = [_plain(each) for each in value]
    return NotImplemented if any(each is NotImplemented for each in found) else found
