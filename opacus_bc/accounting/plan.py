"""Where to look: tilt, window and lattice spacing for a composition, from a quick quadrature.

Nothing in this module carries a guarantee. It decides how accurate the certified computation in `pld` will
be, never whether it is valid: `pld` bounds again, rigorously, all that is left out here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opacus_bc.accounting.lattice import Direction, Floats, Step, losses, resolved

MAX_POINTS = 2**20
_CONDITION = 1e3  # how far the tilted scale may lie above delta
_ALIASED = 1e-9  # share of the tilted mass on either side of the window


@dataclass(frozen=True)
class Plan:
    """Exponential tilt, window [low, high] of total losses, lattice spacing, and what to expect."""

    tilt: float
    above: float  # a larger exponent, for the Chernoff bound beyond `high`
    far: float  # likewise, for the tilted law
    below: float  # a smaller one, for the tilted law under `low`
    low: float
    high: float
    spacing: float
    cut: float
    theta: float
    coarse: bool  # the spacing is wider than accuracy asks for


def _atoms(step: Step, direction: Direction, cut: float) -> tuple[Floats, Floats]:
    """(losses, log weights) of one release, by the trapezoidal rule."""
    start, end = resolved(step, cut)
    tail = max(end - step.mu, -start)
    if step.mu < 4 * tail:
        x = np.linspace(start, end, 400)
    else:  # two separate humps with little in between
        gap = np.linspace(tail, step.mu - tail, 100)[1:-1]
        x = np.concatenate([np.linspace(-tail, tail, 200), gap, np.linspace(step.mu - tail, end, 200)])
        x = x[x >= start]
    loss = losses(step.mu * (x - step.mu / 2), step.q)
    log_base = -(x**2) / 2 - 0.5 * math.log(2 * math.pi) + np.log(np.gradient(x))
    if step.symmetric:
        log_base[0] -= math.log(2)
        rest = max(1e-300, (1 - step.q) * math.erf(step.mu / 2 * math.sqrt(0.5)))
        values = np.concatenate([-loss[::-1], [0.0], loss])
        return values, np.concatenate([log_base[::-1], [math.log(rest)], log_base + loss])
    if direction == "add" and step.q < 1:
        return -loss, log_base
    return loss, log_base + loss


def _cumulants(atoms: Sequence[tuple[Floats, Floats, int]], exponents: Floats) -> Floats:
    """Sum over the composition of log E[exp(lambda * loss)]."""
    total = np.zeros(len(exponents))
    for loss, log_weight, count in atoms:
        power = exponents[:, None] * loss + log_weight
        peak = power.max(axis=1)
        total += count * (peak + np.log(np.exp(power - peak[:, None]).sum(axis=1)))
    return total


def _deviation(atoms: Sequence[tuple[Floats, Floats, int]], tilt: float) -> float:
    variance = 0.0
    for loss, log_weight, count in atoms:
        power = tilt * loss + log_weight
        weight = np.exp(power - power.max())
        weight /= weight.sum()
        centred = loss - weight @ loss
        variance += count * float(weight @ centred**2)
    return math.sqrt(max(variance, 1e-300))


def make_plan(
    steps: Sequence[Step],
    direction: Direction,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    theta: float,
    two_sided: bool = False,
    kept: float = 1e-6,
) -> Plan:
    """Plan the computation of epsilon at `delta` (an `epsilon` beside it is a first guess), or of delta at
    `epsilon`.

    `kept` is the share of delta that truncation may cost: a larger one tames heavy tails.
    `two_sided` widens the window until wrap-around, which never spoils the upper bound, is harmless to the
    lower one too.

    The tilt is the exponent of the best moments (Renyi) bound: under the tilted law the answer lies in the
    bulk, so floating-point errors are small relative to delta itself, however small that is.
    """
    total = sum(step.count for step in steps)
    goal = delta if delta is not None else 1e-15
    cut = min(1e-9, max(1e-290, kept * goal / total))
    atoms = [(*_atoms(step, direction, cut), step.count) for step in steps]
    spread = max(_deviation(atoms, 0.0), 1e-7)
    positive = np.logspace(-6, 1.6, 153) / spread
    exponents = np.concatenate([-positive[::-1], [0.0], positive])
    cumulants = _cumulants(atoms, exponents)
    zero = len(positive)
    upper, upper_k = exponents[zero + 1 :], cumulants[zero + 1 :]
    factor = upper * np.log(upper) - (1 + upper) * np.log1p(
        upper
    )  # max of (1 - e^(eps-l)) e^(-lambda (l-eps))
    if delta is not None:
        aim = float(((upper_k + factor - math.log(delta)) / upper).min()) if epsilon is None else epsilon
    else:
        assert epsilon is not None
        aim = epsilon
        goal = math.exp(min(0.0, max(-690.0, float((upper_k + factor - upper * aim).min()))))
    # The smallest exponent that keeps rounding relative to delta: larger ones only make the tilted tail
    # heavier.
    excess = upper_k - upper * aim
    best = min(int(np.argmax(excess <= max(excess.min() + 1.0, math.log(_CONDITION * goal)))), len(upper) - 3)
    tilt, tilt_k = float(upper[best]), float(upper_k[best])
    over = (upper_k - math.log(kept * goal)) / upper
    pick = int(np.argmin(over))
    high, above = float(over[pick]), float(upper[pick])
    over = (upper_k[best + 1 :] - tilt_k - math.log(_ALIASED)) / (upper[best + 1 :] - tilt)
    pick = int(np.argmin(over))
    far = float(upper[best + 1 + pick])
    if two_sided:
        high = max(high, float(over[pick]))
    under_exponents, under_k = exponents[: zero + 1 + best], cumulants[: zero + 1 + best]
    under = (math.log(_ALIASED) + tilt_k - under_k) / (tilt - under_exponents)
    pick = int(np.argmax(under))
    low, below = float(under[pick]), float(under_exponents[pick])
    margin = 0.02 * (high - low) + 1e-9 * max(abs(high), abs(low))
    low, high = low - margin, high + margin
    spread = max(1e-7, min(spread, _deviation(atoms, tilt)))
    wanted = 2.4 * theta * spread / math.sqrt(total)
    widest = max(float(np.abs(loss).max()) for loss, _, _ in atoms)
    least = max((high - low) / MAX_POINTS, widest * 2.0**-40)
    return Plan(tilt, above, far, below, low, high, max(wanted, least), cut, theta, coarse=least > 2 * wanted)
