"""Claim: a batch-clipping step costs little more than plain SGD: one ordinary backward, no sample gradients.

    python benchmarks/step_overhead.py [--rounds 5] [--models resnet18 convnet]

Measures whole steps (loader, forward, backward, optimizer) of plain SGD, BC, GBC and stock Opacus on the same
random images, interleaved round by round in one process; every ratio is the median over rounds of the ratio
to plain SGD in the same round. Peak memory is what model, data, gradients and three steps add to a process of
their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from opacus import PrivacyEngine as StockEngine
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.experiments.models import build

BATCH = 64
METHODS = ("plain SGD", "BC", "GBC s=16", "GBC s=8", "Opacus hooks", "Opacus ghost")
warnings.filterwarnings("ignore")


def stepper(method: str, model_name: str) -> Callable[[], None]:
    """A function that trains one logical step of ``method``."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8 * BATCH, 3, 32, 32), torch.randint(0, 10, (8 * BATCH,)))
    stock = method.startswith("Opacus")
    model = build(model_name, norm="group" if stock else "batch", in_channels=3, num_classes=10)
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader: DataLoader = DataLoader(data, batch_size=BATCH, shuffle=True)
    criterion: Callable = nn.CrossEntropyLoss()
    deliveries = 1
    common = {"module": model, "optimizer": optimizer, "data_loader": loader, "max_grad_norm": 1.0}
    if stock:
        mode = method.split()[1]
        parts = StockEngine(accountant="rdp").make_private(
            **common, noise_multiplier=1.0, grad_sample_mode=mode, poisson_sampling=False
        )
        model, optimizer, loader = parts[0], parts[1], parts[-1]
        criterion = parts[2] if mode == "ghost" else criterion
    elif method != "plain SGD":
        size = int(method.split("=")[1]) if "=" in method else None
        deliveries = 1 if size is None else BATCH // size
        # Shuffling gives every method exactly BATCH samples a step, so that times can be compared.
        model, optimizer, loader = PrivacyEngine().make_private(
            **common, noise_multiplier=1.0, clipping="batch", batch_norm="batch", mini_batch_size=size,
            sampling="shuffle",
        )  # fmt: skip

    def batches():
        while True:
            yield from loader

    stream = batches()

    def step() -> None:
        for _ in range(deliveries):
            x, y = next(stream)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return step


def times(model_name: str, rounds: int, steps: int, methods: Sequence[str]) -> dict[str, list[float]]:
    """Seconds per step by method and round, interleaved."""
    steppers = {method: stepper(method, model_name) for method in methods}
    for step in steppers.values():
        step()
    found: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, step in steppers.items():
            start = time.perf_counter()
            for _ in range(steps):
                step()
            found[method].append((time.perf_counter() - start) / steps)
    return found


def peak_mib(method: str, model_name: str) -> float:
    """What a fresh process needs at its peak for model, data, gradients and three steps (Linux).

    Tensors are mapped one by one, so that freed ones leave the process at once and the peak is theirs.
    """
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import step_overhead as s
s.torch.set_num_threads(2)
read = lambda key: int(open('/proc/self/status').read().split(key + ':')[1].split()[0])
s.stepper('plain SGD', 'bn_lenet5')()  # loads what every method loads
before = read('VmRSS')
open('/proc/self/clear_refs', 'w').write('5')
step = s.stepper(sys.argv[2], sys.argv[3])
for _ in range(3):
    step()
print(read('VmHWM') - before)
"""
    out = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), method, model_name],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout.split()[-1]) / 1024


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["resnet18", "convnet"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_overhead.json")
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    print(f"{'model':10} {'method':14} {'time / plain':>13} {'spread':>13} {'memory / plain':>15}")
    for model_name in args.models:
        found = times(model_name, args.rounds, args.steps, args.methods)
        memories = {m: peak_mib(m, model_name) for m in args.methods}
        for method in args.methods:
            ratios = [a / b for a, b in zip(found[method], found["plain SGD"], strict=True)]
            memory = memories[method] / memories["plain SGD"]
            row = {
                "model": model_name,
                "method": method,
                "time": round(statistics.median(ratios), 3),
                "low": round(min(ratios), 3),
                "high": round(max(ratios), 3),
                "memory": round(memory, 3),
                "peak_mib": round(memories[method]),
            }
            rows.append(row)
            spread = f"{row['low']:.2f}-{row['high']:.2f}"
            print(
                f"{model_name:10} {method:14} {row['time']:12.2f}x {spread:>13} {memory:14.2f}x", flush=True
            )
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"rounds": args.rounds, "batch": BATCH, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
