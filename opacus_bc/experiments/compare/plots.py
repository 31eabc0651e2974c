"""The report's pictures, drawn from rows; nothing is computed here but means.

A method has one colour and one marker in all of them. Accuracies of two budgets are never joined by a line:
nobody trained between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opacus_bc.experiments.compare.looks import (
    BETTER_LEFT,
    BETTER_RIGHT,
    BETTER_UP,
    PLAIN,
    TEXT,
    Look,
    beyond,
    budgets_of,
    looks,
    window,
)
from opacus_bc.experiments.compare.privacy_plots import noise_by_layer, tradeoff_curves
from opacus_bc.experiments.compare.summary import Row
from opacus_bc.experiments.training import canvas

_PANELS = (("individual clipping", "individual"), ("batch clipping", "batch"), ("mini-sets", "mini-sets"))
_BUDGETS = "oD^sv<>P"  # markers where they tell budgets, and colours tell methods


def draw_all(rows: Sequence[Row], folder: Path) -> dict[str, Path]:
    """Draw every picture that the rows have numbers for; returns title -> file."""
    from matplotlib import rc_context

    pictures: list[tuple[str, str, Callable[[Sequence[Row]], Any]]] = [
        ("Accuracy by method", "accuracy_methods.png", by_method),
        ("Accuracy over epochs", "accuracy_epochs.png", over_epochs),
        ("Accuracy against ε", "accuracy_epsilon.png", against_epsilon),
        ("Accuracy against cost", "accuracy_cost.png", against_cost),
        ("Trade-off curves", "tradeoff.png", tradeoff_curves),
        ("Noise-to-signal ratio by layer", "noise_to_signal.png", noise_by_layer),
    ]
    drawn = {}
    with rc_context({"font.size": TEXT}):
        for title, name, draw in pictures:
            figure = draw(rows)
            if figure is not None:
                canvas.save(figure, folder / name)
                drawn[title] = folder / name
    return drawn


def _panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    found = [(title, [row for row in rows if row.family == family]) for title, family in _PANELS]
    return [(title, members) for title, members in found if members]


def by_method(rows: Sequence[Row]) -> Any:
    """The answer at a glance: a line for each method, a point with its spread for each budget."""
    shown = [row for row in rows if row.private]
    names, budgets, styles = list(dict.fromkeys(row.name for row in shown)), budgets_of(shown), looks(rows)
    if not budgets:
        return None
    plain = next((row for row in rows if not row.private), None)
    figure = canvas.figure(10.5, 1.6 + 0.44 * len(names))
    at = figure.add_subplot()
    at.set_yticks(range(len(names)), [next(row.title for row in shown if row.name == n) for n in names])
    at.set_ylim(len(names) - 0.5, -0.5)
    low, high = window(_ends(shown))
    at.set_xlim(low, high if plain is None else max(high, min(101.0, plain.mean + 1)))
    for row in shown:
        if row.budget is None or row.mean < low:
            continue
        look = styles[row.name]
        newest = row.budget == budgets[-1]
        marker = _BUDGETS[budgets.index(row.budget) % len(_BUDGETS)]
        at.errorbar(
            row.mean, names.index(row.name), xerr=row.spread or 0.0, marker=marker, markersize=8,
            markerfacecolor=look.colour if newest else "white", color=look.colour, capsize=3, elinewidth=1.2,
        )  # fmt: skip
    for index, name in enumerate(names):
        below = [f"{r.mean:.1f} at ε = {r.budget:g}" for r in shown if r.name == name and r.mean < low]
        if below:
            beyond(at, ", ".join(below), index, styles[name], across=True)
    for index, budget in enumerate(budgets):
        face = "0.3" if budget == budgets[-1] else "white"
        marker = _BUDGETS[index % len(_BUDGETS)]
        at.plot([], [], marker, color="0.3", markerfacecolor=face, label=f"ε = {budget:g}", markersize=8)
    if plain is not None:
        at.axvline(
            plain.mean,
            color=PLAIN,
            linestyle="--",
            linewidth=1.2,
            label=f"{plain.title} ({plain.mean:.1f} %)",
        )
    at.set_xlabel(f"test accuracy, %   ({BETTER_RIGHT})")
    figure.legend(loc="outside upper center", ncols=len(budgets) + 1, frameon=False)
    canvas.tidy(at)
    return figure


def _ends(rows: Sequence[Row]) -> list[float]:
    """Where error bars end."""
    return [row.mean + side * (row.spread or 0.0) for row in rows for side in (-1, 1)]


def over_epochs(rows: Sequence[Row]) -> Any:
    """Mean and spread over seeds after each epoch; one column a family, one line of panels a budget.

    A family has an axis of its own, so that a weak one does not squeeze a strong one.
    """
    panels, budgets, styles = _panels(rows), budgets_of(rows), looks(rows)
    if not panels:
        return None
    figure = canvas.figure(4.8 * len(panels), 4.0 * len(budgets) + 1.2)
    axes = figure.subplots(len(budgets), len(panels), squeeze=False, sharex=True, sharey="col")
    for line, budget in enumerate(budgets):
        for column, (title, members) in enumerate(panels):
            at = axes[line][column]
            for row in members:
                if row.budget == budget:
                    _curve(at, row, styles[row.name])
            at.set_title(f"{title}, ε = {budget:g}", fontsize="medium")
            canvas.tidy(at)
        axes[line][0].set_ylabel(f"test accuracy, %   ({BETTER_UP})")
    for column, (at, (_, members)) in enumerate(zip(axes[-1], panels, strict=True)):
        low, high = window([value for row in members for value in np.mean(row.curves, axis=0)])
        at.set_ylim(low, high)
        for row in members:
            if row.mean < low and row.budget is not None:
                panel = axes[budgets.index(row.budget)][column]
                beyond(panel, f"{row.mean:.1f}", len(row.curves[0]), styles[row.name], across=False)
        at.set_xlabel("epoch")
        _legend_below(at)
        at.xaxis.get_major_locator().set_params(integer=True)
    _axes_differ(figure, panels)
    return figure


def _axes_differ(figure: Any, panels: Sequence[Any]) -> None:
    if len(panels) > 1:
        figure.suptitle(
            "every family has an axis of its own: read the numbers", fontsize="small", color="0.35"
        )


def _legend_below(axes: Any) -> None:
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1, frameon=False)


def _curve(axes: Any, row: Row, look: Look) -> None:
    values = np.array(row.curves)
    epochs = np.arange(1, values.shape[1] + 1)
    mean = values.mean(axis=0)
    axes.plot(
        epochs, mean, label=row.title, linewidth=1.8, color=look.colour, marker=look.marker, markersize=5
    )
    if row.seeds > 1:
        deviation = values.std(axis=0, ddof=1)
        axes.fill_between(epochs, mean - deviation, mean + deviation, color=look.colour, alpha=0.13, lw=0)


def against_epsilon(rows: Sequence[Row]) -> Any:
    """Final accuracy with its spread, method beside method at each budget."""
    panels, styles = _panels(rows), looks(rows)
    if not panels:
        return None
    figure = canvas.figure(4.8 * len(panels), 5.4)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for at, (title, members) in zip(axes, panels, strict=True):
        budgets, names = budgets_of(members), list(dict.fromkeys(row.name for row in members))
        low, high = window(_ends(members))
        at.set_ylim(low, high)
        at.set_xlim(-0.5, len(budgets) - 0.5)
        for row in members:
            if row.budget is None:
                continue
            look = styles[row.name]
            place = budgets.index(row.budget) + 0.8 * ((names.index(row.name) + 0.5) / len(names) - 0.5)
            first = row.budget == next(other.budget for other in members if other.name == row.name)
            at.errorbar(
                place, row.mean if row.mean >= low else math.nan, yerr=row.spread or 0.0, marker=look.marker,
                markersize=8, capsize=3, linestyle="none", color=look.colour,
                label=row.title if first else None,
            )  # fmt: skip
            if row.mean < low:
                beyond(at, f"{row.mean:.1f}", place, look, across=False)
        at.set_title(title, fontsize="medium")
        at.set_xticks(range(len(budgets)), [f"ε = {budget:g}" for budget in budgets])
        at.set_xlabel("budget   (← more private)" if len(budgets) > 1 else "budget")
        _legend_below(at)
        canvas.tidy(at)
    axes[0].set_ylabel(f"test accuracy, %   ({BETTER_UP})")
    _axes_differ(figure, panels)
    return figure


def against_cost(rows: Sequence[Row]) -> Any:
    """Final accuracy against time per epoch; the area of a point grows with its peak memory."""
    shown = [row for row in rows if row.time is not None]
    budgets, styles = budgets_of(shown), looks(rows)
    if not budgets:
        return None
    figure = canvas.figure(4.8 * len(budgets) + 3.4, 5.4)
    axes = figure.subplots(1, len(budgets), squeeze=False, sharex=True, sharey=True)[0]
    low, high = window([row.mean for row in shown])
    for at, budget in zip(axes, budgets, strict=True):
        at.set_ylim(low, high)
        for row in shown:
            if row.budget not in (None, budget) or row.time is None:
                continue
            look = styles[row.name]
            inside = row.mean >= low
            at.scatter(
                row.time if inside else math.nan, row.mean, s=60 * math.sqrt(row.memory or 1.0),
                marker=look.marker, color=look.colour, alpha=0.8, linewidth=0, label=row.title,
            )  # fmt: skip
            if not inside:
                beyond(at, f"{row.mean:.1f}", row.time, look, across=False)
        at.set_xlim(left=0)
        at.set_title(f"ε = {budget:g}", fontsize="medium")
        at.set_xlabel(f"time per epoch, plain SGD = 1   ({BETTER_LEFT})")
        canvas.tidy(at)
    axes[0].set_ylabel(f"test accuracy, %   ({BETTER_UP})")
    handles, labels = axes[0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside right center", fontsize="small", frameon=False,
        title="size: peak memory", title_fontsize="small",
    )  # fmt: skip
    for handle in legend.legend_handles:
        handle.set_sizes([60])
    return figure
