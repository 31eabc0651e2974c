"""What `opacus-bc epsilon` and `opacus-bc calibrate` print: plain numbers, as a table or as JSON."""

from __future__ import annotations

import json as json_module
import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opacus_bc import accounting
from opacus_bc.accounting.display import rounded_up
from opacus_bc.mechanism.blocks import over_layers
from opacus_bc.mechanism.names import Sampling, Unit, adjacency_of, neighbours

MEANINGLESS = 50.0
_PRV_POINTS = 2e7  # Opacus's PRV accountant beyond this many lattice points exhausts the memory


@dataclass(frozen=True)
class Schedule:
    """Sample rate, steps and passes over the data."""

    sample_rate: float
    steps: int
    passes: int


def report(
    plan: Schedule,
    noise_multiplier: float,
    layers: int,
    delta: float,
    sampling: Sampling,
    plot: Path | None = None,
    unit: Unit = "sample",
) -> dict[str, Any]:
    """Everything the table shows, as plain numbers; None where a tool gives no answer."""
    sigma = float(noise_multiplier)

    def at(groups: int, how: Sampling) -> float:
        return accounting.epsilon(
            noise_multiplier=sigma,
            sample_rate=plan.sample_rate,
            steps=plan.steps,
            delta=delta,
            layers=groups,
            sampling=how,
            passes=plan.passes,
        )

    value = at(layers, sampling)
    curve = accounting.tradeoff(
        noise_multiplier=sigma,
        sample_rate=plan.sample_rate,
        steps=plan.steps,
        layers=layers,
        sampling=sampling,
        passes=plan.passes,
    )
    releases = plan.passes if sampling == "shuffle" else plan.steps
    sigma_eff = over_layers(sigma, layers)
    unamplified = math.sqrt(releases) / sigma_eff if sigma > 0 else math.inf
    mu = min(curve.dominating_mu(delta), unamplified)
    if plot is not None:
        curve.plot(plot, mu=mu)
    return {
        "epsilon": value,
        "delta": delta,
        "adjacency": neighbours(adjacency_of(sampling), unit),
        "protects": "one user with all their samples" if unit == "user" else "one sample",
        "sampling": sampling,
        "noise_multiplier": sigma,
        "layers": layers,
        "effective_noise_multiplier": sigma_eff,
        "sample_rate": plan.sample_rate,
        "steps": plan.steps,
        "passes": plan.passes,
        "mu": mu,
        "mu_clt_approximation": accounting.mu_clt(
            noise_multiplier=sigma, sample_rate=plan.sample_rate, steps=plan.steps, layers=layers
        ),
        "advantage": curve.advantage,
        "epsilon_without_layers": at(1, sampling),
        "epsilon_with_shuffling": at(layers, "shuffle"),
        "opacus": opacus_epsilons(sigma_eff, plan.sample_rate, plan.steps, delta),
    }


def opacus_epsilons(
    sigma_eff: float, sample_rate: float, steps: int, delta: float
) -> dict[str, float | None]:
    """Epsilon by Opacus's accountants at the effective noise multiplier; None where one cannot answer."""
    from opacus.accountants import create_accountant

    out: dict[str, float | None] = {}
    for name in ("rdp", "prv", "gdp"):
        out[name] = None
        if sigma_eff <= 0 or math.isinf(sigma_eff) or steps == 0 or sample_rate == 0:
            continue
        if name == "prv" and not _prv_is_affordable(out["rdp"], steps, delta):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accountant = create_accountant(name)
                accountant.history = [(sigma_eff, sample_rate, steps)]
                value = float(accountant.get_epsilon(delta))
        except (ArithmeticError, ValueError, RuntimeError, MemoryError):
            continue
        out[name] = value if math.isfinite(value) else None
    return out


def _prv_is_affordable(rdp: float | None, steps: int, delta: float) -> bool:
    if rdp is None:
        return False
    spacing = 0.01 / math.sqrt(steps / 2 * math.log(12_000 / delta))
    return 2 * (rdp + 3) / spacing < _PRV_POINTS


def _figure(value: float | None) -> str:
    return "no answer" if value is None else f"{value:.4g}" if value < 1e5 else f"{value:.3e}"


def show(facts: Mapping[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
        print(json_module.dumps(clean, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    opacus = facts["opacus"]
    poisson = facts["sampling"] == "poisson"
    foreign = "" if poisson else "; for Poisson sampling, another mechanism"
    rows: list[tuple[str, str, str]] = [
        (f"epsilon at delta = {facts['delta']:g}", rounded_up(facts["epsilon"]), "certified upper bound"),
        ("adjacency", facts["adjacency"], f"{facts['sampling']} sampling"),
        ("protects", facts["protects"], "the unit of the guarantee"),
        (
            "sample rate, steps",
            f"{facts['sample_rate']:.4g}, {facts['steps']}",
            "1/(steps per epoch), all epochs",
        ),
        (
            "effective noise multiplier",
            _figure(facts["effective_noise_multiplier"]),
            f"{facts['noise_multiplier']:.6g} / sqrt({facts['layers']})",
        ),
        ("mu", rounded_up(facts["mu"]), "Gaussian DP, wherever delta(epsilon) is at least delta"),
        ("mu by the paper's CLT", _figure(facts["mu_clt_approximation"]), "approximation, not a bound"),
        ("advantage", rounded_up(facts["advantage"]), "true minus false positive rate, at most"),
        (
            "epsilon without layers",
            rounded_up(facts["epsilon_without_layers"]),
            "the same noise on one group",
        ),
        (
            "epsilon with shuffling",
            rounded_up(facts["epsilon_with_shuffling"]),
            "no amplification, replace one",
        ),
        ("epsilon by Opacus rdp", _figure(opacus["rdp"]), f"bound{foreign}"),
        ("epsilon by Opacus prv", _figure(opacus["prv"]), f"numerical bound, one direction{foreign}"),
        ("epsilon by Opacus gdp", _figure(opacus["gdp"]), f"approximation, not a bound{foreign}"),
    ]
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    if facts["epsilon"] > MEANINGLESS:
        console.print(f"Above epsilon = {MEANINGLESS:g} there is no meaningful protection.")
