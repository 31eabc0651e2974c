"""Audits are lower bounds: above the truth no more often than stated, and close to it where they can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from opacus_bc import accounting
from opacus_bc._opacus import GradSampleModuleFastGradientClipping
from opacus_bc.accounting import TradeOffCurve, gaussian
from opacus_bc.audit import AuditResult, Claim, Scores, Toy, audit_one_run, audit_scores, audit_training
from opacus_bc.audit import worst_case as wc
from opacus_bc.audit.bounds import (
    binomial_upper,
    epsilon_bound,
    held_out_rates,
    largest_noise,
    mu_bound,
    rates_at,
    share_of,
)
from opacus_bc.audit.canaries import audit_many_canaries
from opacus_bc.audit.modes import MODES
from opacus_bc.audit.one_run import curve_refuted_in_one_run, guess, one_run_epsilon, one_run_p_value
from opacus_bc.audit.resumed import audit_resumed
from opacus_bc.audit.scores import learn_projection, likelihood_ratio, log_ratio, repeated_noise, silent_steps
from opacus_bc.audit.toys import make_toy, single_round
from opacus_bc.optimizers.book_keeping import BookKeepingOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
HALF = Claim(noise_multiplier=2.0, sample_rate=1.0, steps=1)


# --- limits and bounds ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trials=st.integers(1, 300), share=st.floats(0, 1), level=st.sampled_from([0.05, 1e-3, 1e-6]))
def test_at_the_upper_limit_so_few_would_be_as_rare_as_the_level(trials, share, level):
    count = int(share * trials)
    limit = float(binomial_upper(count, trials, level))
    if count == trials:
        assert limit == 1.0
    else:
        assert binom.cdf(count, trials, limit) == pytest.approx(level, rel=1e-6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mu=st.floats(0.05, 4), threshold=st.floats(-3, 6), delta=st.sampled_from([1e-6, 1e-3, 0.05]))
def test_exact_rates_never_refute_the_truth_and_the_best_test_attains_it(mu, threshold, delta):
    """On the true error rates of a Gaussian pair all bounds stay at or below the closed forms."""
    rates = np.array([norm.sf(threshold)]), np.array([norm.cdf(threshold - mu)])
    assert mu_bound()(*rates)[0] == pytest.approx(mu, rel=1e-6)
    assert epsilon_bound(delta)(*rates)[0] <= gaussian.epsilon(mu, delta) + 1e-9
    assert share_of(TradeOffCurve.gaussian(mu))(*rates)[0] <= 1 + 1e-9
    assert share_of(TradeOffCurve.gaussian(0.9 * mu))(*rates)[0] > 1
    epsilon = gaussian.epsilon(mu, delta)
    best = epsilon / mu + mu / 2
    tightest = epsilon_bound(delta)(np.array([norm.sf(best)]), np.array([norm.cdf(best - mu)]))[0]
    assert tightest == pytest.approx(epsilon, abs=1e-6)


def test_audited_figures_exceed_the_truth_at_most_at_the_stated_rate():
    """400 audits of a Gaussian pair with mu = 1: at 95 % at most 5 % too high; 36 of 400 has p < 0.001."""
    rng = np.random.default_rng(0)
    too_high = 0
    for _ in range(400):
        scores = Scores(rng.normal(1, 1, 400), rng.normal(0, 1, 400))
        too_high += held_out_rates(scores, mu_bound(), 0.05).worth(mu_bound()) > 1.0
    assert too_high <= 36


def test_a_threshold_is_judged_by_repetitions_that_did_not_choose_it():
    """The half that chooses sees a perfect test, the half that judges sees nothing."""
    present, absent = np.zeros(400), np.zeros(400)
    present[::2] = 1.0
    assert audit_scores(present, absent, HALF).audited_epsilon == 0.0
    assert audit_scores(np.ones(400), absent, HALF).audited_epsilon > 3.0


def test_rates_count_ties_as_alarms():
    scores = Scores(np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 2.0]))
    false_positive, false_negative = rates_at(scores, 1.0, 0.1)
    assert float(false_positive) == float(binomial_upper(2, 3, 0.05))
    assert float(false_negative) == float(binomial_upper(0, 3, 0.05))


def test_the_largest_noise_left_possible_is_found_from_either_side():
    for start in (0.1, 1.0, 40.0):
        found = largest_noise(lambda sigma: sigma >= 3.0, start)
        assert 3.0 <= found <= 3.0 * 1.006
    assert largest_noise(lambda sigma: False, 1.0) == math.inf


@pytest.mark.parametrize("wrong", [[1.0], [math.nan, 1.0], [[1.0, 2.0]]])
def test_scores_that_say_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="canary present"):
        audit_scores(wrong, [0.0, 1.0], HALF)


def test_too_few_runs_are_refused():
    with pytest.raises(ValueError, match="at least 4"):
        audit_scores([1.0, 2.0], [0.0, 1.0], HALF)
    with pytest.raises(ValueError, match="runs must be"):
        audit_training(lambda present, seed: 0.0, HALF, runs=2)


def test_constant_scores_prove_nothing():
    result = audit_scores(np.zeros(100), np.zeros(100), HALF)
    assert (result.audited_epsilon, result.audited_mu, result.verdict) == (0.0, 0.0, "holds")


# --- statistics -------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None, derandomize=True)
@given(z=st.floats(-20, 20), sigma=st.floats(0.3, 5), q=st.floats(0.001, 0.999))
def test_the_statistic_is_the_one_of_the_worst_case(z, sigma, q):
    expected = math.log(1 - q + q * math.exp((z - 0.5) / sigma**2))
    assert float(log_ratio(np.array(z / sigma), 1 / sigma, q)) == pytest.approx(expected, abs=1e-9)


def test_grouped_steps_are_one_draw():
    x = np.random.default_rng(0).normal(size=(4, 3))
    pairs = likelihood_ratio(0.7, 0.2, steps_per_draw=2)(x)
    by_hand = sum(np.log(0.8 + 0.2 * np.exp(0.7 * (x[t] + x[t + 1]) - 0.7**2)) for t in (0, 2))
    np.testing.assert_allclose(pairs, by_hand)


def test_the_projection_is_the_optimal_one_and_uses_a_feature_without_noise():
    rng = np.random.default_rng(1)
    scale, shift = np.array([1.0, 3.0, 0.5]), np.array([1.0, 1.0, 0.2])
    absent = rng.normal(size=(40_000, 3)) * scale + 5.0
    present = rng.normal(size=(40_000, 3)) * scale + 5.0 + shift
    projection = learn_projection(absent, present)
    assert projection.mu == pytest.approx(math.sqrt(((shift / scale) ** 2).sum()), rel=0.03)
    assert projection(absent).std() == pytest.approx(1.0, rel=0.02)
    for feature in (absent, present):
        feature[:, 1] = feature[:, 1].mean()
    quiet = learn_projection(absent, present)
    assert quiet.mu > 100


def test_repeated_noise_and_silence_are_seen_and_fresh_noise_is_not():
    rng = np.random.default_rng(2)
    fresh = rng.normal(size=(20, 500))
    assert repeated_noise(2.0, lag=1)(fresh).mean() > -0.5
    twice = fresh.repeat(2, axis=0)
    assert repeated_noise(2.0, lag=1)(twice).mean() == pytest.approx(-20, abs=0.5)
    twice[::4] += 2.0
    assert repeated_noise(2.0, lag=1)(twice).mean() == pytest.approx(-10, abs=0.5)
    assert not silent_steps()(fresh).any()
    fresh[3] = fresh[9] = 0.0
    assert (silent_steps()(fresh) == -1).all()


# --- one run ----------------------------------------------------------------------------------------------


def test_without_delta_the_one_run_bound_is_randomised_response():
    p = one_run_p_value(canaries=100, guesses=50, correct=40, epsilon=1.0, delta=0.0)
    assert p == pytest.approx(float(binom.sf(39, 50, 1 / (1 + math.exp(-1)))))
    assert one_run_p_value(canaries=100, guesses=50, correct=40, epsilon=1.0, delta=1e-3) > p


def test_the_one_run_bounds_grow_with_what_was_guessed():
    counts = {"canaries": 200, "guesses": 100, "level": 0.05}
    values = [one_run_epsilon(correct=c, delta=1e-5, **counts) for c in (50, 70, 90)]
    assert values[0] == 0.0
    assert values[0] < values[1] < values[2]
    curve = TradeOffCurve.gaussian(1.0)
    refuted = [curve_refuted_in_one_run(curve, correct=c, **counts) for c in (60, 80, 99)]
    assert refuted == sorted(refuted)
    assert refuted[-1]


def simulated(mu: float, canaries: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    coins = rng.random(canaries) < 0.5
    return rng.normal(size=canaries) + mu * coins, coins


def test_one_run_audits_of_independent_canaries_refute_the_truth_at_most_at_the_stated_rate():
    """300 runs at 95 %: more than 28 refutations of the truth have p < 0.001."""
    rng = np.random.default_rng(3)
    by_curve = by_epsilon = 0
    truth, delta = TradeOffCurve.gaussian(1.0), 1e-3
    for _ in range(300):
        scores, coins = simulated(1.0, 400, rng)
        guesses, correct = guess(scores, coins, 0.2)
        counts = {"canaries": 400, "guesses": guesses, "correct": correct, "level": 0.05}
        by_curve += curve_refuted_in_one_run(truth, **counts)
        by_epsilon += one_run_epsilon(delta=delta, **counts) > truth.epsilon(delta)
    assert by_curve <= 28
    assert by_epsilon <= 28


def test_one_run_catches_a_third_of_the_noise_and_the_curve_is_tighter_than_epsilon():
    scores, coins = simulated(3.0, 4000, np.random.default_rng(4))
    result = audit_one_run(scores, coins, Claim(noise_multiplier=1.0, sample_rate=1.0, steps=1), audits=20)
    assert result.verdict == "VIOLATION"
    assert result.family_epsilon > result.audited_epsilon > 0
    honest = audit_one_run(scores, coins, Claim(noise_multiplier=1 / 3, sample_rate=1.0, steps=1), audits=20)
    assert honest.verdict == "holds"
    assert 0.5 < honest.ratio <= 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"included": np.ones(3, dtype=bool)}, "equally long"),
        ({"scores": np.full(4, math.nan)}, "not NaN"),
        ({"guessed": 0.0}, "guessed must lie"),
        ({"audits": 0}, "audits=0"),
        ({"delta": 0.0}, "delta=0.0"),
    ],
)
def test_wrong_one_run_arguments_are_named(change, words):
    given_ = {"scores": np.arange(4.0), "included": np.array([True, False, True, False]), "claim": HALF}
    with pytest.raises(ValueError, match=words):
        audit_one_run(**(given_ | change))


def test_a_real_run_with_many_canaries_is_tight_for_individual_clipping():
    result = audit_many_canaries(
        name="IC", canaries=1000, steps=20, steps_per_epoch=4, noise_multiplier=1.0, audits=20
    )
    assert result.verdict == "holds"
    assert result.ratio > 0.4


def test_a_real_run_with_many_mini_sets_reaches_up_to_half_for_batch_clipping():
    result = audit_many_canaries(
        name="GBC", canaries=200, steps=4, steps_per_epoch=2, noise_multiplier=0.25, mini_sets=200, audits=20
    )
    assert result.verdict == "holds"
    assert 0 < result.ratio < 0.6


# --- the worst case through the real optimizer ------------------------------------------------------------

SHUFFLED = {
    f"{method}, shuffle": Toy(method=method, sampling="shuffle", steps_per_epoch=3, steps=2)
    for method in ("BC", "IC", "BK")
}
METHODS = {**{method: single_round(method) for method in MODES}, **SHUFFLED}


@pytest.mark.parametrize("method", METHODS)
def test_a_single_round_is_audited_to_85_percent_of_its_claimed_mu_and_not_above(method):
    """With BatchNorm four rounds, of fewer repetitions and to 75 %."""
    toy = METHODS[method]
    few = toy.mode.batch_norm is not None
    result = wc.audit_worst_case(toy, name=method, repetitions=4_000 if few else 10_000, audits=50)
    assert result.claimed_mu == pytest.approx(1.0 if method in MODES else result.claimed_mu)
    assert result.verdict == "holds"
    assert (0.75 if few else 0.85) <= result.ratio <= 1.0
    assert result.noise_ratio == pytest.approx(1.0, abs=0.05 if few else 0.03)


@pytest.mark.parametrize("method", [name for name, mode in MODES.items() if mode.individual])
def test_every_individual_mode_of_the_table_is_set_up_as_it_says(method):
    """A row that forgot its mode would audit another one twice."""
    mode, private = MODES[method], make_toy(single_round(method), canaries=1)
    (run,) = private.engine._runs
    assert run.clipping == mode.clipping
    assert (private.optimizer.noise is None) == mode.stock
    assert isinstance(private.optimizer, BookKeepingOptimizer) == (mode.gradients == "bk")
    assert isinstance(private.model, GradSampleModuleFastGradientClipping) == (mode.gradients == "ghost")
    assert (private.optimizer.adaptive is not None) == (mode.alc is not None)
    assert ("norm" in dict(private.inner.named_children())) == (mode.batch_norm is not None)


def test_a_run_of_fifty_sampled_steps_is_audited_to_45_percent_of_its_claimed_epsilon():
    toy = Toy(method="BC", steps=50, steps_per_epoch=10)
    result = wc.audit_worst_case(toy, name="BC", repetitions=300_000, audits=20)
    claimed = accounting.epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=50, delta=1e-5)
    assert result.claimed_epsilon == pytest.approx(claimed, rel=1e-9)
    assert result.verdict == "holds"
    assert 0.45 * claimed <= result.audited_epsilon <= claimed
    assert result.audited_epsilon < result.family_epsilon <= claimed


@pytest.mark.parametrize("exact", [True, False])
def test_a_run_that_was_resumed_is_audited_as_tightly_as_one_that_was_not(exact):
    toy = Toy(method="BC", steps=10, steps_per_epoch=5)
    result = audit_resumed(toy, name="resumed", repetitions=20_000, exact=exact, audits=20)
    assert result.setting == "T = 10, q = 0.2, σ_eff = 1"  # both halves are booked
    assert result.verdict == "holds"
    assert 0.8 < result.ratio <= 1.0
    assert result.attack == "likelihood ratio"


def test_a_fixed_partition_is_audited_with_draws_of_its_own():
    toy = Toy(method="BC", sampling="partition", steps_per_epoch=5, steps=4)
    result = wc.audit_worst_case(toy, name="partition", repetitions=2000, audits=20)
    assert "partition" in result.setting
    assert result.verdict == "holds"
    assert result.ratio > 0.4


def test_participation_comes_from_the_real_sampler_and_is_independent():
    """At 1/q = 4: rate, and correlation of neighbouring canaries, within 5 deviations."""
    private = make_toy(Toy(method="BC", steps_per_epoch=4), canaries=500, width=1)
    taken = wc.participation(private, 500, 400)
    assert abs(taken.mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / taken.size)
    centred = taken - taken.mean()
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 5 * 0.25 * 0.75 / math.sqrt(taken.size)


def test_entries_of_a_wide_release_are_independent_repetitions_of_the_claimed_shift_and_noise():
    toy = Toy(method="BC", noise_multiplier=2.0)
    private = make_toy(toy, canaries=1, width=5000)
    out, present = (wc.releases(private, with_canary=w, draws=2)[:, :, 0] for w in (False, True))
    shift, std = (present.mean() - out.mean()), private.noise_stds()[0]
    assert shift / std == pytest.approx(1 / 2.0, abs=5 * math.sqrt(2 / 10_000))
    assert out.std() == pytest.approx(std, rel=5 / math.sqrt(2 * 10_000))
    for one, two in ((out[0], out[1]), (out[0, 1:], out[0, :-1])):
        assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(5000)


# --- runs of one's own ------------------------------------------------------------------------------------


def test_a_training_function_of_ones_own_is_audited():
    def train(with_canary: bool, seed: int) -> float:
        return float(np.random.default_rng(seed).normal(1.0 if with_canary else 0.0))

    claim = Claim(noise_multiplier=1.0, sample_rate=1.0, steps=1)
    honest = audit_training(train, claim, runs=2000)
    assert honest.verdict == "holds"
    assert 0.8 < honest.audited_mu <= 1.0
    assert audit_training(train, TradeOffCurve.gaussian(0.5), runs=2000).verdict == "VIOLATION"


def test_every_run_gets_a_seed_of_its_own():
    seeds: list[int] = []
    audit_training(lambda present, seed: float(seeds.append(seed) or 0), HALF, runs=10)
    assert len(set(seeds)) == 20


def test_a_claim_is_what_the_accountant_of_the_run_has_booked():
    """Steps, or passes, noise and rate come out of the history; epsilon is the engine's own."""
    toys = {
        "BC": (Toy(method="BC", steps_per_epoch=2), 5, 5),
        "IC": (Toy(method="IC", steps_per_epoch=2, noise_multiplier=2.0), 3, 3),
        "partition": (Toy(method="BC", sampling="partition", steps_per_epoch=2), 3, 3),
        "shuffle": (Toy(method="BC", sampling="shuffle", steps_per_epoch=2), 6, 3),
    }
    for toy, draws, booked in toys.values():
        private = make_toy(toy, canaries=1)
        wc.releases(private, with_canary=True, draws=draws)
        claim = Claim.booked(private.engine)
        assert claim.steps == booked
        assert claim.epsilon(1e-5) == private.engine.get_epsilon(1e-5)
        ours, engines = claim.tradeoff(), private.engine.get_tradeoff()
        np.testing.assert_array_equal(ours(np.linspace(0, 1, 9)), engines(np.linspace(0, 1, 9)))
        assert Claim.booked(private.engine, scale=3.0).noise_multiplier == 3 * claim.noise_multiplier


def test_a_history_of_several_kinds_is_no_single_claim():
    private = make_toy(Toy(method="BC"), canaries=1)
    with pytest.raises(ValueError, match="steps of one kind"):
        Claim.booked(private.engine)  # nothing is booked
    wc.releases(private, with_canary=True, draws=1)
    private.engine.accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    with pytest.raises(ValueError, match="steps of one kind"):
        Claim.booked(private.engine)
    private.engine.accountant.history = []
    private.engine.accountant.release(noise_multiplier=2.0, adjacency="add/remove one")
    with pytest.raises(ValueError, match="steps of one kind"):
        Claim.booked(private.engine)


def test_a_result_explains_itself():
    result = audit_scores(np.arange(100.0), np.arange(100.0), HALF)
    assert isinstance(result, AuditResult)
    facts = result.facts()
    assert "scores" not in facts
    assert facts["verdict"] == "holds"
    assert 0 <= facts["ratio"] <= 1
