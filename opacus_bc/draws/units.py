"""Who is protected: users with all their samples, found by one id for each sample.

:class:`Units` is what a caller says, :class:`UserIndex` what the draws use: two arrays, from which a user's
samples are read without a look at anybody else's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from opacus_bc.mechanism.numbers import check_count

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class UserIndex:
    """All users' samples, user by user: those of user u are ``order[offsets[u]:offsets[u + 1]]``.

    **Formal guarantee**: every sample belongs to exactly one user, and every user has at least one sample.
    Reading a user costs as much as that user has samples.
    """

    order: Indices
    offsets: Indices

    @property
    def users(self) -> int:
        """How many users there are."""
        return len(self.offsets) - 1

    def samples_of(self, user: int) -> Indices:
        """Which samples are this user's."""
        return self.order[self.offsets[user] : self.offsets[user + 1]]

    def fingerprint(self) -> str:
        """SHA-256 of who owns which samples; names of users do not matter. It is private, as the ids are."""
        owner = np.empty(len(self.order), dtype=np.int64)
        owner[self.order] = np.repeat(np.arange(self.users), np.diff(self.offsets))
        _, first = np.unique(owner, return_index=True)
        ranks = np.empty(self.users, dtype=np.int64)
        ranks[np.argsort(first)] = np.arange(self.users)
        return hashlib.sha256(ranks[owner].tobytes()).hexdigest()


@dataclass(frozen=True)
class Units:
    """The users whose data are protected, for ``make_private(unit=...)``.

    Attributes:
        ids: One id for each sample of the data set, in its order (a list, numpy array, tensor or pandas
            column), or a function of a sample's index that returns its id without reading the sample.
        users: The number of users, where it is known from elsewhere; other numbers are then refused.

    Example:
        >>> index = Units(["ann", "bob", "ann"]).index(3)
        >>> index.users, index.samples_of(0).tolist()
        (2, [0, 2])
        >>> Units(lambda i: i // 2).index(6).users
        3
    """

    ids: Sequence[Any] | npt.NDArray[Any] | Tensor | Callable[[int], Hashable]
    users: int | None = None

    def index(self, size: int) -> UserIndex:
        """The index of the users of ``size`` samples.

        Raises:
            TypeError: ``ids`` is no sequence of ids.
            ValueError: There are not ``size`` of them, one is missing (None, NaN), there is one user only, or
                not as many as were said.
        """
        ids = [self.ids(i) for i in range(size)] if callable(self.ids) else self.ids
        owner = _numbered(_as_array(ids, size))
        counts = np.bincount(owner)
        if len(counts) < 2:
            raise ValueError(
                f"unit= has one user only ({size} samples with the same id): with nobody else in the data "
                "there is nobody to hide among. Pass one id for each sample, equal for a user's samples"
            )
        if self.users is not None:
            check_count("Units(users=...)", self.users, wanted="a whole number >= 2 or None")
            if len(counts) != self.users:
                few = self.users - len(counts)
                problem = f"{few} users have no samples" if few > 0 else f"{-few} users are unknown"
                raise ValueError(
                    f"Units(users={self.users}) and the ids name {len(counts)} users, so {problem}: the "
                    "number of users decides the sample rate and must be that of the data"
                )
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return UserIndex(order=np.argsort(owner, kind="stable").astype(np.int64), offsets=offsets)


def as_units(unit: Any) -> Units:
    """What was passed as ``unit=``; bare ids become a :class:`Units`."""
    return unit if isinstance(unit, Units) else Units(unit)


def _as_array(ids: Any, size: int) -> npt.NDArray[Any]:
    """Ids as a numpy array with one entry for each sample, none of them missing."""
    if isinstance(ids, (str, bytes, dict, set)) or not hasattr(ids, "__len__"):
        raise TypeError(
            f"unit= must be one user id for each sample (a list, array, tensor or column), a function of "
            f"the index in opacus_bc.Units, or None, got {type(ids).__name__}"
        )
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, (list, tuple)):
        if any(isinstance(each, Tensor) for each in ids):
            ids = [each.item() if isinstance(each, Tensor) else each for each in ids]
        kinds = {type(each) for each in ids}
        array = np.asarray(ids) if len(kinds) == 1 and kinds <= {int, str} else _objects(ids)
    else:
        array = np.asarray(ids)
    if array.ndim != 1 or len(array) != size:
        raise ValueError(
            f"unit= has shape {array.shape} and the data set {size} samples: pass one user id for each "
            "sample, in the data set's order (for a Subset the ids of its own samples: ids[subset.indices])"
        )
    missing = _missing(array)
    if missing.any():
        raise ValueError(
            f"unit= has no id for {int(missing.sum())} samples (None, NaN or infinite; the first is sample "
            f"{int(np.argmax(missing))}): samples without an owner belong to nobody who could be protected. "
            "Leave them out, or give each an id of its own"
        )
    return array


def _objects(values: Iterable[Any]) -> npt.NDArray[Any]:
    """A one-dimensional array of the objects themselves: numpy would take tuples for rows."""
    values = list(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _missing(array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    if array.dtype.kind in "fc":
        finite: npt.NDArray[np.bool_] = np.isfinite(array)
        return ~finite
    if array.dtype.kind in "mM":
        never: npt.NDArray[np.bool_] = np.isnat(array)
        return never
    if array.dtype.kind == "O":
        return np.fromiter(map(_is_missing, array), dtype=bool, count=len(array))
    return np.zeros(len(array), dtype=bool)


def _is_missing(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_missing, value))
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, (float, np.floating)):
        return not np.isfinite(value)
    try:
        return bool(value != value)  # Decimal("NaN"), NaT: what does not equal itself is nobody's id
    except (TypeError, ValueError, RuntimeError):  # arrays do not say it in one word
        return False


def _numbered(array: npt.NDArray[Any]) -> Indices:
    """Users as numbers 0..U-1."""
    if array.dtype.kind != "O":
        return np.unique(array, return_inverse=True)[1].astype(np.int64)
    numbers: dict[Hashable, int] = {}
    try:
        found = [numbers.setdefault(_compared_by_value(each), len(numbers)) for each in array]
    except TypeError as error:
        raise TypeError(f"unit= has ids that are not hashable ({error}): use numbers or strings") from error
    return np.asarray(found, dtype=np.int64)


def _compared_by_value(value: Any) -> Hashable:
    """An id that equals the other ids of its user.

    Raises:
        TypeError: It only equals itself, so that every sample would be a user of its own.
    """
    if isinstance(value, tuple):
        return tuple(map(_compared_by_value, value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    by_identity = getattr(type(value), "__hash__", None) is object.__hash__ and not isinstance(value, type)
    if isinstance(value, Tensor) or by_identity:
        raise TypeError(
            f"{type(value).__name__} objects equal only themselves, so that every sample would be a user of "
            "its own"
        )
    hash(value)
    return value  # type: ignore[no-any-return]  # hash() has seen to it


def check_views(views: Any) -> int:
    """The number of augmented views of a sample."""
    check_count("views", views, wanted="a whole number >= 1")
    return int(views)
