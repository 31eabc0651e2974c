"""From rows to units: a batch's rows that belong to one sample (its views) or to one user are one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def owners(counts: Sequence[int], device: torch.device | None = None) -> Tensor:
    """For every row the number of its unit, where unit after unit has so many rows.

    >>> owners([2, 1]).tolist()
    [0, 0, 1]
    """
    sizes = torch.tensor(list(counts), dtype=torch.int64, device=device)
    return torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)


def segment_sums(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Every unit's sum of its rows; the units' rows stand one after the other.

    **Formal guarantee**: row u of the result is a function of unit u's rows alone.

    >>> segment_sums(torch.tensor([[1.0], [2.0], [4.0]]), [2, 1]).tolist()
    [[3.0], [4.0]]
    """
    if len(counts) and min(counts) == max(counts) and len(rows) == sum(counts):
        return rows.reshape(len(counts), counts[0], *rows.shape[1:]).sum(1)
    sums = rows.new_zeros((len(counts), *rows.shape[1:]))
    return sums.index_add_(0, owners(counts, rows.device), rows)


def segment_means(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Every unit's mean of its rows: what is clipped as one vector.

    >>> segment_means(torch.tensor([[1.0], [3.0], [4.0]]), [2, 1]).tolist()
    [[2.0], [4.0]]
    """
    sizes = torch.tensor(list(counts), dtype=rows.dtype, device=rows.device)
    return segment_sums(rows, counts).div_(sizes.view(-1, *(1 for _ in rows.shape[1:])))
