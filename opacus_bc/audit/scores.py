"""Attack statistics on the outputs of a noisy mechanism, sharpest for Gaussian releases with sampling.

A release is seen as a vector of features (one for each clip group); :class:`Projection` reduces it to the one
number that tells a canary apart, standardised so that it is N(0, 1) without and N(mu, 1) with the canary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Attack = Callable[[Floats], Floats]

_LARGEST_MU = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """The optimal linear reduction of a release, learned from releases with and without a canary.

    Attributes:
        weights: What the features are multiplied by.
        offset: Subtracted afterwards.
        mu: The mean of the result with a canary; without one it has mean 0 and variance 1.
    """

    weights: Floats
    offset: float
    mu: float

    def __call__(self, features: Floats) -> Floats:
        """Reduce the last axis."""
        return np.asarray(np.dot(features, self.weights) - self.offset)


def learn_projection(absent: Floats, present: Floats) -> Projection:
    """Fisher's discriminant: for Gaussian releases with a common covariance it is the likelihood ratio.

    Learning it, instead of trusting the claimed noise scales, lets an audit use a feature that carries less
    noise than claimed.

    Args:
        absent: Releases of a step without the canary, shape ``(samples, features)``.
        present: Releases of a step with it.

    **Edge cases**: features without any noise would give an infinite mu; it is limited to 1000.
    """
    shift = present.mean(0) - absent.mean(0)
    covariance = np.atleast_2d(np.cov(np.concatenate([absent - absent.mean(0), present - present.mean(0)]).T))
    scale = np.maximum(np.abs(shift), np.sqrt(np.diag(covariance)))
    scale = np.where(scale > 0, scale, 1.0)
    # In units of its shift a feature's noise counts as at least 1 / _LARGEST_MU.
    whitened = covariance / np.outer(scale, scale) + np.eye(len(scale)) / _LARGEST_MU**2
    weights = np.linalg.solve(whitened, shift / scale) / scale
    spread = math.sqrt(float((weights * scale) @ whitened @ (weights * scale)))
    if spread == 0.0:
        return Projection(weights=np.zeros_like(shift), offset=0.0, mu=0.0)
    weights = weights / spread
    return Projection(weights=weights, offset=float(absent.mean(0) @ weights), mu=float(shift @ weights))


def log_ratio(x: Floats, mu: float, rate: float) -> Floats:
    """Log-likelihood ratio ``ln(1 - q + q e^{mu x - mu^2/2})`` of one release with sample rate q.

    With ``mu = 1/sigma`` and ``x = z/sigma`` this is ``ln(1 - q + q e^{(z - 1/2)/sigma^2})``.
    """
    exponent = mu * x - mu**2 / 2
    if rate >= 1.0:
        return exponent
    small = np.minimum(exponent, 600.0)  # beyond, the 1 - q no longer counts and e^600 is still a float
    return np.asarray(np.log1p(rate * np.expm1(small)) + (exponent - small))


def likelihood_ratio(mu: float, rate: float, *, steps_per_draw: int = 1) -> Attack:
    """Neyman-Pearson statistic of a run: the sum over its draws of :func:`log_ratio`.

    Args:
        mu: Mean of a standardised release with the canary.
        rate: Probability that the canary is drawn.
        steps_per_draw: Steps known to have used the same draw; 1 in a correct loop.

    Returns:
        A function of runs: shape ``(steps, repetitions)`` to ``(repetitions,)``.
    """

    def attack(x: Floats) -> Floats:
        root = math.sqrt(steps_per_draw)
        total = np.zeros(x.shape[-1])
        for group in x.reshape(-1, steps_per_draw, x.shape[-1]):  # one at a time stays in the cache
            total += log_ratio(group.sum(0) / root, mu * root, rate)
        return total

    return attack


def repeated_noise(mu: float, *, lag: int, sign: float = 1.0) -> Attack:
    """Looks for noise that comes back after ``lag`` steps: then steps alike in data are alike in output.

    With ``sign=-1`` the loss had the opposite sign in one of the two, so that noise comes back reversed.

    The score is minus the number of pairs of steps that differ by less than a hundredth of the canary's
    shift: a canary makes them rarer. Noise that is fresh at every step makes the count uninformative.
    """

    def attack(x: Floats) -> Floats:
        return -np.asarray((np.abs(x[lag:] - sign * x[:-lag]) < 0.01 * mu).sum(0), dtype=np.float64)

    return attack


def silent_steps() -> Attack:
    """Counts steps without any noise at all: the very same output as another step of the run.

    The score is the negative count: a canary makes empty batches rarer.
    """

    def attack(x: Floats) -> Floats:
        ordered = np.sort(x, axis=0)
        return -np.asarray((ordered[1:] == ordered[:-1]).sum(0), dtype=np.float64)

    return attack
