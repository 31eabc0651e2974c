"""Certified composition of privacy-loss distributions.

The lattice distributions of `lattice` are tilted, multiplied in the frequency domain and untilted. An answer
carries bounds on everything that was left out: mass beyond the window (Chernoff), wrap-around (which only
adds mass, so it matters to the lower bound alone), truncated losses (infinite), and floating-point error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

from opacus_bc.accounting.lattice import UNIT, Direction, Floats, Lattice, Step, discretise
from opacus_bc.accounting.plan import Plan

Complexes = npt.NDArray[np.complex128]

_FLOOR = 0.1


@dataclass(frozen=True)
class Composed:
    """The composed distribution on losses start + k*spacing, and the certified errors of its hockey-stick
    divergence.

    `mass` is untilted. At epsilon the divergence carries an error of at most
    `noise * exp(log_scale - tilt * epsilon) + outside`, and only the lower bound also the wrap-around.
    """

    start: float
    spacing: float
    mass: Floats
    tilt: float
    log_scale: float
    noise: float
    wrapped: float
    outside: float
    lattices: tuple[tuple[Lattice, int], ...]
    slack: float  # rounding of the losses themselves

    def _profile(self) -> tuple[Floats, Floats, Floats]:
        """Loss, divergence at that loss, and numerical error of the latter, at every lattice point."""
        backwards = self.mass[::-1]
        above = np.cumsum(backwards)
        discounted = np.asarray(lfilter([1.0], [1.0, -math.exp(-self.spacing)], backwards))
        loss = self.start + self.spacing * np.arange(len(backwards), dtype=np.float64)
        divergence = np.asarray(np.maximum(0.0, above - discounted)[::-1])
        return loss, divergence, 4 * UNIT * len(backwards) * above[::-1]

    def _scale(self, loss: Floats) -> Floats:
        return np.asarray(np.exp(np.clip(self.log_scale - self.tilt * loss, -740.0, 690.0)))

    def error_at(self, epsilon: float, *, two_sided: bool) -> float:
        """What floating-point error (and wrap-around, if two_sided) may amount to at epsilon."""
        share = self.noise + (self.wrapped if two_sided else 0.0)
        return share * float(self._scale(np.array([epsilon]))[0])

    def upper_profile(self) -> tuple[Floats, Floats]:
        """Losses and certified upper bounds on delta there; linear interpolation in e^epsilon stays an upper
        bound.
        """
        loss, divergence, error = self._profile()
        bound = divergence + error + self.noise * self._scale(loss) + self.outside
        end = self.start + self.spacing * len(loss)  # nothing but `outside` is left from here on
        return np.append(loss, end) + self.slack, np.append(bound, self.outside)

    def last_above(self, delta: float) -> float:
        """A lower bound on epsilon at `delta`, for the pair itself rather than for its discretisation.

        The rounding of `discretise` is a coupling: true loss >= rounded loss - w, except with probability
        `failure`.
        """
        failure = 1e-4 * delta
        loss, divergence, error = self._profile()
        inflated = sum(count * max(0.0, float(lattice.mass.sum()) - 1.0) for lattice, count in self.lattices)
        lumped = sum(count * lattice.lumped for lattice, count in self.lattices)
        lost = error + (self.noise + self.wrapped) * self._scale(loss) + failure + lumped
        kept = divergence * max(0.0, 1 - 2 * inflated - 1e-9)
        exceeding = np.nonzero(kept - lost > delta)[0]
        if not len(exceeding):
            return 0.0
        k = int(exceeding[-1])
        share = 0.0
        if (
            k + 1 < len(loss) and self.spacing < 30.0
        ):  # a chord in e^epsilon, the errors taken at its worse end
            share = (kept[k] - lost[k] - delta) / max(kept[k] - kept[k + 1], 1e-300)
        step = math.log1p(min(1.0, share) * math.expm1(min(self.spacing, 30.0)))
        shift = rounding_quantile(self.lattices, failure)
        return max(0.0, float(loss[k]) + step - shift - self.slack)


def rounding_quantile(lattices: Sequence[tuple[Lattice, int]], failure: float) -> float:
    """W with Pr[sum of roundings > w] <= failure: Bennett's inequality cell by cell, exponent chosen from a
    list.
    """
    widest = max(float(lattice.widths.max()) for lattice, _ in lattices)
    spread = math.sqrt(sum(c * float(a.split @ a.widths**2) for a, c in lattices)) + 1e-300
    normal = math.sqrt(-2 * math.log(failure)) / spread * np.logspace(-2, 0.5, 24)
    exponents = np.concatenate([np.minimum(normal, 300 / widest), np.logspace(-1, 2.4, 24) / widest])
    total = np.zeros(len(exponents))
    for lattice, count in lattices:
        grown = exponents[:, None] * lattice.widths
        total += count * (exponents * lattice.drift.sum() + (np.expm1(grown) - grown) @ lattice.split)
    certain = sum(count * float(lattice.widths.max()) for lattice, count in lattices)
    return min(certain, float(np.min((total - math.log(failure)) / exponents)))


def _power(base: Complexes, exponent: int) -> Complexes:
    """base**exponent by squaring; every factor is rounded at most once, so the relative error is below
    4*exponent units.
    """
    result = None
    while True:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        base = base * base


def compose(steps: Sequence[Step], direction: Direction, plan: Plan) -> Composed:
    """Compose all releases within the plan's window.

    **Formal guarantee.** `upper_profile` bounds delta of the composition from above and `lower_profile` from
    below, for every plan. A rounding error of at most e in each value of a characteristic function phi, |phi|
    <= 1, moves its T-th power by at most T e (|phi| + e)^(T-1); by Parseval and Cauchy-Schwarz the sum of
    |errors| over the window is at most the Euclidean norm of the errors over the frequencies.
    """
    spacing = plan.spacing
    lattices = tuple((discretise(s, spacing, plan.cut, plan.theta, direction), s.count) for s in steps)
    offset = math.fsum(lattice.offset * count for lattice, count in lattices)
    first = math.floor((plan.low - offset) / spacing)
    size = next_fast_len(math.ceil((plan.high - plan.low) / spacing) + 2, real=True)
    per_value = 8 * UNIT * math.log2(size) + 4 * UNIT

    spectrum = None
    bound, least = np.ones(size // 2 + 1), np.ones(size // 2 + 1)
    # Chernoff bounds take the best of a few exponents: the planned ones, and tame ones in case those
    # overshoot.
    tame = (plan.below / 4, plan.below / 32, -1.0, -0.1, 0.0)
    scales = dict.fromkeys((plan.tilt, plan.above, plan.far, plan.below, *tame), 0.0)
    total = 0
    for lattice, count in lattices:
        loss = lattice.offset + lattice.index * spacing
        for exponent in scales:
            power = exponent * loss
            peak = float(power.max())
            weight = lattice.mass * np.exp(power - peak)
            log_sum = peak + math.log(float(weight.sum()))
            scales[exponent] += count * log_sum
            if exponent == plan.tilt:
                tilted = weight * math.exp(peak - log_sum)
        phi = rfft(np.bincount(lattice.index % size, weights=tilted, minlength=size))
        powered = _power(phi, count)
        # |phi| + e <= floor + e or <= |phi| (1 + e/floor): bounds the power without taking it twice.
        bound *= np.maximum(np.abs(powered), _FLOOR**count) * ((1 + per_value / _FLOOR) ** count * (1 + 1e-9))
        least = np.minimum(least, np.maximum(np.abs(phi), _FLOOR))
        spectrum = powered if spectrum is None else spectrum * powered
        total += count
    assert spectrum is not None
    norm = math.sqrt(2.0)  # half spectrum -> full spectrum
    noise = (
        norm * per_value * (total * float(np.linalg.norm(bound / least)) + float(np.linalg.norm(spectrum)))
    )
    mass = np.maximum(0.0, np.roll(irfft(spectrum, size), -(first % size)))
    start = offset + first * spacing
    end = start + size * spacing
    loss = start + spacing * np.arange(size)
    log_scale = scales[plan.tilt]
    rounding = 1 + 4 * UNIT * (total * 40 + 1) + 1e-12

    def chernoff(log_values: list[float]) -> float:
        return math.exp(min(0.0, *log_values)) * (1 + 1e-6)

    beyond = chernoff([k - e * end for e, k in scales.items() if e > 0])
    wrapped = chernoff([k - log_scale - (e - plan.tilt) * end for e, k in scales.items() if e > plan.tilt])
    wrapped += chernoff([k - log_scale + (plan.tilt - e) * start for e, k in scales.items() if e < plan.tilt])
    infinite = math.fsum(lattice.infinite * count for lattice, count in lattices)
    slack = 8 * UNIT * (math.fsum(lattice.top * count for lattice, count in lattices) + abs(start) + abs(end))
    return Composed(
        start=start,
        spacing=spacing,
        mass=mass * np.exp(np.clip(log_scale - plan.tilt * loss, -740.0, 690.0)) * rounding,
        tilt=plan.tilt,
        log_scale=log_scale,
        noise=noise,
        wrapped=wrapped,
        outside=beyond + infinite,
        lattices=lattices,
        slack=slack,
    )
