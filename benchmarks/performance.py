"""Claim: batch clipping costs little more than plain SGD on convolutional networks; IC with public BatchNorm
costs what stock Opacus costs.

    python benchmarks/performance.py [--parts networks batch ...] [--networks convnet ...] [--methods BC ...]
                                     [--rounds 7] [--memory] [--page]

Whole steps (loader, forward, backward, optimizer) on random data, in turns, round by round, in one process
with one thread, by CPU time, so that other processes disturb little; a ratio is the median over rounds of the
ratio to plain SGD in the same round. Individual clipping with public BatchNorm is measured twice, without new
statistics and with new ones at every step; the row is the mean that new ones at every tenth step would have.
glibc is told to keep freed memory: by default it gives large tensors back to the system again and again, and
who pays for that changes from run to run. Memory is that of all tensors
(`opacus_bc.experiments.training.measure.TensorMemory`), at its peak. Stock Opacus trains the network with
GroupNorm (the transformer: LayerNorm). Results are kept in ``results/performance.json`` row by row, with
the number of processes that wanted a core then (the load); ``--networks`` and ``--methods`` measure some rows
anew, in one run with plain SGD;
``--memory`` measures memory anew and keeps the times; ``--page`` only writes docs/performance.md and its
pictures from what is kept and from ``results/sampling.json`` and ``results/norm_choice.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import performance_networks as networks
import torch
from opacus import PrivacyEngine as StockEngine
from performance_breakdown import breakdown
from performance_page import write_page
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine, PublicStatistics
from opacus_bc.accounting import query
from opacus_bc.accounting.lattice import Step
from opacus_bc.experiments.training.measure import TensorMemory

RESULTS = Path(__file__).parent / "results" / "performance.json"
METHODS = (
    "plain SGD",
    "BC",
    "GBC s=32",
    "GBC s=16",
    "GBC s=8",
    "IC + public BatchNorm, bk",
    "IC + public BatchNorm, bk, refresh 1",
    "IC + public BatchNorm, bk, differentiated",
    "IC + public BatchNorm, bk, differentiated, refresh 1",
    "IC + public BatchNorm, bk, secure",
    "IC + public BatchNorm, hooks",
    "IC + public BatchNorm, ghost",
    "Opacus, hooks",
    "Opacus, ghost",
    "Opacus, functorch",
)
GROWING = (
    "plain SGD",
    "BC",
    "GBC s=16",
    "IC + public BatchNorm, bk",
    "IC + public BatchNorm, hooks",
    "Opacus, hooks",
    "Opacus, ghost",
)
DEPTHWISE = (  # the other methods are not measured on this network
    "plain SGD",
    "BC",
    "IC + public BatchNorm, bk",
    "IC + public BatchNorm, bk, refresh 1",
    "IC + public BatchNorm, bk, differentiated",
    "IC + public BatchNorm, bk, differentiated, refresh 1",
    "IC + public BatchNorm, bk, secure",
)
BATCH, REFRESH, ROUND_SECONDS = 64, 10, 0.3
NEVER = 10**9
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def examples(network: str, batch: int) -> tuple[TensorDataset, TensorDataset]:
    """Private and public data."""
    torch.manual_seed(0)
    data, public = (networks.examples(network, n) for n in (4 * batch, 4 * batch))
    return data, public


Stepper = Callable[[], None]


def stepper(*setting: Any, refresh: int = REFRESH) -> Stepper:
    """A function that trains one logical step."""
    return prepared(*setting, refresh=refresh)[0]


def prepared(
    method: str, network: str, batch: int, data: TensorDataset, public: TensorDataset, refresh: int = REFRESH
) -> tuple[Stepper, list[Tensor]]:
    """A function that trains one logical step of ``method``, and the public data that it keeps."""
    kept: list[Tensor] = []
    torch.manual_seed(0)
    private = method != "plain SGD"
    individual, stock = method.startswith(("IC", "Opacus")), method.startswith("Opacus")
    model = networks.build(network, norm="group" if stock else "batch")
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch, shuffle=True)
    criterion: Any = nn.CrossEntropyLoss()
    size = int(method.split("=")[1]) if "=" in method else batch
    if private:
        mode = method.split(", ")[1] if individual else "hooks"
        options: dict[str, Any] = {"clipping": "flat", "grad_sample_mode": mode}
        if not individual:
            options = {"clipping": "batch", "mini_batch_size": size}
        if not stock:
            source = DataLoader(TensorDataset(*public.tensors), batch_size=batch // 4 or 2)
            options["batch_norm"] = PublicStatistics(loader=source, differentiate="differentiated" in method)
        if individual and not stock:
            options["batch_norm_refresh"] = refresh
        # Without Poisson sampling every method gets exactly `batch` samples a step: times can be compared.
        engine = StockEngine(accountant="rdp") if stock else PrivacyEngine(secure_mode="secure" in method)
        made = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False, **options,
        )  # fmt: skip
        model, optimizer, loader = made[0], made[1], made[-1]
        criterion = made[2] if len(made) == 4 else criterion
        if not stock:
            kept = [one for one in engine._runs[-1].policy.keeper.batches.all() if isinstance(one, Tensor)]

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    stream = endless()

    def step() -> None:
        for _ in range(batch // size):
            x, y = next(stream)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return step, kept


def measure(methods: Sequence[str], network: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each method: time and memory over plain SGD's."""
    methods = [method for method in methods if method == "plain SGD" or not _methods or method in _methods]
    run, load = round(time.time()), os.getloadavg()[0]
    memory = {method: peak(method, network, batch) for method in methods}
    steps = {method: shares(method, network, batch) for method in methods}
    for _, step in chain.from_iterable(steps.values()):
        step()
    repeats = max(1, round(ROUND_SECONDS / timed(steps["plain SGD"][0][1], 1)))
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, parts in steps.items():
            seconds[method].append(sum(share * timed(step, repeats) for share, step in parts))
    rows = []
    for method in methods:
        ratios = [mine / plain for mine, plain in zip(seconds[method], seconds["plain SGD"], strict=True)]
        rows.append(
            {
                "network": network,
                "parameters": sum(p.numel() for p in networks.build(network, norm="batch").parameters()),
                "batch": batch,
                "method": method,
                **spread(ratios),
                "ratios": [round(ratio, 4) for ratio in ratios],
                "memory": memory[method] / memory["plain SGD"],
                "peak_mib": memory[method] / 2**20,
                "run": run,
                "load": round((load + os.getloadavg()[0]) / 2, 1),
            }
        )
        row = rows[-1]
        words = f"{row['time']:6.2f}x ({row['low']:.2f}-{row['high']:.2f}) memory {row['memory']:6.2f}x"
        print(f"{network:12} m={batch:<5}{method:42}{words}", flush=True)
    return rows


def shares(method: str, network: str, batch: int) -> list[tuple[float, Stepper]]:
    """Kinds of steps that ``method`` makes, each with its share; few rounds would seldom see a refresh."""
    kinds = [(1.0, REFRESH)]
    if method.endswith("refresh 1"):
        kinds = [(1.0, 1)]
    elif method.startswith("IC"):
        kinds = [(1 - 1 / REFRESH, NEVER), (1 / REFRESH, 1)]
    return [
        (share, stepper(method, network, batch, *examples(network, batch), refresh=refresh))
        for share, refresh in kinds
    ]


def timed(step: Stepper, repeats: int) -> float:
    """CPU seconds a step."""
    start = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats


def spread(ratios: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"time": middle, "low": low, "high": high}


def peak(method: str, network: str, batch: int) -> int:
    """Bytes of all tensors but the private and public data at the peak of two steps."""
    parts = examples(network, batch)
    memory = TensorMemory(outside=[tensor for part in parts for tensor in part.tensors])
    with memory:
        step, public = prepared(method, network, batch, *parts)
        memory.leave_out(public)
        for _ in range(2):
            step()
    return memory.peak


def accounting(rounds: int) -> list[dict[str, Any]]:
    """CPU time of a certified epsilon over that of T = 1,000 and sigma = 1, at q = 0.01."""
    grid = [(1.0, steps) for steps in (100, 1_000, 10_000, 100_000, 1_000_000)]
    grid += [(sigma, 1_000) for sigma in (0.25, 0.5, 2.0, 4.0, 8.0)]
    seconds: dict[tuple[float, int], list[float]] = {setting: [] for setting in grid}
    for _ in range(rounds):
        for sigma, steps in grid:
            query.epsilon_upper.cache_clear()
            start = time.process_time()
            query.epsilon_upper((Step(1 / sigma, 0.01, steps),), 1e-5)
            seconds[sigma, steps].append(time.process_time() - start)
    rows = []
    for (sigma, steps), mine in seconds.items():
        ratios = [a / b for a, b in zip(mine, seconds[1.0, 1_000], strict=True)]
        epsilon = query.epsilon_upper((Step(1 / sigma, 0.01, steps),), 1e-5)
        rows.append(
            {
                "sigma": sigma,
                "steps": steps,
                "epsilon": epsilon,
                **spread(ratios),
            }
        )
        print(f"sigma={sigma:<6}T={steps:<9}epsilon={epsilon:<10.4g}{rows[-1]['time']:.2f}x", flush=True)
    return rows


_only: list[str] = []
_methods: list[str] = []


def chosen(names: Sequence[str]) -> list[str]:
    """Those of ``names`` that ``--networks`` asks for; all if it asks for none."""
    return [name for name in names if not _only or name in _only]


def merged(kept: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in the place of kept ones of the same network, batch and method."""
    names, methods = [*networks.NETWORKS, *networks.WIDTHS], list(METHODS)
    rows = {(row["network"], row["batch"], row["method"]): row for row in (*kept, *new)}
    return [rows[key] for key in sorted(rows, key=lambda k: (names.index(k[0]), k[1], methods.index(k[2])))]


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    # Steps of the small networks scatter more and cost little: they get more rounds.
    "networks": lambda rounds: [
        row
        for name in chosen(networks.NETWORKS)
        for row in measure(
            DEPTHWISE if name == networks.DEPTHWISE else METHODS,
            name,
            BATCH,
            rounds if name in ("resnet18", networks.DEPTHWISE) else 3 * rounds,
        )
    ],
    "batch": lambda rounds: [
        row for batch in (16, 32, 64, 128, 256) for row in measure(GROWING, "convnet", batch, rounds)
    ],
    "parameters": lambda rounds: [
        row for name in networks.WIDTHS for row in measure(GROWING, name, BATCH, rounds)
    ],
    "breakdown": lambda rounds: [
        row
        for name in chosen(networks.NETWORKS)
        for row in breakdown(
            name,
            rounds,
            lambda method, network: stepper(method, network, BATCH, *examples(network, BATCH), refresh=NEVER),
        )
    ],
    "accounting": accounting,
}


def remember(rows: list[dict[str, Any]]) -> None:
    """Measure the memory of kept rows anew; plain SGD comes first in every group."""
    plain = 0
    for row in rows:
        own = peak(row["method"], row["network"], row["batch"])
        plain = own if row["method"] == "plain SGD" else plain
        row |= {"memory": own / plain, "peak_mib": own / 2**20}
        print(f"{row['network']:12} m={row['batch']:<5}{row['method']:42}{row['memory']:6.2f}x", flush=True)


def main() -> None:
    """Measure what was asked for, keep it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--networks", nargs="*", default=[], choices=networks.NETWORKS)
    parser.add_argument("--methods", nargs="*", default=[], choices=METHODS)
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.page and not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _only.extend(args.networks)
    _methods.extend(args.methods)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in args.parts if args.memory else ():
        if part not in ("accounting", "breakdown"):
            remember(kept[part]["rows"])
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    for part in () if args.page or args.memory else args.parts:
        rows = PARTS[part](args.rounds)
        if part == "breakdown" and part in kept:
            fresh = {row["network"] for row in rows}
            rows = [*rows, *(row for row in kept[part]["rows"] if row["network"] not in fresh)]
        elif part in kept and (args.networks or args.methods):
            rows = merged(kept[part]["rows"], rows)
        kept[part] = {"rounds": args.rounds, "rows": rows}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    sampling, choice = (
        json.loads((RESULTS.parent / f"{name}.json").read_text()) for name in ("sampling", "norm_choice")
    )
    write_page(kept, sampling, choice)


if __name__ == "__main__":
    main()
