"""What happened: history entries, their validation, and their translation into releases to compose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from opacus_bc.accounting.lattice import Floats, Step
from opacus_bc.mechanism.names import (
    OVER_USERS,
    SAMPLINGS,
    Adjacency,
    Sampling,
    Unit,
    adjacency_of,
    event_kind,
    neighbours,
)

Entry: TypeAlias = tuple[float, float, int, str]

# One-off Gaussian releases of all the data; each kind says against which neighbours its sigma was taken.
RELEASE, REPLACE_RELEASE = "release", "release (replace one)"
_ADJACENCY: dict[str, Adjacency] = {
    **{sampling: adjacency_of(sampling) for sampling in SAMPLINGS},
    RELEASE: "add/remove one",
    REPLACE_RELEASE: "replace one",
}
_PROTECTED: tuple[Unit, ...] = ("sample", "user")
# Every kind of entry, and the neighbouring data sets that it is about; samples and users do not mix.
ADJACENCY: dict[str, str] = {
    event_kind(name, unit): neighbours(adjacency, unit)
    for unit in _PROTECTED
    for name, adjacency in _ADJACENCY.items()
}
RELEASES = tuple(event_kind(name, unit) for unit in _PROTECTED for name in (RELEASE, REPLACE_RELEASE))
MAX_LEVELS = 256


def check_number(name: str, value: float, low: float, high: float, *, open_ends: bool = False) -> float:
    """Return value as a float, or raise a ValueError that names it and says what would be right.

    >>> check_number("delta", 2.0, 0, 1, open_ends=True)
    Traceback (most recent call last):
        ...
    ValueError: delta=2.0 must lie strictly between 0 and 1.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    fine = low < number < high if open_ends else low <= number <= high
    if not fine:
        if math.isinf(high):
            right = f"be a number above {low}" if open_ends else f"be a number of at least {low}"
        else:
            right = f"lie {'strictly ' if open_ends else ''}between {low} and {high}"
        raise ValueError(f"{name}={value!r} must {right}.")
    return number


def check_count(name: str, value: int, least: int = 0) -> int:
    """Return value as an int, or raise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
    return int(value)


def check_delta(delta: float, name: str = "delta") -> float:
    """A delta strictly between 0 and 1."""
    return check_number(name, delta, 0, 1, open_ends=True)


def check_sigma(noise_multiplier: float, name: str = "noise_multiplier") -> float:
    """A noise multiplier: any number from 0 (no protection) to infinity (no information)."""
    return check_number(name, noise_multiplier, 0, math.inf)


def check_sampling(sampling: str) -> Sampling:
    """One of the three samplings."""
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling={sampling!r} must be one of {', '.join(map(repr, SAMPLINGS))}.")
    return sampling


def base_kind(kind: str) -> str:
    """An entry's kind without the word for whom it protects: users compose as samples do.

    >>> base_kind("shuffle over users")
    'shuffle'
    """
    return kind.removesuffix(OVER_USERS)


def check_kind(kind: str) -> str:
    """A sampling, or one of users."""
    check_sampling(base_kind(kind))
    return kind


def check_entry(entry: Sequence[Any]) -> Entry:
    """A history entry (sigma_eff, q, steps[, sampling]); three fields, as Opacus writes them, mean Poisson
    sampling.
    """
    if len(entry) not in (3, 4):
        raise ValueError(
            f"history entry {tuple(entry)!r} must be (noise_multiplier, sample_rate, steps[, sampling])."
        )
    sigma, rate, steps, *rest = entry
    sampling = str(rest[0]) if rest else "poisson"
    if sampling not in RELEASES:
        check_kind(sampling)
    return (
        check_sigma(sigma),
        check_number("sample_rate", rate, 0, 1),
        check_count("steps", steps),
        sampling,
    )


def _mu(sigma: float) -> float:
    # Below 1e-150 the squares of mu overflow; the answer is "no protection" long before.
    return 1.0 / sigma if sigma > 1e-150 else math.inf


def to_steps(entries: Iterable[Entry]) -> tuple[Step, ...]:
    """The releases of a history, equal ones merged, at most `MAX_LEVELS` different sampled ones.

    **Formal guarantee.** Rounding to levels moves noise multipliers down and sample rates up, never the other
    way; both make the pair of distributions easier to tell apart, for every sampling, so an upper bound stays
    one.
    """
    counts: dict[tuple[float, float, bool], int] = {}
    squares = 0.0
    for sigma, rate, steps, kind in entries:
        sampling = base_kind(kind)
        if sampling in ("shuffle", *RELEASES):
            squares += _mu(sigma) ** 2 if sampling in RELEASES or steps else 0.0
        else:
            key = (sigma, rate, sampling == "partition")
            counts[key] = counts.get(key, 0) + steps
    if len(counts) > MAX_LEVELS:
        counts = _round_to_levels(counts)
    out = [Step(_mu(sigma), rate, count, symmetric) for (sigma, rate, symmetric), count in counts.items()]
    if squares > 0:
        out.append(Step(math.sqrt(squares), 1.0, 1))
    return tuple(sorted(out))


def _levels(values: Floats, number: int, *, down: bool) -> Floats:
    """Round to at most `number` of the values themselves, spread evenly on a logarithmic scale."""
    positive = np.maximum(values, 1e-300)
    low, high = math.log(positive.min()), math.log(positive.max())
    bins = np.clip(
        np.floor((np.log(positive) - low) / max(high - low, 1e-300) * number), 0, number - 1
    ).astype(int)
    extreme = np.full(number, np.inf if down else -np.inf)
    (np.minimum if down else np.maximum).at(extreme, bins, values)
    return np.asarray(extreme[bins])


def _round_to_levels(counts: dict[tuple[float, float, bool], int]) -> dict[tuple[float, float, bool], int]:
    keys = list(counts)
    sigma = np.array([key[0] for key in keys])
    rate = np.array([key[1] for key in keys])
    kinds = len({key[2] for key in keys})
    rates = len(set(rate))
    if rates > 16:
        rate, rates = _levels(rate, 16, down=False), 16
    sigma = _levels(sigma, max(1, MAX_LEVELS // (rates * kinds)), down=True)
    out: dict[tuple[float, float, bool], int] = {}
    for key, low, high in zip(keys, sigma.tolist(), rate.tolist(), strict=True):
        out[low, high, key[2]] = out.get((low, high, key[2]), 0) + counts[key]
    return out
