"""The optimizer of batch clipping: the gradient of a whole mini-set is clipped as one vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus_bc.draws.ledger import Delivery, DrawLedger
from opacus_bc.mechanism.clipping import (
    accumulation_dtype,
    add_scaled_,
    clip_coefficients,
    scale_,
    tensor_norms,
)
from opacus_bc.mechanism.noise import NoiseSource
from opacus_bc.mechanism.rules import ClipRule
from opacus_bc.optimizers.clipped_sum import ClippedSumOptimizer, zeros_for
from opacus_bc.optimizers.private import OpenDraw
from opacus_bc.parallel.ranks import Reduction
from opacus_bc.parallel.shards import local_part


class BatchClippingOptimizer(ClippedSumOptimizer):
    """Clips the gradient of whole mini-sets instead of single samples, so that BatchNorm can stay.

    **Formal guarantee**: one completed step releases, for every block h of :meth:`blocks`, the sum of the
    mini-sets' clipped vectors plus ``N(0, tau_h^2)``; given the draw this is ``G_mu``-DP with
    ``mu = 1 / effective_noise_multiplier``. Everything else that happens to the weights is a function of
    this release.

    **Edge cases**: a mini-set whose gradient is not finite counts as zero; a trainable parameter without a
    gradient counts as zero and is noised.

    Args:
        optimizer: The user's optimizer; any first-order one.
        noise_multiplier: Noise standard deviation over L2-sensitivity.
        max_grad_norm: C, the clip bound.
        clip_rule: How the parameters are grouped and clipped.
        ledger: The private loader's record of deliveries.
        mini_sets: k, the number of mini-sets in a draw (a public constant, whatever was delivered).
        noise: Source of the Gaussian noise.
        parameter_names: Names of the parameters; numbered if missing.
        loss_reduction: ``"mean"`` divides the release by k, ``"sum"`` does not.
        reduction: How several processes make one release, if there are several.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        clip_rule: ClipRule,
        ledger: DrawLedger,
        mini_sets: int,
        noise: NoiseSource,
        parameter_names: Mapping[nn.Parameter, str] | None = None,
        loss_reduction: str = "mean",
        reduction: Reduction | None = None,
    ) -> None:
        self._cleared: set[nn.Parameter] = set()
        super().__init__(
            optimizer,
            ledger=ledger,
            clip_rule=clip_rule,
            noise=noise,
            parameter_names=parameter_names,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=mini_sets,
            loss_reduction=loss_reduction,
            reduction=reduction,
        )

    def before_delivery(self) -> None:
        """Forget all gradients."""
        super().before_delivery()
        self._cleared = set(self.held_parameters())

    def _check_gradients(self, draw: OpenDraw, delivery: Delivery) -> None:
        grads = [p.grad for p in draw.params]
        if all(g is None for g in grads):
            raise RuntimeError(
                "optimizer.step() found no gradient: call loss.backward() on this batch first, and "
                "optimizer.zero_grad() not between backward() and step()"
            )
        for name, g in zip(draw.names, grads, strict=True):
            if g is not None and g.layout != torch.strided:
                raise RuntimeError(
                    f"{name} has a gradient of layout {g.layout}: noise must reach every entry, so use dense "
                    "gradients (sparse=False)"
                )

    def _accumulate(self, draw: OpenDraw, delivery: Delivery) -> None:
        if not delivery.placeholder:
            self._clip_and_add(draw, delivery)
        # All of them, not only the draw's: one frozen after backward() or thawed within the draw stays.
        self.before_delivery()

    def _clip_and_add(self, draw: OpenDraw, delivery: Delivery) -> None:
        # A parameter that joined the optimizer after this batch was delivered may hold older gradients.
        grads = [_as_accumulator(p, usable=p in self._cleared) for p in draw.params]
        weight = 1.0 / self.loss_scale
        if self.loss_reduction == "mean" and delivery.size != delivery.set_size:
            weight *= delivery.size / delivery.set_size
        if weight != 1.0:
            scale_(grads, [weight] * len(grads))
        if draw.unclipped_chunks is not None:
            torch._foreach_add_(grads, draw.unclipped_chunks)
        if not delivery.ends_set:
            draw.unclipped_chunks = [g.clone() for g in grads]
            return
        draw.unclipped_chunks = None
        self.mask_(grads, draw.names)
        norms = tensor_norms if self.reduction is None else self.reduction.norms
        coefficients = clip_coefficients(grads, draw.blocks, norms)
        if coefficients is None:
            return  # not finite: this mini-set counts as zero
        if draw.clipped_sum is None:
            # What outlives this call must be ours: the loop may write its next gradient into the same memory.
            draw.clipped_sum = grads if delivery.ends_draw else [g.clone() for g in grads]
            scale_(draw.clipped_sum, coefficients)
        else:
            add_scaled_(draw.clipped_sum, grads, coefficients)


def _as_accumulator(p: nn.Parameter, *, usable: bool) -> Tensor:
    """The parameter's gradient in accumulation precision; the tensor itself where that needs no copy."""
    if p.grad is None or not usable:
        return zeros_for(p)
    return local_part(p.grad).detach().to(accumulation_dtype(p.dtype))
