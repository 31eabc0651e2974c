"""Training what is missing: one kept file a run, whatever its number of epochs, which a longer run continues.

Neither the noise nor the schedules of these runs depend on the number of epochs, so a run of 50 epochs passes
through the weights of one of 10: results are kept under a key without epochs and only ever grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opacus_bc.experiments.reproduce.as_published import published
from opacus_bc.experiments.reproduce.specs import Spec, Variant, cell_of, variants_of
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Source, limited
from opacus_bc.experiments.training.pool import Progress, run_all
from opacus_bc.experiments.training.progress import Bar
from opacus_bc.experiments.training.store import Store, key, read_json, write_json
from opacus_bc.experiments.training.train import train

Job = tuple[str, Cell]  # what a terminal calls it, and what it is


def jobs_of(
    specs: Sequence[Spec],
    *,
    variants: tuple[Variant, ...],
    seeds: int = 1,
    epochs: int | None = None,
    limit: int | None = None,
    core: bool = False,
    labels: Sequence[str] = (),
) -> list[Job]:
    """Every training run of some figures, each once, in their order; the first seed of all comes first.

    Raises:
        ValueError: A label is that of no run.
    """
    for label in labels:
        known = dict.fromkeys(run.label for spec in specs for run in spec.runs)
        if label not in known:
            raise ValueError(f"--runs {label!r}: not among {', '.join(map(repr, known))}")
    found: dict[Cell, str] = {}
    for seed in range(seeds):
        for spec in specs:
            for run in spec.runs:
                if (core and not run.core) or (labels and run.label not in labels):
                    continue
                for variant in variants_of(run, variants):
                    cell = cell_of(spec, run, variant, seed=seed, epochs=epochs, limit=limit)
                    found.setdefault(cell, f"{spec.id}, {run.label}, {variant}, seed {seed}")
    return [(name, cell) for cell, name in found.items()]


def family(cell: Cell) -> str:
    """The key of everything but seed, epochs and limit: what a row of a table is about."""
    return key(replace(cell, seed=0, epochs=0, limit=None))


def kept_epochs(result: dict[str, Any] | None) -> int:
    """How many epochs a kept result has."""
    return 0 if result is None else len(result["accuracies"])


def run_cell(cell: Cell, on_epoch: Progress, *, root: Path, data: Path, download: bool) -> dict[str, Any]:
    """Train a cell from where it stands and keep its result; every finished epoch is kept at once."""
    store, timeless = Store(root), replace(cell, epochs=0)
    path = store.cell(timeless)

    def keep(result: dict[str, Any]) -> None:
        if kept_epochs(result) >= kept_epochs(read_json(path)):
            write_json(path, result | {"family": family(cell)})

    source = Source(dataset=cell.dataset, root=data, download=download)
    result = train(
        cell,
        limited(source.load(), cell.limit),
        checkpoint=store.checkpoint(timeless),
        on_epoch=on_epoch,
        on_partial=keep,
        keep_last=True,
        recipe=published,
    )
    keep(result)
    return result


def missing(jobs: Iterable[Job], store: Store) -> list[Job]:
    """The runs that have fewer epochs than they should."""
    return [
        (name, cell)
        for name, cell in jobs
        if kept_epochs(read_json(store.cell(replace(cell, epochs=0)))) < cell.epochs
    ]


def execute(
    wanted: Sequence[Job], *, store: Store, data: Path, download: bool, processes: int
) -> dict[str, str]:
    """Train what is missing; returns the reasons of failures by name."""
    failures: dict[str, str] = {}
    left = missing(wanted, store)
    work = partial(run_cell, root=store.root, data=data, download=download)
    cells = [cell for _, cell in left]
    with Bar("training", [cell.epochs for cell in cells], kept=len(wanted) - len(left)) as bar:
        for index, result in run_all(work, cells, jobs=processes, on_progress=bar.report):
            name = left[index][0]
            if isinstance(result, Exception):
                failures[name] = f"{type(result).__name__}: {result}".splitlines()[0]
            bar.finished(name, result)
    return failures


def load_results(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Everything that is kept, by family."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((store.root / "cells").glob("*.json")):
        result = read_json(path)
        if result is not None and "family" in result:
            found.setdefault(result["family"], []).append(result)
    return found
