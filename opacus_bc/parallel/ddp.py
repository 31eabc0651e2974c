"""Batch clipping on DistributedDataParallel: one draw, one release, one noise, whatever the number of ranks.

Every rank draws the same global draws and adds the same noise, because rank 0's seeds are agreed on before
the first step. What a rank does of a draw is its own part:

* BC: the batch is split over the ranks; a communication hook weights each rank's gradient by its share of
  the batch, so DDP's reduction gives the gradient of the whole batch, which every rank clips alike.
* GBC: whole mini-sets are dealt to the ranks; DDP reduces nothing, each rank clips its own mini-sets, and the
  clipped sums are added up before the noise.

BatchNorm's statistics are those of the rank's part, a function of the draw like everything else in g.
SyncBatchNorm's are those of the whole batch, which BC clips as one; GBC's mini-sets must not share them.
(torch weights ranks equally in its backward, so with parts of unequal size g is close to the gradient of the
batch's loss and not equal to it; it stays a function of the batch.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from opacus_bc.draws.ledger import Delivery, DrawLedger
from opacus_bc.draws.plan import SMALLEST_MINI_SET, SamplingPlan
from opacus_bc.draws.sources import (
    Draw,
    Part,
    every_mini_set,
    placeholder,
    whole_batch,
    whole_draw,
    whole_units,
)
from opacus_bc.parallel.ranks import Agreement, Ranks, Reduction, communicating, weigh_


def ranks_of(wrapper: DistributedDataParallel) -> Ranks:
    """The processes of a DistributedDataParallel."""
    return Ranks(wrapper.process_group, next(wrapper.parameters()).device)


def check_data_parallel(
    wrapper: DistributedDataParallel, *, sampling: str, policy: str, one_by_one: bool
) -> None:
    """Refuse what no single process would do in the same way, and what is not built; changes nothing."""
    if wrapper._comm_hooks:
        raise ValueError(
            "this DistributedDataParallel has a communication hook, which would change gradients before they "
            "are clipped: pass one without"
        )
    if sampling == "shuffle":
        raise ValueError("sampling='shuffle' is each rank's own order: use 'poisson' or 'partition' with DDP")
    together = dist.get_process_group_ranks(wrapper.process_group)
    for child in wrapper.modules():
        if not isinstance(child, nn.SyncBatchNorm):
            continue
        if one_by_one:
            raise ValueError(
                "SyncBatchNorm shares statistics between mini-sets that are clipped one by one, so a sample "
                "would move all of them: use BatchNorm, or clip the whole batch (no mini_batch_size, no unit)"
            )
        if dist.get_process_group_ranks(child.process_group or dist.group.WORLD) != together:
            raise ValueError("SyncBatchNorm and DistributedDataParallel must have the same process group")
    if policy in ("private", "unprotected"):
        raise NotImplementedError(
            f"batch_norm={policy!r} writes statistics that ranks would have to agree on: use a public "
            "loader, 'batch' or 'frozen' with DDP"
        )


def part_of_each_mini_set(draw: Draw, *, rank: int, size: int, joint: bool = False) -> Part:
    """This rank's part of every mini-set (BC has one), and its share of it.

    No part has fewer than two samples: small mini-sets are left to the first ranks, and the others take part
    with a placeholder of weight zero. Where ranks compute jointly (SyncBatchNorm), a placeholder would enter
    the others' results: then a mini-set that cannot give every rank a part is not used.

    **Formal guarantee**: the parts of all ranks are disjoint and make up the mini-sets that one process would
    clip (``joint``: those of them that are large enough); whether and how a mini-set is split follows from
    that mini-set alone. If there is none, the draw contributes zero, as in one process.
    """
    smallest = SMALLEST_MINI_SET * (size if joint else 1)
    kept = [mini_set for mini_set in draw if len(mini_set) >= smallest]
    if not kept:
        return Part(mini_sets=[placeholder()], placeholder=True, shares=(0.0,))
    parts = []
    for whole in kept:
        active = min(size, len(whole) // SMALLEST_MINI_SET)
        parts.append(np.array_split(np.asarray(whole), active)[rank].tolist() if rank < active else [])
    return Part(
        mini_sets=[part or placeholder() for part in parts],
        placeholder=False,
        shares=tuple(len(part) / len(whole) for part, whole in zip(parts, kept, strict=True)),
    )


def whole_mini_sets(draw: Draw, *, rank: int, size: int, smallest: int = SMALLEST_MINI_SET) -> Part:
    """The mini-sets that this rank clips by itself; a placeholder if none of them is deliverable."""
    return whole_draw(draw[rank::size], smallest)


def part_of_units(draw: Draw, *, rank: int, size: int) -> Part:
    """This rank's units of a draw whose units are clipped one by one.

    **Formal guarantee**: every unit is one rank's, with all its rows; otherwise as :func:`part_of_batch`.
    """
    return whole_units(draw[rank::size])


def part_of_batch(draw: Draw, *, rank: int, size: int) -> Part:
    """This rank's samples of a draw whose samples are clipped one by one.

    **Formal guarantee**: the parts of all ranks are disjoint and make up the draw, and every rank makes as
    many steps as there are draws: an empty part is delivered, and its gradient is discarded. (Opacus's own
    sampler leaves empty parts out, so that its ranks wait for each other for ever.)
    """
    (batch,) = draw
    return whole_batch([batch[rank::size]])


def part_for(
    ranks: Ranks | None, *, whole: bool, joint: bool, smallest: int = SMALLEST_MINI_SET
) -> Callable[[Draw], Part]:
    """What a process does of a draw: ``whole`` mini-sets, or a part of each (see there for ``joint``)."""
    if ranks is None:
        return whole_draw if smallest > 1 else every_mini_set
    if whole:
        return partial(whole_mini_sets, rank=ranks.rank, size=ranks.size, smallest=smallest)
    return partial(part_of_each_mini_set, rank=ranks.rank, size=ranks.size, joint=joint)


def joint_statistics(module: nn.Module) -> bool:
    """Whether a SyncBatchNorm makes ranks exchange the statistics of their parts."""
    return any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())


class WeightedReduction(Reduction):
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
        self._agreement = Agreement(ranks)

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
        """Refuse to release what differs between ranks: they add the same noise, which would cancel out."""
        self._agreement.check(clipped)


def _reduce_weighted(state: WeightedReduction, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    weigh_(buffer, state.weight())
    with communicating():
        work = dist.all_reduce(buffer, group=state.ranks.group, async_op=True)
        assert work is not None  # async_op
        future = work.get_future()
    return future.then(_sum_of_ranks)


def _sum_of_ranks(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    with communicating():
        return done.value()[0]


# DistributedDataParallel checks the annotations themselves, and here they are strings.
_reduce_weighted.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


class SummedReduction(Reduction):
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
    reduction = SummedReduction(ranks) if plan.one_by_one else WeightedReduction(ranks, ledger, mean=mean)
    reduction.attach(wrapper)
    # No private forward writes a buffer, and ranks with different numbers of forwards cannot broadcast any.
    wrapper.broadcast_buffers = False
    return reduction
