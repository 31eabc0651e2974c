"""Claim: a Poisson draw costs O(m), not O(N): 50 times less than Opacus's at N = 10 million, m = 1,024.

    python benchmarks/sampling.py

Draws are interleaved; the ratio is the median over rounds, with its quartiles. `tests/test_sampling.py`
shows that the distribution is the same.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from opacus_bc.sampling import PoissonBins, SamplingPlan

BATCH, ROUNDS = 1024, 15


def main() -> None:
    """Print the table and write it as JSON."""
    rows = []
    print(f"{'N':>12} {'ours, us':>10} {'Opacus, us':>12} {'ratio':>8}")
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        steps = -(-n // BATCH)
        plan = SamplingPlan(
            kind="poisson", dataset_size=n, steps_per_epoch=steps, mini_sets=1, mini_set_size=BATCH
        )
        ours = PoissonBins(plan, np.random.Generator(np.random.Philox(0)))
        theirs = iter(UniformWithReplacementSampler(num_samples=n, sample_rate=1 / steps, steps=10**6))
        pairs = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            ours.draw()
            middle = time.perf_counter()
            next(theirs)
            pairs.append((middle - start, time.perf_counter() - middle))
        mine, other = (1e6 * statistics.median(p[i] for p in pairs) for i in (0, 1))
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
