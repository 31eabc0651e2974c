"""One subsampled Gaussian release as a discrete privacy-loss distribution that provably dominates it.

With L(x) = dN(mu,1)/dN(0,1) = exp(mu x - mu^2/2) the losses are

* Poisson sampling, add/remove one:   l(x) = log(1 - q + q L(x)), under P = (1-q)N(0,1) + qN(mu,1) ("remove"),
  and -l(x) under N(0,1) ("add");
* C_q(G_mu), replace one ("symmetric"): the part l > 0 of the former, its mirror image, and the rest at zero
  (Dong, Roth & Su 2022, definition 4.1: the convex hull of min(f_q, f_q^-1), which is linear where f_q
  crosses its inverse);
* q = 1: the Gaussian release itself.

Losses live on offset + d*Z. A cell's mass is split over its two ends so that *both* distributions keep their
mass ("connect the dots", Doroshenko et al. 2022): the discrete pair has the true hockey-stick divergence at
every edge and a chord in between, hence dominates. Edges are dense where the mass is and geometrically spaced
in the tails; a coarser subset of a lattice is still a lattice, and a cell of relative width theta adds only
theta^2/6 of variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, ndtr, ndtri

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Direction = Literal["remove", "add"]

UNIT = 2.0**-53
SPECIAL = 64 * UNIT
_TAIL = 1 + 1e-9  # on probabilities beyond the lattice, far more than `allowance` asks for
_LARGE = 30.0


@dataclass(frozen=True, order=True)
class Step:
    """`count` releases of Gaussian parameter mu = 1/sigma_eff at sample rate q; `symmetric` selects
    C_q(G_mu).
    """

    mu: float
    q: float
    count: int
    symmetric: bool = False


@dataclass(frozen=True)
class Lattice:
    """Mass `mass[j]` at loss `offset + index[j] * spacing`, plus `infinite` at +infinity.

    `lumped` is the mass moved up from below the lattice; `ends` holds for every cell (width, mass the split
    can send either way, bound on the mean rounding): what the lower bound needs to undo the rounding in
    probability.
    """

    offset: float
    index: Ints
    mass: Floats
    infinite: float
    lumped: float
    widths: Floats
    split: Floats
    drift: Floats
    top: float  # largest |loss| in use, for the rounding slack


def allowance(x: Floats) -> Floats:
    """Relative error granted to ndtr(x), and to exp(-x^2/2) erfcx: 64 + 3 x^2 units of rounding.

    A rounded argument alone costs about x^2 units in the tail; `tests/accounting/test_pld.py` compares both
    with fifty digits.
    """
    return np.asarray(SPECIAL * (1 + np.square(x) / 20))


def losses(log_ratio: Floats, q: float) -> Floats:
    """log(1 - q + q L), accurate for small q and for enormous L."""
    small = np.minimum(log_ratio, _LARGE)
    with np.errstate(divide="ignore", over="ignore"):
        exact = np.log1p(q * np.expm1(small))
        large = np.logaddexp(np.log1p(-q), math.log(q) + log_ratio)
    return np.asarray(np.where(log_ratio < _LARGE, exact, large))


def _log_ratios(y: Floats, step: Step) -> Floats:
    """The log-likelihood ratio log L at which the loss is offset + y; the inverse of `losses`."""
    if step.q == 1.0:
        return y
    with np.errstate(divide="ignore"):
        scaled = y + np.log(-np.expm1(-y)) - math.log(step.q)  # log(expm1(y)/q)
    if step.symmetric:
        return np.asarray(np.logaddexp(0.0, scaled))
    return np.asarray(scaled + math.log1p(-step.q))


def resolved(step: Step, cut: float) -> tuple[float, float]:
    """The x between which losses are resolved: probability of about `cut` lies beyond, on either side."""
    low = -ndtri(cut)
    high = max(-ndtri(min(0.1, cut / (2 * step.q))), -ndtri(cut / 2) - step.mu)
    return (step.mu / 2 if step.symmetric else -float(low)), step.mu + float(high)


def _edges(step: Step, spacing: float, cut: float, theta: float) -> tuple[float, Ints]:
    """Offset and indices of the cell edges covering the resolved x."""
    mu, q = step.mu, step.q
    ends = np.array(resolved(step, cut))
    ratio = mu * (ends - mu / 2)
    if q == 1.0:
        offset, span, centre = 0.0, ratio, mu * mu / 2
    elif step.symmetric:
        offset, span, centre = 0.0, losses(ratio, q), 0.0
    else:
        offset = math.log1p(-q)
        odds = math.log(q) - offset
        span = np.logaddexp(0.0, ratio + odds)
        centre = float(np.logaddexp(0.0, -mu * mu / 2 + odds))
    first, last = math.floor(span[0] / spacing), math.ceil(span[1] / spacing) + 1
    if q < 1.0:
        first = max(first, 0)
    middle = min(max(round(centre / spacing), first), last)
    reach = max(last - middle, middle - first)
    widest = max(1.0, 0.01 * mu / spacing)
    dense = math.ceil(1 / theta)
    pieces = [np.arange(min(dense, reach) + 1, dtype=np.float64)]
    if reach > dense:
        turn = min(float(reach), max(float(dense), widest / theta))
        growth = math.log1p(theta)
        pieces.append(dense * np.exp(growth * np.arange(1, math.ceil(math.log(turn / dense) / growth) + 1)))
        pieces.append(np.arange(turn, reach + widest, widest))
    distance = np.unique(np.floor(np.concatenate(pieces))).astype(np.int64)
    index = np.unique(np.concatenate([middle - distance[::-1], middle + distance, [first, last]]))
    return offset, index[(index >= first) & (index <= last)].astype(np.int64)


@dataclass(frozen=True)
class _Cells:
    """Masses of the cells between consecutive edges, under N(0,1) and under the mixture, with rounding
    bounds.
    """

    base: Floats
    mixture: Floats
    upper: Floats  # mixture mass that goes to the upper edge
    slack: Floats  # bound on the rounding error of `upper`
    blur: Floats  # bound on the rounding error of `base` and `mixture`


def _cells(step: Step, y: Floats) -> _Cells:
    mu, q = step.mu, step.q
    log_ratio = _log_ratios(y, step)
    x = log_ratio / mu + mu / 2
    low, high = slice(None, -1), slice(1, None)
    cdf0, sf0, cdf1, sf1 = ndtr(x), ndtr(-x), ndtr(x - mu), ndtr(mu - x)
    right, right1 = x[low] > 0, x[low] >= mu
    base = np.where(right, sf0[low] - sf0[high], cdf0[high] - cdf0[low])
    shifted = np.where(right1, sf1[low] - sf1[high], cdf1[high] - cdf1[low])
    with np.errstate(over="ignore", invalid="ignore"):
        # L(x) Phi(-x) = exp(-(x-mu)^2/2) erfcx(x/sqrt 2)/2 : finite for every x > 0.
        weighted = np.exp(-((x - mu) ** 2) / 2) * 0.5 * erfcx(np.maximum(x, 0.0) * math.sqrt(0.5))
        ratio = np.exp(np.where(np.isfinite(log_ratio[low]), log_ratio[low] - log_ratio[high], -np.inf))
        left_ratio = np.exp(np.minimum(log_ratio[low], 0.0))
    scaled = np.where(right, weighted[low] - weighted[high] * ratio, left_ratio * base)
    finite = np.where(np.isfinite(x), x, 0.0)  # an infinite argument is exact
    grant0, grant1 = (np.maximum(a[low], a[high]) for a in (allowance(finite), allowance(finite - mu)))
    tail0 = grant0 * np.where(right, sf0[low], cdf0[high])
    tail1 = grant1 * np.where(right1, sf1[low], cdf1[high])
    error = q * (tail1 + np.where(right, grant1 * weighted[low], left_ratio * tail0))
    share = -np.expm1(-np.diff(y))
    mixture = np.maximum(0.0, (1 - q) * base + q * shifted)
    return _Cells(
        base=np.maximum(0.0, base),
        mixture=mixture,
        upper=np.clip(q * (shifted - scaled) / share, 0.0, mixture),
        slack=error / share,
        blur=tail0 + q * tail1,
    )


def _split(total: Floats, upper: Floats, slack: Floats, blur: Floats) -> tuple[Floats, Floats]:
    """(lower, upper) shares of each cell with every rounding error resolved upwards."""
    up = np.minimum(upper + slack, total) + blur
    return np.maximum(0.0, total - up) + blur, up


def _drift(widths: Floats, low: Floats, up: Floats) -> tuple[Floats, Floats]:
    """Per cell: bounds on (second moment / width^2, mean) of the rounding r = rounded loss - true loss.

    Given the true loss, E[e^-r] = 1 and r has variance width^2 pi (1 - pi); so E[r] <= e^width E[r^2]/2 and
    E[r] <= width pi.
    """
    either = np.minimum(low, up)
    with np.errstate(over="ignore"):
        mean = np.minimum(0.5 * np.exp(np.minimum(widths, 50.0)) * widths**2 * either, widths * up)
    return either + mean / widths, mean


def discretise(
    step: Step, spacing: float, cut: float, theta: float, direction: Direction = "remove"
) -> Lattice:
    """The dominating lattice distribution of one release.

    **Formal guarantee.** The discrete pair's hockey-stick divergence is at least the true one, at every
    epsilon, rounding of the special functions included. What lies beyond the resolved range counts as
    infinite loss.

    Args:
        step: the release; its count is not used here.
        spacing: lattice spacing d.
        cut: probability on either side that need not be resolved.
        theta: largest relative width of a cell, measured from the centre of the distribution.
        direction: which of the pair is the first argument; no matter for symmetric releases.
    """
    offset, index = _edges(step, spacing, cut, theta)
    y = np.asarray(index * spacing, dtype=np.float64)
    cells = _cells(step, y)
    widths = np.diff(y)
    log_ratio = _log_ratios(y[[0, -1]], step)
    x = log_ratio / step.mu + step.mu / 2
    if direction == "add" and not step.symmetric and step.q < 1.0:
        down = np.exp(-(offset + y[1:]))
        kept = np.maximum(0.0, cells.upper - cells.slack) * down  # stays at the far (lower) end of -l
        far, near = _split(cells.base, np.maximum(0.0, cells.base - kept), np.zeros_like(kept), cells.blur)
        mass = np.zeros(len(index))
        mass[:-1] += near
        mass[1:] += far
        split, drift = _drift(widths, far, near)
        lumped = float(ndtr(-x[1])) * _TAIL
        mass[-1] += lumped
        infinite = float(ndtr(x[0])) * _TAIL
        return Lattice(
            -offset,
            -index[::-1],
            mass[::-1].copy(),
            infinite,
            lumped,
            widths,
            split,
            drift,
            abs(offset) + y[-1],
        )
    low, up = _split(cells.mixture, cells.upper, cells.slack, cells.blur)
    mass = np.zeros(len(index))
    mass[:-1] += low
    mass[1:] += up
    split, drift = _drift(widths, low, up)
    infinite = ((1 - step.q) * float(ndtr(-x[1])) + step.q * float(ndtr(step.mu - x[1]))) * _TAIL
    top = abs(offset) + float(np.max(np.abs(y)))
    if not step.symmetric:
        lumped = ((1 - step.q) * float(ndtr(x[0])) + step.q * float(ndtr(x[0] - step.mu))) * _TAIL
        mass[0] += lumped
        return Lattice(offset, index, mass, infinite, lumped, widths, split, drift, top)
    # Mirror image: a cell's mass under N(0,1) at minus its edges, the part nearer to zero rounded upwards.
    kept = np.maximum(0.0, cells.upper - cells.slack) * np.exp(-y[1:])
    far, near = _split(cells.base, np.maximum(0.0, cells.base - kept), np.zeros_like(kept), cells.blur)
    mirror = np.zeros(len(index))
    mirror[:-1] += near
    mirror[1:] += far
    # Mass that the pair has in common beyond the last edge of the mirror image is moved up to that edge.
    lumped = float(ndtr(-x[1])) * _TAIL
    mirror[-1] += lumped
    half = step.mu / 2
    rest = (
        (1 - step.q) * (1 - 2 * float(ndtr(-half)))
        if half > 1
        else (1 - step.q) * math.erf(half * math.sqrt(0.5))
    )
    mass[0] += mirror[0] + rest * (1 + SPECIAL)
    split2, drift2 = _drift(widths, far, near)
    return Lattice(
        0.0,
        np.concatenate([-index[:0:-1], index]),
        np.concatenate([mirror[:0:-1], mass]),
        infinite,
        lumped,
        np.concatenate([widths, widths]),
        np.concatenate([split, split2]),
        np.concatenate([drift, drift2]),
        top,
    )
