"""Batch clipping on DistributedDataParallel: one draw, one release, one noise, whatever the number of ranks.

Every rank draws the same global draws and adds the same noise, because rank 0's seeds are agreed on before
the first step. What a rank does of a draw is its own part:

* BC: the batch is split over the ranks; a communication hook weights each rank's gradient by its share of
  the batch, so DDP's reduction gives the gradient of the whole batch, which every rank clips alike.
* GBC: whole mini-sets are dealt to the ranks; DDP reduces nothing, each rank clips its own mini-sets, and the
  clipped sums are added up before the noise.

Per-rank BatchNorm statistics are those of the rank's part, a function of the draw like everything else in g.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from opacus_bc.clipping import tensor_norms
from opacus_bc.ledger import Delivery, DrawLedger
from opacus_bc.sampling import SMALLEST_MINI_SET, Draw, Part, SamplingPlan, placeholder, whole_draw


class Ranks:
    """The processes that train one model together.

    Args:
        group: Their process group.
        device: Where the group can communicate.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank. Values are not negative and have at most 128 bits."""
        words = torch.tensor([value & (2**62 - 1), (value >> 62) & (2**62 - 1), value >> 124])
        words = words.to(self.device)
        dist.broadcast(words, group=self.group, group_src=0)
        low, middle, high = words.tolist()
        return int(low | middle << 62 | high << 124)

    def agree_on_rows(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Rank 0's table of numbers, on every rank."""
        shape = (self.agree(len(rows)), self.agree(len(rows[0]) if rows else 0))
        table = torch.zeros(shape, dtype=torch.float64)
        if self.rank == 0 and rows:
            table = torch.tensor(rows, dtype=torch.float64)
        table = table.to(self.device)
        dist.broadcast(table, group=self.group, group_src=0)
        agreed: list[list[float]] = table.tolist()
        return agreed

    def all(self, condition: bool) -> bool:
        """Whether it holds on every rank."""
        flag = torch.tensor([int(condition)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())

    def check_same(self, what: str, *values: Any) -> None:
        """Refuse to go on if ranks were given different things.

        Raises:
            ValueError: On every rank, if the values differ between any two.
        """
        digest = int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little") >> 2
        if not self.all(self.agree(digest) == digest):
            raise ValueError(f"{what} must be the same on every rank; rank {self.rank} has {values}")

    def add_up_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in one message for each type.

        Raises:
            RuntimeError: Another rank has stopped.
        """
        by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in by_type.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            try:
                dist.all_reduce(flat, group=self.group)
            except RuntimeError as error:
                raise RuntimeError(
                    "the sum over ranks failed: another rank has stopped. No weight was moved; start all "
                    "ranks again from the last checkpoint"
                ) from error
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def data_parallel(module: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel in ``module``, under torch.compile or not."""
    while hasattr(module, "_orig_mod"):
        module = module._orig_mod
    return module if isinstance(module, DistributedDataParallel) else None


def ranks_of(wrapper: DistributedDataParallel) -> Ranks:
    """The processes of a DistributedDataParallel."""
    return Ranks(wrapper.process_group, next(wrapper.parameters()).device)


def check_data_parallel(wrapper: DistributedDataParallel, *, sampling: str, policy: str) -> None:
    """Refuse what no single process would do in the same way; changes nothing.

    Raises:
        ValueError: The wrapper has a communication hook of its own, or the sampling cannot be agreed on.
        NotImplementedError: Not built yet.
    """
    if wrapper._comm_hooks:
        raise ValueError(
            "this DistributedDataParallel has a communication hook, which would change gradients before they "
            "are clipped: pass one without"
        )
    if sampling == "shuffle":
        raise ValueError("sampling='shuffle' is each rank's own order: use 'poisson' or 'partition' with DDP")
    if any(isinstance(child, nn.SyncBatchNorm) for child in wrapper.modules()):
        raise NotImplementedError(
            "SyncBatchNorm mixes what ranks compute, placeholders included: use BatchNorm, whose statistics "
            "are those of a rank's part"
        )
    if policy in ("private", "unprotected"):
        raise NotImplementedError(
            f"batch_norm={policy!r} writes statistics that ranks would have to agree on: use a public "
            "loader, 'batch' or 'frozen' with DDP"
        )


def part_of_batch(draw: Draw, *, rank: int, size: int) -> Part:
    """BC: this rank's part of the one mini-set, and its share of it.

    No part has fewer than two samples: small batches are left to the first ranks, and the others take part
    with a placeholder of weight zero.

    **Formal guarantee**: the parts of all ranks are disjoint and make up the mini-set, unless it has fewer
    than two samples; then it contributes zero, as in one process.
    """
    (whole,) = draw
    if len(whole) < SMALLEST_MINI_SET:
        return Part(mini_sets=[placeholder()], placeholder=True, share=0.0)
    active = min(size, len(whole) // SMALLEST_MINI_SET)
    if rank >= active:
        return Part(mini_sets=[placeholder()], placeholder=False, share=0.0)
    own = np.array_split(np.asarray(whole), active)[rank].tolist()
    return Part(mini_sets=[own], placeholder=False, share=len(own) / len(whole))


def part_of_mini_sets(draw: Draw, *, rank: int, size: int) -> Part:
    """GBC: the mini-sets that this rank clips; a placeholder if none of them is deliverable."""
    own = [mini_set for mini_set in draw[rank::size] if len(mini_set) >= SMALLEST_MINI_SET]
    return Part(mini_sets=own or [placeholder()], placeholder=not own, share=1.0)


def part_for(plan: SamplingPlan, ranks: Ranks | None) -> Callable[[Draw], Part]:
    """What a process does of the draws of a plan."""
    if ranks is None:
        return whole_draw
    split = part_of_batch if plan.mini_sets == 1 else part_of_mini_sets
    return partial(split, rank=ranks.rank, size=ranks.size)


_SAME = 1e-5  # norms of one and the same gradient, computed on different hardware


class WeightedReduction:
    """BC: DDP's own reduction, each rank's gradient weighted by its share of the batch.

    **Formal guarantee**: after ``backward()`` every rank holds the gradient of the whole batch's loss, or the
    step is refused on every rank before weights move; a rank with share zero adds exact zeros, whatever its
    placeholder computed.
    """

    def __init__(self, ranks: Ranks, ledger: DrawLedger, *, mean: bool) -> None:
        self.ranks = ranks
        self.ledger = ledger
        self.mean = mean
        self._reduced: Delivery | None = None

    def attach(self, wrapper: DistributedDataParallel) -> None:
        """Take DDP's reduction over."""
        wrapper.register_comm_hook(self, _reduce_weighted)

    def weight(self) -> float:
        """What this rank's gradient counts."""
        delivery = self.ledger.outstanding()
        self._reduced = delivery
        return delivery.share if self.mean else float(delivery.share > 0)

    def check(self, delivery: Delivery) -> None:
        """Refuse a gradient that is this rank's alone."""
        if self._reduced is not delivery:
            raise RuntimeError(
                "the gradient of this batch was not reduced over the ranks: call the DistributedDataParallel "
                "itself (not model.module) and no no_sync(), whose gradients differ from rank to rank"
            )

    def finish_(self, clipped: Sequence[Tensor]) -> None:
        """Refuse to release what differs between ranks: they add the same noise, which could be subtracted.

        A second backward around DDP (an auxiliary loss on ``model.module``) would make such a difference.
        """
        norms = torch.tensor(tensor_norms(clipped), dtype=torch.float64, device=self.ranks.device)
        extremes = torch.cat([norms, -norms])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.ranks.group)
        largest, smallest = extremes[: len(norms)], -extremes[len(norms) :]
        if bool((largest - smallest > _SAME * largest).any()):
            raise RuntimeError(
                "the clipped gradients differ from rank to rank: part of this batch's gradient was not "
                "reduced. Make one backward a batch, through the DistributedDataParallel itself"
            )


def _reduce_weighted(state: WeightedReduction, bucket: Any) -> Any:
    buffer, weight = bucket.buffer(), state.weight()
    if weight == 0.0:
        buffer.zero_()  # zero times infinity is not zero
    elif weight != 1.0:
        buffer.mul_(weight)
    future = dist.all_reduce(buffer, group=state.ranks.group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


# DistributedDataParallel checks the annotations themselves, and here they are strings.
_reduce_weighted.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


class SummedReduction:
    """GBC: every rank clips its own mini-sets; the clipped sums are added up before the noise.

    **Formal guarantee**: every rank releases the same sum over all mini-sets of the draw.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def attach(self, wrapper: DistributedDataParallel) -> None:
        """Switch DDP's reduction off: ranks make different numbers of backwards."""
        self._wrapper = wrapper
        wrapper.require_backward_grad_sync = False

    def check(self, delivery: Delivery) -> None:
        """Refuse gradients that mix mini-sets of several ranks."""
        if self._wrapper.require_backward_grad_sync:
            raise RuntimeError("something switched DDP's reduction on: mini-sets are clipped one by one")

    def finish_(self, clipped: Sequence[Tensor]) -> None:
        """Add the ranks' sums up."""
        self.ranks.add_up_(clipped)


def attach(
    wrapper: DistributedDataParallel, ranks: Ranks, ledger: DrawLedger, plan: SamplingPlan, *, mean: bool
) -> WeightedReduction | SummedReduction:
    """The reduction that goes with the plan, attached to DDP."""
    reduction = SummedReduction(ranks) if plan.mini_sets > 1 else WeightedReduction(ranks, ledger, mean=mean)
    reduction.attach(wrapper)
    # No private forward writes a buffer, and ranks with different numbers of forwards cannot broadcast any.
    wrapper.broadcast_buffers = False
    return reduction
