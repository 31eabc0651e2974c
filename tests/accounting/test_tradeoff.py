"""Trade-off curves: shape, safe side, closed forms, composition."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from opacus_bc import accounting
from opacus_bc.accounting import TradeOffCurve, gaussian

ALPHA = np.concatenate([[0.0], np.logspace(-9, -3, 40), np.linspace(0.002, 1, 400)])

CURVES = {
    "gaussian": TradeOffCurve.gaussian(1.0),
    "poisson": accounting.tradeoff(noise_multiplier=1.0, sample_rate=0.02, steps=500),
    "few steps": accounting.tradeoff(noise_multiplier=0.6, sample_rate=0.3, steps=3),
    "partition": accounting.tradeoff(noise_multiplier=1.0, sample_rate=0.02, steps=500, sampling="partition"),
    "shuffle": accounting.tradeoff(noise_multiplier=2.0, sample_rate=0.1, steps=30, sampling="shuffle"),
    "composed": accounting.tradeoff(noise_multiplier=1.0, sample_rate=0.02, steps=500).compose(
        TradeOffCurve.gaussian(0.5)
    ),
    "no steps": accounting.tradeoff(noise_multiplier=1.0, sample_rate=0.02, steps=0),
    "no noise": accounting.tradeoff(noise_multiplier=0.0, sample_rate=0.02, steps=1),
    "hardly any noise": accounting.tradeoff(noise_multiplier=0.05, sample_rate=0.01, steps=1000),
}
every_curve = pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())


@every_curve
def test_a_curve_is_convex_decreasing_and_between_zero_and_the_ideal(curve: TradeOffCurve) -> None:
    value = curve(ALPHA)
    assert np.all(value >= 0)
    assert np.all(value <= 1 - ALPHA + 1e-15)
    assert np.all(np.diff(value) <= 1e-15)
    slopes = np.diff(value) / np.diff(ALPHA)
    assert np.all(np.diff(slopes) >= -1e-6 * np.maximum(1, np.abs(slopes[1:])))


@every_curve
def test_a_curve_is_its_own_inverse(curve: TradeOffCurve) -> None:
    value = curve(ALPHA[1:])
    inside = (value > 1e-6) & (value < 1 - 1e-6)
    np.testing.assert_allclose(curve.inverse(value[inside]), ALPHA[1:][inside], rtol=1e-6, atol=1e-9)


@every_curve
def test_every_epsilon_delta_statement_of_a_curve_is_a_line_below_which_it_never_falls(
    curve: TradeOffCurve,
) -> None:
    for epsilon in (0.0, 0.3, 1.0, 4.0):
        delta = curve.delta(epsilon)
        assert np.all(curve(ALPHA) >= 1 - delta - math.exp(epsilon) * ALPHA - 1e-12)
        assert np.min(curve(ALPHA) - (1 - delta - math.exp(epsilon) * ALPHA)) <= 2e-3


@every_curve
def test_advantage_and_bayes_risk_follow_from_the_curve(curve: TradeOffCurve) -> None:
    assert curve.advantage == pytest.approx(float(np.max(1 - ALPHA - curve(ALPHA))), abs=1e-4)
    for prior in (0.1, 0.5, 0.8):
        risk = float(np.min(prior * ALPHA + (1 - prior) * curve(ALPHA)))
        assert curve.bayes_risk(prior) <= risk + 1e-12
        assert curve.bayes_risk(prior) == pytest.approx(risk, abs=2e-4)
    assert curve.bayes_risk(0.5) == pytest.approx((1 - curve.advantage) / 2, abs=1e-7)
    assert curve.bayes_risk(0.0) == curve.bayes_risk(1.0) == 0.0


def test_the_curve_of_a_poisson_step_never_exceeds_either_direction() -> None:
    """Both test problems in closed form: thresholds on x are optimal, in either direction."""
    mu, q = 1.0, 0.2
    curve = accounting.tradeoff(noise_multiplier=1 / mu, sample_rate=q, steps=1)
    x = np.linspace(-4, 5, 400)
    base, mixture = ndtr(-x), (1 - q) * ndtr(-x) + q * ndtr(mu - x)
    assert np.all(curve(base) <= 1 - mixture + 1e-12)
    assert np.all(curve(1 - mixture) <= base + 1e-12)
    # It is the convex hull of the two: steeper than slope -1 it is "remove", and there it is tight.
    steep = x > mu / 2
    np.testing.assert_allclose(curve(base[steep]), (1 - mixture)[steep], atol=1e-5)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(st.floats(0.01, 6.0), st.floats(0.001, 0.999))
def test_the_gaussian_curve_is_the_normal_shift(mu: float, alpha: float) -> None:
    curve = TradeOffCurve.gaussian(mu)
    assert curve(alpha) == pytest.approx(float(ndtr(-ndtri(alpha) - mu)), rel=1e-9)
    epsilon = curve.epsilon(1e-6)
    assert curve.delta(epsilon) <= 1e-6
    polygon = TradeOffCurve(curve.epsilons, curve.deltas)
    assert 0 <= curve(alpha) - polygon(alpha) <= 1e-4


def test_gaussian_curves_compose_in_closed_form_and_through_the_lattice_alike() -> None:
    one, other = TradeOffCurve.gaussian(0.6), TradeOffCurve.gaussian(0.8)
    assert one.compose(other).mu == pytest.approx(1.0)
    polygon = TradeOffCurve(one.epsilons, one.deltas).compose(TradeOffCurve(other.epsilons, other.deltas))
    exact = TradeOffCurve.gaussian(1.0)
    assert np.all(polygon(ALPHA) <= exact(ALPHA) + 1e-12)
    np.testing.assert_allclose(polygon(ALPHA), exact(ALPHA), atol=1e-4)
    assert exact.epsilon(1e-6) <= polygon.epsilon(1e-6) <= exact.epsilon(1e-6) * 1.001


def test_composed_curves_agree_with_the_composed_mechanism() -> None:
    half = accounting.tradeoff(noise_multiplier=1.0, sample_rate=0.02, steps=250, sampling="partition")
    whole = CURVES["partition"]
    joint = half.compose(half)
    assert whole.epsilon(1e-5) == pytest.approx(joint.epsilon(1e-5), rel=1e-3)
    np.testing.assert_allclose(joint(ALPHA), whole(ALPHA), atol=1e-3)


def test_points_of_the_curve_match_the_accountant() -> None:
    curve = CURVES["poisson"]
    for delta in (1e-2, 1e-5, 1e-9):
        exact = accounting.epsilon(noise_multiplier=1.0, sample_rate=0.02, steps=500, delta=delta)
        assert curve.epsilon(delta) == pytest.approx(exact, rel=1e-3)
    assert curve.epsilon(1e-40) == math.inf


@pytest.mark.parametrize("floor", [1e-10, 1e-5, 1e-2])
def test_the_dominating_gaussian_lies_above_the_curve_down_to_the_floor_and_is_needed(floor: float) -> None:
    curve = CURVES["poisson"]
    mu = curve.dominating_mu(floor)
    epsilons = np.linspace(0, curve.epsilon(floor), 501)
    deltas = np.array([curve.delta(float(e)) for e in epsilons])
    assert np.all(gaussian.delta(mu, epsilons) >= deltas - 1e-15)
    assert not np.all(gaussian.delta(mu * 0.995, epsilons) >= deltas)


def test_a_plot_shows_the_ideal_the_gaussian_and_the_curve(tmp_path: Path) -> None:
    target = tmp_path / "curve.png"
    axes = CURVES["poisson"].plot(target, mu=1.0)
    assert len(axes.get_lines()) == 3
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TradeOffCurve.gaussian(-1.0), "mu=-1.0"),
        (lambda: CURVES["gaussian"](1.5), "alpha=1.5"),
        (lambda: CURVES["gaussian"].epsilon(0.0), "delta=0.0"),
        (lambda: CURVES["gaussian"].bayes_risk(2.0), "prior=2.0"),
        (lambda: CURVES["poisson"].delta(math.nan), "epsilon=nan"),
        (lambda: TradeOffCurve(np.array([0.0, 1.0]), np.array([0.5])), "equally long"),
        (lambda: TradeOffCurve(np.array([1.0, 0.0]), np.array([0.5, 0.1])), "increase from 0"),
    ],
)
def test_wrong_values_are_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
