"""One real run with many canaries, each with a gradient of its own direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.audit.claims import AuditResult, Claim, Row
from opacus_bc.audit.modes import MODES
from opacus_bc.audit.one_run import audit_one_run
from opacus_bc.audit.scores import likelihood_ratio
from opacus_bc.audit.toys import repeat_noise
from opacus_bc.engine.privacy_engine import PrivacyEngine

_SIZE = 100.0


def one_hot(dimension: int, size: float) -> Callable[[list[tuple[Tensor]]], Tensor]:
    """A collate function: direction i becomes ``size`` times the i-th unit vector, -1 the zero vector."""

    def collate(members: list[tuple[Tensor]]) -> Tensor:
        x = torch.zeros(len(members), dimension)
        chosen = torch.stack([member for (member,) in members])
        rows = torch.nonzero(chosen >= 0).flatten()
        x[rows, chosen[rows]] = size
        return x

    return collate


def audit_many_canaries(
    *,
    canaries: int,
    steps: int,
    steps_per_epoch: int,
    noise_multiplier: float,
    mini_sets: int | None = None,
    mini_set_size: int = 4,
    max_grad_norm: float = 0.5,
    method: str = "IC",
    seed: int = 0,
    **row: Unpack[Row],
) -> AuditResult:
    """Train the linear toy once with about half of the canaries and guess which.

    Args:
        canaries: m.
        steps: T.
        steps_per_epoch: 1/q.
        noise_multiplier: sigma.
        mini_sets: k of general batch clipping; None is individual clipping.
        mini_set_size: s; samples without a gradient fill the mini-sets up.
        max_grad_norm: C.
        method: A row of :data:`opacus_bc.audit.modes.MODES` of individual clipping, without ``mini_sets``.
        seed: Of everything random.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    members = np.flatnonzero(coins).tolist()
    if mini_sets is not None:
        batch = mini_sets * mini_set_size
        members += [-1] * max(0, batch * steps_per_epoch - len(members))
    else:
        batch = math.ceil(len(members) / steps_per_epoch)
    torch.manual_seed(seed)
    model = nn.Linear(canaries, 1, bias=False)
    loader = DataLoader(
        TensorDataset(torch.tensor(members)),
        batch_size=batch,
        collate_fn=one_hot(canaries, _SIZE * max_grad_norm * mini_set_size),
        generator=torch.Generator().manual_seed(seed),
    )
    individual = mini_sets is None
    how = MODES[method].arguments(size=len(members), bound=max_grad_norm)
    if not individual:
        how = {"clipping": "batch", "mini_batch_size": mini_set_size, "max_grad_norm": max_grad_norm}
    engine = PrivacyEngine()
    net, optimizer, private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        **how,
    )
    repeat_noise(optimizer, seed)
    outputs: list[Tensor] = []

    def record(*_: Any) -> None:
        outputs.append(-model.weight.detach().flatten().clone())
        with torch.no_grad():
            model.weight.zero_()

    with torch.no_grad():
        model.weight.zero_()
    optimizer.original_optimizer.register_step_post_hook(record)
    while len(outputs) < steps:
        for x in private:
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            if len(outputs) == steps:
                break
    claim = Claim.booked(engine)
    std = noise_multiplier * max_grad_norm * (1 if individual else 2) / optimizer.expected_batch_size
    x_all = torch.stack(outputs).double().numpy() / std
    # A canary alone in its mini-set adds C: all of individual clipping's sensitivity, half of a mini-set's.
    mu = (1.0 if individual else 0.5) / noise_multiplier
    scores = likelihood_ratio(mu, claim.sample_rate)(x_all)
    return audit_one_run(scores, coins, claim, **row)
