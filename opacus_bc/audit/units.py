"""Audits of users: one whose every sample is the adversary's, through the real draws, loader and optimizer.

As in :mod:`opacus_bc.audit.worst_case`, many repetitions lie side by side: the canary's clipped vector points
into the direction of all ones, so that each entry of the release is one repetition with a share of the
sensitivity. Whether a repetition's canary takes part in a step comes from the real draws of users.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.audit.claims import AuditResult, Claim, Row
from opacus_bc.audit.scores import Floats
from opacus_bc.audit.worst_case import Booleans, Observed, judge_observed
from opacus_bc.draws.plan import users_plan
from opacus_bc.draws.sources import draws_of_users
from opacus_bc.draws.units import Units
from opacus_bc.engine.privacy_engine import PrivacyEngine
from opacus_bc.gradients.local_update import local_update

Method = Literal["flat", "bk", "GBC", "GBC, local steps"]
METHODS: tuple[Method, ...] = ("flat", "bk", "GBC", "GBC, local steps")
_HUGE = 1e3  # what the canary's samples are made of: far beyond every bound


@dataclass(frozen=True, kw_only=True, slots=True)
class UserToy:
    """A run in which one user may be there or not.

    Attributes:
        method: Individual clipping by hooks or in one backward, or a mini-set for each user, with the user's
            own batch statistics or with local steps.
        noise_multiplier: Of one repetition.
        steps: T.
        steps_per_epoch: 1/q.
        cap: The most samples of a user in a step.
        samples: Samples of the canary; more than the cap.
        crowd: Other users, each with two samples.
        rows_at_once: Rows of a physical batch; None does not cut batches.
    """

    method: Method
    noise_multiplier: float = 1.0
    steps: int = 1
    steps_per_epoch: int = 1
    cap: int = 4
    samples: int = 6
    crowd: int = 3
    rows_at_once: int | None = None

    @property
    def batch(self) -> bool:
        """Whether the loader delivers user after user."""
        return self.method.startswith("GBC")


def _model(toy: UserToy, width: int) -> nn.Module:
    """A model whose gradient, for the canary, has the same entry everywhere, and for all others is zero."""
    if toy.batch:  # the gradient of the weight is the mean of label times normalised input
        model: nn.Module = nn.BatchNorm1d(width, track_running_stats=False)
        nn.init.zeros_(model.weight)  # type: ignore[arg-type]  # torch types attributes as modules too
    else:
        model = nn.Sequential(nn.Linear(width, 1, bias=False))
    return model.double()


def _loss(toy: UserToy, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output: Tensor = model(x)
    if toy.batch:
        return _HUGE * (output * y[:, None]).sum(1).mean()
    return output.mean()


def _data(toy: UserToy, *, canary: bool, width: int) -> tuple[TensorDataset, list[int]]:
    """Samples and their users; the canary is the last user."""
    size = 2 * toy.crowd + toy.samples * canary
    x, y = torch.zeros(size, width, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    ids = [i // 2 for i in range(2 * toy.crowd)] + [toy.crowd] * (toy.samples * canary)
    if canary and toy.batch:  # every second sample is the opposite of the others, and so is its label
        y[2 * toy.crowd :] = torch.tensor([1.0, -1.0]).repeat(toy.samples)[: toy.samples]
        x[2 * toy.crowd :] = y[2 * toy.crowd :, None]
    elif canary:
        x[2 * toy.crowd :] = _HUGE
    return TensorDataset(x, y), ids


def _releases(toy: UserToy, *, canary: bool, width: int, seed: int) -> tuple[Floats, PrivacyEngine, Any]:
    """The noised sums of ``toy.steps`` steps that draw everybody, with the canary or without."""
    data, ids = _data(toy, canary=canary, width=width)
    model, users = _model(toy, width), toy.crowd + canary
    weight = next(iter(model.parameters()))
    engine = PrivacyEngine()
    how: dict[str, Any] = {"clipping": "batch"}
    if not toy.batch:
        how = {"clipping": "flat", "grad_sample_mode": "bk" if toy.method == "bk" else "hooks"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD([weight], lr=1.0),
            data_loader=DataLoader(data, batch_size=users),
            noise_multiplier=toy.noise_multiplier / width**0.5,
            max_grad_norm=1.0,
            noise_generator=torch.Generator().manual_seed(seed),
            unit=ids,
            mini_batch_size=toy.cap,
            **how,
        )
    if toy.rows_at_once is not None:
        loader = loader.with_max_physical_batch_size(toy.rows_at_once)
    found = []
    for _ in range(toy.steps):  # a pass is one step: everybody is drawn
        before = weight.detach().clone()
        for x, y in loader:
            if toy.method == "GBC, local steps":
                steps = [lambda x=x, y=y: _loss(toy, private, x, y)] * 2
                local_update(private, lambda params: torch.optim.SGD(params, lr=1.0), steps)
            else:
                _loss(toy, private, x, y).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
        moved = (before - weight.detach()) * float(optimizer.expected_batch_size)
        found.append(moved.flatten().numpy())
    return np.stack(found)[:, :, None], engine, optimizer


def participation(toy: UserToy, *, repetitions: int, seed: int) -> tuple[Booleans, float]:
    """At which steps each repetition's canary is drawn, and the rate that the plan states for it.

    Every repetition has a user of its own; under Poisson sampling these are drawn independently.
    """
    owner = np.repeat(np.arange(repetitions), toy.samples)
    index = Units(owner).index(len(owner))
    loader = DataLoader(
        TensorDataset(torch.zeros(1).expand(len(owner))),
        batch_size=max(1, repetitions // toy.steps_per_epoch),
    )
    plan = users_plan(loader, index, sampling="poisson", cap=toy.cap, individual=not toy.batch)
    generator = np.random.Generator(np.random.Philox(seed))
    out = np.zeros((toy.steps, repetitions), dtype=np.bool_)
    taken = 0
    while taken < toy.steps:
        for draw in draws_of_users(plan, index, generator):
            out[taken, [owner[mini_set[0]] for mini_set in draw]] = True
            taken += 1
            if taken == toy.steps:
                break
    return out, plan.sample_rate


def audit_users(toy: UserToy, *, repetitions: int, seed: int = 0, **row: Unpack[Row]) -> AuditResult:
    """Audit clipping, noise, draws and booking of a run that protects users.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`.

    Args:
        toy: What is audited.
        repetitions: With the canary, and as many without.
        seed: Of everything random.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    with_canary, engine, optimizer = _releases(toy, canary=True, width=repetitions, seed=3 * seed)
    without, *_ = _releases(toy, canary=False, width=repetitions, seed=3 * seed + 1)
    booked = Claim.booked(engine, scale=repetitions**0.5)
    taken, rate = participation(toy, repetitions=repetitions, seed=3 * seed + 2)
    claim = Claim(noise_multiplier=booked.noise_multiplier, sample_rate=rate, steps=toy.steps)
    stds = np.array([block.noise_std for block in optimizer.blocks()])
    seen = Observed(taken=taken, with_canary=with_canary, without=without, claim=claim, noise_stds=stds)
    return judge_observed(seen, **row)
