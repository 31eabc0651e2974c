"""Accounting without a training run: epsilon for given noise, and noise for a given target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from opacus_bc.accounting import query
from opacus_bc.accounting.events import (
    ADJACENCY,
    RELEASE,
    REPLACE_RELEASE,
    Entry,
    check_count,
    check_delta,
    check_number,
    check_sampling,
    check_sigma,
    to_steps,
)
from opacus_bc.accounting.tradeoff import TradeOffCurve
from opacus_bc.mechanism.blocks import over_layers
from opacus_bc.mechanism.names import Sampling

_SMALLEST, _LARGEST = 1e-4, 1e7
_TOLERANCE = 5e-4  # calibrated values lie within [1 - 2 * tolerance, 1] of the target


def _entries(
    sigma_eff: float,
    sample_rate: float,
    steps: int,
    sampling: str,
    passes: int | None,
    releases: Sequence[float],
) -> list[Entry]:
    kind = RELEASE if ADJACENCY[sampling] == ADJACENCY[RELEASE] else REPLACE_RELEASE
    entries: list[Entry] = [(sigma, 1.0, 0, kind) for sigma in releases]
    if sampling == "shuffle":
        return entries + [(sigma_eff, sample_rate, 1, "shuffle")] * (passes or 0)
    return [*entries, (sigma_eff, sample_rate, steps, sampling)]


def _checked(
    sample_rate: float, steps: int, layers: int, sampling: str, passes: int | None
) -> tuple[float, int, int, Sampling, int]:
    rate = check_number("sample_rate", sample_rate, 0, 1)
    steps, layers = check_count("steps", steps), check_count("layers", layers, 1)
    # Rounding of q = 1/len must not turn E * len * q = E into one more pass.
    number = math.ceil(steps * rate - 1e-9) if passes is None else check_count("passes", passes)
    return rate, steps, layers, check_sampling(sampling), number


def tradeoff_of(entries: Sequence[Entry]) -> TradeOffCurve:
    """The certified trade-off curve of a history."""
    steps = query.normalise(to_steps(entries))
    if all(step.q == 1.0 for step in steps):
        return TradeOffCurve.gaussian(query.unamplified_mu(steps))
    if math.isinf(query.unamplified_mu(steps)):
        return TradeOffCurve.gaussian(math.inf)
    return TradeOffCurve(*query.profile(steps))


def epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    layers: int = 1,
    sampling: Sampling = "poisson",
    passes: int | None = None,
) -> float:
    """Certified epsilon of `steps` steps with `layers` separately clipped and noised groups.

    **Formal guarantee.** An upper bound for the stated sampling: "poisson" (add/remove one), "partition"
    (fixed mini-sets drawn without replacement, replace one), "shuffle" (every sample once a pass, replace
    one; no amplification).

    Args:
        noise_multiplier: noise standard deviation over L2-sensitivity, for every group; sigma_eff =
            noise_multiplier/sqrt(layers).
        sample_rate: probability that a sample takes part in a step.
        steps: number of steps.
        delta: the delta of (epsilon, delta)-DP.
        layers: number of clip groups L.
        sampling: how mini-sets are drawn.
        passes: for "shuffle": started passes over the data; ceil(steps * sample_rate) if not given.

    **Edge cases.** No steps: 0. No noise: inf.

    >>> round(epsilon(noise_multiplier=2.5, sample_rate=64 / 54000, steps=42188, delta=1e-5, layers=8), 3)
    1.565
    >>> round(epsilon(noise_multiplier=1.0, sample_rate=1.0, steps=1, delta=1e-5), 4)
    4.3772
    """
    delta = check_delta(delta)
    sigma = check_sigma(noise_multiplier)
    rate, steps, layers, sampling, number = _checked(sample_rate, steps, layers, sampling, passes)
    return query.epsilon_upper(
        to_steps(_entries(over_layers(sigma, layers), rate, steps, sampling, number, ())), delta
    )


def tradeoff(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    layers: int = 1,
    sampling: Sampling = "poisson",
    passes: int | None = None,
) -> TradeOffCurve:
    """Certified trade-off curve; arguments as for `epsilon`."""
    sigma = check_sigma(noise_multiplier)
    rate, steps, layers, sampling, number = _checked(sample_rate, steps, layers, sampling, passes)
    return tradeoff_of(_entries(over_layers(sigma, layers), rate, steps, sampling, number, ()))


def noise_multiplier(
    *,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    target_mu: float | None = None,
    target_tpr: float | None = None,
    at_fpr: float | None = None,
    sample_rate: float,
    steps: int,
    layers: int = 1,
    sampling: Sampling = "poisson",
    passes: int | None = None,
    releases: Sequence[float] = (),
) -> float:
    """The least noise multiplier that meets a target: (epsilon, delta), or mu, or a true positive rate at a
    false positive rate.

    **Formal guarantee.** The returned value meets the target, never exceeds it, and comes within 0.1 % of it
    (of epsilon, of mu, or of the true positive rate).

    Args:
        target_epsilon: with `target_delta`, the budget.
        target_delta: the delta of the budget.
        target_mu: instead: the composition must be mu-GDP wherever its delta is at least 1e-10 (or
            `target_delta`).
        target_tpr: instead: no test may have a larger true positive rate...
        at_fpr: ...at this false positive rate.
        sample_rate: probability that a sample takes part in a step.
        steps: number of steps.
        layers: number of clip groups L; the noise multiplier is that of every group.
        sampling: how mini-sets are drawn.
        passes: for "shuffle": passes over the data.
        releases: noise multipliers of one-off Gaussian releases that share the budget.

    Raises:
        ValueError: if the releases alone exceed the target, or no noise in [1e-4, 1e7] meets it.

    >>> round(noise_multiplier(target_epsilon=8.0, target_delta=1e-5, sample_rate=0.01, steps=1000), 2)
    0.59
    """
    rate, steps, layers, sampling, number = _checked(sample_rate, steps, layers, sampling, passes)
    fixed = [check_sigma(sigma, "releases") for sigma in releases]
    target, spent = _objective(target_epsilon, target_delta, target_mu, target_tpr, at_fpr)

    def value(sigma_eff: float) -> float:
        return spent(_entries(sigma_eff, rate, steps, sampling, number, fixed))

    alone = spent(_entries(math.inf, rate, 0, sampling, 0, fixed))
    if fixed and alone >= target:
        raise ValueError(
            f"releases={list(fixed)!r} alone spend {alone:.6g} of {target:.6g}; give them more noise."
        )
    if steps == 0 or rate == 0:
        return 0.0
    return _search(value, target) / over_layers(1.0, layers)


def _objective(
    target_epsilon: float | None,
    target_delta: float | None,
    target_mu: float | None,
    target_tpr: float | None,
    at_fpr: float | None,
) -> tuple[float, Callable[[Sequence[Entry]], float]]:
    """The target value and the function of a history that must not exceed it."""
    given = [target_epsilon is not None, target_mu is not None, target_tpr is not None]
    if sum(given) != 1:
        raise ValueError(
            "give exactly one of target_epsilon (with target_delta), target_mu, target_tpr (with at_fpr); "
            f"got target_epsilon={target_epsilon!r}, target_mu={target_mu!r}, target_tpr={target_tpr!r}."
        )
    if target_epsilon is not None:
        target = check_number("target_epsilon", target_epsilon, 0, math.inf, open_ends=True)
        delta = check_delta(math.nan if target_delta is None else target_delta, "target_delta")
        return target, lambda entries: query.epsilon_upper(to_steps(entries), delta)
    if target_mu is not None:
        floor = 1e-10 if target_delta is None else check_delta(target_delta, "target_delta")
        target = check_number("target_mu", target_mu, 0, math.inf, open_ends=True)
        return target, lambda entries: tradeoff_of(entries).dominating_mu(floor)
    fpr = check_number("at_fpr", math.nan if at_fpr is None else at_fpr, 0, 1, open_ends=True)
    target = check_number(
        "target_tpr", math.nan if target_tpr is None else target_tpr, fpr, 1, open_ends=True
    )
    return target, lambda entries: 1.0 - float(tradeoff_of(entries)(fpr))


def _search(value: Callable[[float], float], target: float) -> float:
    """The least sigma in range with value(sigma) <= target, up to the tolerance; `value` decreases from inf
    to `alone`.
    """
    low, high = 1.0, 1.0
    while value(high) > target:
        low, high = high, high * 4
        if high > _LARGEST:
            raise ValueError(
                f"no noise multiplier up to {_LARGEST:g} meets the target {target:.6g}; "
                "raise the target or take fewer steps."
            )
    if low == high:
        while value(low) <= target:
            low, high = low / 4, low
            if low < _SMALLEST:
                return high
    best = high
    reached = value(best)
    low_value = value(low)
    for trial in range(200):
        if reached >= (1 - 2 * _TOLERANCE) * target or high / low < 1 + 1e-13:
            break
        # Secant in logarithms, aimed just below the target; every third time plain bisection keeps it safe.
        middle = math.sqrt(low * high)
        if trial % 3 != 2 and 0 < reached < low_value < math.inf:
            aim = math.log((1 - _TOLERANCE) * target)
            share = (math.log(low_value) - aim) / (math.log(low_value) - math.log(reached))
            middle = low * (high / low) ** min(max(share, 0.02), 0.98)
        found = value(middle)
        if found <= target:
            high, best, reached = middle, middle, found
        else:
            low, low_value = middle, found
    return best
