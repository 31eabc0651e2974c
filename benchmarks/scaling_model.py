"""Model: what a step costs on R GPUs, from formulas and a few stated constants. Nothing is measured here.

    python benchmarks/scaling_model.py

docs/scaling.md writes the formulas out and says which constants were measured (on two CPU cores) and which
are assumed. Change the constants to those of your machines.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Assumed hardware and job; times in seconds, sizes in bytes, for each GPU.

    Attributes:
        parameters: d.
        local_batch: Samples for each rank and step.
        samples: N.
        forward, backward: Seconds of a plain step's two halves.
        bandwidth: Of the slowest link of an all-reduce.
        latency: Of one message.
        memory_bandwidth: Of the GPU's memory.
        draw: CPU seconds for each index of a global draw (measured: benchmarks/weak_scaling.py).
        coin: CPU seconds for each coin that Opacus's sampler flips (measured: benchmarks/sampling.py).
        hooks: Opacus's step over a plain one, computing only (CPU: benchmarks/performance.py).
    """

    parameters: float = 1e8
    local_batch: int = 256
    samples: float = 1e9
    forward: float = 0.05
    backward: float = 0.10
    bandwidth: float = 25e9
    latency: float = 20e-6
    memory_bandwidth: float = 1.5e12
    draw: float = 1e-7
    coin: float = 9e-9
    hooks: float = 3.0

    def reduce(self, ranks: int, numbers: float) -> float:
        """An all-reduce: every number goes out and comes back once; messages go along a tree."""
        if ranks == 1:
            return 0.0
        volume = 2 * (ranks - 1) / ranks * 4 * numbers
        return volume / self.bandwidth + 2 * math.ceil(math.log2(ranks)) * self.latency

    def plain(self, ranks: int) -> float:
        """DDP: the reduction runs beside the backward."""
        return self.forward + max(self.backward, self.reduce(ranks, self.parameters))

    def release(self) -> float:
        """Clip and noise: read d twice, write it twice."""
        return 4 * 4 * self.parameters / self.memory_bandwidth

    def draws(self, ranks: int) -> float:
        """A global draw, by each rank, on its CPU beside the step."""
        return self.draw * ranks * self.local_batch

    def batch_clipping(self, ranks: int) -> float:
        """BC: plain DDP, the release, and one small reduction that compares ranks."""
        step = self.plain(ranks) + self.release() + self.reduce(ranks, 1000)
        return max(step, self.draws(ranks))

    def per_sample(self, ranks: int) -> float:
        """Opacus's hooks: more computing, and a reduction of clipped sums after the backward."""
        compute = self.hooks * (self.forward + self.backward)
        return compute + self.reduce(ranks, self.parameters) + self.release()

    def per_sample_memory(self) -> float:
        """Bytes of per-sample gradients on each GPU."""
        return 4 * self.local_batch * self.parameters

    def coins(self, ranks: int) -> float:
        """What Opacus's distributed sampler flips on each rank for one step."""
        return self.coin * self.samples / ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 1024])
    config = parser.parse_args()
    machine = Machine()
    print(
        "| R | m | reduce, ms | plain DDP, ms | BC, ms | BC/plain | draw, ms | Opacus hooks, ms | coins, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in config.ranks:
        plain, private = machine.plain(ranks), machine.batch_clipping(ranks)
        values = [
            f"{ranks:,}",
            f"{ranks * machine.local_batch:,}",
            f"{1e3 * machine.reduce(ranks, machine.parameters):.1f}",
            f"{1e3 * plain:.1f}",
            f"{1e3 * private:.1f}",
            f"{private / plain:.3f}",
            f"{1e3 * machine.draws(ranks):.2f}",
            f"{1e3 * machine.per_sample(ranks):.1f}",
            f"{1e3 * machine.coins(ranks):,.1f}",
        ]
        print("| " + " | ".join(values) + " |")
    print(f"\nper-sample gradients on each GPU: {machine.per_sample_memory() / 1e9:.0f} GB")


if __name__ == "__main__":
    main()
