"""Audit of Opacus's adaptive clipping: a step releases a noised sum and a noised count of unclipped samples.

The count steers the next clip bound, which everybody sees. Under Poisson sampling there is no claim to audit:
``"fdp"`` refuses it, because Opacus divides the count by the exact batch size. With a loader that is not
sampled (``poisson_sampling=False``) both parts are booked for replacing one sample, as one step of noise
multiplier sigma: ``(2 / sigma_sum)^2 + (1 / sigma_count)^2 = (2 / sigma)^2``.

The worst case uses up both: the canary's gradient is far beyond the bound C, so that it is clipped; the other
sample in its place has a gradient of just below C to the other side, so that it is not. A repetition is one
pass of one step. Weights and bound go back to the start before the next. With BatchNorm all features are
zero, and so are the public means: the shift alone has a gradient, and the sample's third column is its size.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.audit.claims import AuditResult, Claim, Row
from opacus_bc.audit.models import InnerProduct, Normalised, Wide
from opacus_bc.audit.modes import Policy, policy_argument
from opacus_bc.audit.scores import Floats
from opacus_bc.audit.worst_case import Observed, judge_observed
from opacus_bc.engine.privacy_engine import PrivacyEngine

_SAMPLES = 4
_BELOW, _ABOVE = 1 - 1e-4, 100.0  # gradients over the bound: just not clipped, and clipped by far


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveToy:
    """A run of adaptive clipping in which one sample may be another.

    Attributes:
        noise_multiplier: sigma, which is booked.
        count_std: Noise of the count; the sum's noise makes up for it.
        max_grad_norm: C of every step.
        rate: How much the count moves the bound.
        gradients: What ``make_private`` calls ``grad_sample_mode``.
        batch_norm: The policy; with one, the model has a BatchNorm layer.
    """

    noise_multiplier: float = 2.0
    count_std: float = 1.5
    max_grad_norm: float = 0.5
    rate: float = 0.1
    gradients: str = "hooks"
    batch_norm: Policy | None = None

    @property
    def sum_std(self) -> float:
        """Noise of the sum, by Theorem 1 of Andrew et al. (2021)."""
        left = self.noise_multiplier**-2 - (2 * self.count_std) ** -2
        return self.max_grad_norm / math.sqrt(left)


def _private(toy: AdaptiveToy, *, canary: bool, seed: int) -> tuple[Wide, Any, Any, Any, PrivacyEngine]:
    """The plain model, and what ``make_private`` returns for samples of which the last one is the canary."""
    normalised = toy.batch_norm is not None
    plain: Wide = Normalised(1) if normalised else InnerProduct(1, 1)
    x = torch.zeros(_SAMPLES, 3 if normalised else 1, dtype=torch.float64 if normalised else torch.float32)
    x[-1, -1] = toy.max_grad_norm * (_ABOVE if canary else -_BELOW)
    engine = PrivacyEngine()
    with warnings.catch_warnings():
        for message in ("Full backward hook", "batch_norm=", "the public data has"):
            warnings.filterwarnings("ignore", message=message)
        private = engine.make_private(
            module=plain,
            optimizer=torch.optim.SGD(plain.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x), batch_size=_SAMPLES),
            noise_multiplier=toy.noise_multiplier,
            max_grad_norm=toy.max_grad_norm,
            clipping="adaptive",
            grad_sample_mode=toy.gradients,
            batch_norm=None if toy.batch_norm is None else policy_argument(toy.batch_norm),
            poisson_sampling=False,
            noise_generator=torch.Generator().manual_seed(seed),
            target_unclipped_quantile=0.5,
            clipbound_learning_rate=toy.rate,
            max_clipbound=1e3 * toy.max_grad_norm,
            min_clipbound=1e-3 * toy.max_grad_norm,
            unclipped_num_std=toy.count_std,
        )
    return plain, *private, engine


def _releases(toy: AdaptiveToy, *, canary: bool, repetitions: int, seed: int) -> tuple[Floats, Claim]:
    """Noised sums and counts, shape ``(1, repetitions, 2)``, and what is booked for one of them."""
    plain, model, optimizer, loader, engine = _private(toy, canary=canary, seed=seed)
    found = np.empty((1, repetitions, 2))
    for number in range(repetitions):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        moved = float(plain.moved()[0, -1]) * _SAMPLES
        share = 0.5 - math.log(float(optimizer.max_grad_norm) / toy.max_grad_norm) / toy.rate
        found[0, number] = moved, share * _SAMPLES
        plain.reset()
        optimizer.max_grad_norm = toy.max_grad_norm
    booked = Claim.booked(engine)
    if booked.steps != repetitions:
        raise ValueError(f"{repetitions} passes were made and {booked.steps} are booked")
    return found, replace(booked, steps=1)


def audit_adaptive(toy: AdaptiveToy, *, repetitions: int, seed: int = 0, **row: Unpack[Row]) -> AuditResult:
    """Audit clipping, both noises and the booking of Opacus's adaptive clipping.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`.

    Args:
        toy: What is audited.
        repetitions: Passes with the canary, and as many with the other sample in its place.
        seed: Of everything random.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    with_canary, claim = _releases(toy, canary=True, repetitions=repetitions, seed=2 * seed)
    without, _ = _releases(toy, canary=False, repetitions=repetitions, seed=2 * seed + 1)
    seen = Observed(
        taken=np.ones((1, repetitions), dtype=np.bool_),
        with_canary=with_canary,
        without=without,
        claim=claim,
        noise_stds=np.array([toy.sum_std, toy.count_std]),
    )
    return judge_observed(seen, **row)
