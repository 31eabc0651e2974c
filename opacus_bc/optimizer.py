"""The optimizer of batch clipping: accumulate, clip, noise, scale, account, step.

A reader who wants to know where a gradient goes can read :meth:`BatchClippingOptimizer.pre_step` from top to
bottom; nothing else moves weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus_bc.block_optimizer import BlockOptimizer
from opacus_bc.clipping import (
    Block,
    ClipRule,
    accumulation_dtype,
    add_scaled_,
    check_positive,
    clip_coefficients,
    scale_,
    tensor_norms,
)
from opacus_bc.ledger import CHUNKS_OVER_RANKS, Delivery, DrawLedger
from opacus_bc.noise import NoiseSource
from opacus_bc.ranks import Reduction
from opacus_bc.shards import as_gradient_of, local_part


@dataclass(kw_only=True)
class _OpenDraw:
    """What has been accumulated of the draw that the next step will release. Never outlives the step."""

    serial: int
    pass_index: int
    blocks: list[Block]
    params: list[nn.Parameter]
    clipped_sum: list[Tensor] | None = None
    unclipped_chunks: list[Tensor] | None = field(default=None)

    @property
    def names(self) -> list[str]:
        return [name for block in self.blocks for name in block.names]


class BatchClippingOptimizer(BlockOptimizer):
    """Clips the gradient of whole mini-sets instead of single samples, so that BatchNorm can stay.

    **Formal guarantee**: one completed step releases, for every block h of :meth:`blocks`, the sum of the
    mini-sets' clipped vectors plus ``N(0, tau_h^2)``; given the draw this is ``G_mu``-DP with
    ``mu = 1 / effective_noise_multiplier``. Everything else that happens to the weights is a function of
    this release. The clip bounds and the noise of a draw are read once, when its first mini-set arrives, so a
    scheduler moves them together or not at all.

    **Edge cases**: a mini-set whose gradient is not finite counts as zero; a trainable parameter without a
    gradient counts as zero and is noised; a step without a fresh batch, with several of them, without
    ``backward()`` raises RuntimeError before anything changes; gradients are cleared before a batch is
    delivered, so ``zero_grad()`` may be forgotten; an exception in the accountant leaves the weights alone.

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
    ) -> None:
        check_optimizer(optimizer)
        super().__init__(
            optimizer,
            noise_multiplier=check_positive("noise_multiplier", noise_multiplier, zero_allowed=True),
            max_grad_norm=check_positive("max_grad_norm", max_grad_norm),
            expected_batch_size=mini_sets,
            loss_reduction=loss_reduction,
            secure_mode=noise.secure,
        )
        self.clip_rule = clip_rule
        self.ledger = ledger
        self.noise = noise
        self._names = dict(parameter_names or {})
        self._loss_scale = 1.0
        self._draw: _OpenDraw | None = None
        self._released_blocks: list[Block] = []
        self.accounting_hook: Callable[[BatchClippingOptimizer], None] | None = None
        self.reduction: Reduction | None = None
        self._cleared: set[nn.Parameter] = set()
        self._drop_gradients()  # whatever was computed before belongs to no draw
        ledger.on_delivery(self._drop_gradients)

    @property
    def loss_scale(self) -> float:
        """The constant by which the loop multiplies the loss (float16); gradients are divided by it."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._loss_scale = check_positive("loss_scale", value)

    def _drop_gradients(self) -> None:
        """Forget all gradients: called before a batch is delivered, so that none survives from another."""
        everything = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for p in everything:
            p.grad = None
        if self.reduction is not None:
            self.reduction.forget()
        self._cleared = set(everything)

    def _blocks_under_way(self) -> list[Block] | None:
        return None if self._draw is None else self._draw.blocks

    @property
    def accumulated_iterations(self) -> int:
        """Always one draw."""
        return 1

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Called by Opacus's BatchMemoryManager before it fetches a chunk."""
        if self.reduction is not None:
            raise RuntimeError(CHUNKS_OVER_RANKS)
        self.ledger.announce_chunk(ends_set=not do_skip)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; what has been clipped of the current draw stays."""
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Consume the delivered batch; on the last one of a draw, release and move the weights.

        Args:
            closure: Evaluated once, before anything else.

        Returns:
            The closure's value, if there is one.
        """
        self._refuse_grad_scaler()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
            self._end_step(self._released_blocks)
        return loss

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Accumulate the delivered batch; on the last one of a draw, leave the release in ``.grad``.

        Returns:
            Whether the draw is complete, so that the underlying optimizer may step.
        """
        delivery = self.ledger.outstanding()
        if self.reduction is not None:
            self.reduction.check(delivery)
        draw = self._open(delivery)
        if not delivery.placeholder:
            self._check_gradients(draw)

        self.ledger.consume()
        self._draw = draw
        try:
            if not delivery.placeholder:
                self._accumulate(draw, delivery)
            # All of them, not only the draw's: one frozen after backward() or thawed within the draw stays.
            self._drop_gradients()
            self._is_last_step_skipped = True  # Opacus's name: schedulers by steps ask whether weights moved
            if not delivery.ends_draw:
                return False
            release = self._release(draw)
            if self.accounting_hook:
                self.accounting_hook(self)
            if self.step_hook:
                self.step_hook(self)
        except BaseException:
            self._drop_gradients()
            self._draw = None
            raise
        self._draw = None
        self._is_last_step_skipped = False
        self._released_blocks = draw.blocks
        for p, value in zip(draw.params, release, strict=True):
            p.grad = as_gradient_of(p, value)
        return True

    def _open(self, delivery: Delivery) -> _OpenDraw:
        draw = self._draw
        if draw is not None and draw.serial == delivery.serial:
            return draw
        self._draw = None  # left over by a loop that was broken off: iter(loader) has discarded its draw
        blocks = self._begin_draw()
        by_name = dict(self._named_params())
        ordered = [by_name[name] for block in blocks for name in block.names]
        if len(ordered) != len(by_name):
            raise RuntimeError(f"the clip rule covers {len(ordered)} of {len(by_name)} trainable parameters")
        return _OpenDraw(
            serial=delivery.serial, pass_index=delivery.pass_index, blocks=blocks, params=ordered
        )

    def _check_gradients(self, draw: _OpenDraw) -> None:
        grads = [p.grad for p in draw.params]
        if all(g is None for g in grads):
            raise RuntimeError("optimizer.step() found no gradient: call loss.backward() on this batch first")
        for p, g in zip(draw.params, grads, strict=True):
            if g is not None and g.layout != torch.strided:
                name = self._names.get(p, "a parameter")
                raise RuntimeError(
                    f"{name} has a gradient of layout {g.layout}: noise must reach every entry, so use dense "
                    "gradients (sparse=False)"
                )

    def _accumulate(self, draw: _OpenDraw, delivery: Delivery) -> None:
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
        self._mask_(grads, draw.names)
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

    def _release(self, draw: _OpenDraw) -> list[Tensor]:
        stds = [b.noise_std / m for b in draw.blocks for m in b.factors]
        release = draw.clipped_sum
        if release is None:  # nothing was deliverable, or nothing was finite
            release = [_as_accumulator(p, usable=False) for p in draw.params]
        if self.reduction is not None:
            self.reduction.finish_(release)
        for value, std in zip(release, stds, strict=True):
            self.noise.add_(value, std)
        draw.clipped_sum = None
        self._mask_(release, draw.names)
        if self.loss_reduction == "mean" and self.expected_batch_size != 1:
            torch._foreach_div_(release, float(self.expected_batch_size))
        return release


def _as_accumulator(p: nn.Parameter, *, usable: bool) -> Tensor:
    """The parameter's gradient in accumulation precision; the tensor itself where that needs no copy."""
    dtype = accumulation_dtype(p.dtype)
    if p.grad is None or not usable:
        return torch.zeros_like(local_part(p), dtype=dtype, requires_grad=False)
    return local_part(p.grad).detach().to(dtype)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers and parameters that a Gaussian release cannot serve.

    Raises:
        ValueError: LBFGS (it evaluates the private loss many times a step), or complex parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times for each step: use a first-order optimizer")
    params: Sequence[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in params):
        raise ValueError("optimizer has no trainable parameters: there is nothing to make private")
    for p in params:
        if p.is_complex():
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is complex ({p.dtype}): use real ones")
