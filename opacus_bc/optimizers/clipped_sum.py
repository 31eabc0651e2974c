"""What batch clipping and book-keeping share: one clipped sum for each draw, noised once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus_bc.draws.ledger import CHUNKS_OVER_RANKS, Delivery
from opacus_bc.mechanism.clipping import accumulation_dtype
from opacus_bc.mechanism.noise import NoiseSource
from opacus_bc.mechanism.numbers import check_positive
from opacus_bc.optimizers.private import OpenDraw, PrivateOptimizer
from opacus_bc.parallel.ranks import Reduction
from opacus_bc.parallel.shards import as_gradient_of, local_part


class ClippedSumOptimizer(PrivateOptimizer):
    """Releases a draw's sum of clipped vectors, which its kinds leave in ``draw.clipped_sum``.

    **Formal guarantee**: one step releases, for every block h, ``clipped_sum_h + N(0, tau_h^2)``, divided by
    public constants.

    Args:
        optimizer: The user's optimizer.
        noise: Source of the Gaussian noise.
        reduction: How several processes make one release.
        **kwargs: For :class:`PrivateOptimizer`.
    """

    noise: NoiseSource

    def __init__(
        self, optimizer: Optimizer, *, noise: NoiseSource, reduction: Reduction | None = None, **kwargs: Any
    ) -> None:
        self.reduction = reduction
        self._loss_scale = 1.0
        super().__init__(optimizer, noise=noise, secure_mode=noise.secure, **kwargs)

    @property
    def loss_scale(self) -> float:
        """The constant by which the loop multiplies the loss (float16); gradients are divided by it."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._loss_scale = check_positive("loss_scale", value)

    @property
    def accumulated_iterations(self) -> int:
        """Always one draw."""
        return 1

    def before_delivery(self) -> None:
        """Forget all gradients, also those that other processes' reduction still holds back."""
        super().before_delivery()
        if self.reduction is not None:
            self.reduction.forget()

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Called by Opacus's BatchMemoryManager before it fetches a chunk."""
        if self.reduction is not None:
            raise RuntimeError(CHUNKS_OVER_RANKS)
        super().signal_skip_step(do_skip)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; what has been clipped of the current draw stays."""
        self.original_optimizer.zero_grad(set_to_none)

    def _check_delivery(self, delivery: Delivery) -> None:
        if self.reduction is not None:
            self.reduction.check(delivery)

    def _release(self, draw: OpenDraw) -> None:
        stds = [b.noise_std / m for b in draw.blocks for m in b.factors]
        release = draw.clipped_sum
        if release is None:  # nothing was deliverable, or nothing was finite
            release = [zeros_for(p) for p in draw.params]
        if self.reduction is not None:
            self.reduction.finish_(release)
        for value, std in zip(release, stds, strict=True):
            self.noise.add_(value, std)
        draw.clipped_sum = None
        self.mask_(release, draw.names)
        if self.loss_reduction == "mean" and self.expected_batch_size != 1:
            torch._foreach_div_(release, float(self.expected_batch_size))
        for p, value in zip(draw.params, release, strict=True):
            p.grad = as_gradient_of(p, value)


def zeros_for(p: nn.Parameter) -> Tensor:
    """Zeros in the shape of what this process holds of a parameter, in the precision of sums."""
    return torch.zeros_like(local_part(p), dtype=accumulation_dtype(p.dtype), requires_grad=False)
