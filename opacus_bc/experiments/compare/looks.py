"""What the report's pictures and its table share: a colour for each method, axes that show what matters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opacus_bc.experiments.compare.summary import Row

BETTER_RIGHT, BETTER_LEFT, BETTER_UP = "better →", "← better", "better ↑"
TEXT = 13  # points, in pictures that the page shows at 80 pixels an inch
PLAIN = "#8a8f99"
# By family: blues, warm colours, greens; two neighbours differ in lightness too.
_COLOURS: Mapping[str, tuple[str, ...]] = {
    "plain": (PLAIN, "#5b6475", "#b3b8c2"),
    "individual": ("#0072b2", "#56b4e9", "#173f7a", "#7b8fe0", "#00a0b0", "#4b2e83"),
    "batch": ("#d55e00", "#e69f00", "#9c2c10", "#cc79a7", "#7a4a1d", "#f4a582"),
    "mini-sets": ("#009e73", "#8cbf26", "#00573f", "#66c2a5", "#5e7d00", "#2fd18b"),
}
_MARKERS = "osDv^<>PXdp*h8"
_NARROWEST = 2.0  # points of accuracy below the quartile that are always shown


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a method is drawn, everywhere."""

    colour: str
    marker: str


def looks(rows: Iterable[Row]) -> dict[str, Look]:
    """One colour and one marker for each method; no two methods of a report share both."""
    found: dict[str, Look] = {}
    families: dict[str, int] = {}
    for row in rows:
        if row.name not in found:
            place = families.get(row.family, 0)
            families[row.family] = place + 1
            colours = _COLOURS[row.family]
            found[row.name] = Look(
                colour=colours[place % len(colours)], marker=_MARKERS[len(found) % len(_MARKERS)]
            )
    return found


def budgets_of(rows: Iterable[Row]) -> list[float]:
    """All budgets, the smallest first."""
    return sorted({row.budget for row in rows if row.budget is not None})


def window(values: Sequence[float]) -> tuple[float, float]:
    """From where to where an axis of accuracies goes: values far below the others must not squeeze them.

    The axis ends above the largest value and starts below the smallest, but no farther below the lower
    quartile than that is below the top. What lies lower belongs at the edge, with its number (`beyond`).

    >>> window([90.0, 92.0, 94.0, 95.0, 11.0])
    (84.0, 96.0)
    >>> window([60.0, 70.0, 80.0])
    (59.0, 81.0)
    """
    top, quartile = max(values), float(np.quantile(values, 0.25))
    low = max(min(values), quartile - max(top - quartile, _NARROWEST))
    margin = max(0.05 * (top - low), 1.0)
    return float(max(0, math.floor(low - margin))), float(min(101, math.ceil(top + margin)))


def beyond(axes: Any, text: str, place: float, look: Look, *, across: bool) -> None:
    """Mark at the edge of an axis that a method lies below it.

    Args:
        axes: Its limits are set.
        text: Where the method lies.
        place: Where the method is on the other axis.
        look: Of the method.
        across: Whether accuracy goes across; else it goes up.
    """
    edge = axes.get_xlim()[0] if across else axes.get_ylim()[0]
    at = (edge, place) if across else (place, edge)
    axes.plot(*at, marker="<" if across else "v", color=look.colour, markersize=8, clip_on=False)
    axes.annotate(
        text, at, xytext=(9, 0) if across else (0, 8), textcoords="offset points",
        ha="left" if across else "center", va="center" if across else "bottom", fontsize="small",
        color=look.colour,
    )  # fmt: skip
