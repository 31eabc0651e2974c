"""`opacus-bc reproduce`: train what is missing of the paper's figures, and show ours next to theirs."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opacus_bc.accounting.events import check_count
from opacus_bc.experiments.reproduce import drawings, tables
from opacus_bc.experiments.reproduce import page as page_module
from opacus_bc.experiments.reproduce.facts import Sheet
from opacus_bc.experiments.reproduce.guarantees import GUARANTEES
from opacus_bc.experiments.reproduce.registry import select
from opacus_bc.experiments.reproduce.results import Results, Row, rows_of
from opacus_bc.experiments.reproduce.runs import execute, jobs_of, load_results, missing
from opacus_bc.experiments.reproduce.specs import DEFAULT, VARIANTS, Spec, Variant
from opacus_bc.experiments.training.data import Source
from opacus_bc.experiments.training.store import Store, write_file

INTERRUPTED = 130
LEGEND = (
    "epochs: ours/paper's. * fewer epochs or images than the paper's: no verdict. Variants: "
    + "; ".join(f"{name}: {words}" for name, words in VARIANTS.items())
    + "."
)


def reproduce(
    *,
    only: tuple[str, ...] = (),
    list: bool = False,
    variants: tuple[Variant, ...] = DEFAULT,
    core: bool = False,
    runs: tuple[str, ...] = (),
    epochs: int | None = None,
    limit: int | None = None,
    seeds: int = 1,
    out: Path = Path("runs/reproduce"),
    data: Path = Path("data"),
    download: bool = False,
    jobs: int | None = None,
    train: bool = True,
    page: Path | None = None,
    json: bool = False,
) -> int:
    """Every figure and table of the paper, ours next to theirs; what is kept is not trained again.

    Args:
        only: figures, tables or models by name, the most important first (fig11, table2, guarantees,
            bn_lenet5). Default: all.
        list: name everything and stop.
        variants: paper (as printed, not private), code (with choices of the authors' public code, not
            private), sound (certified epsilon), unprotected (Poisson draws, leaking BatchNorm).
        core: only the runs behind the paper's main numbers.
        runs: only the runs with these labels, such as "C = 0.2".
        epochs: passes over the data. Default: the paper's. Asking for more later continues the same runs.
        limit: training images (public and private), and the same share of the test images. Default: all.
        seeds: runs of each setting.
        out: folder for results, tables and pictures.
        data: folder with the data sets' files.
        download: let torchvision download what is missing.
        jobs: processes, with one thread each. Default: one for each core.
        train: train what is missing; --no-train only reports.
        page: write the numbers and pictures of this Markdown page anew from what is kept; nothing is trained.
        json: print JSON instead of tables.
    """
    specs, sheets = select(only)
    if list:
        _print_listing()
        return 0
    for name, value in (("--epochs", epochs), ("--jobs", jobs), ("--seeds", seeds)):
        if value is not None:
            check_count(name, value, 1)
    if limit is not None and check_count("--limit", limit, 1) < 100:
        raise ValueError(f"--limit {limit}: must be at least 100, of which a tenth is public")
    if not variants:
        raise ValueError(f"--variants: give at least one of {', '.join(VARIANTS)}")
    store = Store(out)
    if page is not None:
        changed = page_module.refresh(page, load_results(store))
        print(f"{page}: {'written' if changed else 'up to date'}")
        return 0
    failures: dict[str, str] = {}
    if train and specs:
        wanted = jobs_of(
            specs, variants=variants, seeds=seeds, epochs=epochs, limit=limit, core=core, labels=runs
        )
        store.check_writable()
        for name in dict.fromkeys(cell.dataset for _, cell in missing(wanted, store)):
            Source(dataset=name, root=data, download=download).load()  # tell now that files are missing
        try:
            failures = execute(
                wanted, store=store, data=data, download=download, processes=jobs or os.cpu_count() or 1
            )
        except KeyboardInterrupt:
            print(
                f"opacus-bc: interrupted; what is finished is kept in {out}, and the same command continues "
                "there",
                file=sys.stderr,
            )
            return INTERRUPTED
    results = load_results(store)
    if json:
        print(json_module.dumps(_as_json(specs, sheets, results), indent=1, allow_nan=False))
    else:
        _print(specs, sheets, results)
    if any(results.values()):
        _write(specs, sheets, results, out)
    for name, reason in failures.items():
        print(f"opacus-bc: {name} could not be trained: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 150)


def _table(title: str, head: Sequence[str], body: Sequence[Sequence[str]], words: int = 2) -> Any:
    """A table whose first ``words`` columns are words and whose others are figures."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < words else "right", overflow="fold")
    for row in body:
        table.add_row(*row)
    return table


def _print_listing() -> None:
    head = ("id", "where", "what", "runs", "the paper prints")
    _console().print(_table("Figures, tables and guarantees of the paper", head, tables.listing(), words=5))


def _print(specs: Sequence[Spec], sheets: Sequence[Sheet], results: Results) -> None:
    console = _console()
    for spec in specs:
        rows = rows_of(spec, results)
        title = f"{spec.id}: {spec.title} ({spec.where})"
        console.print(_table(title, tables.HEAD, [tables.cells(row) for row in tables.shown(rows)]))
        for claim, words in tables.claims_of(spec, rows):
            console.print(f"  {claim.words}: {words}")
        console.print("  " + tables.left_out(rows), style="dim")
    if specs:
        console.print(LEGEND, style="dim")
    for sheet in sheets:
        body = [tables.fact_cells(fact) for fact in sheet.facts]
        console.print(_table(f"{sheet.id}: {sheet.title} ({sheet.where})", tables.FACT_HEAD, body))


def _write(specs: Sequence[Spec], sheets: Sequence[Sheet], results: Results, folder: Path) -> None:
    """Write report.md and a picture a figure."""
    parts = ["# Ours next to the paper's", "", LEGEND]
    for spec in specs:
        parts += ["", f"## {spec.id}: {spec.title} ({spec.where})", "", tables.spec_table(spec, results)]
        picture = drawings.draw(spec, results, folder)
        if picture is not None:
            parts += ["", f"![{spec.title}]({picture.name})"]
    for sheet in sheets:
        parts += ["", f"## {sheet.id}: {sheet.title} ({sheet.where})", "", tables.sheet_table(sheet)]
        if sheet is GUARANTEES:
            parts += ["", f"![{sheet.title}]({drawings.draw_guarantees(folder).name})"]
    write_file(folder / "report.md", ("\n".join(parts) + "\n").encode())


def _as_json(specs: Sequence[Spec], sheets: Sequence[Sheet], results: Results) -> dict[str, Any]:
    def row(one: Row) -> dict[str, Any]:
        kept = {name: getattr(one, name) for name in ("variant", "ours", "spread", "best", "seeds", "epoch")}
        paper = None if one.paper is None else asdict(one.paper)
        return kept | {
            "run": one.run.label, "limit": one.limit, "paper": paper, "difference": one.difference,
            "verdict": one.verdict, "epsilon": one.epsilon, "privacy": one.privacy,
        }  # fmt: skip

    return {
        "figures": {
            spec.id: {"title": spec.title, "where": spec.where, "rows": [*map(row, rows_of(spec, results))]}
            for spec in specs
        },
        "sheets": {
            sheet.id: {f.key: {"name": f.name, "ours": f.ours(), "paper": f.paper} for f in sheet.facts}
            for sheet in sheets
        },
    }
