"""Trade-off curves: for every false positive rate, the least false negative rate an adversary can reach."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.signal import fftconvolve
from scipy.special import erfcx

from opacus_bc.accounting import gaussian
from opacus_bc.accounting.events import check_delta, check_number
from opacus_bc.accounting.lattice import Floats
from opacus_bc.accounting.query import interpolate

_LARGEST_EXPONENT = 690.0


@dataclass(frozen=True)
class TradeOffCurve:
    """A symmetric trade-off function f, certified from below.

    It is held as points (epsilon_j, delta_j), epsilon_j >= 0, at which (epsilon, delta)-DP has been
    certified; each is a supporting line beta >= 1 - delta - e^epsilon alpha of the true curve, and its mirror
    image another.

    **Formal guarantee.** f(alpha) is at most the true least false negative rate, convex, non-increasing,
    symmetric (f is its own inverse) and between 0 and 1 - alpha. With `mu` set it is exactly G_mu.

    >>> curve = TradeOffCurve.gaussian(1.0)
    >>> round(float(curve(0.05)), 4), round(curve.epsilon(1e-5), 4), round(curve.advantage, 4)
    (0.7405, 4.3772, 0.3829)
    """

    epsilons: Floats
    deltas: Floats
    mu: float | None = None

    def __post_init__(self) -> None:
        points = np.asarray(self.epsilons, dtype=np.float64), np.asarray(self.deltas, dtype=np.float64)
        if points[0].ndim != 1 or points[0].shape != points[1].shape or not len(points[0]):
            raise ValueError(
                f"epsilons and deltas must be equally long, not {points[0].shape} and {points[1].shape}."
            )
        if not (
            np.all(np.diff(points[0]) > 0)
            and points[0][0] == 0
            and np.all((points[1] >= 0) & (points[1] <= 1))
        ):
            raise ValueError("epsilons must increase from 0 and deltas lie between 0 and 1.")
        epsilons, deltas = _convex(points[0], np.minimum.accumulate(points[1]))
        object.__setattr__(self, "epsilons", epsilons)
        object.__setattr__(self, "deltas", deltas)

    @classmethod
    def gaussian(cls, mu: float) -> TradeOffCurve:
        """G_mu, the trade-off between N(0, 1) and N(mu, 1)."""
        mu = check_number("mu", mu, 0, math.inf)
        if mu == 0:
            return cls(np.zeros(1), np.zeros(1), 0.0)
        if math.isinf(mu):
            return cls(np.zeros(1), np.ones(1), mu)
        reach = gaussian.epsilon(mu, 1e-15)
        epsilons = np.linspace(0, reach, 2001) if reach else np.zeros(1)
        return cls(epsilons, gaussian.delta(mu, epsilons), mu)

    def __call__(self, alpha: float | Floats) -> Any:
        """f(alpha): the least false negative rate at false positive rate alpha."""
        rate = _check_rates("alpha", alpha)
        if self.mu is not None:
            out = gaussian.tradeoff(self.mu, rate)
        else:
            x, y = self._vertices()
            out = np.clip(np.interp(rate, x, y), 0.0, 1 - rate)
        return out if np.ndim(alpha) else float(out)

    def inverse(self, beta: float | Floats) -> Any:
        """The least false positive rate at false negative rate beta; the curve is symmetric, so this is
        f(beta).
        """
        return self(beta)

    def _vertices(self) -> tuple[Floats, Floats]:
        """Corners of the polygon, from (0, f(0)) to (1, 0)."""
        keep = self.epsilons <= _LARGEST_EXPONENT
        eps, delta = self.epsilons[keep], self.deltas[keep]
        # On the diagonal alpha = beta the highest line is the last one in use; flatter ones lie below it.
        diagonal = (1 - delta) / (1 + np.exp(eps))
        last = int(np.argmax(diagonal))
        eps, delta, middle = eps[last:], delta[last:], diagonal[last]
        alpha = (delta[:-1] - delta[1:]) * np.exp(-eps[:-1]) / np.expm1(np.diff(eps))
        beta = 1 - delta[:-1] - np.exp(eps[:-1]) * alpha
        x = np.concatenate([[0.0], np.minimum(alpha[::-1], middle), [middle]])
        y = np.concatenate([[1 - delta[-1]], np.maximum(beta[::-1], middle), [middle]])
        x, y = np.maximum.accumulate(x), np.minimum.accumulate(y)  # rounding must not make it turn back
        return np.concatenate([x, y[-2::-1], [1.0]]), np.concatenate([y, x[-2::-1], [0.0]])

    def delta(self, epsilon: float) -> float:
        """The least certified delta at epsilon; negative epsilons by symmetry."""
        epsilon = check_number("epsilon", epsilon, -math.inf, math.inf)
        if epsilon < 0:
            return 1 - math.exp(epsilon) * (1 - self.delta(-epsilon))
        if self.mu is not None:
            return float(gaussian.delta(self.mu, epsilon))
        if epsilon == 0:
            return float(self.deltas[0])
        return float(interpolate(self.epsilons, self.deltas, np.array([epsilon]))[0])

    def epsilon(self, delta: float) -> float:
        """The least certified epsilon at delta; inf below the smallest delta of the curve."""
        delta = check_delta(delta)
        if self.mu is not None:
            return gaussian.epsilon(self.mu, delta)
        good = self.deltas <= delta
        if not good.any():
            return math.inf
        k = int(np.argmax(good))
        if k == 0:
            return 0.0
        left, right = float(self.epsilons[k - 1]), float(self.epsilons[k])
        if right - left > 30:
            return right
        share = (self.deltas[k - 1] - delta) / (self.deltas[k - 1] - self.deltas[k])
        return min(right, left + math.log1p(float(share) * math.expm1(right - left)) + 1e-15 * right)

    @property
    def advantage(self) -> float:
        """Total variation: the most by which true positive rate can exceed false positive rate."""
        return self.delta(0.0)

    def bayes_risk(self, prior: float) -> float:
        """The least error probability of an adversary who believes in the null hypothesis with probability
        `prior`.
        """
        prior = check_number("prior", prior, 0, 1)
        if prior in (0.0, 1.0):
            return 0.0
        if self.mu is not None:
            # The supporting line of slope -prior/(1-prior) is what (epsilon, delta)-DP at these odds says.
            odds = math.log(prior) - math.log1p(-prior)
            return max(0.0, (1 - prior) * (1 - self.delta(odds)))
        x, y = self._vertices()
        return float(np.min(prior * x + (1 - prior) * y))

    def compose(self, other: TradeOffCurve) -> TradeOffCurve:
        """The curve of both releases together, again certified from below."""
        if self.mu is not None and other.mu is not None:
            return TradeOffCurve.gaussian(math.hypot(self.mu, other.mu))
        reach = max(float(self.epsilons[-1]), float(other.epsilons[-1]))
        if reach == 0.0:
            failure = 1 - (1 - self.advantage) * (1 - other.advantage)
            return TradeOffCurve(np.zeros(1), np.array([min(1.0, failure)]))
        spacing = reach / 2**14
        (first, lost), (second, lost2) = self._masses(spacing), other._masses(spacing)
        joint = np.maximum(0.0, fftconvolve(first, second))
        middle = (len(joint) - 1) // 2
        loss = spacing * np.arange(middle + 1)
        above = np.cumsum(joint[middle:][::-1])[::-1]
        discount = np.zeros(middle + 2)
        tail = joint[middle:] * np.exp(-np.minimum(loss, 700.0))
        discount[:-1] = np.cumsum(tail[::-1])[::-1]
        growth = np.exp(np.minimum(loss, 700.0))
        bound = above - growth * discount[:-1]
        bound = np.maximum(bound, 0.0) + lost + lost2 + 1e-12  # rounding of the convolution and of the sums
        keep = np.unique(np.linspace(0, middle, 2001).astype(int))
        return TradeOffCurve(loss[keep], np.minimum(1.0, bound[keep]))

    def _masses(self, spacing: float) -> tuple[Floats, float]:
        """Symmetric lattice masses around zero, and the mass at infinity."""
        number = max(1, math.ceil(float(self.epsilons[-1]) / spacing))
        eps = np.asarray(spacing * np.arange(number + 1), dtype=np.float64)
        if self.mu is not None:
            deltas = gaussian.delta(self.mu, eps)
        else:
            deltas = interpolate(self.epsilons, self.deltas, eps)
            deltas[0] = self.deltas[0]
        # Mass under the first distribution at e_i is t_i (s_{i-1} - s_i), with s the slopes of delta in t =
        # e^epsilon.
        scaled = (deltas[:-1] - deltas[1:]) / math.expm1(spacing)  # t_i s_i
        mass = np.maximum(0.0, math.exp(spacing) * scaled - np.append(scaled[1:], 0.0))
        mirror = mass * np.exp(-np.minimum(eps[1:], 700.0))
        infinite = float(deltas[-1])
        centre = max(0.0, 1 - infinite - float(mass.sum()) - float(mirror.sum()))
        return np.concatenate([mirror[::-1], [centre], mass]), infinite

    def dominating_mu(self, delta: float) -> float:
        """The least mu (rounded up) with delta_f(epsilon) <= delta_{G_mu}(epsilon) wherever delta_f(epsilon)
        >= delta.

        **Formal guarantee.** Holds between the points too: in t = e^epsilon the curve is a chord there, and
        G_mu, being convex, lies above its tangent; the returned mu is one for which the tangent is above the
        chord.
        """
        delta = check_delta(delta)
        if self.mu is not None:
            return self.mu
        inside = int(np.sum(self.deltas >= delta))
        if inside == 0:
            return 0.0
        if self.deltas[0] >= 1:
            return math.inf
        stop = min(inside + 1, len(self.deltas))
        eps, deltas = self.epsilons[:stop], self.deltas[:stop]
        mu = float(np.max(gaussian.mu_from(eps[:inside], deltas[:inside])))
        excess = 1e-6
        while not _tangents_above(mu, eps, deltas):
            mu *= 1 + excess
            excess *= 1.5
        return mu

    def plot(self, path: str | Path | None = None, *, axes: Any = None, mu: float | None = None) -> Any:
        """Draw the curve, the ideal 1 - alpha and, with mu, G_mu; save to `path` if given."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plots need matplotlib: pip install 'opacus-bc[experiments]'") from error
        if axes is None:
            figure = Figure(figsize=(4.5, 4.2), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
        alpha = np.linspace(0, 1, 1001)
        axes.plot(alpha, 1 - alpha, color="0.6", linestyle="--", label="perfect privacy, 1 − α")
        if mu is not None and math.isfinite(mu):
            axes.plot(alpha, gaussian.tradeoff(mu, alpha), linestyle=":", label=f"Gaussian, μ = {mu:.3g}")
        axes.plot(alpha, self(alpha), label="this mechanism (certified)")
        axes.set(xlabel="false positive rate α", ylabel="false negative rate", xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper right", fontsize="small")
        if path is not None:
            axes.figure.savefig(path, dpi=150)
        return axes


def _check_rates(name: str, value: float | Floats) -> Floats:
    rates = np.asarray(value, dtype=np.float64)
    if not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError(f"{name}={value!r} must lie between 0 and 1.")
    return rates


def _convex(epsilons: Floats, deltas: Floats) -> tuple[Floats, Floats]:
    """Drop points above the chord (in e^epsilon) of their neighbours: delta is convex there, so the chord is
    certified.
    """
    while len(epsilons) > 2:
        gap = np.diff(epsilons)
        left = (deltas[1:-1] - deltas[:-2]) / -np.expm1(-gap[:-1])
        right = (deltas[2:] - deltas[1:-1]) / np.expm1(np.minimum(gap[1:], 700.0))
        above = np.concatenate([[False], left > right, [False]])
        above[1:] &= ~above[:-1]  # never two neighbours at once
        if not above.any():
            break
        epsilons, deltas = epsilons[~above], deltas[~above]
    return epsilons, deltas


def _tangents_above(mu: float, eps: Floats, deltas: Floats) -> bool:
    if len(eps) < 2:
        return bool(np.all(gaussian.delta(mu, eps) >= deltas))
    middle = (eps[:-1] + eps[1:]) / 2
    upper, lower = middle / mu - mu / 2, middle / mu + mu / 2
    slope = np.exp(-(upper**2) / 2) * 0.5 * erfcx(lower * math.sqrt(0.5))
    value = gaussian.delta(mu, middle)
    half = np.minimum(np.diff(eps) / 2, 700.0)
    return bool(
        np.all(value - slope * np.expm1(-half) >= deltas[:-1])
        and np.all(value - slope * np.expm1(half) >= deltas[1:])
    )
