"""The recommendation follows from the numbers, and only from numbers that may be compared."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opacus_bc.accounting import FDPAccountant
from opacus_bc.experiments.compare.recommendation import FACTOR, recommend
from opacus_bc.experiments.compare.summary import Row, make_rows, separation


def row(name: str, *accuracies: float, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "name": name, "title": name, "family": "individual", "adjacency": "add/remove one", "protected": True,
        "budget": 8.0, "delta": 1e-5, "epsilon": 7.99, "accuracies": accuracies,
        "curves": tuple((a / 2, a) for a in accuracies), "test_size": 10_000, "majority_share": 10.0,
        "batch_size": 64, "lr": 0.1, "clip": 1.0, "noise_multiplier": 1.0, "sigma_eff": 1.0, "groups": 1,
        "noise_factor": 1.0, "history": (), "layers": (),
    }  # fmt: skip
    return Row(**(values | changes))


PLAIN = row("no privacy", 99.0, 99.1, family="plain", budget=None, epsilon=None, protected=False)
accuracies = st.lists(st.floats(20, 100), min_size=2, max_size=4)


@given(st.lists(accuracies, min_size=2, max_size=5))
def test_the_method_with_the_highest_mean_is_recommended(values: list[list[float]]) -> None:
    rows = [row(f"method{i}", *found) for i, found in enumerate(values)]
    best = max(rows, key=lambda r: r.mean)
    assume(sum(r.mean == best.mean for r in rows) == 1 and best.mean - 10 > FACTOR * best.standard_error)
    assert f"use **{best.title}**" in recommend(rows, tuned=False)[0]


@given(accuracies, accuracies)
def test_it_claims_to_be_sure_exactly_when_the_difference_exceeds_two_standard_errors(
    a: list[float], b: list[float]
) -> None:
    first, second = sorted((row("one", *a), row("two", *b)), key=lambda r: -r.mean)
    assume(first.mean > second.mean and first.mean - 10 > FACTOR * first.standard_error)
    text = recommend([first, second], tuned=False)[0]
    difference = first.mean - second.mean
    error = math.hypot(first.standard_error, second.standard_error)
    assert ("sure: the next" in text) == (difference >= 2 * error)
    assert ("Not sure" in text) == (difference < 2 * error)


def test_a_method_without_a_competitor_is_not_recommended() -> None:
    rows = [PLAIN, row("alone", 90, 91), row("other", 95, 96, adjacency="replace one")]
    text = recommend(rows, tuned=False)[0]
    assert "**alone** has nothing to be compared with: 90.5" in text
    assert "use **" not in text
    assert "Privacy costs 8.5 points" in text


def test_methods_of_different_adjacencies_are_not_ranked_against_each_other() -> None:
    poisson, partition = row("added", 60, 61), row("replaced", 90, 91, adjacency="replace one")
    texts = recommend([PLAIN, poisson, partition], tuned=False)
    for name, other in (("added", "replaced"), ("replaced", "added")):
        (mine,) = [text for text in texts if f"**{name}**" in text]
        assert other not in mine
    assert any("not ranked against each other" in text for text in texts)


def test_budgets_get_paragraphs_of_their_own() -> None:
    rows = [row("low", 50, 51, budget=1.0, epsilon=0.99), row("high", 90, 91)]
    texts = recommend(rows, tuned=False)
    assert "ε = 1," in texts[0]
    assert "ε = 8," in texts[1]
    assert "high" not in texts[0]


def test_leaking_statistics_and_no_privacy_are_never_recommended() -> None:
    rows = [PLAIN, row("leaky", 98, 98.1, protected=False), row("honest", 50, 51), row("worse", 40, 41)]
    text = recommend(rows, tuned=False)[0]
    assert "use **honest**" in text
    assert "leaky" not in text
    assert recommend([PLAIN], tuned=False) == [
        "No private method was compared, so there is nothing to recommend."
    ]


def test_one_seed_is_called_a_hint() -> None:
    text = recommend([row("one", 90.0), row("two", 50.0)], tuned=False)[0]
    assert "hint" in text
    assert "sure: the next" not in text


def test_chance_is_called_chance() -> None:
    assert "no method learned anything" in recommend([row("one", 10.1, 10.3)], tuned=False)[0]
    text = recommend([row("one", 90, 90.1), row("two", 10.2, 9.9)], tuned=False)[0]
    assert "that always answering with the most frequent class gets): two." in text


def test_among_equals_the_fastest_is_named_with_its_memory() -> None:
    rows = [row("slow", 90.1, 89.9, time=3.0, memory=4.0), row("fast", 90.0, 89.8, time=1.1, memory=9.0)]
    text = recommend(rows, tuned=False)[0]
    assert "fast takes less time: 89.9" in text
    assert "at 1.10 × the time of plain SGD and 9.00 × its memory" in text
    assert "cheaper" not in text  # its memory is larger


def test_the_small_test_set_counts_in_the_error() -> None:
    small = row("small", 90.0, 90.0, test_size=100)
    assert small.standard_error == pytest.approx(100 * math.sqrt(0.09 / 100))
    large = row("large", 88.0, 88.0, test_size=100)
    assert separation(small, large) < FACTOR
    assert separation(row("a", 90.0, 90.0), row("b", 88.0, 88.0)) > FACTOR


@pytest.mark.parametrize("tuned", [True, False])
def test_what_is_not_accounted_is_said(tuned: bool) -> None:
    *_, settings, meaning = recommend([row("one", 90, 91)], tuned=tuned)
    assert ("not accounted" in settings) == tuned
    assert ("no ε here accounts for" in settings) == (not tuned)
    for words in (
        "one run",
        "seeded",
        "counts as public and is not protected",
        "not itself a private release",
    ):
        assert words in meaning


def test_epsilon_is_that_of_todays_accountant_whatever_a_kept_run_says() -> None:
    """A run that was kept before a correction of the accountant must not show the old value."""
    history = [[1.2, 0.1, 40, "poisson"]]
    method = {"name": "ic", "title": "IC", "private": True, "clipping": "flat", "mini_set": None}
    cell = {"epsilon": 8.0, "delta": 1e-4, "method": method, "batch_size": 8, "lr": 1.0, "clip": 1.0}
    kept = {
        "cell": cell, "epsilon": 0.01, "accuracies": [50.0, 60.0], "adjacency": "add/remove one",
        "protected": True, "test_size": 100, "majority_share": 10.0, "history": history,
    }  # fmt: skip
    (made,) = make_rows([kept], {})
    fresh = FDPAccountant()
    fresh.history = [tuple(entry) for entry in history]
    assert made.epsilon == pytest.approx(fresh.get_epsilon(1e-4))
    assert made.epsilon > 1


def test_a_choice_by_public_images_is_said_and_not_called_unaccounted() -> None:
    *_, settings, meaning = recommend(
        [row("one", 90, 91)], tuned=True, tuned_on_public=True, public_apart=True
    )
    assert "in short runs on public images alone" in settings
    assert "not accounted" not in settings
    assert "public images are a folder of their own" in meaning


figures = st.floats(30, 99)


@settings(max_examples=50)
@given(figures, figures, figures)
def test_differences_are_those_of_the_figures_that_are_shown(a: float, b: float, c: float) -> None:
    plain = row("no privacy", a, a + 0.2, family="plain", budget=None, epsilon=None, protected=False)
    text = recommend([plain, row("one", b, b + 0.2), row("two", c, c + 0.2)], tuned=False)[0]
    best, without = (
        float(re.findall(start + r"(\d+\.\d) ±", text)[0]) for start in (r"\*\*: ", "without it ")
    )
    cost = re.search(r"Privacy costs (-?\d+\.\d) points", text)
    if cost is not None:
        assert float(cost[1]) == pytest.approx(without - best, abs=1e-9)
    else:
        assert re.search("Privacy costs no accuracy that these runs can show|is not known here", text)
        assert without <= best
    less = re.search(r"gets (\d+\.\d) ± .*?, (\d+\.\d) points less", text)
    if less is not None:
        assert float(less[2]) == pytest.approx(best - float(less[1]), abs=1e-9)


def test_a_baseline_clearly_below_a_private_run_is_called_undertrained() -> None:
    plain = row("no privacy", 82.0, 83.0, family="plain", budget=None, epsilon=None, protected=False)
    rows = [plain, row("one", 91.0, 91.2)]
    text = recommend(rows, tuned=False)[0]
    assert "without it 82.5 ± 0.7 % (2 seeds), which is below a private run" in text
    assert "probably undertrained (its settings are defaults and not tuned); --tune or more --epochs" in text
    assert "costs no accuracy" not in text
    assert "probably undertrained; more --epochs may tell" in recommend(rows, tuned=True)[0]
    on_public = recommend(rows, tuned=True, tuned_on_public=True)[0]
    assert "leaves alone); more --epochs may tell" in on_public
    near = recommend([plain, row("one", 82.4, 83.4)], tuned=False)[0]
    assert "Privacy costs no accuracy that these runs can show: without it 82.5" in near


def test_methods_too_close_to_call_are_not_called_equal() -> None:
    text = recommend([row("one", 90.0, 91.0), row("two", 89.5, 90.7), row("far", 50, 51)], tuned=False)[0]
    assert "Not sure: these runs do not show whether it is better than two (0.4 points behind):" in text
    assert "That does not make them equal" in text
    assert "told apart" not in text
    assert "far" not in text


def test_a_linear_probe_is_not_taken_for_training_without_privacy() -> None:
    probe = row("probe", 80.0, 81.0, family="plain", budget=None, epsilon=None, protected=False)
    assert "Privacy costs" not in recommend([probe, row("one", 82.0, 83.0)], tuned=False)[0]
