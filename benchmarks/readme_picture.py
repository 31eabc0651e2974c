"""Draws README's picture from committed results: where BatchNorm pays, and what a step costs.

    python benchmarks/readme_picture.py        # writes docs/images/readme.png

Left: `opacus-bc compare --weights` (results/compare/pretrained-cifar10). Right: performance.py, ResNet-18.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "readme.png"
BLUE, GREY, LIGHT, ORANGE = "#1f5fa8", "#666666", "#a8a8a8", "#c8641e"
ACCURACIES = {
    "ic-frozen": ("opacus_bc, BatchNorm and head trained", BLUE, "o"),
    "stock-conv": ("Opacus, BatchNorm all frozen, rest trained", GREY, "s"),
    "stock-head": ("Opacus, head trained", LIGHT, "D"),
    "swap": ("Opacus, BatchNorm swapped for GroupNorm", ORANGE, "v"),
}
LIFTED = {"stock-conv": 3, "ic-frozen": -11}  # labels that would lie on one another, in points
STEPS = {
    "IC + public BatchNorm, bk": ("one backward,\nBatchNorm in place", BLUE),
    "Opacus, hooks": ("Opacus, hooks,\nGroupNorm", ORANGE),
    "Opacus, ghost": ("Opacus, ghost,\nGroupNorm", LIGHT),
}


def accuracies(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Test accuracy at every budget that was trained."""
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    for name, (title, colour, mark) in ACCURACIES.items():
        found = [(row["budget"], row["mean"]) for row in rows if row["name"] == name]
        for budget, mean in found:
            place = budgets.index(budget)
            axes.plot(
                place, mean, mark, color=colour, markersize=9, label=title if budget == budgets[-1] else None
            )
            axes.annotate(
                f"{mean:.1f}",
                (place, mean),
                (9, LIFTED.get(name, -4)),
                textcoords="offset points",
                color=colour,
            )
    axes.set_xticks(range(len(budgets)), [f"ε = {budget:g}" for budget in budgets])
    axes.set_xlim(-0.4, len(budgets) - 0.4)
    axes.set_ylabel("test accuracy, %")
    axes.set_title("CIFAR-10 from ImageNet weights", loc="left")
    axes.legend(frameon=False, fontsize=9)


def steps(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Time and memory of a step over plain SGD's."""
    found = {row["method"]: row for row in rows if row["network"] == "resnet18"}
    for place, (name, (title, colour)) in enumerate(STEPS.items()):
        for shift, key, shade in ((-0.2, "time", 1.0), (0.2, "memory", 0.55)):
            value = found[name][key]
            axes.bar(place + shift, value, 0.38, color=colour, alpha=shade)
            axes.annotate(
                f"{value:.2f}", (place + shift, value), (0, 3), textcoords="offset points", ha="center"
            )
        axes.text(place, -0.9, title, ha="center", va="top", fontsize=9)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks([])
    axes.set_ylabel("× plain SGD")
    axes.set_title("A step of ResNet-18: time (dark), memory (light)", loc="left")


def main() -> None:
    """Draw it."""
    compared = json.loads((RESULTS / "compare" / "pretrained-cifar10" / "compare.json").read_text())["rows"]
    measured = json.loads((RESULTS / "performance.json").read_text())["networks"]["rows"]
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), width_ratios=(1.15, 1))
    accuracies(left, compared)
    steps(right, measured)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)
    print(PICTURE)


if __name__ == "__main__":
    main()
