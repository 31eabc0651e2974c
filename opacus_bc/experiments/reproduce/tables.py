"""Tables of ours | paper | difference, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opacus_bc.accounting.display import rounded_up
from opacus_bc.experiments.reproduce.facts import Fact, Sheet, Value
from opacus_bc.experiments.reproduce.registry import SPECS
from opacus_bc.experiments.reproduce.results import Results, Row, check, rows_of
from opacus_bc.experiments.reproduce.sheets import SHEETS
from opacus_bc.experiments.reproduce.specs import DEFAULT, Published, Spec, Variant

HEAD = ("run", "variant", "epochs", "ours, %", "best epoch, %", "paper, %", "difference", f"ε (δ = {1e-5:g})")
FACT_HEAD = ("fact", "ours", "paper", "difference")
NONE = "–"


def number(value: Value) -> str:
    """A figure with four digits, or words.

    >>> number(7317848.67), number(62.0), number(0.52128), number("no")
    ('7.318e+06', '62', '0.5213', 'no')
    """
    if isinstance(value, str):
        return value
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"


def published(paper: Published | None) -> str:
    """The paper's number as it prints it."""
    if paper is None:
        return NONE
    return f"≈ {paper.value:g}" if paper.about else f"{paper.value:.2f}"


def cells(row: Row) -> tuple[str, ...]:
    """A row as words, in the order of `HEAD`."""
    goal = row.paper.epoch if row.paper else row.spec.epochs
    images = f", {row.limit:,} images" if row.limit else ""
    spread = f" ± {row.spread:.1f}" if row.spread is not None else ""
    return (
        row.run.label,
        row.variant if row.run.mode != "none" else {"code": "code"}.get(row.variant, "no privacy"),
        f"{row.epoch}/{goal}{images}" if row.epoch else f"0/{goal}",
        NONE if row.ours is None else f"{row.ours:.2f}{spread}",
        NONE if row.best is None else f"{row.best:.2f}",
        published(row.paper),
        NONE if row.difference is None else f"{row.difference:+.2f}" + ("" if row.comparable else " *"),
        _privacy(row),
    )


def _privacy(row: Row) -> str:
    if row.epsilon is not None:
        return rounded_up(row.epsilon)
    return NONE if row.privacy == "certified" else row.privacy


def fact_value(fact: Fact) -> str:
    """Our value; what is a certified bound is never rounded down."""
    ours = fact.ours()
    return rounded_up(ours) if fact.key.startswith("eps_") and isinstance(ours, float) else number(ours)


def fact_cells(fact: Fact) -> tuple[str, ...]:
    """A fact as words, in the order of `FACT_HEAD`."""
    ours = fact.ours()
    difference = NONE
    if isinstance(ours, float) and isinstance(fact.paper, float):
        difference = f"{ours - fact.paper:+.2g}" if ours != fact.paper else "0"
    elif fact.paper is not None and isinstance(ours, str):
        difference = "same" if ours == fact.paper else "differs"
    return (fact.name, fact_value(fact), NONE if fact.paper is None else number(fact.paper), difference)


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def shown(rows: Iterable[Row]) -> list[Row]:
    """Rows that were run."""
    return [row for row in rows if row.ours is not None]


def left_out(rows: Iterable[Row]) -> str:
    """Printed numbers of the default variants that were not run, as a sentence; empty if there are none."""
    variants: dict[str, list[str]] = {}
    for row in rows:
        if row.ours is None and row.paper and row.variant in DEFAULT:
            epoch = f" at epoch {row.paper.epoch}" if len(row.run.paper) > 1 else ""
            name = f"{row.run.label}: {published(row.paper)}{epoch}"
            variants.setdefault(name, []).append("" if row.run.mode == "none" else row.variant)
    words = [f"{name} ({', '.join(which)})" if any(which) else name for name, which in variants.items()]
    return f"Not run, with the paper's number: {'; '.join(words)}." if words else ""


def spec_table(spec: Spec, results: Results) -> str:
    """A figure's table and claims in Markdown, and what is missing."""
    rows = rows_of(spec, results)
    run = shown(rows)
    parts = [markdown(HEAD, map(cells, run))] if run else []
    parts += [f"- {claim.words}: {words}." for claim, words in claims_of(spec, rows)]
    missing = left_out(rows) or ("" if run else "Not run; the paper shows curves only.")
    return "\n\n".join([*parts, missing] if missing else parts)


def claims_of(spec: Spec, rows: Sequence[Row]) -> list[tuple[Any, str]]:
    """Every claim of a figure, and what the variants that were run say about it."""
    variants: list[Variant] = list(dict.fromkeys(row.variant for row in rows if row.ours is not None))
    found = []
    for claim in spec.claims:
        answers = {variant: check(claim, rows, variant) for variant in variants}
        said = {variant: words for variant, words in answers.items() if words != "not run"}
        if not claim.labels:
            found.append((claim, "in words and curves only, no number to check"))
        else:
            found.append((claim, "; ".join(f"{v}: {words}" for v, words in said.items()) or "not run"))
    return found


def sheet_table(sheet: Sheet) -> str:
    """A sheet in Markdown."""
    return markdown(FACT_HEAD, map(fact_cells, sheet.facts))


def summary_table(results: Results) -> str:
    """Every number that the paper prints and that we have one for, where ours stands, and what is missing."""
    body: list[tuple[str, ...]] = []
    missing: dict[str, None] = {}
    for spec in SPECS.values():
        for row in rows_of(spec, results):
            if row.paper is None:
                continue
            if row.ours is not None:
                values = cells(row)
                body.append((spec.id, *values[:4], values[5], values[6], row.verdict))
            elif row.variant in DEFAULT:
                missing[f"{spec.id} ({row.variant})"] = None
    table = markdown(("figure", *HEAD[:4], HEAD[5], HEAD[6], "verdict"), body)
    left = f"\n\nWithout a run for some printed number: {', '.join(missing)}." if missing else ""
    return (table if body else "Nothing has been run yet.") + left


def listing() -> list[tuple[str, str, str, str, str]]:
    """Everything in the registry: id, place, what, runs, printed numbers."""
    figures = [
        (
            spec.id,
            spec.where,
            f"{spec.model}, {spec.dataset}: {spec.title}",
            str(len(spec.runs)),
            ", ".join(
                dict.fromkeys(f"{run.label}: {published(paper)}" for run in spec.runs for paper in run.paper)
            )
            or "curves only",
        )
        for spec in SPECS.values()
    ]
    sheets = [
        (
            sheet.id,
            sheet.where,
            sheet.title,
            NONE,
            ", ".join(f"{number(fact.paper)}" for fact in sheet.facts if fact.paper is not None),
        )
        for sheet in SHEETS.values()
    ]
    return figures + sheets
