"""Claim: certified epsilon at least 5 times faster than dp-accounting and Opacus PRV, at equal certified
width.

For every setting the width of our [lower, upper] is measured first. The others are then given the coarsest
discretisation whose own certified width is no larger: PRV through eps_error, dp-accounting by refining its
interval (pessimistic and optimistic estimates, which is where its width comes from). CPU seconds, the three
tools taking turns, each measurement in a process of its own with 20 s and 6 GB; "-" means no answer within
that.

    python benchmarks/accounting.py
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from accounting_table import Setting, limited, with_dp_accounting, with_prv

from opacus_bc.accounting import query
from opacus_bc.accounting.lattice import Step

ROUNDS, SECONDS = 3, 20
PAPER_RATE = 64 / 54000
GRID: dict[str, Setting] = {
    "paper, sigma 2.5, L 8": (2.5 / math.sqrt(8), PAPER_RATE, 42188, 1e-5),
    "paper, sigma 1.5, L 8": (1.5 / math.sqrt(8), PAPER_RATE, 42188, 1e-5),
    "paper, sigma 0.5, L 8": (0.5 / math.sqrt(8), PAPER_RATE, 42188, 1e-5),
    "paper, sigma 0.01875, L 62": (0.01875 / math.sqrt(62), PAPER_RATE, 42188, 1e-5),
    "sigma 2.5, L 8, m 1024": (2.5 / math.sqrt(8), 1024 / 54000, 2637, 1e-5),
    "sigma 1, q 0.01, T 1000": (1.0, 0.01, 1000, 1e-5),
    "sigma 0.8, q 0.005, T 4000": (0.8, 0.005, 4000, 1e-6),
    "sigma 4, q 0.1, T 10000": (4.0, 0.1, 10_000, 1e-5),
}


def ours(sigma: float, rate: float, steps: int, delta: float) -> tuple[float, float]:
    return query.epsilon_bounds((Step(1 / sigma, rate, steps),), delta)


def timed(tool: Callable[..., tuple[float, float]]) -> Callable[..., tuple[float, float]]:
    """The tool, returning (CPU seconds, width)."""

    def run(*setting: float) -> tuple[float, float]:
        begin = time.process_time()
        lower, upper = tool(*setting)
        return time.process_time() - begin, upper - lower

    return run


def at_width(
    tool: Callable[..., tuple[float, float]], start: float, width: float, setting: Setting
) -> Callable[..., tuple[float, float]] | None:
    """The tool at the coarsest of start, start/3, start/10, ... whose certified width is at most `width`."""
    accuracy = start
    while accuracy > 1e-7:
        answer = limited(lambda *s, a=accuracy: tool(*s, a), setting, SECONDS)
        if answer is None:
            return None
        if answer[1] - answer[0] <= width * 1.01:
            return lambda *s: tool(*s, accuracy)
        accuracy /= 3
    return None


def main() -> None:
    print("| setting | epsilon | width | ours, s | dp-accounting, times ours | PRV, times ours |")
    print("|---|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {"dp": [], "prv": []}
    for name, setting in GRID.items():
        lower, upper = ours(*setting)
        width = upper - lower
        tools: dict[str, Callable[..., tuple[float, float]] | None] = {
            "ours": ours,
            "dp": at_width(with_dp_accounting, 1e-3, width, setting),
            "prv": at_width(with_prv, width / 2, width, setting),
        }
        seconds: dict[str, list[float]] = {key: [] for key in tools}
        for _ in range(ROUNDS):
            for key, tool in tools.items():
                answer = limited(timed(tool), setting, SECONDS) if tool else None
                if answer:
                    seconds[key].append(answer[0])
        base = statistics.median(seconds["ours"])
        cells = []
        for key in ("dp", "prv"):
            if seconds[key]:
                ratios[key].append(statistics.median(seconds[key]) / base)
                cells.append(f"{ratios[key][-1]:.1f}")
            else:
                ratios[key].append(math.inf)
                cells.append("-")
        print(f"| {name} | {upper:.5g} | {width:.2g} | {base:.3f} | {' | '.join(cells)} |", flush=True)
    middle = {key: statistics.median(values) for key, values in ratios.items()}
    print(f"| **median** | | | | **{middle['dp']:.1f}** | **{middle['prv']:.1f}** |")


if __name__ == "__main__":
    import dp_accounting.pld.privacy_loss_distribution  # noqa: F401  (once, before the processes are forked)
    import opacus.accountants  # noqa: F401

    main()
