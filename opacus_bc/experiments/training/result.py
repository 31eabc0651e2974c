"""What a training run reports: accuracies, what its accountant holds, and what its last weights show."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.accounting import FDPAccountant
from opacus_bc.experiments.training.noise_to_signal import noise_to_signal
from opacus_bc.experiments.training.session import Training
from opacus_bc.mechanism.blocks import noise_against_individual_clipping
from opacus_bc.mechanism.names import Adjacency


def accuracy(model: nn.Module, part: TensorDataset) -> float:
    """Per cent of the images that are recognised; leaves the model in training mode."""
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in DataLoader(part, batch_size=1000):
            right += int((model(x).argmax(dim=1) == y).sum())
    model.train()
    return 100.0 * right / len(part)


@lru_cache(maxsize=4096)
def spent(history: tuple[tuple[Any, ...], ...], delta: float, epoch: int, epochs: int) -> float:
    """Certified epsilon after some of a run's epochs.

    Shuffling has an entry a pass; of other entries the steps count in proportion, rounded up.
    """
    accountant = FDPAccountant()
    passes = [entry for entry in history if entry[3:] == ("shuffle",)]
    accountant.history = passes[:epoch] or [
        (sigma, rate, math.ceil(steps * epoch / epochs), *kind) for sigma, rate, steps, *kind in history
    ]
    return float(accountant.get_epsilon(delta))


def facts(
    training: Training, accuracies: list[float], seconds: float, norms: list[dict[str, float]]
) -> dict[str, Any]:
    """What a run so far has brought.

    ``accuracies`` are test accuracies after each epoch, ``history`` what the accountant holds, ``epsilon``
    its certified upper bound (None where there is none).
    """
    cell, data, engine = training.cell, training.data, training.engine
    method = cell.method
    found: dict[str, Any] = {
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
        found["layer_norms"] = norms
    if training.optimizer is training.plain_optimizer:
        return found
    found |= {
        "protected": engine is not None and method.batch_norm != "unprotected",
        "noise_multiplier": float(training.optimizer.noise_multiplier),
        "groups": len(training.optimizer.blocks()),
    }
    if engine is None:
        return found
    epsilon = engine.get_epsilon(cell.delta, allow_unprotected=True)
    return found | {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "sigma_eff": float(training.optimizer.effective_noise_multiplier),
        "noise_factor": 1.0
        if method.clipping == "flat" or method.users
        else noise_against_individual_clipping(cell.unit, adjacency=cast(Adjacency, method.adjacency)),
        "history": [list(entry) for entry in engine.accountant.history],
    }


def report(
    training: Training, accuracies: list[float], seconds: float, norms: list[dict[str, float]]
) -> dict[str, Any]:
    """The result of a finished run: `facts`, and what is measured on its last weights.

    ``public_accuracy`` is that on the public part (whose labels serve for nothing but ALC's bounds;
    ``--tune`` selects by it), ``layers`` the noise-to-signal ratios.
    """
    cell, data = training.cell, training.data
    found = facts(training, accuracies, seconds, norms)
    found["public_accuracy"] = accuracy(training.model, data.public)
    if training.optimizer is training.plain_optimizer:
        return found
    plain = training.model
    if training.engine is not None:
        plain = training.engine.finalize(training.forward)
    found["layers"] = noise_to_signal(
        plain,
        training.optimizer.blocks(),
        data.public,
        unit=cell.unit,
        vectors=cell.vectors,
        batch_statistics=cell.method.clipping == "batch",
    )
    return found


def _majority(part: TensorDataset) -> float:
    """Per cent that always answering with the most frequent class gets right."""
    counts = torch.bincount(part.tensors[1])
    return 100.0 * float(counts.max()) / len(part)
