"""Audits of users: one whose every sample is the adversary's, through the real draws, loader and optimizer.

As in :mod:`opacus_bc.audit.toys`, many repetitions lie side by side: the canary's clipped vector is the same
in every entry, or in every channel, each of which is a repetition with its share of the sensitivity. Whether
a repetition's canary takes part in a step comes from the real draws of users.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.audit.claims import AuditResult, Claim, Row
from opacus_bc.audit.models import InnerProduct, Normalised, Wide
from opacus_bc.audit.modes import USERS, Mode
from opacus_bc.audit.scores import Floats
from opacus_bc.audit.toys import stated_noise
from opacus_bc.audit.worst_case import Booleans, Observed, judge_observed
from opacus_bc.draws.plan import users_plan
from opacus_bc.draws.sources import draws_of_users
from opacus_bc.draws.units import Units
from opacus_bc.engine.privacy_engine import PrivacyEngine
from opacus_bc.gradients.local_update import local_update

_HUGE = 1e3  # what the canary's samples are made of: far beyond every bound


@dataclass(frozen=True, kw_only=True, slots=True)
class UserToy:
    """A run in which one user may be there or not.

    Attributes:
        method: A row of :data:`opacus_bc.audit.modes.USERS`.
        noise_multiplier: Of one repetition.
        steps: T.
        steps_per_epoch: 1/q.
        layers: L, clip groups of ALC.
        cap: The most samples of a user in a step.
        samples: Samples of the canary; more than the cap.
        crowd: Other users, each with two samples.
        rows_at_once: Rows of a physical batch; None does not cut batches.
    """

    method: str
    noise_multiplier: float = 1.0
    steps: int = 1
    steps_per_epoch: int = 1
    layers: int = 1
    cap: int = 4
    samples: int = 6
    crowd: int = 3
    rows_at_once: int | None = None

    @property
    def mode(self) -> Mode:
        """The row of the table that ``method`` names."""
        return USERS[self.method]

    @property
    def proportions(self) -> tuple[float, ...]:
        """Relative size of the layers' gradients: halves from layer to layer."""
        return tuple(0.5**h for h in range(self.layers))


def single_user_round(method: str) -> UserToy:
    """A row of the table at mu = 1 without sampling: one step, or with BatchNorm four."""
    mode = USERS[method]
    if mode.batch_norm is not None:
        return UserToy(method=method, steps=4, noise_multiplier=2.0)
    if mode.alc is not None:  # "clip", which costs the root of four layers
        return UserToy(method=method, layers=4, noise_multiplier=2.0)
    return UserToy(method=method)


def _data(toy: UserToy, *, canary: bool) -> tuple[Tensor, list[int]]:
    """Samples and their users; the canary is the last user, and nobody else has a gradient."""
    ids = [i // 2 for i in range(2 * toy.crowd)] + [toy.crowd] * (toy.samples * canary)
    if toy.mode.batch_norm is None:
        x = torch.zeros(len(ids), toy.layers)
        x[2 * toy.crowd :] = _HUGE * torch.tensor(toy.proportions)
        return x, ids
    x = torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64).repeat(len(ids), 1)
    for place in range(2 * toy.crowd, len(ids)):  # of different features, so that their statistics matter
        x[place] = torch.tensor([(-1) ** place * _HUGE, place * _HUGE, place * _HUGE])
    return x, ids


def _releases(toy: UserToy, *, canary: bool, width: int, seed: int) -> tuple[Floats, PrivacyEngine, Floats]:
    """The noised sums of ``toy.steps`` steps that draw everybody, with the canary or without.

    Also the engine, and the noise that the optimizer states for every feature.
    """
    x, ids = _data(toy, canary=canary)
    mode = toy.mode
    inner: Wide = Normalised(width) if mode.batch_norm is not None else InnerProduct(toy.layers, width)
    movements: list[Tensor] = []

    def record(*_: Any) -> None:
        movements.append(inner.moved())
        inner.reset()

    descent = torch.optim.SGD(inner.parameters(), lr=1.0)
    descent.register_step_post_hook(record)
    engine = PrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, loader = engine.make_private(
            module=inner,
            optimizer=descent,
            data_loader=DataLoader(TensorDataset(x), batch_size=toy.crowd + canary),
            noise_multiplier=toy.noise_multiplier / width**0.5,
            noise_generator=torch.Generator().manual_seed(seed),
            unit=ids,
            mini_batch_size=toy.cap,
            **mode.arguments(size=len(ids), bound=1.0, proportions=toy.proportions),
        )
        if toy.rows_at_once is not None:
            loader = loader.with_max_physical_batch_size(toy.rows_at_once)
        for _ in range(toy.steps):  # a pass is one step: everybody is drawn
            for (rows,) in loader:
                if mode.local_steps:
                    steps = [lambda rows=rows: private(rows).mean()] * mode.local_steps
                    local_update(private, lambda params: torch.optim.SGD(params, lr=1.0), steps)
                else:
                    private(rows).mean().backward()
                optimizer.step()
    sums = torch.stack(movements).mul_(float(optimizer.expected_batch_size))
    return sums.numpy(), engine, stated_noise(optimizer, inner)


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
    plan = users_plan(loader, index, sampling="poisson", cap=toy.cap, individual=toy.mode.individual)
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
    with_canary, engine, stds = _releases(toy, canary=True, width=repetitions, seed=3 * seed)
    without, *_ = _releases(toy, canary=False, width=repetitions, seed=3 * seed + 1)
    booked = Claim.booked(engine, scale=repetitions**0.5)
    taken, rate = participation(toy, repetitions=repetitions, seed=3 * seed + 2)
    claim = Claim(noise_multiplier=booked.noise_multiplier, sample_rate=rate, steps=toy.steps)
    seen = Observed(taken=taken, with_canary=with_canary, without=without, claim=claim, noise_stds=stds)
    return judge_observed(seen, **row)
