"""Makes tests/data/accounting_reference.csv: epsilon by dp-accounting and Opacus's PRV, 200 random settings.

The claim it serves: FDPAccountant is never below their lower bounds and within 1e-3 (relative or absolute) of
dp-accounting's upper one. Every tool gets 60 s and 6 GB a setting; an empty cell means that it did not answer
within that.

    python benchmarks/accounting_table.py [FILE]
"""

from __future__ import annotations

import csv
import math
import multiprocessing
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SETTINGS, SECONDS, GIGABYTES, SEED = 200, 60, 6, 3
COLUMNS = ("sigma", "q", "steps", "delta", "dp_lower", "dp_upper", "prv_lower", "prv_upper")
DEFAULT = Path(__file__).parent.parent / "tests" / "data" / "accounting_reference.csv"

Setting = tuple[float, float, int, float]


def settings() -> Iterator[Setting]:
    """Random settings, rounded so that the table says exactly what was computed."""
    rng = np.random.default_rng(SEED)
    for _ in range(SETTINGS):
        sigma, rate = (
            10 ** rng.uniform(math.log10(0.5), math.log10(20)),
            10 ** rng.uniform(-5, math.log10(0.5)),
        )
        steps, delta = 10 ** rng.uniform(0, math.log10(50_000)), 10 ** rng.uniform(-10, -3)
        yield float(f"{sigma:.4g}"), float(f"{rate:.4g}"), round(steps), float(f"{delta:.3g}")


def with_dp_accounting(
    sigma: float, rate: float, steps: int, delta: float, interval: float | None = None
) -> tuple[float, float]:
    """(optimistic, pessimistic) epsilon, the worse of both directions.

    Its default interval of 1e-4 is too coarse for small sample rates: a tenth of one step's standard
    deviation is used.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    if interval is None:
        interval = min(1e-4, max(1e-6, 0.1 * rate * math.sqrt(math.expm1(sigma**-2))))
    lower, upper = (
        pld.from_gaussian_mechanism(
            sigma,
            value_discretization_interval=interval,
            pessimistic_estimate=pessimistic,
            sampling_prob=rate,
            use_connect_dots=pessimistic,
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for pessimistic in (False, True)
    )
    return lower, upper


def with_prv(sigma: float, rate: float, steps: int, delta: float, error: float = 0.01) -> tuple[float, float]:
    """(lower, upper) epsilon of Opacus's PRV accountant, which looks at the "remove" direction."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    composed = accountant._get_dprv(eps_error=error, delta_error=delta / 1000)
    lower, _, upper = composed.compute_epsilon(delta, delta / 1000, error)
    return lower, upper


def _child(tool: Callable[..., tuple[float, float]], setting: Setting, seconds: int, pipe: object) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES * 2**30,) * 2)
    signal.alarm(seconds)
    try:
        pipe.send(tool(*setting))  # type: ignore[attr-defined]  # a Connection
    except (Exception, MemoryError):
        pipe.send(None)  # type: ignore[attr-defined]  # a Connection


def limited(
    tool: Callable[..., tuple[float, float]], setting: Setting, seconds: int = SECONDS
) -> tuple[float, float] | None:
    """The tool's answer, or None if it fails or exceeds its limits; in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(tool, setting, seconds, sender))
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = None
    process.join()
    return answer if answer is not None and all(map(math.isfinite, answer)) else None


def main(path: Path = DEFAULT) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for setting in settings():
            row: list[object] = [*setting]
            for tool in (with_dp_accounting, with_prv):
                answer = limited(tool, setting)
                row += ["", ""] if answer is None else [f"{value:.8g}" for value in answer]
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    import dp_accounting.pld.privacy_loss_distribution  # noqa: F401  (once, before the processes are forked)
    import opacus.accountants  # noqa: F401  (likewise)

    main(*map(Path, sys.argv[1:2]))
