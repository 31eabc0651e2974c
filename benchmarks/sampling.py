"""Claim: a Poisson draw costs O(m), not O(N): 50 times less than Opacus's at N = 10 million, m = 1,024.

    python benchmarks/sampling.py

Draws are interleaved, by CPU time, with one thread; the ratio is the median over rounds, with its quartiles.
`tests/draws/test_sampling.py` shows that the distribution is the same.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.draws.sources import PoissonBins

BATCH, ROUNDS = 1024, 15


def microseconds(draw: Callable[[], object]) -> float:
    """CPU time of a draw: the mean of enough of them to be measured."""
    count, start = 0, time.process_time()
    while count < 1 or time.process_time() - start < 0.005:
        draw()
        count += 1
    return 1e6 * (time.process_time() - start) / count


def main() -> None:
    """Print the table and write it as JSON."""
    torch.set_num_threads(1)
    rows = []
    print(f"{'N':>12} {'ours, us':>10} {'Opacus, us':>12} {'ratio':>8}")
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        steps = -(-n // BATCH)
        plan = SamplingPlan(
            kind="poisson", dataset_size=n, steps_per_epoch=steps, mini_sets=1, mini_set_size=BATCH
        )
        ours = PoissonBins(plan, np.random.Generator(np.random.Philox(0)))
        theirs = iter(UniformWithReplacementSampler(num_samples=n, sample_rate=1 / steps, steps=10**6))
        ours.draw()
        next(theirs)
        pairs = [(microseconds(ours.draw), microseconds(theirs.__next__)) for _ in range(ROUNDS)]
        mine, other = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        low, ratio, high = statistics.quantiles((b / a for a, b in pairs), n=4, method="inclusive")
        rows.append(
            {
                "N": n,
                "ours_us": round(mine),
                "opacus_us": round(other),
                "ratio": round(ratio, 1),
                "low": round(low, 1),
                "high": round(high, 1),
            }
        )
        print(f"{n:12,} {mine:10.0f} {other:12.0f} {ratio:7.1f}x ({low:.1f}-{high:.1f})")
    out = Path(__file__).parent / "results" / "sampling.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"batch": BATCH, "rounds": ROUNDS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
