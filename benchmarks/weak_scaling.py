"""Weak scaling: a step of private batch clipping on DDP costs at most 1.10 times one of plain DDP.

Each rank gets ``--local`` samples a step, so the work of a rank stays the same as ranks are added. Times are
medians over steps of rank 0, private and plain steps alternating so that both see the same machine.

    torchrun --nproc-per-node 1 benchmarks/weak_scaling.py
    torchrun --nproc-per-node 2 benchmarks/weak_scaling.py
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.draws.sources import PoissonBins


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, 10))


def images(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 10)


def endless(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Seconds of one step, and of nothing but it: samples for each second are compared."""
    dist.barrier()
    started = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return time.perf_counter() - started


def draw_cost(samples: int, batch: int) -> float:
    """CPU seconds in which a rank draws a global batch out of all samples; median of five."""
    plan = SamplingPlan(
        kind="poisson",
        dataset_size=samples,
        steps_per_epoch=samples // batch,
        mini_sets=1,
        mini_set_size=batch,
    )
    draws, times = PoissonBins(plan, np.random.default_rng(0)), []
    for _ in range(5):
        started = time.process_time()
        draws.draw()
        times.append(time.process_time() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--local", type=int, default=128, help="samples for each rank and step")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    config = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    batch = config.local * ranks

    plain = DistributedDataParallel(network(config.width))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    model = DistributedDataParallel(network(config.width))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        data_loader=DataLoader(images(8 * batch, seed=1), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="batch",
        batch_norm=DataLoader(images(64, seed=2), batch_size=64),
    )
    times: dict[str, list[float]] = {"plain": [], "private": []}
    for index, (x, y) in enumerate(endless(loader)):
        private = step(model, optimizer, x, y)
        ordinary = step(plain, plain_optimizer, x, y)  # the very same samples
        if index >= 5:  # warm-up
            times["private"].append(private)
            times["plain"].append(ordinary)
        if index == config.steps + 5:
            break
    if dist.get_rank() == 0:
        private, ordinary = (statistics.median(times[name]) for name in ("private", "plain"))
        ratio = statistics.median(a / b for a, b in zip(times["private"], times["plain"], strict=True))
        size = sum(p.numel() for p in plain.parameters())
        print(
            f"{ranks} ranks, {config.local} samples each, {size:,} parameters: plain DDP "
            f"{1e3 * ordinary:.1f} ms, private {1e3 * private:.1f} ms, ratio {ratio:.3f}"
        )
        cost = draw_cost(10**9, 1024 * 256)
        print(f"drawing 1,024 x 256 out of 10^9 samples takes a rank {1e3 * cost:.0f} ms of CPU time")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
