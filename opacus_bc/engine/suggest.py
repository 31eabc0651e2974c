"""Choosing C and the batch size before training, from public data alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from opacus_bc.alc.choice import without_alc
from opacus_bc.alc.drowning import warn_of_drowning
from opacus_bc.alc.measuring import LARGEST_COUNT, PublicNorms
from opacus_bc.alc.report import ratio
from opacus_bc.batch_norm.choices import keeps_statistics
from opacus_bc.batch_norm.policy import make_policy
from opacus_bc.engine.reports import NOTHING_MEASURED
from opacus_bc.mechanism.names import Unit
from opacus_bc.mechanism.numbers import check_count, check_positive
from opacus_bc.mechanism.types import Loader
from opacus_bc.parallel.wrappers import unwrap
from opacus_bc.public.data import PublicDataError, check_yields_samples
from opacus_bc.public.norms import loss_gradient

QUANTILE = 0.5
SHOWN = (0.1, 0.25, 0.5, 0.75, 0.9)
_LARGER = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class SuggestedClipping:
    """Norms of public gradients, and the clip bound that follows from them.

    The suggestion is the **median** of the norms. Noise is in proportion to C, the signal to the mean of
    ``min(norm, C)``. So noise over signal falls with C, towards a least value for tiny C. At the median it is
    at most twice that value, because half of the clipped vectors have length C; and the other half keep their
    own lengths. A larger C brings noise, a smaller one only bias. A learning rate that was chosen for another
    C is to be divided by the ratio of the two: a step is in proportion to their product.

    Attributes:
        norms: Of the whole gradient, for every public vector that was measured, in ascending order.
        unit: What one vector belongs to: ``"sample"`` or ``"mini-set"``.
        mini_set_size: Samples in one of them.
        entries: Trainable entries of the model.
        batch_size: Samples of a step.
        noise_multiplier: Sigma, if it was given.
    """

    norms: Sequence[float]
    unit: Unit
    mini_set_size: int
    entries: int
    batch_size: int
    noise_multiplier: float | None = None

    @property
    def max_grad_norm(self) -> float:
        """The suggested C, the median norm."""
        return self.quantile(QUANTILE)

    def quantile(self, share: float) -> float:
        """The norm that this share of the vectors does not exceed."""
        return float(np.quantile(self.norms, share))

    def noise_to_signal(
        self,
        *,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        max_grad_norm: float | None = None,
    ) -> float:
        """Noise over signal of an update under Poisson sampling, at least; see ``LayerReport``.

        Args:
            noise_multiplier: Sigma; None is the one that was given.
            batch_size: None is the one that was given. A larger batch at the same epsilon and number of
                epochs needs a larger sigma: see :func:`opacus_bc.accounting.noise_multiplier`.
            max_grad_norm: C; None is the suggested one.
        """
        sigma = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        if sigma is None:
            raise ValueError("noise_multiplier was not given: pass it here")
        size = check_count("batch_size", self.batch_size if batch_size is None else batch_size)
        bound = check_positive(
            "max_grad_norm", self.max_grad_norm if max_grad_norm is None else max_grad_norm
        )
        whole = [("all", torch.empty(self.entries, device="meta"))]
        rule = without_alc(self.unit, "add/remove one")
        (block,) = rule.blocks(whole, noise_multiplier=sigma, max_grad_norm=bound)
        kept = math.fsum(min(norm, bound) for norm in self.norms) / len(self.norms)
        return ratio(block.noise_std * math.sqrt(self.entries), size / self.mini_set_size * kept)

    def __str__(self) -> str:
        """The norms, the suggestion, and what larger batches would bring."""
        what = "samples" if self.unit == "sample" else f"mini-sets of {self.mini_set_size} samples"
        shown = ", ".join(f"{share:.0%}: {self.quantile(share):.3g}" for share in SHOWN)
        text = (
            f"gradient norms of {len(self.norms)} public {what}, by quantile: {shown}\n"
            f"max_grad_norm={self.max_grad_norm:.3g} is suggested, the median"
        )
        if self.noise_multiplier is None:
            return text
        larger = ", ".join(
            f"{n * self.batch_size}: {self.noise_to_signal(batch_size=n * self.batch_size):.3g}"
            for n in _LARGER
        )
        sigma = f"noise_multiplier={self.noise_multiplier:g}"
        return f"{text}\nnoise over signal at {sigma}, at least, by batch size: {larger}"


def suggest_max_grad_norm(
    module: nn.Module,
    public_loader: Loader,
    *,
    batch_size: int,
    clipping: str = "flat",
    mini_batch_size: int | None = None,
    noise_multiplier: float | None = None,
    batch_norm: Any = None,
    criterion: Any = None,
    gradient: Any = None,
) -> SuggestedClipping:
    """Measure gradients on public data as training would clip them, and suggest C.

    Call it before ``make_private``, on the plain model. It warns where noise would drown the signal.

    **Formal guarantee**: the result is a function of the weights and of public data. A copy of the model is
    measured, and random states are put back, so nothing is different afterwards.

    **Edge cases**: norms fall during training, and public data that do not resemble the private ones have
    other norms. At most 128 samples or 32 mini-sets are measured; where half of their gradients are zero,
    there is no suggestion.

    Args:
        module: The model; its trainable parameters count.
        public_loader: Public data: pairs ``(x, y)`` unless ``gradient`` says otherwise.
        batch_size: Samples of a step.
        clipping: ``"flat"`` for single samples, ``"batch"`` for mini-sets.
        mini_batch_size: As in ``make_private``: None clips the whole batch.
        noise_multiplier: Sigma, to say how noise and signal compare.
        batch_norm: As in ``make_private``; None takes statistics from ``public_loader`` if there are any.
        criterion: The loss; None is cross entropy.
        gradient: As :class:`opacus_bc.ALC` takes it.

    Raises:
        ValueError: An argument is out of range, or contradicts another one.
        PublicDataError: The gradients on the public data say nothing.
    """
    unit, size = _clipped(clipping, mini_batch_size, check_count("batch_size", batch_size))
    if noise_multiplier is not None:
        check_positive("noise_multiplier", noise_multiplier, zero_allowed=True)
    check_yields_samples(public_loader)
    scratch = copy.deepcopy(unwrap(module))
    trained = {name: p for name, p in scratch.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("module has no trainable parameters: there is nothing to clip")
    if batch_norm is None and keeps_statistics(scratch):
        batch_norm = public_loader
    with ExitStack() as undo:
        policy = make_policy(scratch, batch_norm, individual=unit == "sample", trained=list(trained.values()))
        policy.install(undo, trained=trained.values())
        measured = PublicNorms(scratch)(
            list(trained),
            loader=public_loader,
            gradient=gradient or loss_gradient(criterion or nn.functional.cross_entropy),
            mini_set_size=size,
            count=LARGEST_COUNT[unit],
            seed=0,
        )
    norms = sorted(math.hypot(*found.values()) for found in measured)
    if not norms or np.quantile(norms, QUANTILE) == 0:
        raise PublicDataError(NOTHING_MEASURED)
    found = SuggestedClipping(
        norms=norms,
        unit=unit,
        mini_set_size=size,
        entries=sum(p.numel() for p in trained.values()),
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
    )
    if noise_multiplier is not None:
        warn_of_drowning(found.noise_to_signal(), unit)
    return found


def _clipped(clipping: str, mini_batch_size: int | None, batch_size: int) -> tuple[Unit, int]:
    """What is clipped by itself, and how many samples that are."""
    if clipping not in ("flat", "batch"):
        raise ValueError(f"clipping must be 'flat' or 'batch', got {clipping!r}")
    if clipping == "flat":
        if mini_batch_size is not None:
            raise ValueError("mini_batch_size goes with clipping='batch': clipping='flat' clips samples")
        return "sample", 1
    size = batch_size if mini_batch_size is None else check_count("mini_batch_size", mini_batch_size, least=2)
    if batch_size % size:
        raise ValueError(f"mini_batch_size={size} does not divide batch_size={batch_size}")
    return "mini-set", size
