"""Whose rows are whose: a model's input with fewer rows, or with one row replaced by its neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def nested_tensors(value: object) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from nested_tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from nested_tensors(entry)


def row_count(value: object, batch_dim: int = 0) -> int:
    """How many rows a model's input has: those of its first tensor that has any; 0 if there is none."""
    for tensor in nested_tensors(value):
        if tensor.dim() > batch_dim:
            return tensor.shape[batch_dim]
    return 0


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the rows of an input with ``count`` of them are."""

    count: int
    batch_dim: int = 0

    def dim(self, tensor: Tensor) -> int | None:
        """The dimension of a tensor's rows, None if it has none: lengths have theirs in the first one."""
        for dim in dict.fromkeys((self.batch_dim, 0)):
            if tensor.dim() > dim and tensor.shape[dim] == self.count:
                return dim
        return None

    def map(self, value: Any, change: Callable[[Tensor, int], Tensor]) -> Any:
        """The same nested value with every tensor that has rows changed."""
        if isinstance(value, Tensor):
            dim = self.dim(value)
            return value if dim is None else change(value, dim)
        if isinstance(value, Mapping):
            return {key: self.map(entry, change) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.map(entry, change) for entry in value)
        return value

    def first(self, value: Any, most: int) -> Any:
        """A detached copy of the first rows."""
        return self.map(value, lambda t, dim: t.detach().narrow(dim, 0, min(most, self.count)).clone())

    def replaced(self, value: Any, row: int, factor: float = 1.0) -> Any:
        """A copy with ``row`` equal to the one before it: both are inputs that the model may get.

        ``factor`` multiplies what is no whole number.
        """

        def change(tensor: Tensor, dim: int) -> Tensor:
            changed, other = tensor.detach().clone(), tensor.detach().select(dim, row - 1)
            changed.select(dim, row).copy_(factor * other if tensor.is_floating_point() else other)
            return changed

        return self.map(value, change)

    def others(self, tensor: Tensor, row: int) -> Tensor | None:
        """All rows but one; None for a tensor without rows."""
        dim = self.dim(tensor)
        if dim is None:
            return None
        left = [i for i in range(self.count) if i != row]
        return tensor.detach().index_select(dim, torch.tensor(left, device=tensor.device))


@dataclass
class Run:
    """What a forward pass computed: layers' outputs by name, in the order of their calls, and its own."""

    seen: list[tuple[str, Tensor]] = field(default_factory=list)

    def add(self, name: str, value: object) -> None:
        """Note all tensors of a value."""
        self.seen += [(name, tensor) for tensor in nested_tensors(value)]

    @property
    def finite(self) -> bool:
        """Whether every number is finite."""
        return all(bool(t.isfinite().all()) for _, t in self.seen if t.is_floating_point())


def first_difference(before: Run, after: Run, rows: Rows, row: int, *, tolerance: float = 0.0) -> str | None:
    """The first layer in which another row than ``row`` differs; None if there is none.

    ``tolerance``: see :func:`alike`. Runs that went through other layers, or with other shapes,
    cannot be compared: None.
    """
    names, others = [name for name, _ in before.seen], [name for name, _ in after.seen]
    if names != others or any(
        a.shape != b.shape for (_, a), (_, b) in zip(before.seen, after.seen, strict=True)
    ):
        return None
    for (name, a), (_, b) in zip(before.seen, after.seen, strict=True):
        left, right = rows.others(a, row), rows.others(b, row)
        if left is None or right is None:
            continue
        if alike(left, right, tolerance):
            continue
        return name
    return None


def alike(left: Tensor, right: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors of one shape hold the same numbers.

    An entry that is not finite is like the same infinity, or another NaN, and like nothing else.

    Args:
        left: The one.
        right: The other.
        tolerance: Finite entries may differ by this share of the largest finite one.
    """
    same = (left == right) | (left.isnan() & right.isnan())
    if bool(same.all()):
        return True
    if not tolerance or not left.is_floating_point():
        return False
    finite = left.isfinite() & right.isfinite()
    if not bool((same | finite).all()):
        return False
    one, two = left[finite], right[finite]
    scale = max(float(one.abs().max()), float(two.abs().max()))
    return float((one - two).abs().max()) <= tolerance * scale
