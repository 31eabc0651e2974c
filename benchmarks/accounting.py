"""Claim: certified epsilon at least 5 times faster than dp-accounting and Opacus PRV, at equal certified
width.

For every setting the width of our [lower, upper] is measured first. The others are then given the coarsest
discretisation whose own certified width is no larger: PRV through eps_error, dp-accounting by refining its
interval (optimistic and pessimistic estimates). The last columns compare upper bounds alone, dp-accounting at
its default interval of 1e-4. CPU seconds, the tools taking turns, each measurement in a process of its own
with 60 s and 6 GB; "-" means no answer within that, and counts as infinitely slow in the median.

    python benchmarks/accounting.py
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from accounting_table import Setting, limited, with_dp_accounting, with_prv

from opacus_bc.accounting import query
from opacus_bc.accounting.display import rounded_up
from opacus_bc.accounting.lattice import Step

ROUNDS = 3
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
Tool = Callable[..., tuple[float, float]]


def ours(sigma: float, rate: float, steps: int, delta: float) -> tuple[float, float]:
    query.epsilon_bounds.cache_clear()
    query.epsilon_upper.cache_clear()
    return query.epsilon_bounds((Step(1 / sigma, rate, steps),), delta)


def our_upper(sigma: float, rate: float, steps: int, delta: float) -> tuple[float, float]:
    query.epsilon_upper.cache_clear()
    return 0.0, query.epsilon_upper((Step(1 / sigma, rate, steps),), delta)


def dp_upper(sigma: float, rate: float, steps: int, delta: float) -> tuple[float, float]:
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(sigma, value_discretization_interval=1e-4, sampling_prob=rate)
    return 0.0, one.self_compose(steps).get_epsilon_for_delta(delta)


def timed(tool: Tool) -> Tool:
    """The tool, returning (CPU seconds, upper bound)."""

    def run(*setting: float) -> tuple[float, float]:
        begin = time.process_time()
        _, upper = tool(*setting)
        return time.process_time() - begin, upper

    return run


def at_width(tool: Tool, start: float, width: float, setting: Setting) -> Tool | None:
    """The tool at the coarsest of start, start/3, start/9, ... whose certified width is at most `width`."""
    accuracy = start
    while accuracy > 1e-8:
        answer = limited(lambda *s, a=accuracy: tool(*s, a), setting)
        if answer is None:
            return None
        if answer[1] - answer[0] <= width * 1.02:
            return lambda *s: tool(*s, accuracy)
        accuracy /= 3
    return None


def main() -> None:
    print("| setting | epsilon | width | ours, s | dp-accounting | PRV | upper, s | dp-accounting, upper |")
    print("|---|---|---|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {"dp": [], "prv": [], "dp upper": []}
    for name, setting in GRID.items():
        lower, upper = ours(*setting)
        width = upper - lower
        tools: dict[str, Tool | None] = {
            "ours": ours,
            "dp": at_width(with_dp_accounting, 1e-3, width, setting),
            "prv": at_width(with_prv, width / 2, width, setting),
            "ours upper": our_upper,
            "dp upper": dp_upper,
        }
        seconds: dict[str, list[float]] = {key: [] for key in tools}
        for _ in range(ROUNDS):
            for key, tool in tools.items():
                answer = limited(timed(tool), setting) if tool else None
                if answer:
                    seconds[key].append(answer[0])
                else:
                    tools[key] = None
        times = {key: statistics.median(values) if values else math.inf for key, values in seconds.items()}
        for key in ratios:
            ratios[key].append(times[key] / times["ours upper" if "upper" in key else "ours"])
        shown = {
            key: f"{values[-1]:.1f} x" if math.isfinite(values[-1]) else "-" for key, values in ratios.items()
        }
        print(
            f"| {name} | {rounded_up(upper, 5)} | {width:.2g} "
            f"| {times['ours']:.3f} | {shown['dp']} | {shown['prv']} "
            f"| {times['ours upper']:.3f} | {shown['dp upper']} |",
            flush=True,
        )
    medians = {key: statistics.median(values) for key, values in ratios.items()}
    middle = {k: f"**{v:.1f} x**" if math.isfinite(v) else "**no answer**" for k, v in medians.items()}
    print(f"| **median** | | | | {middle['dp']} | {middle['prv']} | | {middle['dp upper']} |")


if __name__ == "__main__":
    import dp_accounting.pld.privacy_loss_distribution  # noqa: F401  (once, before the processes are forked)
    import opacus.accountants  # noqa: F401  (likewise)

    main()
