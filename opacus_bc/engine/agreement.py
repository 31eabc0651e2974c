"""What the processes that train one model must have been given alike."""

from __future__ import annotations

from opacus_bc.batch_norm.policy import BatchNormPolicy
from opacus_bc.engine.request import Request
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.parallel.same_data import check_same_data


def check_agreement(
    ranks: Ranks, request: Request, policy: BatchNormPolicy, bounds: tuple[float, ...]
) -> None:
    """Refuse, on every rank, arguments or data that differ; changes nothing.

    Raises:
        ValueError: Says what differs.
    """
    ranks.check_same(
        "make_private's arguments",
        request.plan,
        request.noise_multiplier,
        bounds,
        request.loss_reduction,
        request.owners,
    )
    check_same_data(ranks, "data_loader", request.data_loader)
    check_same_data(ranks, "alc=", None if request.config is None else request.config.public_loader)
    check_same_data(ranks, "batch_norm=", policy.public.loader if policy.public else None)
