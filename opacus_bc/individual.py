"""Individual clipping in blocks, on Opacus's per-sample gradients: ``clipping="flat"`` with ``alc=``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from opacus_bc._opacus import check_processed_flag, mark_as_processed
from opacus_bc.block_optimizer import BlockOptimizer
from opacus_bc.clipping import (
    Block,
    ClipRule,
    accumulation_dtype,
    check_positive,
    sample_clip_coefficients,
)
from opacus_bc.noise import NoiseSource


class IndividualClippingOptimizer(BlockOptimizer):
    """Opacus's DPOptimizer with a clip rule: every sample's gradient is clipped block by block.

    Per-sample gradients come from Opacus's hooks, ExpandedWeights or functorch; chunks of a batch
    (``BatchMemoryManager``) are clipped as they arrive with the blocks of their draw.

    **Formal guarantee**: one step releases, for every block h, the sum of the samples' clipped vectors plus
    ``N(0, tau_h^2)``, which given the draw is ``G_mu``-DP with ``mu = 1 / effective_noise_multiplier``.
    Proof: a sample adds one vector of norm at most C_h to block h, so ``step_mu`` applies with
    ``Delta_h = C_h`` (add or remove one) or ``2 C_h`` (replace one).

    **Edge cases**: a sample with a gradient that is not finite in any block counts as zero in all of them; an
    empty batch releases noise.

    Args:
        optimizer: The user's optimizer.
        noise_multiplier: Noise standard deviation over L2-sensitivity.
        max_grad_norm: C.
        expected_batch_size: What a ``"mean"`` loss divides by.
        clip_rule: How the parameters are grouped and clipped.
        noise: Source of the Gaussian noise.
        parameter_names: Names of the parameters; numbered if missing.
        loss_reduction: ``"mean"`` or ``"sum"``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        clip_rule: ClipRule,
        noise: NoiseSource,
        parameter_names: Mapping[nn.Parameter, str] | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=check_positive("noise_multiplier", noise_multiplier, zero_allowed=True),
            max_grad_norm=check_positive("max_grad_norm", max_grad_norm),
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            secure_mode=noise.secure,
        )
        self.clip_rule = clip_rule
        self.noise = noise
        self._names = dict(parameter_names or {})
        self._open: list[Block] | None = None
        self._released_blocks: list[Block] = []

    def attach_to(self, module: nn.Module, *, hooks: Any) -> None:
        """Name the parameters as ``module`` does, and silence Opacus's hooks while public data pass."""
        self._names = {p: name for name, p in module.named_parameters()}
        if self.adaptive is not None:
            self.adaptive.grad_sample_hooks = hooks

    def _blocks_under_way(self) -> list[Block] | None:
        return self._open

    def clip_and_accumulate(self) -> None:
        """Clip the per-sample gradients at hand and add them to ``p.summed_grad``."""
        for p in self.params:
            check_processed_flag(p.grad_sample)
        if self._open is None or all(p.summed_grad is None for p in self.params):
            self._open = None
            self._open = self._begin_draw()
        by_name: dict[str, Any] = dict(self._named_params())  # Opacus keeps its state on the parameters
        names = [name for block in self._open for name in block.names]
        params = [by_name[name] for name in names]
        samples = [self._get_flat_grad_sample(p).to(accumulation_dtype(p.dtype)) for p in params]
        frozen = self.adaptive.frozen if self.adaptive is not None else {}
        samples = [
            g.masked_fill(frozen[name], 0.0) if name in frozen else g
            for name, g in zip(names, samples, strict=True)
        ]
        coefficients, finite = sample_clip_coefficients(samples, self._open)
        if not finite.all():  # zero times infinity is not zero
            samples = [g[finite.to(g.device)] for g in samples]
            coefficients = [c[finite.to(c.device)] for c in coefficients]
        for p, g, c in zip(params, samples, coefficients, strict=True):
            clipped = torch.einsum("i,i...", c.to(device=g.device, dtype=g.dtype), g)
            p.summed_grad = clipped if p.summed_grad is None else p.summed_grad + clipped
            mark_as_processed(p.grad_sample)

    def add_noise(self) -> None:
        """Leave the noised sum in ``p.grad``."""
        by_name: dict[str, Any] = dict(self._named_params())
        for block in self.blocks():
            for name, factor in zip(block.names, block.factors, strict=True):
                p = by_name[name]
                check_processed_flag(p.summed_grad)
                release = p.summed_grad + self.noise.normal(p.summed_grad, block.noise_std / factor)
                self._mask_([release], [name])
                p.grad = release.view_as(p).to(p.dtype)
                mark_as_processed(p.summed_grad)

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Clip; on the last chunk of a batch noise, scale and account."""
        ready = bool(super().pre_step(closure))
        if ready and self._open is not None:
            self._released_blocks, self._open = self._open, None
        return ready

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, or one chunk of it."""
        self._refuse_grad_scaler()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
            self._end_step(self._released_blocks)
        return loss
