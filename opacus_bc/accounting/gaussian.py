"""Closed forms of Gaussian differential privacy: the trade-off function G_mu = T(N(0, 1), N(mu, 1)).

Everything here is exact up to rounding of the normal distribution function, for mu from 0 to 1e6 and beyond:
the formulas are kept in logarithms, so that neither exp(epsilon) nor a tail probability overflows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, ndtr, ndtri

Floats = npt.NDArray[np.float64]

_SQRT1_2 = math.sqrt(0.5)


def delta(mu: float | Floats, epsilon: float | Floats) -> Any:
    """Hockey-stick divergence of G_mu: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    Both arguments broadcast; epsilon may be negative.

    >>> round(float(delta(1.0, 0.0)), 6)
    0.382925
    """
    mu_, eps = np.broadcast_arrays(np.asarray(mu, dtype=np.float64), np.asarray(epsilon, dtype=np.float64))
    out = np.maximum(0.0, -np.expm1(np.minimum(eps, 0.0)))
    with np.errstate(all="ignore"):
        upper = eps / mu_ - mu_ / 2  # the threshold, standardised under the shifted distribution
        lower = eps / mu_ + mu_ / 2
        # e^eps Phi(-lower) = exp(-upper^2/2) erfcx(lower/sqrt 2)/2: no overflow, no cancellation of
        # exponents.
        scaled = np.exp(-(upper**2) / 2) * 0.5 * erfcx(lower * _SQRT1_2)
        value = np.where(lower > 0, ndtr(-upper) - scaled, ndtr(-upper) - np.exp(eps) * ndtr(-lower))
    good = (mu_ > 0) & np.isfinite(value)
    out = np.where(good, np.clip(value, out, 1.0), out)
    return np.where(np.isinf(mu_), 1.0, out)


def epsilon(mu: float, delta_: float) -> float:
    """The smallest epsilon >= 0 with delta(mu, epsilon) <= delta_, rounded up.

    >>> round(epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu <= 0 or float(delta(mu, 0.0)) * (1 + 1e-12) <= delta_:
        return 0.0
    if math.isinf(mu):
        return math.inf
    # delta(mu, eps) <= Phi(mu/2 - eps/mu) puts the root below `high`.
    low, high = 0.0, mu * (mu / 2 - float(ndtri(delta_)))
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if float(delta(mu, middle)) + _rounding(mu, middle) <= delta_:
            high = middle
        else:
            low = middle
    return high * (1 + 1e-13)


def _rounding(mu: float, epsilon_: float) -> float:
    """Bound on the rounding error of `delta`, the difference of two tail probabilities of about this size."""
    return 1e-15 * float(ndtr(mu / 2 - epsilon_ / mu))


def mu_from(epsilon_: float | Floats, delta_: float | Floats) -> Floats:
    """The smallest mu (rounded up) with delta(mu, epsilon_) >= delta_, for every pair."""
    eps, target = np.broadcast_arrays(
        np.asarray(epsilon_, dtype=np.float64), np.asarray(delta_, dtype=np.float64)
    )
    low = np.zeros(eps.shape)
    # delta(mu, eps) >= 1/2 Phi-mass once mu^2/2 > eps; mu = z + sqrt(z^2 + 2 eps) reaches 1 - delta in the
    # tail.
    z = -ndtri(np.clip((1 - target) / 4, 1e-300, 0.5))
    high = 2 * (z + np.sqrt(z**2 + 2 * np.maximum(eps, 0.0))) + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        enough = delta(middle, eps) >= target
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
    return np.where(target <= 0, 0.0, np.where(target >= 1, np.inf, high))


def tradeoff(mu: float, alpha: Floats) -> Floats:
    """G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu)."""
    with np.errstate(all="ignore"):
        out = ndtr(-ndtri(alpha) - mu)
    return np.asarray(np.where(alpha <= 0, 1.0, np.where(alpha >= 1, 0.0, out)), dtype=np.float64)


def binomial_mixture_delta(mu: float, rate: float, steps: int, epsilon_: float) -> float:
    """Upper bound on delta(epsilon) of `steps` subsampled releases: sum_n Bin(n; steps, rate)
    delta_{G_{sqrt(n) mu}}.

    **Formal guarantee.** An adversary who is told which steps used the sample faces G_{sqrt(n) mu} with n
    binomial; the hockey-stick divergence is jointly convex, so knowing less can only lower it. It holds for
    Poisson sampling in both directions and for the symmetrised C_q(G_mu), and is tight as mu grows.

    **Edge cases.** Counts outside mean +- 12 deviations (never below 60 counts) are charged as certain
    failure.
    """
    mean = steps * rate
    spread = 12 * math.sqrt(mean * (1 - rate)) + 60
    first, last = max(0, math.floor(mean - spread)), min(steps, math.ceil(mean + spread))
    counts = np.arange(first, last + 1, dtype=np.float64)
    weights = np.exp(_log_binomial(counts, steps, rate))
    beyond = max(0.0, 1.0 - float(weights.sum())) if last < steps or first > 0 else 0.0
    # 1 - sum is only good to 1e-13; the Chernoff bound is what certifies the tail.
    beyond = min(beyond + 1e-15, _chernoff_outside(first, last, steps, rate)) if beyond else 0.0
    total = float(weights @ delta(mu * np.sqrt(counts), epsilon_))
    return min(1.0, total * (1 + 1e-9) + beyond)


def _log_binomial(counts: Floats, steps: int, rate: float) -> Floats:
    from scipy.stats import binom

    return np.asarray(binom.logpmf(counts, steps, rate), dtype=np.float64)


def _chernoff_outside(first: int, last: int, steps: int, rate: float) -> float:
    """Pr[Bin(steps, rate) < first or > last] by the Chernoff-Hoeffding relative-entropy bound."""

    def tail(count: int) -> float:
        share = count / steps
        if not 0 <= share <= 1:
            return 0.0
        entropy = 0.0
        if share > 0:
            entropy += share * math.log(share / rate)
        if share < 1:
            entropy += (1 - share) * (math.log1p(-share) - math.log1p(-rate))
        return math.exp(-steps * max(0.0, entropy))

    return (tail(first - 1) if first > 0 else 0.0) + (tail(last + 1) if last < steps else 0.0)
