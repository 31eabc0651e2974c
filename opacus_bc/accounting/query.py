"""Answers about a composition: certified epsilon, delta and the whole profile, in bounded time for any
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from opacus_bc.accounting import gaussian
from opacus_bc.accounting.lattice import Direction, Floats, Step
from opacus_bc.accounting.plan import make_plan
from opacus_bc.accounting.pld import Composed, compose

_FINE, _FINEST, _COARSE = 0.004, 0.0015, 0.02
_MANY = 16  # compositions of more different releases than this use the coarse setting
_NEGLIGIBLE = 1e-9  # below this total Gaussian parameter the closed form without amplification is good enough


def normalise(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Drop void releases, merge equal ones, and all unsampled (q = 1) ones into one Gaussian release."""
    merged: dict[tuple[float, float, bool], int] = {}
    squares = 0.0
    for step in steps:
        if step.count == 0 or step.q == 0.0 or step.mu == 0.0:
            continue
        if step.q == 1.0 or math.isinf(step.mu):
            squares += step.count * step.mu**2
        else:
            key = (step.mu, step.q, step.symmetric)
            merged[key] = merged.get(key, 0) + step.count
    out = [Step(mu, q, count, symmetric) for (mu, q, symmetric), count in merged.items()]
    if squares > 0:
        out.append(Step(math.sqrt(squares), 1.0, 1))
    return tuple(sorted(out))


def directions(steps: Sequence[Step]) -> tuple[Direction, ...]:
    """Which directions differ: both under Poisson sampling, one for symmetric releases."""
    return ("remove",) if all(step.symmetric or step.q == 1.0 for step in steps) else ("remove", "add")


def _largest_loss_when_added(steps: Sequence[Step]) -> float:
    """In the direction "add" a Poisson step loses at most -log(1 - q), so epsilon is at most the sum of
    these.
    """
    if any(step.symmetric or step.q == 1.0 for step in steps):
        return math.inf
    return -math.fsum(step.count * math.log1p(-step.q) for step in steps) * (1 + 1e-12)


def unamplified_mu(steps: Sequence[Step]) -> float:
    """The Gaussian parameter of the composition if sampling were known to the adversary to hit every time."""
    return math.sqrt(math.fsum(step.count * step.mu**2 for step in steps))


def _theta(steps: Sequence[Step], two_sided: bool = False) -> float:
    if len(steps) > _MANY:
        return _COARSE
    return _FINEST if two_sided else _FINE


def _closed_form(steps: Sequence[Step]) -> bool:
    return all(step.q == 1.0 for step in steps) or unamplified_mu(steps) < _NEGLIGIBLE


def _crossing(loss: Floats, bound: Floats, delta: float, spacing: float) -> float:
    """Smallest epsilon whose upper bound is at most delta; the profile is a chord in e^epsilon between its
    points.
    """
    good = bound <= delta
    if not good.any():
        return math.inf
    k = int(np.argmax(good))
    if k == 0:
        return float(loss[0])
    if spacing > 30.0 or not math.isfinite(bound[k - 1]):
        return float(loss[k])
    share = (bound[k - 1] - delta) / (bound[k - 1] - bound[k])
    return min(float(loss[k]), float(loss[k - 1]) + math.log1p(share * math.expm1(spacing)))


def _solve(delta_at: Callable[[float], float], delta: float, high: float) -> float:
    """Smallest epsilon in [0, high] with delta_at(epsilon) <= delta, by bisection, rounded up; delta_at(high)
    is.
    """
    if delta_at(0.0) <= delta:
        return 0.0
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


def _mixture(steps: Sequence[Step]) -> Step | None:
    return steps[0] if len(steps) == 1 and steps[0].q < 1.0 else None


def _refined(
    steps: Sequence[Step], direction: Direction, delta: float, theta: float, *, two_sided: bool
) -> tuple[Composed, float, bool]:
    """Compose; where rounding errors are felt at the answer, compose again with the tilt that fits it."""
    guess: float | None = None
    least = math.inf
    for kept in (1e-6, 1e-3, 1e-3):
        plan = make_plan(
            steps, direction, delta=delta, epsilon=guess, theta=theta, two_sided=two_sided, kept=kept
        )
        composed = compose(steps, direction, plan)
        epsilon = _crossing(*composed.upper_profile(), delta, composed.spacing)
        least = min(least, epsilon)
        if not math.isfinite(epsilon) or composed.error_at(epsilon, two_sided=two_sided) <= 1e-3 * delta:
            break
        guess = least
    return composed, least, plan.coarse


@lru_cache(maxsize=128)
def epsilon_upper(steps: tuple[Step, ...], delta: float, direction: Direction | None = None) -> float:
    """Certified upper bound on epsilon at `delta`; the worse direction unless one is asked for.

    **Formal guarantee.** Never below the true epsilon of the composition's dominating pair.

    **Edge cases.** No releases: 0. Infinite mu: inf. Where the lattice would be too coarse the binomial
    mixture bound and the unamplified Gaussian bound step in; the least of all certified bounds is returned.
    """
    steps = normalise(steps)
    if not steps:
        return 0.0
    total = unamplified_mu(steps)
    ceiling = gaussian.epsilon(total, delta)
    if not math.isfinite(ceiling) or ceiling == 0.0 or _closed_form(steps):
        return ceiling
    worst = 0.0
    coarse = False
    for one in (direction,) if direction else directions(steps):
        if one == "add" and worst >= _largest_loss_when_added(steps):
            continue
        _, epsilon, rough = _refined(steps, one, delta, _theta(steps), two_sided=False)
        worst = max(worst, epsilon)
        coarse |= rough
    worst = min(worst, ceiling)
    mixture = _mixture(steps)
    if mixture and (coarse or mixture.mu > 5.0):
        worst = min(
            worst,
            _solve(
                lambda eps: gaussian.binomial_mixture_delta(mixture.mu, mixture.q, mixture.count, eps),
                delta,
                ceiling,
            ),
        )
    return worst


@lru_cache(maxsize=128)
def epsilon_bounds(
    steps: tuple[Step, ...], delta: float, direction: Direction | None = None
) -> tuple[float, float]:
    """Numerical (lower, upper) bounds on epsilon of the stated dominating pair."""
    steps = normalise(steps)
    if not steps:
        return 0.0, 0.0
    total = unamplified_mu(steps)
    ceiling = gaussian.epsilon(total, delta)
    if not math.isfinite(ceiling) or all(step.q == 1.0 for step in steps):
        return ceiling * (1 - 1e-12), ceiling
    if ceiling == 0.0 or _closed_form(steps):
        return 0.0, ceiling
    lower, upper = 0.0, ceiling
    for theta in (1.0, 0.3) if len(steps) <= _MANY else (1.0,):
        least = most = 0.0
        coarse = False
        for one in (direction,) if direction else directions(steps):
            if one == "add" and least >= _largest_loss_when_added(steps):
                continue
            fineness = theta * _theta(steps, two_sided=True)
            composed, epsilon, rough = _refined(steps, one, delta, fineness, two_sided=True)
            most = max(most, epsilon)
            least = max(least, composed.last_above(delta))
            coarse |= rough
        lower, upper = max(lower, least), min(upper, most)
        if coarse or upper - lower <= 0.01 * upper:
            break
    upper = min(upper, epsilon_upper(steps, delta, direction))
    return min(lower, upper), upper


@lru_cache(maxsize=128)
def delta_upper(steps: tuple[Step, ...], epsilon: float) -> float:
    """Certified upper bound on delta at epsilon >= 0."""
    steps = normalise(steps)
    if not steps:
        return 0.0
    ceiling = float(gaussian.delta(unamplified_mu(steps), epsilon))
    if ceiling == 0.0 or _closed_form(steps):
        return ceiling
    worst = 0.0
    for one in directions(steps):
        least, goal, kept = 1.0, None, 1e-6
        for _ in range(3):  # again with less of the tail while rounding errors are felt, as in `_refined`
            plan = make_plan(steps, one, delta=goal, epsilon=epsilon, theta=_theta(steps), kept=kept)
            composed = compose(steps, one, plan)
            least = min(least, float(interpolate(*composed.upper_profile(), np.array([epsilon]))[0]))
            if least < 1e-280 or composed.error_at(epsilon, two_sided=False) <= 1e-3 * least:
                break
            goal, kept = least, 1e-3
        worst = max(worst, least)
    mixture = _mixture(steps)
    if mixture:
        worst = min(worst, gaussian.binomial_mixture_delta(mixture.mu, mixture.q, mixture.count, epsilon))
    return min(worst, ceiling)


def interpolate(loss: Floats, bound: Floats, epsilon: Floats) -> Floats:
    """The profile at other epsilons: chords in e^epsilon inside, its first value 1 before and its last one
    after.
    """
    k = np.searchsorted(loss, epsilon)
    right = np.clip(k, 0, len(loss) - 1)
    left = np.clip(k - 1, 0, len(loss) - 1)
    width = loss[right] - loss[left]
    with np.errstate(all="ignore"):
        share = np.where(width > 0, np.expm1(epsilon - loss[left]) / np.expm1(width), 0.0)
        share = np.where(np.isfinite(share), np.clip(share, 0.0, 1.0), 0.0)
        value = bound[left] + (bound[right] - bound[left]) * share
    value = np.where(np.isfinite(value), value, 1.0)
    return np.asarray(np.where(k == 0, 1.0, np.clip(value, 0.0, 1.0)))


@lru_cache(maxsize=32)
def profile(steps: tuple[Step, ...]) -> tuple[Floats, Floats]:
    """Certified points (epsilon >= 0, delta) of the composition, from delta(0) down to about 1e-15.

    For every direction the least over several tilts, each sharp around its own delta; then the worse
    direction.
    """
    steps = normalise(steps)
    goals = (0.1, 1e-4, 1e-8, 1e-12, 1e-15) if len(steps) <= _MANY else (1e-2, 1e-6, 1e-12)
    curves: list[list[tuple[Floats, Floats]]] = []
    reach = 0.0
    for one in directions(steps):
        curves.append([])
        for goal in goals:
            composed = compose(steps, one, make_plan(steps, one, delta=goal, theta=max(0.006, _theta(steps))))
            curves[-1].append(composed.upper_profile())
            reach = max(reach, _crossing(*curves[-1][-1], goal, composed.spacing))
    ceiling = gaussian.epsilon(unamplified_mu(steps), goals[-1])
    reach = min(reach, ceiling)
    epsilon = reach * np.concatenate([[0.0], np.logspace(-4, -1, 200), np.linspace(0.1, 1, 1500)[1:]])
    worst = np.zeros(len(epsilon))
    for per_direction in curves:
        least = np.ones(len(epsilon))
        for loss, bound in per_direction:
            least = np.minimum(least, interpolate(loss, bound, epsilon))
        worst = np.maximum(worst, least)
    worst = np.minimum(worst, gaussian.delta(unamplified_mu(steps), epsilon))
    epsilon.setflags(write=False)
    worst.setflags(write=False)
    return epsilon, worst
