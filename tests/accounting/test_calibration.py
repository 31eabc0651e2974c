"""Calibration: the target is met, never exceeded, and hardly missed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_bc import accounting
from opacus_bc.accounting import FDPAccountant, gaussian

SAMPLINGS = ["poisson", "partition", "shuffle"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 60.0])
def test_calibrated_noise_meets_the_budget_and_never_exceeds_it(target: float, sampling: str) -> None:
    run = {"sample_rate": 1 / 100, "steps": 2000, "layers": 4, "sampling": sampling}
    sigma = accounting.noise_multiplier(target_epsilon=target, target_delta=1e-5, **run)  # type: ignore[arg-type]
    reached = accounting.epsilon(noise_multiplier=sigma, delta=1e-5, **run)  # type: ignore[arg-type]
    assert 0.999 * target <= reached <= target


@settings(max_examples=12, derandomize=True, deadline=None)
@given(st.floats(-2, 2), st.floats(-9, -3), st.floats(-4, 0), st.floats(0, 4))
def test_any_budget_is_met(target: float, delta: float, rate: float, steps: float) -> None:
    goal, run = 10**target, {"sample_rate": 10**rate, "steps": round(10**steps)}
    sigma = accounting.noise_multiplier(target_epsilon=goal, target_delta=10**delta, **run)  # type: ignore[arg-type]
    reached = accounting.epsilon(noise_multiplier=sigma, delta=10**delta, **run)  # type: ignore[arg-type]
    assert 0.999 * goal <= reached <= goal


def test_the_layers_only_scale_the_result() -> None:
    run = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 100}
    one, nine = accounting.noise_multiplier(**run), accounting.noise_multiplier(layers=9, **run)  # type: ignore[arg-type]
    assert nine == pytest.approx(3 * one)


def test_a_target_mu_is_met() -> None:
    run = {"sample_rate": 0.01, "steps": 400}
    sigma = accounting.noise_multiplier(target_mu=0.7, **run)  # type: ignore[arg-type]
    mu = accounting.tradeoff(noise_multiplier=sigma, **run).dominating_mu(1e-10)  # type: ignore[arg-type]
    assert 0.999 * 0.7 <= mu <= 0.7


def test_a_target_true_positive_rate_is_met() -> None:
    run = {"sample_rate": 0.01, "steps": 400}
    sigma = accounting.noise_multiplier(target_tpr=0.2, at_fpr=0.05, **run)  # type: ignore[arg-type]
    reached = 1 - accounting.tradeoff(noise_multiplier=sigma, **run)(0.05)  # type: ignore[arg-type]
    assert 0.999 * 0.2 <= reached <= 0.2


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_reserved_releases_are_part_of_the_budget(sampling: str) -> None:
    releases = (3.0, 4.0)
    run = {"sample_rate": 0.05, "steps": 60}
    sigma = accounting.noise_multiplier(
        target_epsilon=4.0,
        target_delta=1e-5,
        sampling=sampling,  # type: ignore[arg-type]
        releases=releases,
        **run,  # type: ignore[arg-type]
    )
    accountant = FDPAccountant()
    for number in range(60):
        accountant.step(
            noise_multiplier=sigma, sample_rate=0.05, sampling=sampling, new_pass=number % 20 == 0
        )
    for release in releases:
        accountant.release(noise_multiplier=release)
    assert 0.999 * 4.0 <= accountant.get_epsilon(1e-5) <= 4.0


def test_releases_that_exceed_the_budget_alone_are_refused() -> None:
    with pytest.raises(ValueError, match=r"releases=\[0.5\] alone spend"):
        accounting.noise_multiplier(
            target_epsilon=1.0, target_delta=1e-5, sample_rate=0.01, steps=10, releases=(0.5,)
        )


def test_shuffling_counts_passes() -> None:
    run = {
        "target_epsilon": 3.0,
        "target_delta": 1e-5,
        "sample_rate": 1 / 49,
        "steps": 49 * 7,
        "sampling": "shuffle",
    }
    derived = accounting.noise_multiplier(**run)  # type: ignore[arg-type]
    assert derived == accounting.noise_multiplier(passes=7, **run)  # type: ignore[arg-type]
    assert gaussian.epsilon(math.sqrt(7) / derived, 1e-5) == pytest.approx(3.0, rel=1e-3)
    assert accounting.noise_multiplier(passes=28, **run) == pytest.approx(2 * derived, rel=2e-3)  # type: ignore[arg-type]


def test_no_steps_need_no_noise() -> None:
    assert accounting.noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=0) == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_epsilon": -1.0}, "target_epsilon=-1.0"),
        ({"target_epsilon": 0.0}, "target_epsilon=0.0"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan"),
        ({"target_delta": None}, "target_delta"),
        ({"target_delta": 2.0}, "target_delta=2.0"),
        ({"sample_rate": 2.0}, "sample_rate=2.0"),
        ({"target_mu": 1.0}, "exactly one"),
        ({"target_epsilon": None}, "exactly one"),
        ({"target_epsilon": None, "target_tpr": 0.1, "at_fpr": 0.2}, "target_tpr=0.1"),
        ({"target_epsilon": None, "target_tpr": 0.1}, "at_fpr"),
        ({"releases": (-1.0,)}, "releases=-1.0"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10}
    with pytest.raises(ValueError, match=words):
        accounting.noise_multiplier(**{**good, **change})  # type: ignore[arg-type]
