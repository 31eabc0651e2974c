"""`opacus-bc compare`: every way to keep (or lose) BatchNorm at one (epsilon, delta), in one table.

Each (budget, method, seed) is a cell; finished cells are kept in ``--out``, unfinished ones continue at their
last epoch, and a second run of the same command only writes the report again.
"""

from __future__ import annotations

import json as json_module
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from opacus_bc.experiments.compare import presets, report
from opacus_bc.experiments.compare.facts import facts
from opacus_bc.experiments.compare.plan import Plan, make_plan
from opacus_bc.experiments.compare.presets import Setting
from opacus_bc.experiments.compare.request import FineTuning, Images
from opacus_bc.experiments.compare.summary import cost_name, make_rows
from opacus_bc.experiments.training import measure
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data, Source, limited
from opacus_bc.experiments.training.pool import Progress, run_all
from opacus_bc.experiments.training.pretrained import trial_sizes
from opacus_bc.experiments.training.progress import Bar
from opacus_bc.experiments.training.store import Store, read_json, write_json
from opacus_bc.experiments.training.train import train

INTERRUPTED = 130


def compare(
    *,
    dataset: str = "digits",
    model: str | None = None,
    epsilon: tuple[float, ...] = (8.0,),
    delta: float | Literal["auto"] = "auto",
    methods: tuple[str, ...] = (),
    seeds: int = 3,
    epochs: int | None = None,
    tune: bool = False,
    out: Path | None = None,
    data: Path | None = None,
    download: bool = False,
    jobs: int | None = None,
    costs: bool = True,
    json: bool = False,
    weights: Path | None = None,
    image_size: int | None = None,
    train: Literal["all", "norm+head", "head"] = "all",
    train_from: str = "",
    public: Path | None = None,
    limit: int | None = None,
    target: str | None = None,
) -> int:
    """Which mode should I use, and what does it cost me? Trains every method at the same certified budget.

    Args:
        dataset: digits (embedded), mnist, fashion-mnist, cifar10, a folder of images, one subfolder a class,
            or a CSV file of numbers (with --target). A folder with subfolders train and test, each with one
            subfolder a class, is taken as it is split; of any other a sixth, drawn at random, is held out as
            test images. A tenth of the training samples, drawn at random, serves as public data and is not
            protected; the rest is private.
        model: smallnet, bn_lenet5, convnet, resnet18, mlp (for CSV files), timm:NAME (with --weights), or
            package.module:factory of your own. Default: what suits the data.
        epsilon: the budget; several make several tables.
        delta: the delta of the budget; auto takes the largest power of ten below 2/(3N), N being the number
            of private samples.
        methods: which ones, by name or group; no-dp is always among them. IC clips the gradient of every
            sample, BC that of the batch, GBC those of mini-sets of s samples; ALC gives every layer a bound.
            Default: those marked *. Those marked w need --weights, with which there are other defaults.
        seeds: runs of each method.
        epochs: passes over the private data. Default: the data set's.
        tune: first search learning rate and clip bound of every method, with equal effort, on seed 0. This
            tuning on private data is not accounted. With --weights it takes public images alone: three
            learning rates each, in one epoch with the noise of the largest budget.
        out: folder for results and report. Default: runs/compare-DATASET.
        data: folder with the files of mnist, fashion-mnist or cifar10; your own images go to --dataset.
            Default: data.
        download: let torchvision download what is missing.
        jobs: processes, with one thread each. Default: one for each core.
        costs: measure time and memory relative to plain SGD; --no-costs leaves them out.
        json: print the report as JSON instead of a table.
        weights: fine-tune: a state dict to start from, with another head if need be.
        image_size: pixels to which images are enlarged for such a network. Default: 96.
        train: what moves: all, norm+head (weights and biases of normalisation layers, and the head), or head.
        train_from: name of the first layer that is trained. What lies before it is frozen, and its outputs
            are computed once and kept beside the results.
        public: folder of public images, one subfolder a class, to go with a folder of private ones.
        limit: use so many training images, public ones included, and as small a part of the test images.
        target: the column of a CSV file that holds the classes; the other columns must be numbers.
    """
    plan = make_plan(
        images=Images(dataset=dataset, data=data, download=download, public=public, limit=limit,
                      target=target),
        start=FineTuning(weights=weights, image_size=image_size, train=train, train_from=train_from),
        model=model, epsilon=epsilon, delta=delta, methods=methods, seeds=seeds, epochs=epochs, out=out,
        jobs=jobs,
    )  # fmt: skip
    objection = plan.objection_to_delta()
    if objection is not None:
        print(f"opacus-bc: warning: {objection}", file=sys.stderr)
    try:
        comparison = execute(plan, tune=tune, costs=costs)
    except KeyboardInterrupt:
        print(
            f"opacus-bc: interrupted; what is finished is kept in {plan.store.root}, and the same command "
            "continues there",
            file=sys.stderr,
        )
        return INTERRUPTED
    files = report.write(comparison, plan.store.root)
    if json:
        print(json_module.dumps(report.as_json(comparison), indent=1, allow_nan=False))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 150)
        report.print_table(comparison, console)
        console.print(
            f"\nWritten: {plan.store.root / 'report.html'} and {len(files) - 1} more files beside it."
        )
    for name, reason in comparison.failures.items():
        print(f"opacus-bc: {name} could not be trained: {reason}", file=sys.stderr)
    return 1 if comparison.failures else 0


def execute(plan: Plan, *, tune: bool, costs: bool) -> report.Comparison:
    """Train what is missing, measure what is missing, and put the report together."""
    found = limited(plan.source.load(), plan.limit)
    size = len(found.private)
    settings = {
        method.name: presets.fitted(
            presets.scaled(plan.preset.setting(method), plan.preset.private_size, size)
            if method.private
            else plan.preset.setting(method),
            method,
            size,
        )
        for method in plan.methods
    }
    chosen = {(method.name, budget): settings[method.name] for method, budget in plan.rows()}
    failures: dict[str, str] = {}
    if tune and plan.weights:
        chosen |= _tuned_on_public(plan, settings, found, failures)
    elif tune:
        trials = {
            (method.name, budget): [
                plan.cell(method, budget, setting, 0)
                for setting in presets.candidates(settings[method.name], method)
            ]
            for method, budget in plan.rows()
        }
        results = _run(plan, [cell for cells in trials.values() for cell in cells], "tuning", failures)
        for which, cells in trials.items():
            done = [cell for cell in cells if cell in results]
            if done:
                best = max(done, key=lambda cell: results[cell]["public_accuracy"])
                chosen[which] = Setting(batch_size=best.batch_size, lr=best.lr, clip=best.clip)
    table = [
        [plan.cell(method, budget, chosen[method.name, budget], seed) for seed in range(plan.seeds)]
        for method, budget in plan.rows()
    ]
    # Seeds outermost: an interrupted comparison has every method before it has every seed.
    results = _run(plan, [cells[seed] for seed in range(plan.seeds) for cells in table], "training", failures)
    finished = [results[cell] for cells in table for cell in cells if cell in results]
    if not finished:
        raise ValueError("no method could be trained: " + "; ".join(f"{k}: {v}" for k, v in failures.items()))
    measured = _measure(plan, table, results) if costs else {}
    return report.Comparison(
        facts=facts(plan, found, tune=tune),
        rows=make_rows(finished, measured),
        tuned=tune,
        tuned_on_public=tune and bool(plan.weights),
        public_apart=found.public_apart,
        failures=failures,
    )


def _run(
    plan: Plan, cells: Iterable[Cell], what: str, failures: dict[str, str]
) -> dict[Cell, dict[str, Any]]:
    """Results of all cells that can be trained; those that are kept are not trained again."""
    results: dict[Cell, dict[str, Any]] = {}
    missing: list[Cell] = []
    for cell in dict.fromkeys(cells):
        kept = read_json(plan.store.cell(cell))
        if kept is None:
            missing.append(cell)
        else:
            results[cell] = kept
    work = partial(run_cell, root=plan.store.root, source=plan.source)
    with Bar(what, [cell.epochs for cell in missing], kept=len(results)) as bar:
        for index, result in run_all(work, missing, jobs=plan.jobs, on_progress=bar.report):
            cell = missing[index]
            if isinstance(result, Exception):
                failures[cell.method.title] = f"{type(result).__name__}: {result}".splitlines()[0]
            else:
                results[cell] = result
            bar.finished(f"{cell.method.title}, seed {cell.seed}", result)
    return results


def run_cell(cell: Cell, on_epoch: Progress, *, root: Path, source: Source) -> dict[str, Any]:
    """Train a cell from where it stands and keep its result."""
    store = Store(root)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".* is no less than 1/"
        )  # told once, with the option's name
        result = train(cell, source.load(), checkpoint=store.checkpoint(cell), on_epoch=on_epoch)
    write_json(store.cell(cell), result)
    store.drop_checkpoint(cell)
    return result


def _tuned_on_public(
    plan: Plan, settings: dict[str, Setting], found: Data, failures: dict[str, str]
) -> dict[tuple[str, float | None], Setting]:
    """The settings that did best in short trials on public images at the largest budget, for every budget."""
    sizes = len(found.private), trial_sizes(len(found.public))[0]
    trials: dict[str, dict[Cell, Setting]] = {}
    for method in plan.methods:
        if not method.private:
            continue
        budget = plan.budgets[-1]
        tried = presets.candidates(settings[method.name], method)[: presets.TRIALS]
        trials[method.name] = {plan.trial(method, budget, setting, sizes): setting for setting in tried}
    results = _run(plan, [cell for cells in trials.values() for cell in cells], "trials", failures)
    best = {
        name: cells[max(done, key=lambda cell: results[cell]["accuracies"][-1])]
        for name, cells in trials.items()
        if (done := [cell for cell in cells if cell in results])
    }
    return {(m.name, budget): best[m.name] for m, budget in plan.rows() if m.name in best}


def _measure(
    plan: Plan, table: Sequence[Sequence[Cell]], results: dict[Cell, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Time and memory of every row, each kept once it is known."""
    firsts = [next((cell for cell in cells if cell in results), None) for cells in table]
    known = {cell: _costing(cell) for cell in firsts if cell is not None}
    baseline = next((cost for cost in known.values() if not cost.method.private), None)
    if baseline is None:
        return {}
    missing = [cost for cost in dict.fromkeys(known.values()) if read_json(plan.store.cost(cost)) is None]
    with Bar("measuring", [1] * len(missing)) as bar:
        work = partial(measure_cell, baseline=baseline, source=plan.source)
        for index, costs in run_all(work, missing, jobs=plan.jobs, on_progress=bar.report):
            if isinstance(costs, Exception):
                name = missing[index].method.title
                print(f"opacus-bc: the cost of {name} could not be measured: {costs}", file=sys.stderr)
            else:
                write_json(plan.store.cost(missing[index]), costs)
    found = {cell: read_json(plan.store.cost(cost)) or {} for cell, cost in known.items()}
    return {cost_name(cell.epsilon, cell.method.name): cost for cell, cost in found.items()}


def _costing(cell: Cell) -> Cell:
    """The same cell with any noise given: a calibration must not be measured, and no noise costs more."""
    return replace(cell, epsilon=None, noise_multiplier=1.0 if cell.method.private else None, seed=0)


def measure_cell(cell: Cell, on_progress: Progress, *, baseline: Cell, source: Source) -> dict[str, float]:
    """Time and peak memory of a cell, relative to the baseline's."""
    data = source.load()
    own, plain = (measure.peak_bytes(which, data) for which in (cell, baseline))
    times = measure.time_ratio(cell, baseline, data)
    on_progress(1)
    return {**times, "memory": own / plain, "peak_mib": own / 2**20}
