"""Batch clipping against stock Opacus individual clipping on scikit-learn's digits, at one epsilon.

    python -m opacus_bc.experiments.compare

Claim under test: batch clipping trains a model with BatchNorm in place, at one ordinary backward a mini-set,
and pays for it in noise; individual clipping pays in per-sample gradients, and has to replace BatchNorm or to
take its statistics from public data.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import opacus
import torch
from opacus.validators import ModuleValidator
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.experiments import data

EPSILON, DELTA = 8.0, 1e-3
BATCH_SIZE, EPOCHS, SEEDS = 128, 10, (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table."""

    name: str
    lr: float
    max_grad_norm: float = 1.0
    arguments: dict[str, Any] | None = None  # of make_private_with_epsilon; None trains without privacy
    group_norm: bool = False
    public_statistics: bool = False
    noise_factor: str = ""


METHODS = (
    Method(name="no privacy", lr=0.2, noise_factor="0"),
    Method(name="stock Opacus IC, GroupNorm", lr=1.0, arguments={}, group_norm=True, noise_factor="1"),
    Method(name="IC, public BatchNorm", lr=1.0, arguments={}, public_statistics=True, noise_factor="1"),
    Method(
        name="BC, BatchNorm kept",
        lr=0.2,
        max_grad_norm=0.1,
        arguments={"clipping": "batch"},
        public_statistics=True,
        noise_factor=f"{2 * BATCH_SIZE}",
    ),
    Method(
        name="GBC s = 8, BatchNorm kept",
        lr=0.5,
        max_grad_norm=0.3,
        arguments={"clipping": "batch", "mini_batch_size": 8},
        public_statistics=True,
        noise_factor="16",
    ),
)


def network() -> nn.Module:
    """A small convolutional network with BatchNorm for 8 x 8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def digits() -> tuple[TensorDataset, ...]:
    """Private, public and test part, at the images' own 8 x 8 pixels."""
    found = data.load("digits")
    return tuple(
        TensorDataset(F.avg_pool2d(part.tensors[0], 4), part.tensors[1])
        for part in (found.private, found.public, found.test)
    )


def train(method: Method, parts: tuple[TensorDataset, ...], seed: int) -> dict[str, float]:
    """One run of one method; accuracy, seconds per epoch and what it cost."""
    private, public, test = parts
    torch.manual_seed(seed)
    model = network()
    if method.group_norm:
        model = ModuleValidator.fix(model)
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=method.lr, momentum=0.9)
    loader: DataLoader[Any] = DataLoader(private, batch_size=BATCH_SIZE, shuffle=True)
    forward: Callable[..., Any] = model
    engine: opacus.PrivacyEngine | None = None
    if method.arguments is not None:
        engine = PrivacyEngine()
        forward, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=EPSILON,
            target_delta=DELTA,
            epochs=EPOCHS,
            max_grad_norm=method.max_grad_norm,
            batch_norm=DataLoader(public, batch_size=len(public)) if method.public_statistics else None,
            **method.arguments,
        )
    start = time.perf_counter()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(x), y)
            torch.autograd.backward(loss)
            optimizer.step()
    seconds = (time.perf_counter() - start) / EPOCHS
    model.eval()
    with torch.no_grad():
        x, y = test[:]
        accuracy = float((model(x).argmax(1) == y).float().mean())
    return {
        "accuracy": 100 * accuracy,
        "seconds": seconds,
        "sigma": getattr(optimizer, "noise_multiplier", 0.0),
        "epsilon": engine.get_epsilon(DELTA) if engine is not None else float("inf"),
    }


def main() -> None:
    """Train every method with every seed and print the table."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait for the first
    parts = digits()
    cells = [(method, seed) for seed in SEEDS for method in METHODS]
    runs: dict[str, list[dict[str, float]]] = {method.name: [] for method in METHODS}
    for method, seed in track(cells, description="training"):
        runs[method.name].append(train(method, parts, seed))

    plain = statistics.median(run["seconds"] for run in runs[METHODS[0].name])
    table = Table(title=f"digits, {len(parts[0])} private images, {EPOCHS} epochs, {len(SEEDS)} seeds")
    for column in ("method", "test accuracy", "epsilon", "sigma", "noise on the update", "epoch time"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in METHODS:
        found = runs[method.name]
        accuracies = [run["accuracy"] for run in found]
        ratio = statistics.median(run["seconds"] for run in found) / plain
        table.add_row(
            method.name,
            f"{statistics.mean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f} %",
            f"{max(run['epsilon'] for run in found):.3f}",
            f"{found[0]['sigma']:.2f}",
            f"{method.noise_factor} x",
            f"{ratio:.2f} x",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Epsilon is a certified upper bound at delta = {DELTA}, add/remove-one adjacency, Poisson sampling. "
        "'noise on the update' compares at equal clip bound and sigma. Running statistics come from "
        f"{len(parts[1])} public images. Step sizes and bounds were set by hand, on these data."
    )


if __name__ == "__main__":
    main()
