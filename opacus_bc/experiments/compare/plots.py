"""The report's pictures, drawn from rows; nothing is computed here but means and epsilons along the way."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opacus_bc.accounting import FDPAccountant
from opacus_bc.experiments.compare.summary import Row
from opacus_bc.experiments.training import canvas
from opacus_bc.experiments.training.result import spent

_PANELS = (("individual clipping", "individual"), ("batch clipping", "batch"), ("mini-sets", "mini-sets"))
_MARKERS = "osDv^<>PXdp*h8"
_FAMILIES = {
    "plain": "0.4",
    "individual": canvas.COLOURS[0],
    "batch": canvas.COLOURS[1],
    "mini-sets": canvas.COLOURS[2],
}


def draw_all(rows: Sequence[Row], folder: Path) -> dict[str, Path]:
    """Draw every picture that the rows have numbers for; returns title -> file."""
    pictures: list[tuple[str, str, Callable[[Sequence[Row]], Any]]] = [
        ("Accuracy by method", "accuracy_methods.png", by_method),
        ("Accuracy over epochs", "accuracy_epochs.png", over_epochs),
        ("Accuracy against ε", "accuracy_epsilon.png", against_epsilon),
        ("Accuracy against cost", "accuracy_cost.png", against_cost),
        ("Trade-off curves", "tradeoff.png", tradeoff_curves),
        ("Noise-to-signal ratio by layer", "noise_to_signal.png", noise_by_layer),
    ]
    drawn = {}
    for title, name, draw in pictures:
        figure = draw(rows)
        if figure is not None:
            figure.savefig(folder / name, dpi=canvas.DPI)
            drawn[title] = folder / name
    return drawn


def _budgets(rows: Sequence[Row]) -> list[float]:
    return sorted({row.budget for row in rows if row.budget is not None})


def _panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    found = [(title, [row for row in rows if row.family == family]) for title, family in _PANELS]
    return [(title, members) for title, members in found if members]


def by_method(rows: Sequence[Row]) -> Any:
    """The answer at a glance: a line for each method, a point with its spread for each budget."""
    shown = [row for row in rows if row.private]
    names, budgets = list(dict.fromkeys(row.name for row in shown)), _budgets(shown)
    if not budgets:
        return None
    figure = canvas.figure(7.2, 0.9 + 0.29 * len(names))
    at = figure.add_subplot()
    for row in shown:
        newest = row.budget == budgets[-1]
        at.errorbar(
            row.mean,
            names.index(row.name),
            xerr=row.spread or 0.0,
            marker=_MARKERS[budgets.index(row.budget) % len(_MARKERS)],  # type: ignore[arg-type]  # private rows have one
            markersize=6.5,
            markerfacecolor=_FAMILIES[row.family] if newest else "white",
            color=_FAMILIES[row.family],
            capsize=2.5,
            elinewidth=1.0,
        )
    for index, budget in enumerate(budgets):
        face = "0.3" if budget == budgets[-1] else "white"
        at.plot(
            [],
            [],
            _MARKERS[index % len(_MARKERS)],
            color="0.3",
            markerfacecolor=face,
            label=f"ε = {budget:g}",
            markersize=6.5,
        )
    plain = next((row for row in rows if not row.private), None)
    if plain is not None:
        at.axvline(
            plain.mean, color="0.55", linestyle="--", linewidth=1.0, label=f"no privacy ({plain.mean:.1f} %)"
        )
    at.set_yticks(range(len(names)), [next(row.title for row in shown if row.name == n) for n in names])
    at.set_ylim(len(names) - 0.5, -0.5)
    at.set_xlim(0, 102)
    at.set_xlabel("test accuracy, %")
    figure.legend(fontsize="small", loc="outside upper center", ncols=len(budgets) + 1, frameon=False)
    canvas.tidy(at)
    return figure


def over_epochs(rows: Sequence[Row]) -> Any:
    """Mean and spread over seeds after each epoch; one column a family, one line of panels a budget."""
    panels, budgets = _panels(rows), _budgets(rows)
    if not panels:
        return None
    figure = canvas.figure(4.3 * len(panels), 3.7 * len(budgets))
    axes = figure.subplots(len(budgets), len(panels), squeeze=False, sharex=True, sharey=True)
    plain = next((row for row in rows if not row.private), None)
    for line, budget in enumerate(budgets):
        for column, (title, members) in enumerate(panels):
            at = axes[line][column]
            if plain is not None:
                _curve(at, plain, {"color": "0.55", "linestyle": "--"})
            for index, row in enumerate(row for row in members if row.budget == budget):
                _curve(at, row, canvas.style(index))
            at.set_title(f"{title}, ε = {budget:g}", fontsize="medium")
            canvas.tidy(at)
        axes[line][0].set_ylabel("test accuracy, %")
    for at in axes[-1]:
        at.set_xlabel("epoch")
        canvas.legend_below(at)
        at.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _curve(axes: Any, row: Row, style: dict[str, Any]) -> None:
    values = np.array(row.curves)
    epochs = np.arange(1, values.shape[1] + 1)
    mean = values.mean(axis=0)
    axes.plot(epochs, mean, label=row.title, linewidth=1.6, **style)
    if row.seeds > 1:
        deviation = values.std(axis=0, ddof=1)
        axes.fill_between(epochs, mean - deviation, mean + deviation, color=style["color"], alpha=0.13, lw=0)


def against_epsilon(rows: Sequence[Row]) -> Any:
    """Accuracy against the epsilon spent so far, and the final one against each budget."""
    panels = _panels(rows)
    if not panels:
        return None
    figure = canvas.figure(4.3 * len(panels), 3.7)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for at, (title, members) in zip(axes, panels, strict=True):
        for index, name in enumerate(dict.fromkeys(row.name for row in members)):
            style = canvas.style(index)
            runs = [row for row in members if row.name == name and row.epsilon is not None]
            for row in runs:
                curve = np.array(row.curves).mean(axis=0)
                total = len(curve)
                along = [spent(row.history, row.delta, epoch, total) for epoch in range(1, total + 1)]
                at.plot(along, curve, linewidth=1.0, alpha=0.55, **style)
            ends = [row.epsilon for row in runs]
            at.errorbar(
                ends,
                [row.mean for row in runs],
                yerr=[row.spread or 0.0 for row in runs],
                marker="o",
                markersize=4,
                capsize=2,
                linewidth=1.6,
                label=runs[0].title if runs else name,
                **style,
            )
        at.set_title(title, fontsize="medium")
        at.set_xlabel("ε spent (certified); thin: epochs of a run")
        at.set_xlim(left=0)
        canvas.legend_below(at)
        canvas.tidy(at)
    axes[0].set_ylabel("test accuracy, %")
    return figure


def against_cost(rows: Sequence[Row]) -> Any:
    """Final accuracy against time per epoch; the area of a point grows with its peak memory."""
    shown = [row for row in rows if row.time is not None]
    budgets = _budgets(shown)
    if not budgets:
        return None
    figure = canvas.figure(4.6 * len(budgets) + 2.6, 4.2)
    axes = figure.subplots(1, len(budgets), squeeze=False, sharex=True, sharey=True)[0]
    names = list(dict.fromkeys(row.name for row in shown))
    for at, budget in zip(axes, budgets, strict=True):
        for row in shown:
            if row.budget in (None, budget):
                at.scatter(
                    row.time,
                    row.mean,
                    s=40 * math.sqrt(row.memory or 1.0),
                    marker=_MARKERS[names.index(row.name) % len(_MARKERS)],
                    color=_FAMILIES[row.family],
                    alpha=0.75,
                    linewidth=0,
                    label=row.title,
                )
        at.set_xlim(left=0)
        at.set_ylim(0, 102)
        at.set_title(f"ε = {budget:g}", fontsize="medium")
        at.set_xlabel("time per epoch, plain SGD = 1")
        canvas.tidy(at)
    axes[0].set_ylabel("test accuracy, %")
    handles, labels = axes[0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside right center", fontsize="x-small", frameon=False,
        title="size: peak memory", title_fontsize="x-small",
    )  # fmt: skip
    for handle in legend.legend_handles:
        handle.set_sizes([40])
    return figure


def tradeoff_curves(rows: Sequence[Row]) -> Any:
    """What a membership test can achieve: one curve for methods with the same mechanism."""
    mechanisms: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.epsilon is not None:
            coarse = tuple((float(f"{entry[0]:.3g}"), *entry[1:]) for entry in row.history)
            mechanisms.setdefault((row.budget, coarse), []).append(row)
    if not mechanisms:
        return None
    figure = canvas.figure(7.2, 4.2)
    at = figure.add_subplot()
    alpha = np.linspace(0, 1, 1001)
    at.plot(alpha, 1 - alpha, color="0.6", linestyle="--", linewidth=1.0, label="perfect privacy")
    for index, members in enumerate(mechanisms.values()):
        accountant = FDPAccountant()
        accountant.history = list(members[0].history)
        names = ", ".join(row.name for row in members)
        label = _wrapped(f"ε = {members[0].budget:g}, batch {members[0].batch_size}: {names}")
        at.plot(alpha, accountant.get_tradeoff()(alpha), label=label, **canvas.style(index))
    at.set(xlabel="false positive rate α", ylabel="false negative rate", xlim=(0, 1), ylim=(0, 1))
    at.set_aspect("equal")
    figure.legend(fontsize="x-small", loc="outside right center", frameon=False)
    canvas.tidy(at)
    return figure


def _wrapped(text: str, width: int = 34) -> str:
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))


def noise_by_layer(rows: Sequence[Row]) -> Any:
    """A table of colours: how often the update's noise exceeds its signal, layer by layer."""
    from matplotlib.colors import LogNorm

    shown = [row for row in rows if row.layers]
    if not shown:
        return None
    layers = list(dict.fromkeys(layer["layer"] for row in shown for layer in row.layers))
    table = np.full((len(shown), len(layers)), np.nan)
    for i, row in enumerate(shown):
        for layer in row.layers:
            if layer["noise_to_signal"] is not None:
                table[i, layers.index(layer["layer"])] = layer["noise_to_signal"]
    finite = table[np.isfinite(table) & (table > 0)]
    if not len(finite):
        return None
    figure = canvas.figure(2.6 + 0.62 * len(layers), 1.3 + 0.3 * len(shown))
    at = figure.add_subplot()
    low, high = min(1.0, float(finite.min())), max(2.0, float(finite.max()))
    image = at.imshow(table, norm=LogNorm(low, high), cmap="YlOrRd", aspect="auto")
    several = len(_budgets(shown)) > 1
    at.set_xticks(range(len(layers)), layers, rotation=40, ha="right", fontsize="small")
    at.set_yticks(
        range(len(shown)),
        [row.title + (f", ε = {row.budget:g}" if several else "") for row in shown],
        fontsize="small",
    )
    if len(layers) <= 24:
        for i, j in np.argwhere(np.isfinite(table)):
            colour = "white" if table[i, j] > 3 * math.sqrt(low * high) else "black"
            text = f"{table[i, j]:.0f}" if table[i, j] >= 10 else f"{table[i, j]:.1f}"
            at.text(j, i, text, ha="center", va="center", fontsize=6.5, color=colour)
    figure.colorbar(image, ax=at, label="noise / signal of an update", shrink=0.9)
    return figure
