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
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.clipping import Adjacency, noise_against_individual_clipping
from opacus_bc.experiments.cells import Cell
from opacus_bc.experiments.data import Data
from opacus_bc.experiments.noise_to_signal import noise_to_signal, release_blocks
from opacus_bc.experiments.session import Training, prepare
from opacus_bc.experiments.store import read_checkpoint, write_checkpoint


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
) -> dict[str, Any]:
    """Train a cell and report; continues from ``checkpoint`` if that file exists.

    Args:
        cell: What to do.
        data: The data set that ``cell.dataset`` names.
        checkpoint: Rewritten after each epoch; whoever keeps the result may delete it.
        on_epoch: Called with the number of epochs done, at the start (what a checkpoint brought) and after
            each one.

    Returns:
        Plain numbers, strings and lists, ready for JSON; see `_report`.
    """
    training = prepare(cell, data)
    accuracies: list[float] = []
    seconds = 0.0
    kept = None if checkpoint is None else read_checkpoint(checkpoint)
    if kept is not None:
        training.load_state_dict(kept["training"])
        accuracies, seconds = list(kept["accuracies"]), float(kept["seconds"])
    on_epoch(len(accuracies))
    for epoch in range(len(accuracies), cell.epochs):
        start = time.perf_counter()
        training.reseed(epoch)
        for x, y in training.batches():
            training.step(x, y)
        training.lr_schedule.step()
        if training.clip_schedule is not None:
            training.clip_schedule.step()
        seconds += time.perf_counter() - start
        accuracies.append(accuracy(training.model, data.test))
        if checkpoint is not None and epoch + 1 < cell.epochs:
            state = {"training": training.state_dict(), "accuracies": accuracies, "seconds": seconds}
            write_checkpoint(checkpoint, state)
        on_epoch(epoch + 1)
    return _report(training, accuracies, seconds)


def _report(training: Training, accuracies: list[float], seconds: float) -> dict[str, Any]:
    """The result of a finished run.

    ``accuracies`` are test accuracies after each epoch, ``public_accuracy`` that of the last weights on the
    public part (nothing was fitted to its labels; ``--tune`` selects by it), ``history`` what the accountant
    holds, ``epsilon`` its certified upper bound (None where there is none).
    """
    cell, data, engine = training.cell, training.data, training.engine
    method = cell.method
    report: dict[str, Any] = {
        "cell": asdict(cell),
        "accuracies": accuracies,
        "public_accuracy": accuracy(training.model, data.public),
        "seconds_per_epoch": seconds / max(1, cell.epochs),
        "adjacency": method.adjacency,
        "private_size": len(data.private),
        "public_size": len(data.public),
        "test_size": len(data.test),
        "majority_share": _majority(data.test),
        "epsilon": None,
    }
    if engine is None:
        return report
    epsilon = engine.get_epsilon(cell.delta, allow_unprotected=True)
    blocks = release_blocks(training.optimizer, training.model)
    unit = 1 if method.clipping == "flat" else method.mini_set or cell.batch_size
    report |= {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "protected": method.batch_norm != "unprotected",
        "noise_multiplier": float(training.optimizer.noise_multiplier),
        "sigma_eff": float(
            getattr(training.optimizer, "effective_noise_multiplier", training.optimizer.noise_multiplier)
        ),
        "groups": len(blocks),
        "noise_factor": 1.0
        if method.clipping == "flat"
        else noise_against_individual_clipping(unit, adjacency=cast(Adjacency, method.adjacency)),
        "history": [list(entry) for entry in engine.accountant.history],
    }
    vectors = cell.batch_size // unit
    plain = engine.finalize(training.forward)  # type: ignore[arg-type]  # Opacus's wrapper or the module
    report["layers"] = noise_to_signal(
        plain, blocks, data.public, unit=unit, vectors=vectors, batch_statistics=method.clipping == "batch"
    )
    return report


def _majority(part: TensorDataset) -> float:
    """Per cent that always answering with the most frequent class gets right."""
    counts = torch.bincount(part.tensors[1])
    return 100.0 * float(counts.max()) / len(part)
