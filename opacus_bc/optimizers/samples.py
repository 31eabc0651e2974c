"""Optimizers of individual clipping: every sample's gradient is clipped by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from opacus_bc.draws.ledger import Delivery
from opacus_bc.gradients.book_keeping.sums import weighted_sum
from opacus_bc.mechanism.clipping import accumulation_dtype, sample_clip_coefficients
from opacus_bc.mechanism.segments import segment_means
from opacus_bc.optimizers.private import OpenDraw, PrivateOptimizer
from opacus_bc.optimizers.rows import check_rows


class SampleOptimizer(PrivateOptimizer):
    """What all kinds of individual clipping share: Opacus's order of accumulate, noise and scale.

    Per-sample gradients are in ``p.grad_sample``, as in Opacus. Clipped sums belong to the draw; parameters
    hold them, in ``p.summed_grad``, only while Opacus's arithmetic needs them there. Nothing of both survives
    the step.
    """

    @property
    def accumulated_iterations(self) -> int:
        """One: a step uses one draw, and Opacus divides by this."""
        return 1

    def _check_gradients(self, draw: OpenDraw, delivery: Delivery) -> None:
        if {id(p) for p in self.params} != {id(p) for p in draw.params}:
            raise RuntimeError(
                "parameters were frozen, thawed or added within a draw, whose clip bounds cover others: do "
                "that between draws, or start again with iter(loader)"
            )
        held: list[Any] = [getattr(p, "grad_sample", None) for p in draw.params]
        most = max((len(chunks) for chunks in held if isinstance(chunks, list)), default=1)
        if most > 1:
            raise RuntimeError(
                f"{most} batches were accumulated for one step: a step must use one batch "
                "(BatchMemoryManager splits large ones)"
            )
        _check_nothing_waits(draw.params)
        self._refuse_half_precision_of_a_mean(g.dtype for p in draw.params for g in per_sample_gradients(p))
        # Without a backward this raises "Per sample gradient is not initialized".
        rows = [len(self._get_flat_grad_sample(p)) for p in draw.params]
        check_rows(dict(zip(draw.names, rows, strict=True)), delivery)

    def _accumulate(self, draw: OpenDraw, delivery: Delivery) -> None:
        if delivery.placeholder:
            self._discard_rows()
        elif delivery.counts is not None:
            self._average_units(delivery.counts)
        with self._sums_on_parameters(draw):
            self._add_to_sums()
        self.before_delivery()  # nothing of this batch is needed any more

    def _add_to_sums(self) -> None:
        self.clip_and_accumulate()

    def _discard_rows(self) -> None:
        """Nothing was drawn, so no row that a collate function or a model made up may count."""
        for p in self.params:
            for chunk in per_sample_gradients(p):
                p.grad_sample = chunk[:0]

    def _average_units(self, counts: Sequence[int]) -> None:
        """Put the mean of each unit's rows in the place of the rows: the vectors that are clipped."""
        for p in self.params:
            for chunk in per_sample_gradients(p):
                p.grad_sample = segment_means(chunk.to(accumulation_dtype(chunk.dtype)), counts)

    @contextmanager
    def _sums_on_parameters(self, draw: OpenDraw) -> Iterator[None]:
        """While it is open, parameters hold the draw's clipped sums; otherwise the draw alone does."""
        held: list[Any] = self.held_parameters()
        for p in held:
            p.summed_grad = draw.sums.get(p)
        try:
            yield
            draw.sums = {p: p.summed_grad for p in held if p.summed_grad is not None}
        finally:
            for p in held:
                p.summed_grad = None

    def _release(self, draw: OpenDraw) -> None:
        with self._sums_on_parameters(draw):
            self.add_noise()
        draw.sums.clear()
        self.scale_grad()

    def add_noise(self) -> None:
        """Leave the noised sum in ``p.grad``."""
        if self.noise is None:
            super().add_noise()
            return
        by_name: dict[str, Any] = dict(self.named_parameters())  # Opacus keeps its state on the parameters
        for block in self.blocks():
            for name, factor in zip(block.names, block.factors, strict=True):
                p = by_name[name]
                release = p.summed_grad + self.noise.normal(p.summed_grad, block.noise_std / factor)
                self.mask_([release], [name])
                p.grad = release.view_as(p).to(p.dtype)

    def scale_grad(self) -> None:
        """Divide what was released, and only that, by the expected batch size of a mean."""
        if self.loss_reduction == "mean":
            for p in self.params:
                if p.grad is not None:
                    p.grad /= self.expected_batch_size

    def held_parameters(self) -> list[nn.Parameter]:
        """All parameters of the model: Opacus hangs gradients also on those outside the optimizer."""
        return list(dict.fromkeys([*super().held_parameters(), *self._names]))

    def before_delivery(self) -> None:
        """Forget all gradients, per-sample ones included; clipped sums of the draw stay."""
        super().before_delivery()
        held: list[Any] = self.held_parameters()
        for p in held:
            p.grad_sample = None


class IndividualClippingOptimizer(SampleOptimizer):
    """Every sample's gradient is clipped block by block, float rounding included.

    Per-sample gradients come from Opacus's hooks, ExpandedWeights or functorch; chunks of a batch
    (``BatchMemoryManager``) are clipped as they arrive with the blocks of their draw.

    **Formal guarantee**: one step releases, for every block h, the sum of the samples' clipped vectors plus
    ``N(0, tau_h^2)``, which given the draw is ``G_mu``-DP with ``mu = 1 / effective_noise_multiplier``.
    Proof: a sample adds one vector of norm at most C_h to block h, so ``step_mu`` applies with
    ``Delta_h = C_h`` (add or remove one) or ``2 C_h`` (replace one).

    **Edge cases**: a sample with a gradient that is not finite in any block counts as zero in all of them; an
    empty batch releases noise.
    """

    def clip_and_accumulate(self) -> None:
        """Clip the per-sample gradients at hand and add them to ``p.summed_grad``."""
        blocks = self.blocks()
        by_name: dict[str, Any] = dict(self.named_parameters())
        names = [name for block in blocks for name in block.names]
        params = [by_name[name] for name in names]
        samples = [self._get_flat_grad_sample(p).to(accumulation_dtype(p.dtype)) for p in params]
        frozen = self.adaptive.frozen if self.adaptive is not None else {}
        samples = [
            g.masked_fill(frozen[name], 0.0) if name in frozen else g
            for name, g in zip(names, samples, strict=True)
        ]
        coefficients, finite = sample_clip_coefficients(samples, blocks)
        if not finite.all():  # zero times infinity is not zero
            samples = [g[finite.to(g.device)] for g in samples]
            coefficients = [c[finite.to(c.device)] for c in coefficients]
        for p, g, c in zip(params, samples, coefficients, strict=True):
            clipped = weighted_sum(c.to(device=g.device, dtype=g.dtype), g)
            p.summed_grad = clipped if p.summed_grad is None else p.summed_grad + clipped


def per_sample_gradients(p: Any) -> list[torch.Tensor]:
    """A parameter's per-sample gradients, a tensor for each backward; empty if there are none."""
    held = getattr(p, "grad_sample", None)
    if held is None:
        return []
    return list(held) if isinstance(held, list) else [held]


def _check_nothing_waits(params: Any) -> None:
    """Refuse to clip while Opacus holds per-sample gradients back that the next batch would get.

    Raises:
        RuntimeError: A layer ran forward more often than backward.
    """
    if not any(hasattr(p, "_current_grad_sample") for p in params):
        return
    for p in params:
        p.__dict__.pop("_current_grad_sample", None)
    raise RuntimeError(
        "per-sample gradients of this batch were left behind on a parameter and would be added to the next "
        "batch's: a layer ran forward and never backward. Compute metrics under torch.no_grad() or in "
        "evaluation mode"
    )
