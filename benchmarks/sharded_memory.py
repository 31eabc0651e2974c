"""Memory: what a rank needs for batch clipping shrinks with the number of ranks under FSDP2.

A multilayer perceptron with Adam takes three private steps on 1, 2 and 4 processes (gloo, CPU). Weights are
made in shards, so no rank ever has all of them. "Held" counts the bytes of weights, gradients and Adam's
moments that stay on a rank after a step; "peak" is the largest resident set of a rank beyond what it had
before the model.

    python benchmarks/sharded_memory.py
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.parallel.shards import local_part

STEPS = 3


def resident(kind: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (most so far) of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


def train(width: int, layers: int) -> float:
    """Three private steps; the bytes that stay on this rank afterwards, in MB."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=width**-0.5)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        data_loader=DataLoader(TensorDataset(torch.randn(64, width)), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="batch",
    )
    for _, (x,) in zip(range(STEPS), loader, strict=False):
        model(x).square().mean().backward()
        optimizer.step()
    params = list(model.parameters())
    moments = [v for p in params for v in optimizer.original_optimizer.state[p].values() if v.dim()]
    held: list[Any] = [*params, *(p.grad for p in params), *moments]
    return sum(local_part(t).numel() * t.element_size() for t in held) / 2**20


def measure(rank: int, ranks: int, folder: Path, config: argparse.Namespace) -> dict[str, float]:
    """What this rank needed, in MB."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    # What is freed goes back to the system, so that the resident set is what is in use (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 65536)
    train(8, 2)  # loads the code, whose pages would count otherwise
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # start VmHWM anew
    held = train(config.width, config.layers)
    dist.destroy_process_group()
    return {"held": held, "peak": resident("VmHWM") - before}


def forked(ranks: int, config: argparse.Namespace) -> list[dict[str, float]]:
    """Run ``ranks`` processes and collect what each needed."""
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        for rank in range(ranks):
            if (child := os.fork()) == 0:
                try:
                    torch.save(measure(rank, ranks, folder, config), folder / f"{rank}.pt")
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            raise RuntimeError("a rank failed")
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    config = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| ranks | held by a rank, MB | peak of a rank, MB |\n|---|---|---|")
    for ranks in config.ranks:
        found = forked(ranks, config)
        held, peak = (max(rank[name] for rank in found) for name in ("held", "peak"))
        print(f"| {ranks} | {held:.0f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
