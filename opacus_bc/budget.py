"""From a privacy budget to the noise multiplier of the blocks that training will release."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Sized
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus_bc import accounting
from opacus_bc._opacus import get_noise_multiplier
from opacus_bc.alc import ALC
from opacus_bc.clip_rules import effective_per_multiplier, individual_adjacency, trainable
from opacus_bc.sampling import Sampling


def effective_multiplier(
    mechanism: str,
    *,
    epsilon: float,
    delta: float,
    steps_per_epoch: int,
    epochs: int,
    sampling: Sampling,
    releases: tuple[float, ...] = (),
    stock: bool = False,
) -> float:
    """The sigma_eff with which ``epochs`` passes and the reserved releases spend at most the budget.

    Args:
        mechanism: The accountant's name.
        epsilon: The budget's epsilon.
        delta: The budget's delta.
        steps_per_epoch: Steps in a pass; one over the sample rate.
        epochs: Passes.
        sampling: How steps are drawn.
        releases: Noise multipliers of one-off releases (accountant ``"fdp"`` only).
        stock: Count steps as Opacus does for its own modes.

    Raises:
        ValueError: ``epochs`` is no whole number, or the budget cannot be met.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be a whole number >= 1, got {epochs!r}")
    if mechanism == "fdp":
        return accounting.noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=1 / steps_per_epoch,
            steps=epochs * steps_per_epoch,
            sampling=sampling,
            releases=releases,
        )
    budget = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": 1 / steps_per_epoch}
    length = {"epochs": epochs} if stock else {"steps": epochs * steps_per_epoch}
    return float(get_noise_multiplier(**budget, **length, accountant=mechanism))


def warn_of_large_delta(delta: float, loaders: Sequence[DataLoader[Any]], name: str = "delta") -> None:
    """Warn of a delta that allows to publish a sample: giving away one of N at random is (0, 1/N)-DP."""
    sizes = [len(loader.dataset) for loader in loaders if isinstance(loader.dataset, Sized)]
    if sizes and delta < 1 <= delta * max(sizes):  # what is no probability is refused elsewhere
        warnings.warn(
            f"{name}={delta:g} is no less than 1/{max(sizes)}: publishing a random sample of {max(sizes)} as "
            f"it is would be allowed too; take a much smaller one, e.g. {0.1 / max(sizes):.0e}",
            stacklevel=3,
        )


def multiplier_per_effective(
    config: ALC | None, module: nn.Module, optimizer: Optimizer, *, sampling: Sampling, batch: bool
) -> float:
    """Sigma over sigma_eff, from the blocks that training will release."""
    if not batch and config is None:
        # Opacus's own noise is sigma * C, while a replaced sample moves the sum by up to 2C.
        return 2.0 if sampling == "shuffle" else 1.0
    return 1.0 / effective_per_multiplier(
        config,
        trainable(module, optimizer),
        unit="mini-set" if batch else "sample",
        adjacency=individual_adjacency(sampling),
    )
