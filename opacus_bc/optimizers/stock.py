"""Opacus's own optimizers with guards: the arithmetic of clipping is Opacus's, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opacus_bc._opacus import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
)
from opacus_bc.draws.ledger import Delivery
from opacus_bc.gradients.ghost import HALF_PRECISION
from opacus_bc.mechanism.clipping import HALF
from opacus_bc.optimizers.private import OpenDraw
from opacus_bc.optimizers.rows import check_rows
from opacus_bc.optimizers.samples import SampleOptimizer, per_sample_gradients


class StockOptimizer(SampleOptimizer):
    """Opacus's clipping of per-sample gradients, in which a sample that is not finite counts as zero.

    Opacus multiplies such a sample by a clip factor of 0 or NaN, which turns all weights into NaN: a release
    without noise that the sample took part.

    **Formal guarantee**: the clipped sum stays a sum of one vector of norm <= C for every sample, each a
    function of that sample alone, up to the rounding of Opacus's float32 norms. The sum shows whether an
    entry is not finite (NaN and infinity survive any clip factor), so finite batches cost one look at the sum
    and nothing per sample.
    """

    certified_norms = False
    _look_first = False  # whether every gradient is looked at before clipping

    def clip_and_accumulate(self) -> None:
        """Opacus's clipping, repeated without the samples that are not finite if there are any."""
        params: list[Any] = self.params
        _raise_precision(params)
        before = [None if p.summed_grad is None else p.summed_grad.clone() for p in params]
        if self._look_first:
            _zero_samples(params)
        super().clip_and_accumulate()
        if self._look_first or _all_finite([p.summed_grad for p in params if p.summed_grad is not None]):
            return
        for p, held in zip(params, before, strict=True):
            p.summed_grad = held
            for chunk in per_sample_gradients(p):
                chunk.__dict__.pop("_processed", None)  # Opacus's mark of a used gradient
        _zero_samples(params)
        super().clip_and_accumulate()


class FlatOptimizer(StockOptimizer, DPOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's DPOptimizer."""


class _FixedBounds(SampleOptimizer):
    """Opacus clips to bounds that it stored at construction, while its noise follows ``max_grad_norm``.

    A grad-clip scheduler would lower the noise and keep the clipping, so setting it is an error, and so is a
    step after the stored bounds were changed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stored = self._bounds_in_use()

    def _bounds_in_use(self) -> tuple[float, ...]:
        raise NotImplementedError

    def _check_delivery(self, delivery: Delivery) -> None:
        super()._check_delivery(delivery)
        if self._bounds_in_use() != self._stored:
            raise RuntimeError(
                f"the clip bounds were changed from {self._stored} to {self._bounds_in_use()} and the noise "
                "was not: set them back, or call make_private again"
            )

    @property
    def max_grad_norm(self) -> float:
        """C, or the bounds' root sum of squares."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if self.__dict__.setdefault("_max_grad_norm", value) != value:
            raise ValueError(
                f"max_grad_norm={value!r} cannot be set with Opacus's own per-layer and ghost clipping: "
                "gradients would still be clipped to their old bounds while the noise moves"
            )


class PerLayerOptimizer(_FixedBounds, StockOptimizer, DPPerLayerOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's DPPerLayerOptimizer, whose bounds cannot drift away from its noise."""

    def _bounds_in_use(self) -> tuple[float, ...]:
        return tuple(self.max_grad_norms)


class AdaptiveOptimizer(StockOptimizer, AdaClipDPOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's AdaClipDPOptimizer. Its clipping counts samples, so it must not be repeated."""

    _look_first = True

    @property
    def max_grad_norm(self) -> Any:
        """The clip bound, which Opacus keeps in a tensor after the first step."""
        return self._max_grad_norm if self._in_force is None else self._in_force.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        self._max_grad_norm = value

    def _after_release(self) -> None:
        self.update_max_grad_norm()
        self.sample_size = self.unclipped_num = 0  # the next draw's counts are its own

    def before_pass(self) -> None:
        """Forget a draw that was left unfinished, and its counts."""
        super().before_pass()
        self.sample_size = self.unclipped_num = 0


class _Reduced(StockOptimizer):
    """Several processes: Opacus adds noise on rank 0 and sums the ranks' releases up."""

    def _reduce(self) -> None:
        self.reduce_gradients()
        self.licence.grant()


class DistributedFlatOptimizer(_Reduced, DistributedDPOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's DistributedDPOptimizer."""


class DistributedPerLayerOptimizer(
    _Reduced,
    PerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,  # type: ignore[misc]  # Opacus is untyped
):
    """Opacus's SimpleDistributedPerLayerOptimizer, whose bounds cannot drift away from its noise."""


class GhostOptimizer(_FixedBounds, DPOptimizerFastGradientClipping):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's ghost optimizer, which takes only what ghost clipping's own backward has clipped.

    Opacus clips inside the backward of the criterion that ``make_private`` returned: a first pass leaves
    norms on the parameters, a second one weights the samples by them.

    **Formal guarantee**: a gradient is accumulated only if its coefficients were computed from norms of this
    very batch, and if no other backward has gone through the module since.

    **Edge cases**: ghost clipping forms no per-sample gradients; a sum that is not finite is a RuntimeError
    before anything is released.
    """

    certified_norms = False

    def __init__(self, *args: Any, hooks: Any, **kwargs: Any) -> None:
        self._hooks = hooks  # the guarded wrapper that makes norms and coefficients
        super().__init__(*args, **kwargs)

    def _bounds_in_use(self) -> tuple[float, ...]:
        return (float(self._hooks.max_grad_norm),)

    def before_delivery(self) -> None:
        """Forget all gradients, and that they were clipped."""
        super().before_delivery()
        self._hooks.forget_clipped()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients; what was clipped before it is forgotten."""
        self._hooks.forget_clipped()
        super().zero_grad(set_to_none)

    def _discard_rows(self) -> None:
        for p in self.params:
            p.grad = torch.zeros_like(p)

    def _add_to_sums(self) -> None:
        self.accumulate()

    def _check_gradients(self, draw: OpenDraw, delivery: Delivery) -> None:
        reason = self._hooks.why_not_clipped(self.params)
        if self._through_half_precision():  # of a sum too: the second pass is rounded in another way
            reason = HALF_PRECISION
        if reason is not None:
            self._hooks.forget_norms()
            for p in self.params:
                p.grad = None
            raise RuntimeError(reason)
        check_rows({"every layer": self._hooks.clipped_rows}, delivery)


class DistributedGhostOptimizer(
    GhostOptimizer,
    DistributedDPOptimizerFastGradientClipping,  # type: ignore[misc]  # Opacus is untyped
):
    """Opacus's distributed ghost optimizer."""

    def _reduce(self) -> None:
        self.reduce_gradients()
        self.licence.grant()


GUARDED: Mapping[type[DPOptimizer], type[SampleOptimizer]] = MappingProxyType(
    {
        DPOptimizer: FlatOptimizer,
        DPPerLayerOptimizer: PerLayerOptimizer,
        AdaClipDPOptimizer: AdaptiveOptimizer,
        DistributedDPOptimizer: DistributedFlatOptimizer,
        SimpleDistributedPerLayerOptimizer: DistributedPerLayerOptimizer,
        DPOptimizerFastGradientClipping: GhostOptimizer,
        DistributedDPOptimizerFastGradientClipping: DistributedGhostOptimizer,
    }
)


def _raise_precision(params: Sequence[Any]) -> None:
    """Give gradients that autocast left in half precision to Opacus in float32, in which it takes norms."""
    for p in params:
        chunks = per_sample_gradients(p)
        if any(chunk.dtype in HALF for chunk in chunks):
            wide = [chunk if hasattr(chunk, "_processed") else chunk.float() for chunk in chunks]
            p.grad_sample = wide if isinstance(p.grad_sample, list) else wide[0]


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all sums are finite, as they are not if an entry is not; one look for each device."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(tensor.sum().double())
    return all(bool(torch.stack(same).isfinite().all()) for same in sums.values())


def _zero_samples(params: Sequence[Any]) -> None:
    for parts in zip(*(per_sample_gradients(p) for p in params), strict=False):
        _zero_rows(parts)


@torch.no_grad()
def _zero_rows(parts: tuple[Tensor, ...]) -> None:
    """Set the rows of all tensors to zero where one of them is not finite, in place."""
    device = parts[0].device
    rows = [g.isfinite().reshape(len(g), -1).all(1).to(device) for g in parts if len(g)]
    if not rows:
        return
    finite = torch.stack(rows).all(0)  # entry by entry: whether a row counts must not depend on other rows
    if not finite.all():
        for g in parts:
            g[~finite.to(g.device)] = 0.0
