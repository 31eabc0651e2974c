"""FDPAccountant: what it books, what it refuses, and how it fits into Opacus."""

from __future__ import annotations

import importlib
import io
import math
import time
import warnings

import numpy as np
import pytest
import torch
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant, create_accountant
from opacus.accountants.utils import get_noise_multiplier

from opacus_bc import accounting
from opacus_bc.accounting import FDPAccountant, gaussian
from opacus_bc.accounting.events import MAX_LEVELS, to_steps


def run(*entries: tuple[float, float, int, str]) -> FDPAccountant:
    accountant = FDPAccountant()
    accountant.history = list(entries)
    return accountant


def test_an_empty_history_costs_nothing() -> None:
    accountant = FDPAccountant()
    assert accountant.get_epsilon(1e-5) == 0.0
    assert accountant.get_epsilon_bounds(1e-5) == (0.0, 0.0)
    assert accountant.get_delta(0.0) == 0.0
    assert accountant.get_mu(1e-5) == accountant.get_mu_clt() == 0.0
    assert accountant.get_tradeoff()(0.3) == pytest.approx(0.7)
    assert len(accountant) == 0
    assert accountant.adjacency is None


@pytest.mark.parametrize("sampling", ["poisson", "partition", "shuffle"])
def test_no_noise_costs_everything(sampling: str) -> None:
    accountant = FDPAccountant()
    accountant.step(noise_multiplier=0.0, sample_rate=0.1, sampling=sampling)
    assert accountant.get_epsilon(1e-5) == math.inf
    assert accountant.get_delta(3.0) == 1.0
    assert accountant.get_mu(1e-5) == math.inf
    assert accountant.get_tradeoff()(0.3) == 0.0


def test_steps_are_counted_and_equal_ones_merged() -> None:
    accountant = FDPAccountant()
    for _ in range(7):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    accountant.release(noise_multiplier=20.0)
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    accountant.step(noise_multiplier=1.1, sample_rate=0.1)
    assert len(accountant) == 9
    assert [entry[:3] for entry in accountant.history] == [(1.0, 0.1, 8), (20.0, 1.0, 0), (1.1, 0.1, 1)]


def test_layers_are_the_square_root_correction() -> None:
    direct = accounting.epsilon(noise_multiplier=2.5 / math.sqrt(8), sample_rate=0.01, steps=300, delta=1e-5)
    assert (
        accounting.epsilon(noise_multiplier=2.5, layers=8, sample_rate=0.01, steps=300, delta=1e-5) == direct
    )


@pytest.mark.parametrize("sampling", ["partition", "shuffle"])
def test_one_accountant_has_one_adjacency(sampling: str) -> None:
    accountant = FDPAccountant()
    assert accountant.adjacency is None
    accountant.step(noise_multiplier=1.0, sample_rate=0.1, sampling="poisson")
    assert accountant.adjacency == "add/remove one"
    with pytest.raises(ValueError, match="replace one"):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1, sampling=sampling)
    assert len(accountant) == 1
    other = FDPAccountant()
    other.step(noise_multiplier=1.0, sample_rate=0.1, sampling=sampling)
    assert other.adjacency == "replace one"
    with pytest.raises(ValueError, match="add/remove one"):
        other.step(noise_multiplier=1.0, sample_rate=0.1)


@pytest.mark.parametrize("sampling", ["poisson", "partition", "shuffle"])
def test_a_release_fixes_the_adjacency_too(sampling: str) -> None:
    mine = "add/remove one" if sampling == "poisson" else "replace one"
    other = "replace one" if sampling == "poisson" else "add/remove one"
    accountant = FDPAccountant()
    with pytest.raises(ValueError, match="adjacency=None must be 'add/remove one' or 'replace one'"):
        accountant.release(noise_multiplier=5.0)
    with pytest.raises(ValueError, match="adjacency='neighbours' must be"):
        accountant.release(noise_multiplier=5.0, adjacency="neighbours")
    accountant.release(noise_multiplier=5.0, adjacency=other)
    with pytest.raises(ValueError, match=f"protects against {mine}.*{other}"):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1, sampling=sampling)
    assert len(accountant.history) == 1
    with pytest.raises(ValueError, match=f"protects against {mine}"):
        accountant.release(noise_multiplier=5.0, adjacency=mine)
    accountant = FDPAccountant()
    accountant.release(noise_multiplier=5.0, adjacency=mine)
    assert accountant.adjacency == mine
    accountant.step(noise_multiplier=1.0, sample_rate=0.1, sampling=sampling)
    accountant.release(noise_multiplier=5.0)
    mixed = accountant.state_dict()
    mixed["history"] = [
        *mixed["history"],
        (1.0, 1.0, 0, {"poisson": "release (replace one)"}.get(sampling, "release")),
    ]
    with pytest.raises(ValueError, match="mixes the adjacencies"):
        FDPAccountant().load_state_dict(mixed)


def test_a_shuffled_pass_costs_its_least_noisy_step_and_squares_add_over_passes() -> None:
    accountant = FDPAccountant()
    for sigmas in ((2.0, 4.0, 3.0), (5.0, 2.5, 8.0)):
        for number, sigma in enumerate(sigmas):
            accountant.step(
                noise_multiplier=sigma, sample_rate=1 / 3, sampling="shuffle", new_pass=number == 0
            )
    mu = math.hypot(1 / 2.0, 1 / 2.5)
    assert len(accountant) == 6
    assert accountant.get_mu(1e-5) == pytest.approx(mu)
    assert accountant.get_epsilon(1e-5) == pytest.approx(gaussian.epsilon(mu, 1e-5))
    assert accountant.get_tradeoff().mu == pytest.approx(mu)


def test_a_started_pass_counts_even_if_it_is_not_finished() -> None:
    accountant = FDPAccountant()
    for _ in range(4):
        accountant.step(noise_multiplier=2.0, sample_rate=0.01, sampling="shuffle", new_pass=True)
    assert accountant.get_mu(1e-5) == pytest.approx(math.sqrt(4) / 2)


@pytest.mark.parametrize("sampling", ["poisson", "partition", "shuffle"])
def test_a_release_is_composed_in(sampling: str) -> None:
    accountant = FDPAccountant()
    for _ in range(50):
        accountant.step(noise_multiplier=1.5, sample_rate=0.02, sampling=sampling)
    before = accountant.get_epsilon(1e-5)
    accountant.release(noise_multiplier=1e9)
    assert accountant.get_epsilon(1e-5) == pytest.approx(before, rel=1e-3)
    accountant.release(noise_multiplier=1.0)
    assert accountant.get_epsilon(1e-5) > max(before, gaussian.epsilon(1.0, 1e-5) * (1 - 1e-9))
    assert len(accountant) == 50


def test_epsilon_delta_and_the_curve_tell_one_story() -> None:
    accountant = run((1.0, 0.02, 500, "poisson"))
    epsilon = accountant.get_epsilon(1e-6)
    assert accountant.get_delta(epsilon) == pytest.approx(1e-6, rel=0.01)
    assert accountant.get_tradeoff().epsilon(1e-6) == pytest.approx(epsilon, rel=1e-3)
    low, high = accountant.get_epsilon_bounds(1e-6)
    assert low <= high <= epsilon * (1 + 1e-9)


def test_a_hundred_thousand_noise_levels_are_rounded_down_and_answered_in_five_seconds() -> None:
    sigmas = np.linspace(2.0, 0.8, 100_000)
    accountant = run(*((float(sigma), 0.001, 1, "poisson") for sigma in sigmas))
    steps = to_steps(accountant._entries())
    assert len(steps) <= MAX_LEVELS
    assert sum(step.count for step in steps) == len(accountant) == 100_000
    begin = time.process_time()
    upper = accountant.get_epsilon(1e-5)
    assert time.process_time() - begin <= 5.0
    # Sixty levels rounded UP in sigma give a value that is certainly too small; rounded down, one too large.
    blocks = np.array_split(sigmas, 60)
    optimistic = run(*((float(block.max()), 0.001, len(block), "poisson") for block in blocks)).get_epsilon(
        1e-5
    )
    assert optimistic <= upper <= optimistic * 1.05


def test_rounding_to_levels_never_raises_noise_or_lowers_sample_rates() -> None:
    rng = np.random.default_rng(0)
    entries = [
        (float(s), float(q), 1, "poisson")
        for s, q in zip(rng.uniform(0.5, 3, 900), rng.uniform(0, 0.1, 900), strict=True)
    ]
    steps = to_steps(entries)
    assert len(steps) <= MAX_LEVELS
    assert sum(step.count for step in steps) == 900
    for bound in (0.8, 1.5, 2.5):
        assert sum(s.count for s in steps if 1 / s.mu <= bound) >= sum(entry[0] <= bound for entry in entries)
    for bound in (0.02, 0.05, 0.09):
        assert sum(s.count for s in steps if s.q >= bound) >= sum(entry[1] >= bound for entry in entries)


def test_opacus_gdp_claims_less_than_is_attained_at_the_papers_setting() -> None:
    history = [(1.5 / math.sqrt(8), 64 / 54000, 42188)]
    with pytest.warns(UserWarning, match="underestimate"):
        gdp = GaussianAccountant()
    gdp.history = list(history)
    accountant = FDPAccountant()
    accountant.history = list(history)
    low, high = accountant.get_epsilon_bounds(1e-5)
    assert gdp.get_epsilon(1e-5) < low
    assert low == pytest.approx(7.9, abs=0.05)
    assert high == pytest.approx(7.926, abs=0.01)


def test_the_clt_of_the_paper_is_an_approximation_that_can_be_optimistic() -> None:
    accountant = run((1.5 / math.sqrt(8), 64 / 54000, 42188, "partition"))
    claimed = gaussian.epsilon(accountant.get_mu_clt(), 1e-10)
    low, _ = accountant.get_epsilon_bounds(1e-10)
    assert claimed == pytest.approx(14.2, abs=0.1)
    assert low == pytest.approx(15.6, abs=0.1)
    assert claimed < low


def test_the_paper_figures_come_out() -> None:
    assert accounting.h(2.5 / math.sqrt(8)) == pytest.approx(1.513, abs=0.002)
    assert accounting.h(1.5 / math.sqrt(8)) == pytest.approx(5.783, abs=0.001)
    paper = {"sample_rate": 64 / 54000, "steps": 42188, "layers": 8}
    assert accounting.mu_clt(noise_multiplier=2.5, **paper) == pytest.approx(0.52, abs=0.005)
    assert accounting.mu_clt(noise_multiplier=1.5, **paper) == pytest.approx(1.99, abs=0.005)
    larger = {"sample_rate": 64 / 810000, "steps": 632812, "layers": 8}
    assert accounting.mu_clt(noise_multiplier=1.5, **larger) == pytest.approx(0.51, abs=0.005)


@pytest.mark.parametrize("sigma", [1e6, 1e3, 30.0, 1.0, 0.2, 0.04, 1e-3, 0.0])
def test_h_is_accurate_for_much_noise_and_infinite_rather_than_overflowing_for_little(sigma: float) -> None:
    value = accounting.h(sigma)
    if sigma >= 30:
        assert value * sigma * math.sqrt(2) == pytest.approx(1.0, rel=2 / sigma)
    elif sigma >= 0.04:
        inverse = 1 / sigma
        phi = torch.special.ndtr(torch.tensor([1.5 * inverse, -0.5 * inverse], dtype=torch.float64))
        assert value == pytest.approx(
            math.sqrt(math.exp(inverse**2) * float(phi[0]) + 3 * float(phi[1]) - 2), rel=1e-9
        )
    else:
        assert value == math.inf


def test_the_state_survives_torch_save_with_weights_only() -> None:
    accountant = FDPAccountant()
    accountant.step(noise_multiplier=np.float64(1.3), sample_rate=np.float32(0.25), sampling="shuffle")
    accountant.release(noise_multiplier=7.0)
    buffer = io.BytesIO()
    torch.save(accountant.state_dict(), buffer)
    buffer.seek(0)
    other = FDPAccountant()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.history == accountant.history
    assert other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    other.step(noise_multiplier=1.3, sample_rate=0.25, sampling="shuffle")
    assert len(accountant) == 1  # no shared state
    assert other.get_mu(1e-5) == pytest.approx(math.hypot(1 / 1.3, 1 / 7))


@pytest.mark.parametrize("stock", [PRVAccountant, RDPAccountant])
def test_histories_of_stock_accountants_load_as_poisson(stock: type) -> None:
    other = stock()
    for _ in range(5):
        other.step(noise_multiplier=1.2, sample_rate=0.05)
    accountant = FDPAccountant()
    accountant.load_state_dict(other.state_dict())
    assert accountant.history == [(1.2, 0.05, 5, "poisson")]
    assert accountant.adjacency == "add/remove one"
    assert len(accountant) == 5


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"history": []},
        {"mechanism": "fdp"},
        {"mechanism": "other", "history": []},
        {"mechanism": "fdp", "history": [(-1.0, 0.1, 1)]},
        {"mechanism": "fdp", "history": [(1.0, 0.1)]},
        {"mechanism": "fdp", "history": [(1.0, 0.1, 1, "poisson"), (1.0, 0.1, 1, "shuffle")]},
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(state: object) -> None:
    accountant = run((1.0, 0.1, 3, "poisson"))
    with pytest.raises(ValueError, match=r"."):
        accountant.load_state_dict(state)  # type: ignore[arg-type]
    assert accountant.history == [(1.0, 0.1, 3, "poisson")]


def test_registration_can_be_repeated_and_survives_a_reload() -> None:
    accounting.register()
    accounting.register()
    assert type(create_accountant("fdp")).__name__ == "FDPAccountant"
    module = importlib.import_module("opacus_bc.accounting.accountant")
    original = module.FDPAccountant
    try:
        importlib.reload(module).register()
        assert create_accountant("fdp").mechanism() == "fdp"
    finally:
        module.FDPAccountant = original
        accounting.register()


def test_opacus_can_calibrate_with_it() -> None:
    accounting.register()
    sigma = get_noise_multiplier(
        target_epsilon=3.0,
        target_delta=1e-5,
        sample_rate=0.01,
        steps=500,
        accountant="fdp",
        epsilon_tolerance=0.05,
    )
    ours = accounting.epsilon(noise_multiplier=sigma, sample_rate=0.01, steps=500, delta=1e-5)
    assert 2.9 <= ours <= 3.0


def test_unknown_arguments_of_opacus_callers_are_ignored() -> None:
    accountant = run((1.0, 0.01, 100, "poisson"))
    assert accountant.get_epsilon(1e-5, 3, alphas=[2.0], eps_error=0.01) == accountant.get_epsilon(delta=1e-5)


def test_prv_agrees_where_it_answers() -> None:
    for sigma, rate, steps in [(1.0, 0.01, 1000), (0.8, 0.005, 4000), (2.0, 0.1, 200)]:
        prv = PRVAccountant()
        prv.history = [(sigma, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            claimed = prv.get_epsilon(1e-5)
        ours = accounting.epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=1e-5)
        assert claimed - 0.021 <= ours <= claimed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"sample_rate": 1.5}, "sample_rate=1.5"),
        ({"sample_rate": math.nan}, "sample_rate=nan"),
        ({"steps": -3}, "steps=-3"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"layers": 0}, "layers=0"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"delta": math.nan}, "delta=nan"),
        ({"sampling": "uniform"}, "sampling='uniform'"),
    ],
)
def test_wrong_values_are_named(change: dict[str, float], words: str) -> None:
    good = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10, "delta": 1e-5}
    with pytest.raises(ValueError, match=words):
        accounting.epsilon(**{**good, **change})  # type: ignore[arg-type]
    step = {k: v for k, v in change.items() if k in ("noise_multiplier", "sample_rate", "sampling")}
    if step:
        accountant = FDPAccountant()
        with pytest.raises(ValueError, match=words):
            accountant.step(**{"noise_multiplier": 1.0, "sample_rate": 0.1, **step})  # type: ignore[arg-type]
        assert accountant.history == []
    if "delta" in change:
        with pytest.raises(ValueError, match=words):
            FDPAccountant().get_epsilon(change["delta"])
