"""One training run: a pure function of a frozen `Cell` and the data, resumable after every epoch.

    result = train(Cell(method=METHODS["ic"], dataset="mnist", model="bn_lenet5", epsilon=8.0, delta=1e-5,
                        epochs=10, batch_size=1024, lr=0.8, clip=1.0, seed=0), load("mnist"))

Every epoch's randomness follows from (seed, epoch), so a run that was killed and continued ends with the very
numbers of one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn import functional as F
from torch.utils.data import DataLoader

from opacus_bc.alc.groups import by_parameter
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data
from opacus_bc.experiments.training.result import accuracy, facts, report
from opacus_bc.experiments.training.session import Recipe, Training, prepare
from opacus_bc.public.norms import loss_gradient, mean_group_norms, parameter_norms

_NORM_MINI_SETS = 8  # averaged when layer norms are recorded: a curve of epochs, not a clip bound


def train(
    cell: Cell,
    data: Data,
    *,
    checkpoint: Path | None = None,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    on_partial: Callable[[dict[str, Any]], None] | None = None,
    keep_last: bool = False,
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """Train a cell and report; continues from ``checkpoint`` if that file exists.

    Args:
        cell: What to do.
        data: The data set that ``cell.dataset`` names.
        checkpoint: Rewritten after each epoch; whoever keeps the result may delete it.
        on_epoch: Called with the number of epochs done, at the start (what a checkpoint brought) and after
            each one.
        on_partial: Called after each epoch but the last with what is known so far; see `facts`.
        keep_last: Whether a checkpoint is also written after the last epoch, so that the same cell with more
            epochs can go on from there (where neither noise nor schedules depend on their number).
        recipe: For cells with ``published=True``; see `prepare`.

    Returns:
        Plain numbers, strings and lists, ready for JSON; see `report`.
    """
    training = prepare(cell, data, recipe=recipe)
    data = training.data
    kept = (training.load(checkpoint) if checkpoint is not None else None) or {}
    accuracies: list[float] = list(kept.get("accuracies", []))
    norms: list[dict[str, float]] = list(kept.get("norms", []))
    seconds = float(kept.get("seconds", 0.0))
    on_epoch(len(accuracies))
    for epoch in range(len(accuracies), cell.epochs):
        start = time.perf_counter()
        training.reseed(epoch)
        for x, y in training.batches():
            training.step(x, y)
        seconds += time.perf_counter() - start
        accuracies.append(accuracy(training.model, data.test))
        if cell.record_norms:
            norms.append(_layer_norms(training, epoch))
        if not cell.lr_on_plateau or _stalled(accuracies):
            training.lr_schedule.step()
        if training.clip_schedule is not None:
            training.clip_schedule.step()
        if checkpoint is not None and (keep_last or epoch + 1 < cell.epochs):
            training.save(checkpoint, {"accuracies": accuracies, "seconds": seconds, "norms": norms})
        if on_partial is not None and epoch + 1 < cell.epochs:
            on_partial(facts(training, accuracies, seconds, norms))
        on_epoch(epoch + 1)
    return report(training, accuracies, seconds, norms)


def _stalled(accuracies: list[float]) -> bool:
    """Whether the last of at least three epochs did not raise the test accuracy."""
    return len(accuracies) > 2 and accuracies[-1] <= accuracies[-2]


def _layer_norms(training: Training, epoch: int) -> dict[str, float]:
    """Mean gradient norm of every tensor on public mini-sets of the size that a step uses."""
    names = [name for name, p in training.model.named_parameters() if p.requires_grad]
    measured = parameter_norms(
        training.model,
        names,
        loader=DataLoader(training.data.public, batch_size=training.cell.batch_size),
        gradient=loss_gradient(F.cross_entropy),
        mini_set_size=training.cell.batch_size,
        count=_NORM_MINI_SETS,
        seed=epoch,
    )
    means = mean_group_norms(measured, by_parameter(names)) if measured else {}
    return {name: float(f"{value:.5g}") for name, value in means.items()}
