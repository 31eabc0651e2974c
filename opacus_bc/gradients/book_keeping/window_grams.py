"""Gram matrices of a convolution's windows from those of its pixels.

At output position t and kernel entry i a window of a convolution with stride s, dilation d and padding p
meets pixel ``t s + i d - p``. With ``i d - p = s q + r`` that is pixel ``t + q`` of the image of all pixels
whose place leaves remainder r. So the Gram matrix of windows is a sum of Gram matrices of such images, each
shifted by q along rows and columns; and shifts along several dimensions follow one another. Positions and
pixels are numbered alike, in one box. A shift then moves a matrix along its memory, and a mask drops what has
come from beyond the box.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from opacus_bc.gradients.book_keeping.grams import gram

Shifts = Mapping[int, Sequence[int]]  # remainder -> shifts


def shifts(kernel: int, stride: int, padding: int, dilation: int) -> dict[int, list[int]]:
    """Along one dimension: by how many pixels of which image each kernel entry is away from the position."""
    found: dict[int, list[int]] = {}
    for entry in range(kernel):
        shift, remainder = divmod(entry * dilation - padding, stride)
        found.setdefault(remainder, []).append(shift)
    return found


class Box:
    """Holds the output's positions and the pixels of every remainder, numbered in the order of memory.

    Args:
        image: The image's size.
        out: The output's size.
        stride: The convolution's stride.
    """

    def __init__(self, image: Sequence[int], out: Sequence[int], stride: Sequence[int]) -> None:
        pixels = [-(-size // s) for size, s in zip(image, stride, strict=True)]
        self.stride = tuple(stride)
        self.size = tuple(max(o, p) for o, p in zip(out, pixels, strict=True))
        self.places = math.prod(self.size)

    def columns(self, x: Tensor) -> Tensor:
        """Shape (matrices, channels, *at most the box) as columns, with zeros up to the box."""
        missing = [whole - have for whole, have in zip(self.size, x.shape[2:], strict=True)]
        if any(missing):
            x = F.pad(x, [pad for each in reversed(missing) for pad in (0, each)])
        return x.flatten(2)

    def moved(self, grams: Tensor, dimension: int, by: Sequence[int]) -> Tensor:
        """The sum over shifts q of matrices whose entry (s, t) was (s + q, t + q), zero beyond the box."""
        if list(by) == [0]:
            return grams
        total = grams.clone() if 0 in by else torch.zeros_like(grams)
        into, out_of = total.flatten(1), grams.flatten(1)
        for shift in by:
            if 0 < abs(shift) < self.size[dimension]:
                offset = shift * math.prod(self.size[dimension + 1 :]) * (self.places + 1)
                here, there = (
                    slice(max(0, -offset), min(0, -offset) or None),
                    slice(max(0, offset), min(0, offset) or None),
                )
                mask = inside(self.size, dimension, shift, grams.dtype, grams.device)
                into[:, here].addcmul_(out_of[:, there], mask[here])
        return total


@lru_cache(64)
def inside(
    size: tuple[int, ...], dimension: int, shift: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One where both the row's and the column's place stay in the box when shifted, else zero."""
    line = torch.arange(size[dimension], device=device) + shift
    stays = ((line >= 0) & (line < size[dimension])).to(dtype)
    flat = stays.view([-1 if d == dimension else 1 for d in range(len(size))]).expand(size).reshape(-1)
    return (flat[:, None] * flat).view(-1)


def window_grams(image: Tensor, box: Box, along: Sequence[Shifts]) -> Tensor:
    """AᵀA of every matrix of windows.

    Args:
        image: Shape (matrices, channels, *size), without padding.
        box: Where positions and pixels are numbered.
        along: What :func:`shifts` says of each dimension.

    Returns:
        Shape (matrices, places, places). At places that are no positions of the output the entries mean
        nothing.
    """
    total: Tensor | None = None
    for remainders in product(*along):
        inside = tuple(slice(r, None, s) for r, s in zip(remainders, box.stride, strict=True))
        grams = gram(box.columns(image[(slice(None), slice(None), *inside)]))
        for dimension, (remainder, found) in enumerate(zip(remainders, along, strict=True)):
            grams = box.moved(grams, dimension, found[remainder])
        total = grams if total is None else total.add_(grams)
    assert total is not None  # a kernel has entries
    return total
