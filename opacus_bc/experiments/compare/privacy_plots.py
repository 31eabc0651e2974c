"""Pictures of what is protected and of what the noise does: trade-off curves, and noise against signal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from opacus_bc.accounting import FDPAccountant
from opacus_bc.experiments.compare.looks import budgets_of, looks
from opacus_bc.experiments.compare.summary import Row
from opacus_bc.experiments.training import canvas

_DASHES = ("-", "--", "-.", ":")


def tradeoff_curves(rows: Sequence[Row]) -> Any:
    """What a membership test can achieve: one curve for methods with the same mechanism.

    A curve has the colour of the first of its methods, and dashes for its budget.
    """
    mechanisms: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.epsilon is not None:
            coarse = tuple((float(f"{entry[0]:.3g}"), *entry[1:]) for entry in row.history)
            mechanisms.setdefault((row.budget, coarse), []).append(row)
    if not mechanisms:
        return None
    budgets, styles = budgets_of(rows), looks(rows)
    figure = canvas.figure(10.5, 5.6)
    at = figure.add_subplot()
    alpha = np.linspace(0, 1, 1001)
    at.plot(alpha, 1 - alpha, color="0.6", linestyle=(0, (1, 3)), linewidth=1.2, label="perfect privacy")
    for (budget, _), members in mechanisms.items():
        accountant = FDPAccountant()
        accountant.history = list(members[0].history)
        names = ", ".join(row.name for row in members)
        label = _wrapped(f"ε = {members[0].budget:g}, batch {members[0].batch_size}: {names}")
        dashes = _DASHES[budgets.index(budget) % len(_DASHES)]
        colour = styles[members[0].name].colour
        at.plot(
            alpha,
            accountant.get_tradeoff()(alpha),
            label=label,
            color=colour,
            linestyle=dashes,
            linewidth=1.8,
        )
    at.set(xlabel="false positive rate α", ylabel="false negative rate   (more private ↑)")
    at.set(xlim=(0, 1), ylim=(0, 1))
    at.set_aspect("equal")
    figure.legend(fontsize="small", loc="outside right center", frameon=False)
    canvas.tidy(at)
    return figure


def _wrapped(text: str, width: int = 40) -> str:
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
    high_enough = 5.2  # for the label of the colour bar
    figure = canvas.figure(4.0 + 0.75 * len(layers), max(high_enough, 1.6 + 0.36 * len(shown)))
    at = figure.add_subplot()
    low, high = min(1.0, float(finite.min())), max(2.0, float(finite.max()))
    image = at.imshow(table, norm=LogNorm(low, high), cmap="YlOrRd", aspect="auto")
    several = len(budgets_of(shown)) > 1
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
            at.text(j, i, text, ha="center", va="center", fontsize=10, color=colour)
    figure.colorbar(image, ax=at, label="noise / signal of an update   (lower is better)", shrink=0.9)
    return figure
