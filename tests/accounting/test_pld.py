"""The certified composition: against reference values, closed forms, other accountants, and itself."""

from __future__ import annotations

import csv
import math
import time
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from scipy.special import erfcx, ndtr

from opacus_bc.accounting import gaussian, query
from opacus_bc.accounting.lattice import Step, allowance, discretise, losses
from opacus_bc.accounting.plan import Plan, make_plan
from opacus_bc.accounting.pld import compose

DATA = Path(__file__).parents[1] / "data"


def rows(name: str) -> list[dict[str, str]]:
    lines = [line for line in (DATA / name).read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


PAPER = rows("accounting_paper.csv")
TABLE = rows("accounting_reference.csv")


def paper_bounds(row: dict[str, str]) -> tuple[float, float, float]:
    """Our (upper bound, numerical lower, numerical upper) for a row."""
    mu = math.sqrt(int(row["layers"])) / float(row["sigma"])
    delta = float(row["delta"])
    if row["direction"] == "none":
        steps = (Step(mu * math.sqrt(50), 1.0, 1),)
        return query.epsilon_upper(steps, delta), *query.epsilon_bounds(steps, delta)
    steps = (Step(mu, float(Fraction(row["q"])), int(row["T"]), row["direction"] == "sym"),)
    direction = "add" if row["direction"] == "add" else "remove"
    return query.epsilon_upper(steps, delta, direction), *query.epsilon_bounds(steps, delta, direction)


@pytest.mark.parametrize("row", PAPER, ids=lambda row: "-".join(list(row.values())[:6]).replace("/", ":"))
def test_epsilon_is_never_below_the_reference_and_hardly_above(row: dict[str, str]) -> None:
    upper, low, high = paper_bounds(row)
    assert upper >= float(row["eps_lower"])
    assert upper <= float(row["eps_upper"]) * 1.001 + 1e-3
    assert low <= high <= upper
    assert low <= float(row["eps_upper"])
    if upper < 100:
        assert high - low <= 0.01 * high


def steps_of(row: dict[str, str]) -> tuple[tuple[Step, ...], float]:
    return (Step(1 / float(row["sigma"]), float(row["q"]), int(row["steps"])),), float(row["delta"])


def test_the_table_holds_two_hundred_settings_with_answers() -> None:
    assert len(TABLE) == 200
    assert sum(row["dp_upper"] != "" for row in TABLE) >= 190


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] if number % 4 else []) for number, row in enumerate(TABLE)],
    ids=lambda row: "-".join(list(row.values())[:4]),
)
def test_epsilon_agrees_with_dp_accounting_and_prv(row: dict[str, str]) -> None:
    steps, delta = steps_of(row)
    upper = query.epsilon_upper(steps, delta)
    for lower in (row["dp_lower"], row["prv_lower"]):
        assert lower == "" or upper >= float(lower)
    if row["dp_upper"]:
        assert upper == pytest.approx(float(row["dp_upper"]), rel=1e-3, abs=1e-3)


def spread(row: dict[str, str]) -> float:
    """About the standard deviation of one step's privacy loss."""
    return float(row["q"]) * math.sqrt(math.expm1(float(row["sigma"]) ** -2))


# dp-accounting's default interval is fine enough for these, so that they can be computed again in seconds.
CHEAP = [
    row
    for row in TABLE
    if row["dp_upper"] and row["prv_upper"] and spread(row) >= 1e-3 and 0.05 < float(row["dp_upper"]) < 60
]
LIVE = CHEAP[:: len(CHEAP) // 15][:15]


@pytest.mark.parametrize("row", LIVE, ids=lambda row: "-".join(list(row.values())[:4]))
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Optimal order")  # inside the other tools
def test_fifteen_rows_computed_again_agree_with_the_table_and_with_us(row: dict[str, str]) -> None:
    sigma, rate, steps, delta = float(row["sigma"]), float(row["q"]), int(row["steps"]), float(row["delta"])
    dp_lower, dp_upper = (
        privacy_loss_distribution.from_gaussian_mechanism(
            sigma,
            value_discretization_interval=1e-4,
            pessimistic_estimate=pessimistic,
            sampling_prob=rate,
            use_connect_dots=pessimistic,
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for pessimistic in (False, True)
    )
    prv = PRVAccountant()
    prv.history = [(sigma, rate, steps)]
    composed = prv._get_dprv(eps_error=0.01, delta_error=delta / 1000)
    prv_lower, _, prv_upper = composed.compute_epsilon(delta, delta / 1000, 0.01)
    for name, value in (
        ("dp_lower", dp_lower),
        ("dp_upper", dp_upper),
        ("prv_lower", prv_lower),
        ("prv_upper", prv_upper),
    ):
        # At such deltas the other tools' FFTs round: numpy 2.5 moves dp-accounting's bound by up to 4e-4.
        assert value == pytest.approx(float(row[name]), rel=1e-3 if delta < 1e-8 else 1e-6), name
    ours = query.epsilon_upper(*steps_of(row))
    assert ours >= max(dp_lower, prv_lower)
    assert ours <= prv_upper
    assert ours == pytest.approx(dp_upper, rel=1e-3, abs=1e-3)


def test_special_functions_are_as_accurate_as_the_lattice_grants() -> None:
    """Against fifty digits: ndtr wherever it does not underflow, and L(x) Phi(-x) as `_cells` has it."""
    rng = np.random.default_rng(0)
    with mpmath.workdps(50):
        for x in np.concatenate([rng.uniform(-37, 9, 1500), rng.uniform(-4, 4, 500)]):
            exact = mpmath.erfc(-mpmath.mpf(float(x)) / mpmath.sqrt(2)) / 2
            assert abs(mpmath.mpf(float(ndtr(x))) / exact - 1) <= float(allowance(np.array(x)))
        for x, mu in zip(rng.uniform(0, 60, 1500), 10 ** rng.uniform(-3, 1.6, 1500), strict=True):
            value = float(np.exp(-((x - mu) ** 2) / 2) * 0.5 * erfcx(x * math.sqrt(0.5)))
            if value > 1e-300:
                big, shift = mpmath.mpf(float(x)), mpmath.mpf(float(mu))
                tail = mpmath.erfc(big / mpmath.sqrt(2)) / 2
                exact = mpmath.exp(shift * big - shift**2 / 2) * tail
                assert abs(mpmath.mpf(value) / exact - 1) <= float(allowance(np.array(x - mu)))


def test_fifteen_rows_are_computed_again() -> None:
    assert len(LIVE) == 15


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
def test_without_sampling_epsilon_is_the_closed_form(mu: float, delta: float) -> None:
    steps = (Step(mu / 4, 1.0, 16),)
    value = query.epsilon_upper(steps, delta)
    assert value == pytest.approx(gaussian.epsilon(mu, delta), rel=1e-9)
    if value:
        assert float(gaussian.delta(mu, value)) <= delta
        assert float(gaussian.delta(mu, value * (1 - 1e-3))) > delta


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_the_lattice_reproduces_the_closed_form_when_forced_through_it(mu: float) -> None:
    """Q just below 1 goes through discretisation and composition; q = 1 does not."""
    exact = query.epsilon_upper((Step(mu, 1.0, 9),), 1e-6)
    low, high = query.epsilon_bounds((Step(mu, 1 - 1e-13, 9),), 1e-6)
    assert low <= exact * (1 + 1e-9)
    assert high == pytest.approx(exact, rel=1e-4)
    assert high >= exact * (1 - 1e-9)


def exact_delta(step: Step, epsilon: float, direction: str) -> float:
    """Hockey-stick divergence of a single release, from the threshold on x."""
    if direction == "remove" and epsilon <= math.log1p(-step.q):
        return -math.expm1(epsilon)
    ratio = math.log((math.expm1(epsilon if direction == "remove" else -epsilon) + step.q) / step.q)
    x = ratio / step.mu + step.mu / 2
    base, mixture = ndtr(-x), (1 - step.q) * ndtr(-x) + step.q * ndtr(step.mu - x)
    if direction == "remove":
        return float(mixture - math.exp(epsilon) * base)
    return float((1 - base) - math.exp(epsilon) * (1 - mixture))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("mu", "q"), [(1.0, 0.1), (0.2, 0.5), (3.0, 0.01), (0.01, 0.3)])
def test_a_single_lattice_dominates_the_true_divergence_and_meets_it_at_the_edges(
    mu: float, q: float, direction: str
) -> None:
    step = Step(mu, q, 1)
    spacing = 0.01 * mu * q
    lattice = discretise(step, spacing, 1e-19, 0.01, direction)  # type: ignore[arg-type]
    loss = lattice.offset + lattice.index * spacing
    largest = -math.log1p(-q) if direction == "add" else 5 * mu * q
    for epsilon in np.linspace(-0.4 * q * mu, 0.9 * largest, 23):
        ours = float(lattice.mass @ np.maximum(0.0, -np.expm1(epsilon - loss))) + lattice.infinite
        truth = exact_delta(step, float(epsilon), direction)
        assert ours >= truth - 1e-15
        assert ours <= truth * (1 + 1e-2) + 1e-4 * q
    assert lattice.mass.sum() + lattice.infinite == pytest.approx(1.0, abs=1e-11)
    assert lattice.mass @ np.exp(-loss) == pytest.approx(1.0, abs=1e-9)


def test_the_symmetric_release_is_the_worse_direction_made_symmetric() -> None:
    step = Step(1.0, 0.05, 1, symmetric=True)
    lattice = discretise(step, 1e-4, 1e-19, 0.005)
    loss = lattice.index * 1e-4
    for epsilon in (0.0, 0.01, 0.05, 0.2, 0.5):
        truth = exact_delta(Step(1.0, 0.05, 1), epsilon, "remove")
        above = float(lattice.mass @ np.maximum(0.0, -np.expm1(epsilon - loss))) + lattice.infinite
        assert truth <= above <= truth + 1e-5
        below = float(lattice.mass @ np.maximum(0.0, -np.expm1(-epsilon - loss))) + lattice.infinite
        assert below == pytest.approx(1 - math.exp(-epsilon) * (1 - truth), abs=1e-5)


def test_two_steps_match_brute_force_integration() -> None:
    """A ten-line oracle: the hockey-stick divergence of two releases by quadrature over x and y."""
    mu, q, epsilon = 1.3, 0.2, 0.25
    x = np.linspace(-9, 10.5, 6001)
    weight = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    loss = losses(mu * (x - mu / 2), q)
    remove = add = 0.0
    for w, one in zip(weight, loss, strict=True):
        remove += w * float(weight @ np.maximum(0.0, np.exp(one + loss) - math.exp(epsilon)))
        add += w * float(weight @ np.maximum(0.0, 1 - np.exp(epsilon + one + loss)))
    steps = (Step(mu, q, 2),)
    assert query.delta_upper(steps, epsilon) == pytest.approx(max(remove, add), rel=2e-4)
    assert query.epsilon_upper(steps, remove, "remove") == pytest.approx(epsilon, abs=2e-4)
    assert query.epsilon_upper(steps, add, "add") == pytest.approx(epsilon, abs=2e-4)


def test_the_binomial_mixture_bound_is_valid_and_tight_for_little_noise() -> None:
    for mu, q, steps in [(1.0, 0.01, 100), (5.0, 0.001, 1000), (100.0, 0.001, 1000)]:
        epsilon, _ = query.epsilon_bounds((Step(mu, q, steps),), 1e-5)
        assert gaussian.binomial_mixture_delta(mu, q, steps, epsilon) >= 1e-5
    upper = query.epsilon_upper((Step(100.0, 0.001, 1000),), 1e-5)
    assert gaussian.binomial_mixture_delta(100.0, 0.001, 1000, upper * 1.01) <= 1e-5


anywhere = st.tuples(
    st.floats(-3, 3).map(lambda power: 10**power),
    st.floats(-7, 0).map(lambda power: 10**power),
    st.floats(0, 6).map(lambda power: round(10**power)),
    st.floats(-12, -1).map(lambda power: 10**power),
    st.booleans(),
)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(anywhere)
def test_anywhere_the_answer_is_finite_ordered_and_consistent(
    setting: tuple[float, float, int, float, bool],
) -> None:
    sigma, rate, count, delta, symmetric = setting
    steps = (Step(1 / sigma, rate, count, symmetric),)
    begin = time.process_time()
    upper = query.epsilon_upper(steps, delta)
    assert time.process_time() - begin <= 2.0
    assert 0 <= upper < math.inf
    assert upper <= gaussian.epsilon(query.unamplified_mu(steps), delta)
    if upper > 0:
        more = query.epsilon_upper((Step(1.02 / sigma, rate, count, symmetric),), delta)
        assert more >= upper * (1 - 2e-3) - 1e-6
        assert query.epsilon_upper(steps, delta * 2) <= upper * (1 + 1e-3) + 1e-6


CORNERS = [
    (sigma, rate, count)
    for sigma in (1e-3, 0.05, 0.7, 30.0, 1e3)
    for rate in (1e-7, 1e-3, 0.5, 1.0)
    for count in (1, 10**6)
]


@pytest.mark.parametrize(("sigma", "rate", "count"), CORNERS)
def test_every_corner_is_answered_in_two_seconds_and_half_a_gigabyte(
    sigma: float, rate: float, count: int
) -> None:
    for symmetric in (False, True):
        tracemalloc.start()
        begin = time.process_time()
        upper = query.epsilon_upper((Step(1 / sigma, rate, count, symmetric),), 1e-5)
        elapsed = time.process_time() - begin
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert upper >= 0
        assert math.isfinite(upper)
        assert elapsed <= 2.0
        assert peak <= 500e6


def test_the_papers_settings_take_a_third_of_a_second() -> None:
    query.epsilon_upper((Step(1.0, 0.01, 10),), 1e-5)  # imports and plans of the transform
    for sigma, layers in ((0.5, 8), (1.5, 8), (2.5, 8), (0.01875, 62)):
        begin = time.process_time()
        query.epsilon_upper((Step(math.sqrt(layers) / sigma, 64 / 54000, 42189),), 1e-5)
        assert time.process_time() - begin <= 0.3


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.floats(0.4, 5.0), st.floats(1e-4, 0.9), st.integers(1, 5000), st.floats(-10, -2))
def test_the_lower_bound_is_below_the_upper_bound_and_close(
    sigma: float, rate: float, count: int, power: float
) -> None:
    low, high = query.epsilon_bounds((Step(1 / sigma, rate, count),), 10**power)
    assert low <= high
    if 0.1 <= high <= 100:
        assert high - low <= 0.05 * high


def test_a_mixed_composition_lies_between_its_extremes() -> None:
    one, other = Step(1.0, 0.01, 500), Step(0.5, 0.01, 500)
    mixed = query.epsilon_upper((one, other), 1e-6)
    assert (
        query.epsilon_upper((Step(0.5, 0.01, 1000),), 1e-6)
        < mixed
        < query.epsilon_upper((Step(1.0, 0.01, 1000),), 1e-6)
    )
    split = query.epsilon_upper((Step(1.0, 0.01, 400), Step(1.0 + 1e-12, 0.01, 600)), 1e-6)
    assert split == pytest.approx(query.epsilon_upper((Step(1.0, 0.01, 1000),), 1e-6), rel=1e-5)


def test_a_gaussian_release_composes_with_sampled_steps() -> None:
    alone = query.epsilon_upper((Step(1.0, 0.001, 100),), 1e-6)
    joint = query.epsilon_upper((Step(1.0, 0.001, 100), Step(0.5, 1.0, 1)), 1e-6)
    oracle = (
        privacy_loss_distribution.from_gaussian_mechanism(
            1.0, value_discretization_interval=1e-4, sampling_prob=0.001
        )
        .self_compose(100)
        .compose(privacy_loss_distribution.from_gaussian_mechanism(2.0, value_discretization_interval=1e-4))
    )
    assert joint > alone
    assert joint == pytest.approx(oracle.get_epsilon_for_delta(1e-6), rel=1e-3)


def test_tiny_deltas_keep_their_relative_accuracy() -> None:
    """Without the exponential tilt, rounding at 1e-9 would drown everything below."""
    steps = (Step(0.5, 0.01, 10_000),)
    for delta in (1e-12, 1e-20, 1e-40):
        epsilon = query.epsilon_upper(steps, delta)
        assert query.delta_upper(steps, epsilon) == pytest.approx(delta, rel=0.01)
        low, high = query.epsilon_bounds(steps, delta)
        assert high - low <= 0.01 * high


def test_heavy_tails_do_not_drown_in_rounding() -> None:
    """Rare large losses and a tiny delta: the tilt must not grow with losses that never matter."""
    steps = (Step(1 / 0.9103, 3.229e-05, 2421),)
    assert query.epsilon_upper(steps, 2.64e-10) == pytest.approx(0.024806848, abs=1e-3)
    # With so little chance of a single hit, delta is nearly that of one hit, counted 528 times.
    few = Step(1 / 0.7077, 3.97e-06, 528)
    upper = query.epsilon_upper((few,), 3e-11)
    assert few.count * exact_delta(few, upper, "remove") <= 3e-11 * 1.2
    assert upper <= 0.03


def spoiled(plan: Plan) -> dict[str, Plan]:
    middle = (plan.low + plan.high) / 2
    return {
        "window too short above": replace(plan, high=plan.low + 0.45 * (plan.high - plan.low)),
        "window too short below": replace(plan, low=middle),
        "losses cut off early": replace(plan, cut=1e-7),
        "cut off earlier still": replace(plan, cut=1e-4),
        "no tilt": replace(plan, tilt=1e-9),
        "too much tilt": replace(plan, tilt=1.8 * plan.tilt, far=2.4 * plan.tilt),
        "too coarse": replace(plan, spacing=60 * plan.spacing),
        "cells too wide": replace(plan, theta=0.3),
    }


@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-30])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_a_bad_plan_costs_accuracy_never_validity(delta: float, symmetric: bool, direction: str) -> None:
    """Every error term has its spoiled plan: beyond the window, wrapped, truncated, rounded, coarse."""
    steps = (Step(1.0, 0.02, 300, symmetric),)
    low, high = query.epsilon_bounds(steps, delta, direction)  # type: ignore[arg-type]
    plan = make_plan(steps, direction, delta=delta, theta=0.004, two_sided=True)  # type: ignore[arg-type]
    for name, bad in spoiled(plan).items():
        composed = compose(steps, direction, bad)  # type: ignore[arg-type]
        assert query._crossing(*composed.upper_profile(), delta, composed.spacing) >= low, name
        assert composed.last_above(delta) <= high, name


def test_where_the_lattice_is_too_coarse_the_binomial_mixture_steps_in() -> None:
    upper = query.epsilon_upper((Step(1e3, 0.5, 10**6),), 1e-5)
    assert gaussian.binomial_mixture_delta(1e3, 0.5, 10**6, upper * 0.9999) > 1e-5


def test_the_stated_rounding_error_covers_the_real_one() -> None:
    """Direct convolution in extended precision against the transform, under the same tilt."""
    steps, tilt = (Step(1.0, 0.1, 256),), 0.4
    plan = replace(make_plan(steps, "remove", delta=1e-6, theta=0.1), spacing=0.05, tilt=tilt, cut=1e-12)
    lattice = discretise(steps[0], plan.spacing, plan.cut, plan.theta)
    first, last = int(lattice.index[0]), int(lattice.index[-1])
    start = 256 * (lattice.offset + first * plan.spacing)
    plan = replace(plan, low=start - 1.0, high=start + 256 * (last - first + 1) * plan.spacing)
    composed = compose(steps, "remove", plan)
    exact = np.zeros(last - first + 1, dtype=np.longdouble)
    exact[lattice.index - first] = lattice.mass * np.exp(
        tilt * (lattice.offset + lattice.index * plan.spacing)
    )
    exact /= exact.sum()
    for _ in range(8):
        exact = np.convolve(exact, exact)
    loss = composed.start + composed.spacing * np.arange(len(composed.mass))
    ours = composed.mass * np.exp(tilt * loss - composed.log_scale)
    shift = round((start - composed.start) / composed.spacing)
    padded = np.zeros(len(ours), dtype=np.longdouble)
    padded[shift : shift + len(exact)] = exact
    assert float(np.abs(ours - padded).sum()) <= composed.noise < 1e-9
