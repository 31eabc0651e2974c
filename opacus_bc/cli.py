"""The command line: `opacus-bc epsilon`, `opacus-bc calibrate`, ...

Every command is a function in `COMMANDS`: its keyword arguments become options, its docstring the help text,
its return value the exit code. A ValueError becomes one line on standard error and exit code 2.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json as json_module
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opacus_bc import accounting
from opacus_bc.accounting.display import rounded_up
from opacus_bc.accounting.events import check_count, check_number, check_sigma
from opacus_bc.audit.command import audit
from opacus_bc.experiments.compare.command import compare
from opacus_bc.experiments.reproduce.command import reproduce
from opacus_bc.mechanism.blocks import over_layers
from opacus_bc.mechanism.names import Sampling, Unit, adjacency_of, neighbours

EXTRA = "the command line needs tyro and rich: pip install 'opacus-bc[experiments]'"
MEANINGLESS = 50.0
_PRV_POINTS = 2e7  # Opacus's PRV accountant beyond this many lattice points exhausts the memory


@dataclass(frozen=True)
class Schedule:
    """Sample rate, steps and passes over the data."""

    sample_rate: float
    steps: int
    passes: int


def schedule(
    batch_size: int | None,
    dataset_size: int | None,
    epochs: int | None,
    sample_rate: float | None,
    steps: int | None,
) -> Schedule:
    """From (batch size, data set size, epochs), as a DataLoader counts, or from (sample rate, steps).

    >>> schedule(64, 54000, 50, None, None)
    Schedule(sample_rate=0.001184834123222749, steps=42200, passes=50)
    """
    counted = (batch_size, dataset_size, epochs)
    direct = (sample_rate, steps)
    if all(value is not None for value in counted) and direct == (None, None):
        size, number = (
            check_count("batch_size", batch_size or 0, 1),
            check_count("dataset_size", dataset_size or 0, 1),
        )
        if size > number:
            raise ValueError(f"batch_size={size} must not exceed dataset_size={number} (or users).")
        length = math.ceil(number / size)
        repeats = check_count("epochs", epochs if epochs is not None else -1)
        return Schedule(1 / length, repeats * length, repeats)
    if sample_rate is not None and steps is not None and counted == (None, None, None):
        rate, taken = check_number("sample_rate", sample_rate, 0, 1), check_count("steps", steps)
        return Schedule(rate, taken, math.ceil(taken * rate - 1e-9))
    raise ValueError(
        "give either --batch-size, --dataset-size (or --users) and --epochs, or --sample-rate and --steps."
    )


def _units(dataset_size: int | None, users: int | None) -> int | None:
    """How many there are of whom is protected."""
    if dataset_size is not None and users is not None:
        raise ValueError(
            "give --users or --dataset-size, not both: with --users the number of samples does not matter."
        )
    return dataset_size if users is None else check_count("users", users, 2)


def epsilon(
    *,
    noise_multiplier: float,
    layers: int = 1,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    users: int | None = None,
    epochs: int | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    delta: float = 1e-5,
    sampling: Sampling = "poisson",
    json: bool = False,
    plot: Path | None = None,
) -> int:
    """What a planned training run costs: certified epsilon, trade-off figures, and comparisons.

    Args:
        noise_multiplier: noise standard deviation over sensitivity, of every clip group.
        layers: number of separately clipped groups L (adaptive layerwise clipping); costs sqrt(L).
        batch_size: samples per step; with --dataset-size and --epochs. The sample rate is 1/ceil(size/batch).
        dataset_size: number of private samples.
        users: instead of --dataset-size: number of users, each protected with all their samples; --batch-size
            then counts users.
        epochs: passes over the data.
        sample_rate: instead: the probability that a sample takes part in a step.
        steps: with --sample-rate: the number of steps.
        delta: the delta of (epsilon, delta)-DP.
        sampling: poisson (add/remove one), partition or shuffle (replace one).
        json: print JSON instead of a table.
        plot: write the trade-off curve to this file (.png, .pdf, .svg).
    """
    size = _units(dataset_size, users)
    # With a sample rate nobody needs their number: --users says who is protected.
    plan = schedule(
        batch_size, None if users and sample_rate is not None else size, epochs, sample_rate, steps
    )
    unit: Unit = "sample" if users is None else "user"
    facts = report(plan, noise_multiplier, layers, delta, sampling, plot, unit)
    _show(facts, json, title=f"noise multiplier {noise_multiplier:g}, {layers} layer(s), {sampling} sampling")
    return 0


def calibrate(
    *,
    epsilon: float | None = None,
    mu: float | None = None,
    tpr: float | None = None,
    fpr: float | None = None,
    layers: int = 1,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    users: int | None = None,
    epochs: int | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    delta: float = 1e-5,
    sampling: Sampling = "poisson",
    json: bool = False,
    plot: Path | None = None,
) -> int:
    """The least noise multiplier that meets a target: --epsilon, --mu, or --tpr at --fpr.

    Args:
        epsilon: target epsilon at --delta.
        mu: instead: target Gaussian parameter.
        tpr: instead: the largest true positive rate of a membership test...
        fpr: ...at this false positive rate.
        layers: number of separately clipped groups L.
        batch_size: samples per step; with --dataset-size and --epochs. The sample rate is 1/ceil(size/batch).
        dataset_size: number of private samples.
        users: instead of --dataset-size: number of users, each protected with all their samples; --batch-size
            then counts users.
        epochs: passes over the data.
        sample_rate: instead: the probability that a sample takes part in a step.
        steps: with --sample-rate: the number of steps.
        delta: the delta of (epsilon, delta)-DP.
        sampling: poisson (add/remove one), partition or shuffle (replace one).
        json: print JSON instead of a table.
        plot: write the trade-off curve to this file (.png, .pdf, .svg).
    """
    size = _units(dataset_size, users)
    # With a sample rate nobody needs their number: --users says who is protected.
    plan = schedule(
        batch_size, None if users and sample_rate is not None else size, epochs, sample_rate, steps
    )
    unit: Unit = "sample" if users is None else "user"
    sigma = accounting.noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta if epsilon is not None else None,
        target_mu=mu,
        target_tpr=tpr,
        at_fpr=fpr,
        sample_rate=plan.sample_rate,
        steps=plan.steps,
        layers=layers,
        sampling=sampling,
        passes=plan.passes,
    )
    facts = report(plan, sigma, layers, delta, sampling, plot, unit)
    _show(
        facts, json, title=f"calibrated noise multiplier {sigma:.6g}, {layers} layer(s), {sampling} sampling"
    )
    return 0


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
    sigma = check_sigma(noise_multiplier)

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


def _show(facts: Mapping[str, Any], as_json: bool, title: str) -> None:
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


COMMANDS: dict[str, Callable[..., int]] = {
    "epsilon": epsilon,
    "calibrate": calibrate,
    "compare": compare,
    "reproduce": reproduce,
    "audit": audit,
}


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The command with the same options, which does nothing yet but remember them."""

    @functools.wraps(command)
    def remember(*args: Any, **kwargs: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **kwargs)

    return remember


def _in_one_line(box: str) -> str:
    """What tyro says first inside its frame of several lines."""
    said: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip("│╭╮╰╯─| ")
        if text:
            said.append(text)
        elif said and not said[-1].endswith(":"):
            break
    return " ".join(said).rstrip(".") or "these options make no sense"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        import rich  # noqa: F401 (commands need it later)
        import tyro
    except ImportError:
        print(EXTRA, file=sys.stderr)
        return 2
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command = tyro.extras.subcommand_cli_from_dict(
                {name: _later(function) for name, function in COMMANDS.items()},
                prog="opacus-bc",
                description="Batch clipping for Opacus: accounting, comparison, audits.",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        print(f"opacus-bc: {_in_one_line(said.getvalue())}. --help lists what there is.", file=sys.stderr)
        return 2
    try:
        return int(command())
    except (ValueError, OSError, ImportError) as error:
        print(f"opacus-bc: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
