"""`opacus-bc epsilon` and `opacus-bc calibrate`: what a planned run costs, and how much noise it needs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from opacus_bc import accounting
from opacus_bc.accounting.display import objection_to_delta
from opacus_bc.accounting.events import check_count, check_delta, check_number, check_sigma
from opacus_bc.cli.figures import Schedule, report, show
from opacus_bc.mechanism.names import Sampling, Unit


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
            check_count("--batch-size", batch_size or 0, 1),
            check_count("--dataset-size", dataset_size or 0, 1),
        )
        if size > number:
            raise ValueError(f"--batch-size={size} must not exceed --dataset-size={number} (or --users).")
        length = math.ceil(number / size)
        repeats = check_count("--epochs", epochs if epochs is not None else -1)
        return Schedule(1 / length, repeats * length, repeats)
    if sample_rate is not None and steps is not None and counted == (None, None, None):
        rate, taken = check_number("--sample-rate", sample_rate, 0, 1), check_count("--steps", steps)
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
    return dataset_size if users is None else check_count("--users", users, 2)


def _planned(
    batch_size: int | None,
    dataset_size: int | None,
    users: int | None,
    epochs: int | None,
    sample_rate: float | None,
    steps: int | None,
) -> tuple[Schedule, Unit]:
    """What is drawn, and who is protected. With a sample rate nobody needs the number of users."""
    size = _units(dataset_size, users)
    number = None if users and sample_rate is not None else size
    plan = schedule(batch_size, number, epochs, sample_rate, steps)
    return plan, "sample" if users is None else "user"


def _warn_of_large_delta(delta: float, dataset_size: int | None, users: int | None) -> None:
    """One line on standard error if the number of those who are protected is known, and delta too large."""
    found = objection_to_delta(delta, users or dataset_size or 0, "user" if users else "sample", "--delta")
    if found is not None:
        print(f"opacus-bc: warning: {found}", file=sys.stderr)


def _check_target(epsilon: float | None, mu: float | None, tpr: float | None, fpr: float | None) -> None:
    """Raise unless there is exactly one target, and one that can be met; errors name options."""
    options = {"--epsilon": epsilon, "--mu": mu, "--tpr": tpr}
    given = [f"{option} {value:g}" for option, value in options.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise ValueError(f"give exactly one target: --epsilon, --mu, or --tpr with --fpr; got {got}.")
    if (tpr is None) != (fpr is None):
        raise ValueError(
            "--tpr and --fpr go together: the largest true positive rate, and at which false one."
        )
    for option, value in (("--epsilon", epsilon), ("--mu", mu)):
        if value is not None:
            check_number(option, value, 0, math.inf, open_ends=True)
    if tpr is not None and fpr is not None:
        check_number("--tpr", tpr, check_number("--fpr", fpr, 0, 1, open_ends=True), 1, open_ends=True)


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
    plan, unit = _planned(batch_size, dataset_size, users, epochs, sample_rate, steps)
    check_count("--layers", layers, 1)
    check_delta(delta, "--delta")
    check_sigma(noise_multiplier, "--noise-multiplier")
    _warn_of_large_delta(delta, dataset_size, users)
    facts = report(plan, noise_multiplier, layers, delta, sampling, plot, unit)
    show(facts, json, title=f"noise multiplier {noise_multiplier:g}, {layers} layer(s), {sampling} sampling")
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
    plan, unit = _planned(batch_size, dataset_size, users, epochs, sample_rate, steps)
    check_count("--layers", layers, 1)
    check_delta(delta, "--delta")
    _check_target(epsilon, mu, tpr, fpr)
    _warn_of_large_delta(delta, dataset_size, users)
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
    show(
        facts, json, title=f"calibrated noise multiplier {sigma:.6g}, {layers} layer(s), {sampling} sampling"
    )
    return 0
