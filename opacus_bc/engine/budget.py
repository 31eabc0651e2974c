"""From a privacy budget to the noise multiplier of the blocks that training will release."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from opacus_bc import accounting
from opacus_bc._opacus import get_noise_multiplier
from opacus_bc.accounting.display import objection_to_delta
from opacus_bc.alc.choice import effective_per_multiplier, trainable
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.engine.release import reserved_releases
from opacus_bc.engine.request import Request
from opacus_bc.mechanism.names import Sampling
from opacus_bc.mechanism.numbers import check_count
from opacus_bc.mechanism.warn import users_level
from opacus_bc.parallel.wrappers import bare


def calibrated(request: Request, accountant: Any, *, epsilon: float, delta: float, epochs: int) -> float:
    """The noise multiplier with which ``epochs`` passes of what is asked for spend at most the budget.

    It counts the very steps and releases that the accountant will count, through the same blocks.
    """
    plan, plain = request.plan, bare(request.module)
    effective = effective_multiplier(
        accountant.mechanism(),
        epsilon=epsilon,
        delta=delta,
        steps_per_epoch=plan.steps_per_epoch,
        epochs=epochs,
        sampling=request.kind,
        releases=reserved_releases(accountant, plain, request.policy),
        stock=not request.batch and request.config is None and request.users is None,
    )
    return effective / effective_per_multiplier(
        request.config,
        trainable(plain, request.inner_optimizer),
        unit=request.clipped,
        adjacency=plan.adjacency,
    )


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

    ``releases`` are noise multipliers, for ``"fdp"`` only; ``stock`` counts steps as Opacus does.
    """
    check_count("epochs", epochs)
    steps, rate = epochs * steps_per_epoch, 1 / steps_per_epoch
    budget: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate}
    if mechanism == "fdp":
        return accounting.noise_multiplier(**budget, steps=steps, sampling=sampling, releases=releases)
    length = {"epochs": epochs} if stock else {"steps": steps}
    return float(get_noise_multiplier(**budget, **length, accountant=mechanism))


def warn_of_large_delta(delta: float, plans: Sequence[SamplingPlan], name: str = "delta") -> None:
    """Warn of a delta that allows to publish one of N whole: giving one away at random is (0, 1/N)-DP."""
    size, who = max(((plan.dataset_size, plan.protected) for plan in plans), default=(0, "sample"))
    objection = objection_to_delta(delta, size, who, name)
    if objection is not None:
        warnings.warn(objection, stacklevel=users_level())
