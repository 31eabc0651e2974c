"""The report's pictures: one colour a method, axes that show what matters, budgets that are not joined."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.colors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rc_context
from matplotlib.image import imread

from opacus_bc.experiments.compare import plots, report
from opacus_bc.experiments.compare.looks import TEXT, looks, window
from opacus_bc.experiments.compare.summary import Row
from opacus_bc.experiments.training import canvas
from opacus_bc.experiments.training.methods import METHODS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "compare"
ACCURACIES = {
    "opacus": 95.0,
    "ic": 94.0,
    "bc": 91.0,
    "bc-alc": 90.0,
    "gbc-4": 93.0,
    "gbc-8": 92.5,
    "zhang": 11.0,
}


def row(name: str, budget: float | None, mean: float) -> Row:
    history = () if budget is None else ((1.0 + budget, 0.1, 4, "poisson"),)
    return Row(
        name=name, title=METHODS[name].title, family=METHODS[name].family, adjacency="add/remove one",
        protected=budget is not None, budget=budget, delta=1e-5, epsilon=budget,
        accuracies=(mean - 0.1, mean + 0.1), curves=((mean - 2, mean - 0.1), (mean - 2, mean + 0.1)),
        test_size=10_000, majority_share=10.0, batch_size=64, lr=0.1, clip=1.0, noise_multiplier=1.0,
        sigma_eff=1.0, groups=1, noise_factor=1.0, history=history,
        layers=({"layer": "fc", "noise_to_signal": 2.0},), time=1.5, time_low=1.4, time_high=1.6, memory=2.0,
    )  # fmt: skip


ROWS = [
    row("no-dp", None, 98.0),
    *(row(name, budget, mean + budget / 8) for budget in (1.0, 8.0) for name, mean in ACCURACIES.items()),
]


# As in benchmarks/results/compare/pretrained-cifar10: one seed, few methods at most budgets, one far below.
FROM_WEIGHTS = [
    replace(row(name, budget, mean), accuracies=(mean,), curves=((mean - 1, mean),))
    for name, budget, mean in (
        ("stock-head", 1.0, 80.56), ("ic-frozen", 1.0, 85.92), ("stock-head", 2.0, 81.45),
        ("stock-head", 4.0, 82.06), ("swap", 8.0, 43.62), ("stock-head", 8.0, 82.41),
        ("stock-conv", 8.0, 88.75), ("ic-frozen", 8.0, 87.89), ("ic", 8.0, 81.03),
    )
]  # fmt: skip


@cache
def drawn(draw: Callable[[Sequence[Row]], Any]) -> Any:
    return draw(ROWS)


def colour(thing: Any) -> str:
    found = (
        thing.get_facecolor()[0]
        if hasattr(thing, "get_sizes")
        else thing[0]
        if isinstance(thing, tuple)
        else thing
    )
    return matplotlib.colors.to_hex(found.get_color() if hasattr(found, "get_color") else found)


def legend(figure: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, set()).add(colour(handle))
    return found


def test_a_method_has_one_colour_in_all_pictures_and_in_the_table() -> None:
    styles = looks(ROWS)
    assert len({(look.colour, look.marker) for look in styles.values()}) == len(styles)
    assert len({look.colour for look in styles.values()}) == len(styles)
    expected = {METHODS[name].title: {look.colour} for name, look in styles.items()}
    for draw in (plots.over_epochs, plots.against_epsilon, plots.against_cost):
        found = legend(drawn(draw))
        assert len(found) >= len(ACCURACIES)
        assert found == {title: expected[title] for title in found}
    (axes,) = drawn(plots.by_method).axes
    for bars, line in zip(axes.containers, (r for r in ROWS if r.private and r.name != "zhang"), strict=True):
        assert {colour(bars.lines[0])} == expected[line.title]
    page = report.page(report.Comparison(facts=FACTS, rows=ROWS), {})
    for name, look in styles.items():
        line = rf'<tr class="[^"]*" style="--method: {look.colour}"><td>{re.escape(METHODS[name].title)}<'
        assert re.search(line, page.replace("&#x27;", "'")), name


FACTS = {
    "model": "m", "dataset": "d", "private_size": 9, "public_size": 1, "test_size": 2, "epochs": 1, "seeds": 2
}  # fmt: skip


def test_a_picture_that_leaves_methods_out_has_the_colours_of_the_whole_report() -> None:
    """As that of costs does where some were not measured."""
    rows = [replace(found, time=None) if found.name == "opacus" else found for found in ROWS]
    assert legend(plots.against_cost(rows))[METHODS["ic"].title] == {looks(ROWS)["ic"].colour}


@pytest.mark.parametrize("draw", [plots.by_method, plots.against_epsilon])
def test_nothing_joins_two_budgets(draw: Any) -> None:
    for axes in drawn(draw).axes:
        for line in axes.lines:
            points = set(zip(*map(tuple, line.get_data()), strict=True))
            assert len(points) <= 1 or line.get_linestyle() in ("None", "--"), "only plain SGD has a line"


def test_an_outlier_far_below_does_not_squeeze_the_others_and_is_not_hidden() -> None:
    (axes,) = drawn(plots.by_method).axes
    low, high = axes.get_xlim()
    assert 80 < low < 90 < 98 < high <= 101
    assert [text.get_text() for text in axes.texts] == ["11.1 at ε = 1, 12.0 at ε = 8"]
    for at in drawn(plots.against_cost).axes:
        assert at.get_ylim()[0] > 80
        assert len(at.texts) == 1
    for at in plots.over_epochs(FROM_WEIGHTS).axes:
        assert [text.get_text() for text in at.texts] == ["43.6"] * at.get_title().endswith("ε = 8")
        assert at.get_ylim()[0] >= 70
    individual, batch, _ = drawn(plots.against_epsilon).axes
    assert individual.get_ylim()[0] > 90
    assert {text.get_text() for text in batch.texts} <= {"11.1", "12.0"}


def kept(report_name: str) -> list[Row]:
    """The rows of a committed report."""
    fields = Row.__dataclass_fields__
    text = (RESULTS / report_name / "compare.json").read_text(encoding="utf-8")
    rows = [{k: v for k, v in found.items() if k in fields} for found in json.loads(text)["rows"]]
    return [Row(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}) for found in rows]


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("pretrained-cifar10", plots.against_epsilon),
        ("pretrained-cifar10", plots.over_epochs),
        ("cifar10", plots.noise_by_layer),
    ],
)
def test_nothing_is_cut_off_at_the_edge_of_a_picture(name: str, draw: Any, tmp_path: Path) -> None:
    with rc_context({"font.size": TEXT}):
        canvas.save(draw(kept(name)), tmp_path / "drawn.png")
    for picture in (tmp_path / "drawn.png", *(RESULTS / name).glob("*.png")):
        pixels = imread(picture)[..., :3].min(-1)
        for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            assert edge.min() > 0.8, picture.name


@settings(max_examples=50)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_the_window_shows_the_best_and_at_least_three_quarters(values: Sequence[float]) -> None:
    low, high = window(values)
    assert 0 <= low < high <= 101
    assert low <= max(values) <= high
    assert sum(value >= low for value in values) >= 0.75 * len(values) - 1


def test_axes_say_which_way_is_better() -> None:
    (axes,) = drawn(plots.by_method).axes
    assert axes.get_xlabel().endswith("(better →)")
    for draw in (plots.over_epochs, plots.against_epsilon, plots.against_cost):
        assert drawn(draw).axes[0].get_ylabel() == "test accuracy, %   (better ↑)"
    assert drawn(plots.against_cost).axes[0].get_xlabel().endswith("(← better)")
    assert "more private ↑" in plots.tradeoff_curves(ROWS[:2]).axes[0].get_ylabel()
    assert "lower is better" in plots.noise_by_layer(ROWS[1:3]).axes[-1].get_ylabel()
