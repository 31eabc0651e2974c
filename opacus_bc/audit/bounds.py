"""From the errors of a membership test to lower bounds on what the mechanism gives away.

A test that tells the data sets with and without a canary apart with false positive rate a and false negative
rate b refutes every trade-off function f with f(a) > b, in particular every (epsilon, delta)-DP with
``1 - delta - e^epsilon a > b`` or ``1 - delta - e^epsilon b > a``. The rates are only estimated, so the exact
binomial (Clopper-Pearson) upper limits of both take their place. Which test is looked at is chosen on one
half of the repetitions; the limits come from the other half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri
from scipy.stats import beta

from opacus_bc.accounting import TradeOffCurve

Floats = npt.NDArray[np.float64]
# What a test is worth, from the upper limits of its false positive and false negative rates; larger is better
Worth = Callable[[Floats, Floats], Floats]

_CANDIDATES = 2000
# A threshold is chosen by stricter limits than it is judged by: else chance picks those with too few errors.
_CAUTION = 50


def binomial_upper(count: Any, trials: int, level: float) -> Floats:
    """Clopper-Pearson upper limit of a probability of which ``count`` of ``trials`` were seen.

    **Formal guarantee**: the limit lies below the true probability with probability at most ``level``.

    >>> round(float(binomial_upper(0, 100, 0.05)), 4)  # the rule of three
    0.0295
    """
    number = np.asarray(count)
    with np.errstate(invalid="ignore"):
        limit = beta.isf(level, number + 1, trials - number)
    return np.asarray(np.where(number >= trials, 1.0, limit), dtype=np.float64)


def epsilon_bound(delta: float) -> Worth:
    """The worth of a test: the largest epsilon that it refutes at ``delta`` (0 if none)."""

    def worth(false_positive: Floats, false_negative: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            one = np.log(np.maximum(1 - delta - false_negative, 0.0)) - np.log(false_positive)
            other = np.log(np.maximum(1 - delta - false_positive, 0.0)) - np.log(false_negative)
        return np.asarray(np.maximum(0.0, np.maximum(one, other)))

    return worth


def mu_bound() -> Worth:
    """The worth of a test: the largest mu such that it refutes every smaller Gaussian trade-off."""

    def worth(false_positive: Floats, false_negative: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            mu = -ndtri(false_positive) - ndtri(false_negative)
        return np.asarray(np.where(mu > 0, mu, 0.0))

    return worth


def share_of(curve: TradeOffCurve) -> Worth:
    """The worth of a test against a claimed curve: its mu over the curve's at the same false positive rate.

    More than 1 means that the test lies below the curve: the claim is refuted.
    """
    claimed = mu_bound()

    def worth(false_positive: Floats, false_negative: Floats) -> Floats:
        mu = claimed(false_positive, false_negative)
        allowed = claimed(false_positive, np.asarray(curve(false_positive), dtype=np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(mu > 0, mu / allowed, 0.0))  # a rate of 1 gives mu = 0

    return worth


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Upper limits of a test's error rates, valid together at the stated level."""

    false_positive: float
    false_negative: float
    level: float

    def worth(self, worth: Worth) -> float:
        """What the test is worth at these limits."""
        return float(worth(np.array([self.false_positive]), np.array([self.false_negative]))[0])


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of independent repetitions, larger where the canary seems to be in.

    **Edge cases**: scores must not be NaN; infinite ones are fine. At least two of each kind are needed.
    """

    present: Floats
    absent: Floats

    def __post_init__(self) -> None:
        for name in ("present", "absent"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or len(values) < 2 or np.isnan(values).any():
                raise ValueError(
                    f"scores with the canary {name} must be at least two numbers and none of them NaN, got "
                    f"an array of shape {values.shape}"
                )
            object.__setattr__(self, name, values)

    def halves(self) -> tuple[Scores, Scores]:
        """Every second repetition: one half to choose a test with, one to judge it by."""
        if min(len(self.present), len(self.absent)) < 4:
            raise ValueError(
                f"{len(self.present)} and {len(self.absent)} repetitions cannot be split into halves to "
                "choose a test and to judge it: make at least 4 of each"
            )
        return (
            Scores(self.present[::2], self.absent[::2]),
            Scores(self.present[1::2], self.absent[1::2]),
        )


def thresholds(scores: Scores) -> Floats:
    """Candidates for a threshold: values that occur, denser towards both ends."""
    values = np.unique(np.concatenate([scores.present, scores.absent]))
    if len(values) > _CANDIDATES:
        ends = np.unique(np.geomspace(1, len(values) // 2, _CANDIDATES // 2).astype(int)) - 1
        values = values[np.unique(np.concatenate([ends, len(values) - 1 - ends]))]
    return values


def rates_at(scores: Scores, threshold: Any, level: float) -> tuple[Floats, Floats]:
    """Upper limits of both error rates of the test "present if the score is at least ``threshold``".

    **Formal guarantee**: for a threshold that does not depend on these scores, both limits hold together with
    probability at least ``1 - level`` (half of it is spent on each).
    """
    present, absent = np.sort(scores.present), np.sort(scores.absent)
    missed = np.searchsorted(present, threshold, side="left")
    alarms = len(absent) - np.searchsorted(absent, threshold, side="left")
    return (
        binomial_upper(alarms, len(absent), level / 2),
        binomial_upper(missed, len(present), level / 2),
    )


def best_threshold(scores: Scores, worth: Worth, level: float) -> tuple[float, float]:
    """The threshold whose test is worth most on these scores, and that worth. To be judged by others."""
    candidates = thresholds(scores)
    value = worth(*rates_at(scores, candidates, level / _CAUTION))
    best = int(np.argmax(value))
    return float(candidates[best]), float(value[best])


def held_out_rates(scores: Scores, worth: Worth, level: float) -> Rates:
    """Choose the threshold on one half, limit its error rates on the other.

    **Formal guarantee**: both limits hold together with probability at least ``1 - level``, whatever was
    chosen, provided the repetitions are independent.
    """
    choosing, judging = scores.halves()
    threshold, _ = best_threshold(choosing, worth, level)
    false_positive, false_negative = rates_at(judging, threshold, level)
    return Rates(false_positive=float(false_positive), false_negative=float(false_negative), level=level)


def choose(candidates: dict[str, Scores], worth: Worth, level: float) -> str:
    """The attack whose best test on the choosing halves is worth most; ties go to the first."""
    return max(candidates, key=lambda name: best_threshold(candidates[name].halves()[0], worth, level)[1])


def largest_noise(refuted: Callable[[float], bool], start: float, *, tolerance: float = 0.005) -> float:
    """The least noise multiplier that is refuted, rounded up; ``inf`` if none up to 1000 times ``start`` is.

    ``refuted`` must be monotone: whoever refutes one noise multiplier refutes every larger one, because more
    noise means a higher trade-off curve.
    """
    high = start
    if refuted(high):
        low = high / 1.5
        while low > start * 1e-3 and refuted(low):
            low, high = low / 1.5, low
    else:
        while not refuted(high * 1.5):
            high *= 1.5
            if high > 1e3 * start:
                return math.inf
        low, high = high, high * 1.5
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high
