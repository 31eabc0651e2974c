"""Guards for whatever optimizer an engine hands out: no NaN out of a sample, no copies, no bad arguments."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from opacus_bc._opacus import AdaClipDPOptimizer, DPOptimizer
from opacus_bc.block_optimizer import BlockOptimizer
from opacus_bc.clipping import check_positive
from opacus_bc.ghost import HALF, guard_ghost
from opacus_bc.sampling import check_sampler

COPIES = (
    "a private optimizer or engine cannot be copied or pickled: a copy would repeat its noise. Save its "
    "state_dict(), and call make_private anew on a copy of the model"
)


def check_individual(
    module: nn.Module, max_grad_norm: object, data_loader: DataLoader[Any], *, clipping: str, blocks: bool
) -> None:
    """Refuse what Opacus's own modes would take without a word, or fail on much later.

    Poisson sampling replaces the loader's own sampler, also one that leaves samples out on purpose. Opacus
    computes norms in the gradients' own precision: those of half-precision parameters are off by up to a
    per cent, and so is the clip bound. ``blocks`` says that we clip instead (``alc=``), in float32.

    Raises:
        ValueError: Names the argument and says what would be right.
    """
    dataset = data_loader.dataset
    if data_loader.batch_size is None and data_loader.batch_sampler is None:
        raise ValueError("data_loader has batch_size=None, so it makes no batches: pass a batch_size")
    if isinstance(dataset, Sized):
        if len(dataset) == 0:
            raise ValueError("the data set has 0 samples, at least 1 is needed")
        check_sampler(data_loader.sampler, len(dataset), also=(DistributedSampler,))
    half = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype in HALF]
    if half and not blocks:
        raise ValueError(
            f"{half[0]} is in half precision, in which Opacus computes norms that let a clipped gradient out "
            f"of its ball: keep parameters in float32 (autocast may stay), or use clipping='batch'"
        )
    if clipping != "per_layer":
        check_positive("max_grad_norm", max_grad_norm)
        return
    if not isinstance(max_grad_norm, (list, tuple)):
        raise ValueError(
            "clipping='per_layer' needs max_grad_norm as a list with a bound for each trainable parameter, "
            f"got {max_grad_norm!r}"
        )
    trainable = sum(p.requires_grad for p in module.parameters())
    if trainable and len(max_grad_norm) != trainable:
        raise ValueError(
            f"max_grad_norm has {len(max_grad_norm)} bounds for {trainable} trainable parameters"
        )
    for place, bound in enumerate(max_grad_norm):
        check_positive(f"max_grad_norm[{place}]", bound)


def refuse_copies(optimizer: DPOptimizer) -> None:
    """Let neither ``copy.deepcopy`` nor ``pickle`` near a private optimizer.

    A copy would repeat its noise, so that two releases could be subtracted from each other. (torch patches
    the class of an optimizer that it restores, after which no DPOptimizer in the process can step any more.)
    """

    def refuse(*_: Any) -> NoReturn:
        raise TypeError(COPIES)

    optimizer.__reduce_ex__ = refuse


def drop_non_finite_samples(optimizer: DPOptimizer, wrapper: Any) -> None:
    """Let a sample whose gradient is not finite count as zero in Opacus's own optimizers.

    Opacus multiplies it by a clip factor of 0 or NaN, which turns all weights into NaN: a release without
    noise that such a sample took part.

    **Formal guarantee**: the clipped sum stays a sum of one vector of norm <= C for every sample, each a
    function of that sample alone.

    The sum shows it when there is one (NaN and infinity survive any clip factor), so finite batches cost one
    look at the sum and nothing per sample.

    **Edge cases**: ghost clipping forms no per-sample gradients; there a sum that is not finite is a
    RuntimeError before anything changes, and so is a gradient that was not clipped.
    """
    if isinstance(optimizer, BlockOptimizer):
        return  # counts them as zero itself
    if hasattr(optimizer, "accumulate"):
        guard_ghost(optimizer, wrapper)
        return
    clip = optimizer.clip_and_accumulate
    # Its clipping also counts samples, so it must not be repeated: look at every gradient first.
    always = isinstance(optimizer, AdaClipDPOptimizer)

    def checked() -> None:
        params = optimizer.params
        check_nothing_waits(params)
        _raise_precision(params)
        before = [None if p.summed_grad is None else p.summed_grad.clone() for p in params]
        if always:
            _zero_samples(params)
        clip()
        if always or _all_finite([p.summed_grad for p in params if p.summed_grad is not None]):
            return
        for p, held in zip(params, before, strict=True):
            p.summed_grad = held
            for chunk in _chunks(p.grad_sample):
                chunk.__dict__.pop("_processed", None)  # Opacus's mark of a used gradient
        _zero_samples(params)
        clip()

    optimizer.clip_and_accumulate = checked


def _raise_precision(params: Sequence[Any]) -> None:
    """Give gradients that autocast left in half precision to Opacus in float32, in which it takes norms."""
    for p in params:
        held = getattr(p, "grad_sample", None)
        if any(chunk.dtype in HALF for chunk in _chunks(held)):
            wide = [chunk if hasattr(chunk, "_processed") else chunk.float() for chunk in _chunks(held)]
            p.grad_sample = wide if isinstance(held, list) else wide[0]


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all sums are finite, as they are not if an entry is not; one look for each device."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(tensor.sum().double())
    return all(bool(torch.stack(same).isfinite().all()) for same in sums.values())


def check_nothing_waits(params: Sequence[Any]) -> None:
    """Refuse to clip while Opacus holds per-sample gradients back that the next batch would get.

    Raises:
        RuntimeError: A parameter has gradients of this batch and more of them that wait. (If it has none yet,
            Opacus has a word for it.)
    """
    if any(hasattr(p, "_current_grad_sample") and p.grad_sample is not None for p in params):
        for p in params:
            p.__dict__.pop("_current_grad_sample", None)
        raise RuntimeError(
            "per-sample gradients of this batch were left behind on a parameter and would be added to the "
            "next batch's: a layer ran forward and never backward"
        )


def _zero_samples(params: Sequence[Any]) -> None:
    chunks = [_chunks(getattr(p, "grad_sample", None)) for p in params]
    for parts in zip(*chunks, strict=False):
        _zero_rows(parts)


def _chunks(grad_sample: Tensor | list[Tensor] | None) -> list[Tensor]:
    if grad_sample is None:
        return []  # Opacus has a word for that
    return grad_sample if isinstance(grad_sample, list) else [grad_sample]


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
