"""Sums of many float32 products, made of short ones, and how far rounding can take them.

Adding n numbers one after the other in float32 is off by up to ``n * eps / 2`` of the sum of their absolute
values: a large number and then many that are a little more than half a unit in its last place each add a
whole one. Kernels for one column add that way; 16,384 equal rows were off by 2e-4. Here a sum is cut into
pieces, each of which is off by no more than its own length allows, and the pieces are added in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opacus_bc.mechanism.clipping import memory_order

SHORT = 64  # products in a float32 sum where a result has few columns
LONG = 256  # the same where it has many, and every further piece costs time
FEW = 32  # columns
_AT_ONCE = 2**22  # floats of all pieces' products, up to which one call makes them


def length_of_sums(left: int, right: int) -> int:
    """How many products :func:`short_products` adds in float32, for results of so many rows and columns.

    >>> length_of_sums(1, 4096), length_of_sums(64, 64)
    (64, 256)
    """
    return SHORT if min(left, right) < FEW else LONG


def units_of_sums(count: int, length: int) -> float:
    """By how many eps of its terms' absolute values a sum may be off, with products and the last rounding.

    >>> units_of_sums(6, 64), units_of_sums(16_384, 64)
    (5.0, 34.0)
    """
    return min(count, length) / 2 + 2


def short_products(left: Tensor, right: Tensor) -> Tensor:
    """``leftᵀ right``, matrix by matrix, from shapes (matrices, n, rows) and (matrices, n, columns).

    **Formal guarantee**: off by at most ``units_of_sums(n, length_of_sums(rows, columns)) * eps`` of the sum
    of the products' absolute values, in whatever order a kernel adds them.
    """
    (matrices, count, rows), columns = left.shape, right.shape[2]
    length = length_of_sums(rows, columns)
    if count <= length or left.dtype == torch.float64:
        return torch.bmm(left.transpose(1, 2), right)
    pieces = count // length
    whole = pieces * length
    total = torch.bmm(left[:, whole:].transpose(1, 2), right[:, whole:]).double()
    if matrices * pieces * rows * columns <= _AT_ONCE:
        a = left[:, :whole].reshape(-1, length, rows)
        b = right[:, :whole].reshape(-1, length, columns)
        found = torch.bmm(a.transpose(1, 2), b).view(matrices, pieces, rows, columns)
        total += found.sum(1, dtype=torch.float64)
    else:
        for start in range(0, whole, length):
            part = slice(start, start + length)
            total += torch.bmm(left[:, part].transpose(1, 2), right[:, part])
    return total.to(left.dtype)


def short_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """The sum of rows times their weights, from shapes (n,) and (n, entries); see :func:`short_products`."""
    if len(rows) <= SHORT:
        return weights @ rows
    return short_products(weights[None, :, None], rows[None])[0, 0]


def weighted_sum(weights: Tensor, samples: Tensor) -> Tensor:
    """:func:`short_sum` of samples in any shape, however they lie in memory; the sum lies in its own order.

    >>> weighted_sum(torch.tensor([1.0, 2.0]), torch.ones(2, 3, 1)).tolist()
    [[3.0], [3.0], [3.0]]
    """
    if samples.is_contiguous():
        shape = samples.shape[1:]
        return short_sum(weights, samples.view(len(samples), shape.numel())).view(shape)
    order = memory_order(samples)
    lying = samples.permute(order)
    total = short_sum(weights, lying.reshape(lying.shape[0], lying.shape[1:].numel())).view(lying.shape[1:])
    places = sorted(range(len(order) - 1), key=order[1:].__getitem__)
    return total.permute(places).contiguous()
