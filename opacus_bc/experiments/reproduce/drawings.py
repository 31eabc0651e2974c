"""Our version of a figure: accuracy over epochs, and along the figure's axis next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opacus_bc.experiments.reproduce.guarantees import GUARANTEES
from opacus_bc.experiments.reproduce.results import Results, Row, rows_of
from opacus_bc.experiments.reproduce.runs import family
from opacus_bc.experiments.reproduce.specs import Spec, cell_of
from opacus_bc.experiments.training import canvas

_DASHES = {"paper": "-", "code": ":", "sound": "--", "unprotected": "-."}


def draw(spec: Spec, results: Results, folder: Path) -> Path | None:
    """Draw a figure from what is kept; None if there is nothing."""
    rows = [row for row in rows_of(spec, results) if row.curves]
    if not rows:
        return None
    norms = _recorded(spec, results)
    along = any(row.run.x is not None for row in rows)
    figure = canvas.figure(11.0 if along or norms else 6.4, 4.4)
    axes = figure.subplots(1, 2 if along or norms else 1, squeeze=False)[0]
    _over_epochs(axes[0], rows)
    if norms:
        _norms(axes[1], norms)
    elif along:
        _along_axis(axes[1], spec, rows)
    figure.suptitle(f"{spec.title} ({spec.where})", fontsize="medium")
    path = folder / f"{spec.id}.png"
    figure.savefig(path, dpi=canvas.DPI)
    return path


def draw_guarantees(folder: Path) -> Path:
    """What the printed guarantees amount to, by reading: epsilon at delta = 1e-5 on a logarithmic axis."""
    facts = {fact.key: fact for fact in GUARANTEES.facts}
    readings = {
        "the paper's G_μ taken at its word": ("claimed_2.5", "claimed_1.5"),
        "C_q of the paper's theory": ("eps_2.5_partition", "eps_1.5_partition"),
        "Poisson sampling": ("eps_2.5", "eps_1.5"),
        "Poisson, L = 16 by tensor": ("eps_tensor",),
        "Poisson, m = 1024": ("eps_1024",),
        "a shuffled loader": ("eps_2.5_shuffle",),
    }
    figure = canvas.figure(7.0, 3.0)
    axes = figure.subplots()
    for which, (sigma, marker) in enumerate((("2.5", "o"), ("1.5", "s"))):
        points = [(facts[keys[which]].ours(), name) for name, keys in readings.items() if which < len(keys)]
        axes.plot(
            *zip(*points, strict=True), marker, color=canvas.style(which)["color"], label=f"σ = {sigma}"
        )
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="ε at δ = 1e-5, L = 8, m = 64, 50 epochs unless said otherwise")
    ticks = (2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.legend(fontsize="small", framealpha=0.7)
    canvas.tidy(axes)
    path = folder / f"{GUARANTEES.id}.png"
    figure.savefig(path, dpi=canvas.DPI)
    return path


def _unique(rows: Sequence[Row]) -> list[Row]:
    """One row a curve: several published numbers make several rows of one run."""
    longest: dict[tuple[str, str, int | None], Row] = {}
    for row in sorted(rows, key=lambda row: row.epoch):
        longest[row.run.label, row.variant, row.limit] = row
    return sorted(longest.values(), key=lambda row: rows.index(row))


def _over_epochs(axes: Any, rows: Sequence[Row]) -> None:
    labels = list(dict.fromkeys(row.run.label for row in rows))
    for row in _unique(rows):
        mean = np.mean(np.array(row.curves), axis=0)
        note = f", {row.limit:,} images" if row.limit else ""
        axes.plot(
            np.arange(1, row.epoch + 1), mean, marker="o" if row.epoch == 1 else None,
            color=canvas.style(labels.index(row.run.label))["color"], linestyle=_DASHES[row.variant],
            label=f"{row.run.label}, {row.variant if row.run.mode != 'none' else 'no privacy'}{note}",
        )  # fmt: skip
    stars = {(row.paper.epoch, row.paper.value): row for row in reversed(rows) if row.paper is not None}
    for row in stars.values():  # the first run that it belongs to gives the colour
        if row.paper is not None:
            colour = canvas.style(labels.index(row.run.label))["color"]
            axes.plot(row.paper.epoch, row.paper.value, marker="*", color=colour, markersize=9)
    axes.set(xlabel="epoch", ylabel="test accuracy, % (stars: the paper)")
    _legend(axes)
    canvas.tidy(axes)


def _along_axis(axes: Any, spec: Spec, rows: Sequence[Row]) -> None:
    placed = [row for row in _unique(rows) if row.run.x is not None]
    variants = list(dict.fromkeys(row.variant for row in placed))
    for kind in dict.fromkeys((row.variant, row.epoch, row.limit) for row in placed):
        variant, epoch, limit = kind
        points = [(row.run.x, row.ours) for row in placed if (row.variant, row.epoch, row.limit) == kind]
        colour = canvas.style(variants.index(variant))["color"]
        whole = epoch == spec.epochs and limit is None
        axes.plot(
            *zip(*points, strict=True), "o", color=colour, markerfacecolor=colour if whole else "none",
            label=f"ours, {variant}, epoch {epoch}" + (f", {limit:,} images" if limit else ""),
        )  # fmt: skip
    stars = sorted({(row.run.x, row.paper.value) for row in rows if row.run.x is not None and row.paper})
    if stars:
        axes.plot(*zip(*stars, strict=True), "k*", markersize=11, markerfacecolor="none", label="the paper")
    places = sorted({row.run.x for row in rows if row.run.x is not None})
    if len(places) > 1:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.set_xticks([], minor=True)
    axes.set(
        xlabel={"sigma": "σ"}.get(spec.axis, spec.axis), ylabel="test accuracy, % (hollow: a partial run)"
    )
    _legend(axes)
    canvas.tidy(axes)


def _legend(axes: Any) -> None:
    """Inside while it is short, below the panel where it would hide curves."""
    if len(axes.get_legend_handles_labels()[1]) > 6:
        canvas.legend_below(axes)
    else:
        axes.legend(fontsize="x-small", framealpha=0.7)


def _recorded(spec: Spec, results: Results) -> list[dict[str, float]]:
    for run in spec.runs:
        for result in results.get(family(cell_of(spec, run, "paper")), []):
            if result.get("layer_norms"):
                found: list[dict[str, float]] = result["layer_norms"]
                return found
    return []


def _norms(axes: Any, norms: Sequence[dict[str, float]]) -> None:
    colours = {"conv": "#0072b2", "norm": "#d55e00", "shortcut": "#009e73", "fc": "#444444"}
    for kind, colour in colours.items():
        names = [
            name for name in norms[0]
            if kind in name and not (kind in ("conv", "norm") and "shortcut" in name)
        ]  # fmt: skip
        for index, name in enumerate(names):
            axes.plot(
                range(1, len(norms) + 1), [epoch.get(name, np.nan) for epoch in norms],
                color=colour, alpha=0.6, linewidth=0.9, label=kind if index == 0 else None,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set(xlabel="epoch", ylabel="gradient norm of a tensor (public mini-sets)")
    axes.legend(fontsize="x-small")
    canvas.tidy(axes)
