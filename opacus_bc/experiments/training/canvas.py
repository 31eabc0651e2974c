"""The look that all pictures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DPI = 130
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f3c8d", "#444444")
_DASHES = ("-", "--", "-.", ":")


def figure(width: float, height: float) -> Any:
    """An empty picture of so many inches, which needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Any, file: Path) -> None:
    """Write a picture, laid out twice: numbers at an axis that the first layout changes may be wider."""
    made.draw_without_rendering()
    made.savefig(file, dpi=DPI)


def style(index: int) -> dict[str, Any]:
    """Colour and dashes of the curve with this number."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": _DASHES[index // len(COLOURS) % 4]}


def tidy(axes: Any) -> None:
    """Take the frame off and put a faint grid in."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def legend_below(axes: Any) -> None:
    """Put the legend below the panel, where it hides no curve."""
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
