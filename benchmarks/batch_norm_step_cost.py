"""Individual clipping with public BatchNorm costs no more than stock Opacus with GroupNorm.

Claim: a step of IC + public BatchNorm takes at most 1.0 times a step of stock Opacus's hooks on the same
network with GroupNorm when the public statistics are refreshed every 10 steps, and at most 1.15 times when
they are refreshed at every step. A refresh costs one
forward of a public batch, here a quarter of the private one. CPU time on one thread, medians of the
ratios of interleaved rounds. Exits with 1 if the rounds refute the claim.

    python benchmarks/batch_norm_step_cost.py
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from opacus import PrivacyEngine as StockEngine
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.experiments.training.models import bn_lenet5, convnet

ROUNDS = 12
BATCH = 128
PUBLIC_BATCH = 32
LIMITS = {1: 1.15, 10: 1.0}
NETWORKS = {"bn_lenet5": (bn_lenet5, (1, 32, 32)), "convnet": (convnet, (3, 32, 32))}


def data(shape: tuple[int, ...], n: int) -> TensorDataset:
    return TensorDataset(torch.randn(n, *shape), torch.randint(0, 10, (n,)))


def stepper(
    engine: StockEngine, model: nn.Module, shape: tuple[int, ...], **kwargs: object
) -> Callable[[], float]:
    """One training step on a fixed batch; a draw of the private loader, not timed, makes it legitimate."""
    with warnings.catch_warnings(action="ignore"):
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.01),
            data_loader=DataLoader(data(shape, 4 * BATCH), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **kwargs,
        )
    x, y = data(shape, BATCH).tensors
    criterion = nn.CrossEntropyLoss()

    def step() -> float:
        next(iter(loader))
        start = time.process_time()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        return time.process_time() - start

    return step


def measure(name: str) -> dict[int, list[float]]:
    """CPU time of ten steps of every refresh setting over that of ten steps of stock Opacus with GroupNorm.

    The settings take turns step by step, in an order that rotates, so that all see the same machine; ten
    steps make a round, so that every setting pays for its refreshes.
    """
    factory, shape = NETWORKS[name]
    public = DataLoader(data(shape, 8 * PUBLIC_BATCH), batch_size=PUBLIC_BATCH)
    with warnings.catch_warnings(action="ignore"):
        steps = {0: stepper(StockEngine(), factory("group"), shape)}
        for n in LIMITS:
            options = {"batch_norm": public, "batch_norm_refresh": n, "grad_sample_mode": "hooks"}
            steps[n] = stepper(PrivacyEngine(), factory("batch"), shape, **options)
    order = list(steps)
    ratios: dict[int, list[float]] = {n: [] for n in LIMITS}
    for i in range(-1, ROUNDS):
        times = dict.fromkeys(order, 0.0)
        for _ in range(10):
            order.append(order.pop(0))
            for key in order:
                times[key] += steps[key]()
        for n in LIMITS if i >= 0 else ():
            ratios[n].append(times[n] / times[0])
    return ratios


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    failed = False
    print(f"batch {BATCH}, public batch {PUBLIC_BATCH}, {ROUNDS} rounds of 10 steps, 1 thread")
    print(f"{'network':<12}{'refresh':>8}{'median':>8}{'10 %':>8}{'90 %':>8}{'limit':>8}")
    for name in NETWORKS:
        for n, ratios in measure(name).items():
            median, deciles = statistics.median(ratios), statistics.quantiles(ratios, n=10)
            # The third of twelve ordered rounds is below the median with 98 % confidence: clearly missed.
            failed |= sorted(ratios)[2] > LIMITS[n]
            print(f"{name:<12}{n:>8}{median:>8.3f}{deciles[0]:>8.3f}{deciles[-1]:>8.3f}{LIMITS[n]:>8.2f}")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
