"""Batch clipping on FSDP2 (``fully_shard``): no rank ever holds the whole model, its gradient or its noise.

Gradients are reduced to shards during the backward, before anything is clipped. So every mini-set spans all
ranks: its samples are split over them, each rank's gradient is weighted by its share, and the reduction gives
the mini-set's own gradient in shards. Norms are added up over the shards; clipping, the sum over mini-sets
and the noise stay in shards.

Noise comes from a different stream for each place along the shard dimension (two shards with the same noise
could be subtracted) and from the same one along the replicate dimension (replicas must stay equal).

BatchNorm normalises with the statistics of a rank's part of the mini-set: how a mini-set is split follows
from that mini-set alone, so g stays a function of it and its sensitivity 2C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus_bc.draws.ledger import Delivery, DrawLedger
from opacus_bc.draws.sources import Draw, Part
from opacus_bc.mechanism.clipping import tensor_norms
from opacus_bc.mechanism.types import Loader
from opacus_bc.parallel.ddp import part_of_each_mini_set
from opacus_bc.parallel.ranks import Agreement, Reduction, weigh_
from opacus_bc.parallel.shards import Sharding, communication_groups, local_part
from opacus_bc.public.norms import Gradient, batch_of, measure
from opacus_bc.public.running import untouched_buffers


class _WeightedReduceScatter:
    """FSDP2's reduce-scatter, after each rank's gradient has been weighted."""

    def __init__(self, inner: Any, reduction: ShardedReduction) -> None:
        self.inner = inner
        self.reduction = reduction

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, *, input_tensor: Tensor, **kwargs: Any) -> Any:
        weigh_(input_tensor, self.reduction.weight())
        return self.inner(input_tensor=input_tensor, **kwargs)


class ShardedReduction(Reduction):
    """Weights what FSDP2 reduces, and adds norms up over the shards.

    **Formal guarantee**: after ``backward()`` the shards hold the gradient of the delivered mini-set's loss,
    in which a rank without samples of it counts exactly zero, whatever its placeholder computed; or the step
    is refused before weights move. A gradient of an earlier mini-set that FSDP2 still holds back is dropped.
    """

    def __init__(self, root: nn.Module, sharding: Sharding, ledger: DrawLedger, *, mean: bool) -> None:
        self.root = root
        self.sharding = sharding
        self.ledger = ledger
        self.mean = mean
        self.parameters = dict(root.named_parameters())
        self._reduced: Delivery | None = None
        self._public_share: float | None = None
        self._replicas = None if sharding.replicas is None else Agreement(sharding.replicas)
        self._groups = communication_groups(root)
        self._comms = [_WeightedReduceScatter(g._reduce_scatter_comm, self) for g in self._groups]
        for group, comm in zip(self._groups, self._comms, strict=True):
            group._reduce_scatter_comm = comm
        trainable = [p for p in self.parameters.values() if p.requires_grad]
        self._guarded = set(trainable)
        self._guards = [
            p.register_hook(_refuse_direct_gradient)  # type: ignore[no-untyped-call]  # torch's
            for p in trainable
        ]

    def remove(self) -> None:
        """Give FSDP2 its own reduction back."""
        for group, comm in zip(self._groups, self._comms, strict=True):
            if group._reduce_scatter_comm is comm:
                group._reduce_scatter_comm = comm.inner
        while self._guards:
            self._guards.pop().remove()

    def weight(self) -> float:
        """What this rank's gradient counts before FSDP2 divides the sum by the number of ranks."""
        if self._public_share is not None:
            share = self._public_share
        else:
            self._reduced = self.ledger.outstanding()
            share = self._reduced.share
        return self.sharding.ranks.size * (share if self.mean else float(share > 0))

    def check(self, delivery: Delivery) -> None:
        """Refuse a gradient that is not the reduced one of this delivery."""
        ours = all(g._reduce_scatter_comm is c for g, c in zip(self._groups, self._comms, strict=True))
        reduces = all(group.reduce_grads and group.all_reduce_grads for group in self._groups)
        context = self.root._get_fsdp_state()._state_ctx  # type: ignore[operator]  # an FSDPModule
        finished = context.is_last_backward and not getattr(context, "manual_backward_finalization", False)
        if not (ours and reduces and finished):
            raise RuntimeError(
                "something changed how FSDP2 reduces gradients (set_requires_gradient_sync, "
                "set_is_last_backward, another communication …): every backward must be reduced by itself"
            )
        if self.sharding.ranks.size > 1 and self._reduced is not delivery:
            raise RuntimeError(
                "the gradient of this batch was not reduced over the ranks: call the module that was made "
                "private and backward() once for each batch"
            )
        if any(p.requires_grad and p not in self._guarded for p in self.parameters.values()):
            raise RuntimeError("a parameter became trainable after make_private: call make_private again")

    def forget(self) -> None:
        """Drop gradients that FSDP2 holds back from an earlier batch."""
        if any(_holds_gradients(group) for group in self._groups):
            self.root.reset_iter_state()  # type: ignore[operator]  # an FSDPModule

    def norms(self, grads: Sequence[Tensor]) -> list[float]:
        """Norms of whole gradients, of which ``grads`` are this rank's shards; the same on every rank.

        Squares are taken of ratios to the largest shard, so that nothing over- or underflows that would not
        in one process; what is not finite on one rank is not finite on any.
        """
        shards = self.sharding.shards
        own = torch.tensor(tensor_norms(grads), dtype=torch.float64, device=shards.device)
        unit = own.clone()
        dist.all_reduce(unit, op=dist.ReduceOp.MAX, group=shards.group)
        unit = torch.where((unit > 0) & unit.isfinite(), unit, 1.0)
        squares = (own / unit).square()
        dist.all_reduce(squares, group=shards.group)
        norms: list[float] = (unit * squares.sqrt()).tolist()
        return norms

    def finish_(self, clipped: Sequence[Tensor]) -> None:
        """Refuse to release what differs between replicas, which add the same noise."""
        if self._replicas is not None:
            self._replicas.check(clipped)

    def parameter_norms(
        self,
        module: nn.Module,
        names: Sequence[str],
        *,
        loader: Loader,
        gradient: Gradient,
        mini_set_size: int,
        count: int,
        seed: int,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> list[dict[str, float]]:
        """:func:`opacus_bc.public.norms.parameter_norms` with public mini-sets split over the ranks.

        **Formal guarantee**: gradients, buffers, modes and random states are what they were, whether this
        returns or raises; weights are only read. The gradients are those of real backwards through FSDP2, so
        they are put aside and put back instead of being computed on copies.
        """
        held = [(p, p.grad) for p in self.parameters.values()]

        def norms_of(indices: list[int]) -> list[float]:
            for p, _ in held:
                p.grad = None
            part = self.part([indices])
            self._public_share = part.shares[0]
            gradient(module, batch_of(loader, part.mini_sets[0]))
            return self.norms([_grad_part(self.parameters[name]) for name in names])

        try:
            with untouched_buffers(module):
                sizes = {"size": mini_set_size, "count": count}
                return measure(module, names, norms_of, loader=loader, seed=seed, **sizes)
        finally:
            self._public_share = None
            for p, grad in held:
                p.grad = grad

    def part(self, draw: Draw) -> Part:
        """What this rank does of a draw."""
        ranks = self.sharding.ranks
        return part_of_each_mini_set(draw, rank=ranks.rank, size=ranks.size)


def _refuse_direct_gradient(_gradient: Tensor) -> NoReturn:
    raise RuntimeError(
        "a loss term uses sharded parameters themselves, so its gradient is not weighted and reduced with "
        "the batch's: leave it out (use the optimizer's weight_decay for a penalty)"
    )


def _holds_gradients(group: Any) -> bool:
    leaves = (getattr(p, "_unsharded_param", None) for p in group.fsdp_params)
    return group._partial_reduce_output is not None or any(
        leaf is not None and leaf.grad is not None for leaf in leaves
    )


def _grad_part(p: nn.Parameter) -> Tensor:
    return torch.zeros(0, device=p.device) if p.grad is None else local_part(p.grad)
