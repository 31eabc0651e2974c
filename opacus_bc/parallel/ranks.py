"""The processes that train one model together: what they agree on, and how they find out that they do not."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from opacus_bc.draws.ledger import Delivery
from opacus_bc.mechanism.clipping import tensor_norms

STOPPED = (
    "ranks could not communicate: another one has stopped. No weight was moved; start all ranks again from "
    "the last checkpoint"
)
_SAME = 1e-5  # norms and projections of one and the same gradient, computed on different hardware
_ROW = 2048


@contextmanager
def communicating() -> Iterator[None]:
    """Say what it means when communication fails: another rank has stopped."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(STOPPED) from error


class Ranks:
    """The processes of a group that train one model together, and where they can communicate."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
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

    def each(self, conditions: Sequence[bool]) -> list[bool]:
        """Which of as many conditions on every rank hold on all of them."""
        flags = torch.tensor([int(condition) for condition in conditions], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    def same(self, *values: object) -> bool:
        """Whether all ranks were given the same things."""
        digest = _digest(values)
        return self.all(self.agree(digest) == digest)

    def same_each(self, values: Sequence[object]) -> list[bool]:
        """Which of as many things on every rank are the same on all of them."""
        own = torch.tensor([_digest(value) for value in values], device=self.device)
        first = own.clone()
        dist.broadcast(first, group=self.group, group_src=0)
        return self.each((own == first).tolist())

    def check_same(self, what: str, *values: object) -> None:
        """Refuse to go on, on every rank, if any two were given different things."""
        if not self.same(*values):
            raise ValueError(f"{what} must be the same on every rank; rank {self.rank} has {values}")

    def add_up_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in one message for each type."""
        by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in by_type.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            with communicating():
                dist.all_reduce(flat, group=self.group)
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 2


class Agreement:
    """Compares what ranks are about to release, without sending it.

    **Formal guarantee**: ranks whose tensors differ by more than rounding are told so on every rank, but for
    a probability of about 1e-5: they compare norms and projections on a random direction that rank 0's
    entropy chooses anew for each release.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._directions = torch.Generator().manual_seed(ranks.agree(int.from_bytes(os.urandom(7), "little")))

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that are not the same on every rank."""
        norms = torch.tensor(tensor_norms(tensors), dtype=torch.float64)
        along = torch.stack([_projection(tensor, self._directions) for tensor in tensors])
        found = torch.cat([norms, along]).to(self.ranks.device)
        extremes = torch.cat([found, -found])
        with communicating():
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.ranks.group)
        largest, smallest = extremes[: len(found)], -extremes[len(found) :]
        allowed = _SAME * largest[: len(norms)].repeat(2)
        if bool((largest - smallest > allowed).any()):
            raise RuntimeError(
                "the clipped gradients differ from rank to rank: part of this batch's gradient was not "
                "reduced. Make one backward a batch, through the module that was made private"
            )


def _projection(tensor: Tensor, directions: torch.Generator) -> Tensor:
    """Inner product with a random a ⊗ b, which is zero for no fixed non-zero tensor but by chance."""
    flat = tensor.detach().reshape(-1)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % _ROW)).view(-1, _ROW)
    a = torch.randn(_ROW, generator=directions, dtype=torch.float64).to(rows)
    b = torch.randn(len(rows), generator=directions, dtype=torch.float64).to(rows.device)
    return ((rows @ a).double() @ b).cpu()


class Reduction:
    """How several processes make one release; by default every rank holds whole gradients."""

    def norms(self, grads: Sequence[Tensor]) -> list[float]:
        """Norms of whole gradients, of which this process holds ``grads``."""
        return tensor_norms(grads)

    def forget(self) -> None:
        """Drop gradients of earlier batches that are not in ``.grad`` yet."""

    def check(self, delivery: Delivery) -> None:
        """Refuse a gradient that is not what must be clipped."""
        raise NotImplementedError

    def finish_(self, clipped: Sequence[Tensor]) -> None:
        """Turn this process's sum of clipped vectors into that of all, in place."""
        raise NotImplementedError


def weigh_(gradient: Tensor, weight: float) -> None:
    """Multiply in place; zero times infinity is zero."""
    if weight == 0.0:
        gradient.zero_()
    elif weight != 1.0:
        gradient.mul_(weight)
