"""One training run: a pure function of a frozen `Cell` and the data, resumable after every epoch.

    result = train(Cell(method=METHODS["ic"], dataset="mnist", model="bn_lenet5", epsilon=8.0, delta=1e-5,
                        epochs=10, batch_size=1024, lr=0.8, clip=1.0, seed=0), load("mnist"))

Every epoch's randomness follows from (seed, epoch), so a run that was killed and continued ends with the very
numbers of one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.clipping import Adjacency, noise_against_individual_clipping
from opacus_bc.experiments.cells import Cell
from opacus_bc.experiments.data import Data
from opacus_bc.experiments.noise_to_signal import noise_to_signal, release_blocks
from opacus_bc.experiments.session import Training, prepare
from opacus_bc.experiments.store import read_checkpoint, write_checkpoint
from opacus_bc.layer_groups import by_parameter
from opacus_bc.layer_norms import loss_gradient, mean_group_norms, parameter_norms

_NORM_MINI_SETS = 8  # averaged when layer norms are recorded: a curve of epochs, not a clip bound


def accuracy(model: nn.Module, part: TensorDataset) -> float:
    """Per cent of the images that are recognised; leaves the model in training mode."""
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in DataLoader(part, batch_size=1000):
            right += int((model(x).argmax(dim=1) == y).sum())
    model.train()
    return 100.0 * right / len(part)


def train(
    cell: Cell,
    data: Data,
    *,
    checkpoint: Path | None = None,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    on_partial: Callable[[dict[str, Any]], None] | None = None,
    keep_last: bool = False,
) -> dict[str, Any]:
    """Train a cell and report; continues from ``checkpoint`` if that file exists.

    Args:
        cell: What to do.
        data: The data set that ``cell.dataset`` names.
        checkpoint: Rewritten after each epoch; whoever keeps the result may delete it.
        on_epoch: Called with the number of epochs done, at the start (what a checkpoint brought) and after
            each one.
        on_partial: Called after each epoch but the last with what is known so far; see `_facts`.
        keep_last: Whether a checkpoint is also written after the last epoch, so that the same cell with more
            epochs can go on from there (where neither noise nor schedules depend on their number).

    Returns:
        Plain numbers, strings and lists, ready for JSON; see `_report`.
    """
    training = prepare(cell, data)
    accuracies: list[float] = []
    norms: list[dict[str, float]] = []
    seconds = 0.0
    kept = None if checkpoint is None else read_checkpoint(checkpoint)
    if kept is not None:
        training.load_state_dict(kept["training"])
        accuracies, seconds = list(kept["accuracies"]), float(kept["seconds"])
        norms = list(kept.get("norms", []))
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
            state = {"training": training.state_dict(), "accuracies": accuracies, "seconds": seconds}
            write_checkpoint(checkpoint, state | ({"norms": norms} if norms else {}))
        if on_partial is not None and epoch + 1 < cell.epochs:
            on_partial(_facts(training, accuracies, seconds, norms))
        on_epoch(epoch + 1)
    return _report(training, accuracies, seconds, norms)


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


def _facts(
    training: Training, accuracies: list[float], seconds: float, norms: list[dict[str, float]]
) -> dict[str, Any]:
    """What a run so far has brought.

    ``accuracies`` are test accuracies after each epoch, ``history`` what the accountant holds, ``epsilon``
    its certified upper bound (None where there is none).
    """
    cell, data, engine = training.cell, training.data, training.engine
    method = cell.method
    report: dict[str, Any] = {
        "cell": asdict(cell),
        "accuracies": list(accuracies),
        "seconds_per_epoch": seconds / max(1, len(accuracies)),
        "adjacency": "none" if cell.published else method.adjacency,
        "private_size": len(data.private),
        "public_size": len(data.public),
        "test_size": len(data.test),
        "majority_share": _majority(data.test),
        "epsilon": None,
    }
    if norms:
        report["layer_norms"] = norms
    if training.optimizer is training.plain_optimizer:
        return report
    blocks = release_blocks(training.optimizer, training.model)
    report |= {
        "protected": engine is not None and method.batch_norm != "unprotected",
        "noise_multiplier": float(training.optimizer.noise_multiplier),
        "groups": len(blocks),
    }
    if engine is None:
        return report
    epsilon = engine.get_epsilon(cell.delta, allow_unprotected=True)
    return report | {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "sigma_eff": float(
            getattr(training.optimizer, "effective_noise_multiplier", training.optimizer.noise_multiplier)
        ),
        "noise_factor": 1.0
        if method.clipping == "flat"
        else noise_against_individual_clipping(_unit(cell), adjacency=cast(Adjacency, method.adjacency)),
        "history": [list(entry) for entry in engine.accountant.history],
    }


def _report(
    training: Training, accuracies: list[float], seconds: float, norms: list[dict[str, float]]
) -> dict[str, Any]:
    """The result of a finished run: `_facts`, and what is measured on its last weights.

    ``public_accuracy`` is that on the public part (whose labels serve for nothing but ALC's bounds;
    ``--tune`` selects by it), ``layers`` the noise-to-signal ratios.
    """
    cell, data = training.cell, training.data
    report = _facts(training, accuracies, seconds, norms)
    report["public_accuracy"] = accuracy(training.model, data.public)
    if training.optimizer is training.plain_optimizer:
        return report
    plain = training.model
    if training.engine is not None:
        plain = training.engine.finalize(training.forward)  # type: ignore[arg-type]  # Opacus's wrapper too
    report["layers"] = noise_to_signal(
        plain,
        release_blocks(training.optimizer, training.model),
        data.public,
        unit=_unit(cell),
        vectors=cell.batch_size // _unit(cell),
        batch_statistics=cell.method.clipping == "batch",
    )
    return report


def _unit(cell: Cell) -> int:
    """Samples that are clipped together."""
    return 1 if cell.method.clipping == "flat" else cell.method.mini_set or cell.batch_size


def _majority(part: TensorDataset) -> float:
    """Per cent that always answering with the most frequent class gets right."""
    counts = torch.bincount(part.tensors[1])
    return 100.0 * float(counts.max()) / len(part)
