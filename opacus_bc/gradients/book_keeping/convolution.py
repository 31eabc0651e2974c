"""Per-sample weight gradients of convolutions in any number of dimensions: instantiated, or norms alone.

A sample's weight gradient is B Aᵀ, where column t of A is the window of the input at output position t and
column t of B the gradient of the output there. With T positions its squared norm is the sum of the entries of
(AᵀA) ∘ (BᵀB), which needs T² numbers instead of the weight's. The Gram matrix of windows is a sum of shifted
Gram matrices of *pixels*, one shift for each entry of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from opacus_bc.gradients.book_keeping.grams import gram, gram_squares

_PIECE = 2**17  # floats of a temporary: larger ones cost more in fresh pages than they save
_WIDE = 32  # input channels of a group from which torch's own grouped weight gradient is quick
_SMALL = 2**16  # and entries of the weight up to which it is


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """The shape of a convolution, without its weight."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, x: Tensor) -> Tensor:
        """The input with its zeros around it."""
        if not any(self.padding):
            return x
        both = [pad for pad in reversed(self.padding) for _ in range(2)]
        return F.pad(x, both)

    def windows(self, padded: Tensor, out: Sequence[int]) -> Tensor:
        """A view of shape (rows, channels, *kernel, *out): which pixel each weight meets at each position."""
        rows, channels, *spaces = padded.stride()
        steps = [space * d for space, d in zip(spaces, self.dilation, strict=True)]
        jumps = [space * s for space, s in zip(spaces, self.stride, strict=True)]
        shape = (*padded.shape[:2], *self.kernel, *out)
        return padded.as_strided(shape, (rows, channels, *steps, *jumps))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution with a weight, without a bias."""
        function = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        return function(x, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def weight_gradient(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the batch's weight, as plain SGD computes it."""
        found: Tensor = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.kernel),
            self.groups,
            (False, True, False),
        )[1]
        return found

    def sample_gradients(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """Every sample's gradient of the weight, of shape (rows, *weight.shape)."""
        result = grad.new_empty((len(x), *weight.shape))
        channels = x.shape[1] // self.groups
        depthwise = channels == 1 and self.groups > 1
        if depthwise or (channels >= _WIDE and weight.numel() <= _SMALL):
            make, floats = self._by_groups, math.prod(x.shape[1:]) + math.prod(grad.shape[1:])
        else:
            make, floats = self._by_windows, math.prod((x.shape[1], *self.kernel, *grad.shape[2:]))
        for part in _pieces(len(x), floats):
            result[part] = make(x[part], grad[part], weight)
        return result

    def _by_groups(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """Torch's own weight gradient, each sample a group of its own."""
        rows = len(x)
        shape = (rows * weight.shape[0], *weight.shape[1:])
        apart = Convolution(
            kernel=self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups * rows,
        )
        found = apart.weight_gradient(
            x.reshape(1, -1, *x.shape[2:]),
            grad.reshape(1, -1, *grad.shape[2:]),
            weight.new_empty(1).expand(shape),
        )
        return found.view(rows, *weight.shape)

    def _by_windows(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """A copy of all windows, and one product of matrices for each sample and group."""
        out = grad.shape[2:]
        batches = len(x) * self.groups
        a = self.windows(self.padded(x), out).reshape(batches, weight[0].numel(), -1)
        b = grad.reshape(batches, weight.shape[0] // self.groups, -1)
        return torch.bmm(b, a.transpose(1, 2)).view(len(x), *weight.shape)

    def squares(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """What :func:`gram_squares` returns, of every sample's weight gradient."""
        positions, pixels = math.prod(grad.shape[2:]), math.prod(self.padded(x[:1]).shape[2:])
        found = [(x.new_zeros(0, dtype=torch.float64),) * 2]
        for part in _pieces(len(x), self.groups * max(pixels, positions) ** 2):
            b = gram(grad[part].reshape(-1, grad.shape[1] // self.groups, positions))
            found.append(gram_squares(self._window_grams(x[part], grad.shape[2:]), b, rows=len(x[part])))
        values, lengths = zip(*found, strict=True)
        return torch.cat(values), torch.cat(lengths)

    def _window_grams(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """AᵀA of every sample and group, of shape (rows * groups, T, T)."""
        padded = self.padded(x)
        image = padded.reshape(len(x) * self.groups, -1, *padded.shape[2:])
        if math.prod(self.kernel) == 1 and set(self.stride) == {1}:
            return gram(image.flatten(2))
        total = image.new_zeros((len(image), *out, *out))
        grams: dict[tuple[int, ...], Tensor] = {}
        for shift in product(*map(range, self.kernel)):
            places = [k * d for k, d in zip(shift, self.dilation, strict=True)]
            # Windows of a strided convolution meet in pixels of one residue class only.
            residue = tuple(place % s for place, s in zip(places, self.stride, strict=True))
            if residue not in grams:
                inside = tuple(slice(r, None, s) for r, s in zip(residue, self.stride, strict=True))
                same = image[(slice(None), slice(None), *inside)]
                grams[residue] = gram(same.flatten(2)).view(len(image), *same.shape[2:], *same.shape[2:])
            starts = [place // s for place, s in zip(places, self.stride, strict=True)]
            cut = tuple(slice(start, start + size) for start, size in zip(starts, out, strict=True))
            total += grams[residue][(slice(None), *cut, *cut)]
        return total.view(len(image), math.prod(out), math.prod(out))


def _pieces(rows: int, floats: int) -> Iterator[slice]:
    """Rows in pieces whose temporaries have at most ``_PIECE`` floats."""
    step = max(1, _PIECE // max(1, floats))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))
