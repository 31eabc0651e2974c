"""A report of several audits: table, JSON, Markdown and a picture."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opacus_bc.accounting.display import rounded_down, rounded_up
from opacus_bc.audit.bounds import Scores
from opacus_bc.audit.claims import AuditResult

COLUMNS = (
    "audit",
    "setting",
    "repetitions",
    "claimed ε",
    "audited ε ≥",
    "audited ε ≥ (Gaussian)",
    "μ claimed, audited ≥",
    "ratio",
    "verdict",
)
LEGEND = (
    "ε at δ = {delta:g}. Audited figures are lower bounds at 95 % confidence: the first assumes nothing "
    "about the mechanism, the second that it is a sampled Gaussian whose noise is unknown. Ratio: audited "
    "over claimed, of μ for Gaussian claims, else of the second ε if there is one. A verdict against a claim "
    "looks at its whole trade-off curve, at 99.9 % confidence for all audits together."
)
BEGIN, END = "<!-- audit table: begin -->", "<!-- audit table: end -->"


def claimed(value: float | None) -> str:
    """An upper bound in three significant digits, or a dash."""
    return _figure(value, rounded_up)


def audited(value: float | None) -> str:
    """A lower bound in three significant digits, or a dash."""
    return _figure(value, rounded_down)


def _figure(value: float | None, rounded: Callable[[float, int], str]) -> str:
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else rounded(value, 3)


def row(result: AuditResult) -> tuple[str, ...]:
    """The cells of a result's row, in the order of :data:`COLUMNS`."""
    mu = "–"
    if result.claimed_mu is not None:
        mu = f"{claimed(result.claimed_mu)}, {audited(result.audited_mu)}"
    return (
        result.name,
        result.setting + (f"; {result.note}" if result.note else ""),
        f"{result.repetitions:,}",
        claimed(result.claimed_epsilon),
        audited(result.audited_epsilon),
        audited(result.family_epsilon),
        mu,
        f"{result.ratio:.2f}",
        result.verdict,
    )


def legend(results: Sequence[AuditResult]) -> str:
    """What the columns mean."""
    return LEGEND.format(delta=results[0].delta)


def markdown(results: Sequence[AuditResult], command: str) -> str:
    """The table for docs/audit.md, between its marks."""
    lines = [
        BEGIN,
        f"Printed by `{command}`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row(result)) + " |" for result in results),
        "",
        textwrap.fill(legend(results), width=110, break_on_hyphens=False),
        END,
    ]
    return "\n".join(lines)


def update(path: Path, table: str) -> None:
    """Put a fresh table in the place of the old one.

    Raises:
        ValueError: The file has no marks.
    """
    text = path.read_text(encoding="utf-8")
    found = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    if not found.search(text):
        raise ValueError(f"{path} has no lines {BEGIN} and {END} to put the table between")
    path.write_text(found.sub(lambda _: table, text), encoding="utf-8")


def as_json(results: Sequence[AuditResult]) -> str:
    """Every figure, for machines."""

    def clean(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    facts = [{key: clean(value) for key, value in result.facts().items()} for result in results]
    return json.dumps(facts, indent=2, ensure_ascii=False)


def print_table(results: Sequence[AuditResult], width: int | None) -> None:
    """The table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="audits", title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if place < 2 else "right", overflow="fold")
    for result in results:
        table.add_row(*row(result))
    console = Console(width=width)
    console.print(table)
    console.print(legend(results))


def empirical_curve(scores: Scores) -> tuple[Any, Any]:
    """False positive and false negative rates of all thresholds (point estimates, for the picture)."""
    both = np.concatenate([scores.present, scores.absent])
    levels = np.unique(np.concatenate([[-np.inf, np.inf], np.quantile(both, np.linspace(0, 1, 500))]))
    present, absent = np.sort(scores.present), np.sort(scores.absent)
    false_negative = np.searchsorted(present, levels, side="left") / len(present)
    false_positive = 1 - np.searchsorted(absent, levels, side="left") / len(absent)
    return false_positive, false_negative


def plot(results: Sequence[AuditResult], path: Path) -> None:
    """Score histograms, and the empirical against the certified trade-off curve, one row for each audit.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'opacus-bc[experiments]'") from error
    shown = [result for result in results if result.scores is not None and result.curve is not None]
    rows = max(1, len(shown))
    drawing = Figure(figsize=(9, 3 * rows))
    FigureCanvasAgg(drawing)
    drawing.subplots_adjust(
        left=0.05, right=0.98, top=1 - 0.3 / (3 * rows), bottom=0.5 / (3 * rows), hspace=0.45, wspace=0.18
    )
    alpha = np.linspace(0, 1, 501)
    for place, result in enumerate(shown):
        left = drawing.add_subplot(len(shown), 2, 2 * place + 1)
        scores, curve = result.scores, result.curve
        assert scores is not None
        assert curve is not None
        both = np.concatenate([scores.present, scores.absent])
        both = both[np.isfinite(both)]
        low, high = np.quantile(both, [0.0005, 0.9995])
        bins = np.linspace(low, high if high > low else low + 1, 60).tolist()
        for values, name in ((scores.absent, "without canary"), (scores.present, "with canary")):
            left.hist(np.clip(values, low, high), bins, density=True, alpha=0.55, label=name)
        left.set(title=f"{result.name}: {result.attack}", xlabel="score", yticks=[])
        left.legend(fontsize="x-small")
        right = drawing.add_subplot(len(shown), 2, 2 * place + 2)
        right.plot(alpha, 1 - alpha, color="0.7", linestyle="--", label="perfect privacy")
        right.plot(alpha, curve(alpha), label="certified: nothing may lie below")
        right.plot(*empirical_curve(scores), linewidth=1, label="measured")
        right.set(xlabel="false positive rate", ylabel="false negative rate", xlim=(0, 1), ylim=(0, 1))
        right.set_title(result.setting, fontsize="small")
        right.legend(fontsize="x-small")
    drawing.savefig(path, dpi=100)
