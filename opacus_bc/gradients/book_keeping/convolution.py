"""Per-sample weight gradients of convolutions in any number of dimensions: instantiated, or norms alone.

A sample's weight gradient is B Aᵀ, where column t of A is the window of the input at output position t and
column t of B the gradient of the output there. With T positions its squared norm is the sum of the entries of
(AᵀA) ∘ (BᵀB), which needs T² numbers instead of the weight's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opacus_bc.gradients.book_keeping.grams import gram, gram_squares
from opacus_bc.gradients.book_keeping.window_grams import Box, shifts, window_grams

_PIECE = 2**18  # floats of a temporary: they stay in the cache
_CHANNELS, _SMALL = 32, 2**16  # inputs and entries of a weight for which samples as groups are faster
_GROUPED = 2**21  # floats that torch's own weight gradient sees at once: each call costs it much


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
        if self.groups > 1 and x.dtype == torch.float64:  # torch is wrong for some layouts (2.15)
            x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
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
        if self._pointwise:
            return torch.bmm(grad.flatten(2), x.flatten(2).transpose(1, 2)).view(len(x), *weight.shape)
        if self.groups == 1 and x.stride(1) == 1 < x.shape[1]:  # channels lie side by side in memory
            return self._by_pixels(x, grad, weight)
        if not self._prefers_groups(x, weight):
            by = self._by_pixels if self._prefers_pixels(x, grad) else self._by_windows
            return by(x, grad, weight)
        result = grad.new_empty((len(x), *weight.shape))
        for part in _pieces(len(x), math.prod(x.shape[1:]) + math.prod(grad.shape[1:]), most=_GROUPED):
            result[part] = self._by_groups(x[part], grad[part], weight)
        return result

    def _prefers_groups(self, x: Tensor, weight: Tensor) -> bool:
        """Whether torch's own weight gradient, a group for each sample, is faster than windows (measured)."""
        if self.groups > 1:
            return x.shape[1] == self.groups
        return x.shape[1] >= _CHANNELS and weight.numel() <= _SMALL

    def _prefers_pixels(self, x: Tensor, grad: Tensor) -> bool:
        """Whether a line of a window with all its channels is a much longer run than a line of outputs.

        What is copied lies side by side in memory for that long; beyond some channels neither way is faster.
        """
        run = x.shape[1] * self.kernel[-1]
        return self.groups == 1 and x.shape[1] < _CHANNELS and run >= 2 * grad.shape[-1]

    @property
    def _pointwise(self) -> bool:
        """Whether every window is one pixel, and every pixel one window."""
        ones = {*self.kernel, *self.stride, self.groups}
        return ones == {1} and not any(self.padding)

    def _by_pixels(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """:meth:`_by_windows` with all channels of a pixel side by side in memory."""
        pixels = self.padded(x).movedim(1, -1).contiguous()
        rows, *spaces, _ = pixels.stride()
        jumps = [space * s for space, s in zip(spaces, self.stride, strict=True)]
        steps = [space * d for space, d in zip(spaces, self.dilation, strict=True)]
        shape = (len(x), *grad.shape[2:], *self.kernel, x.shape[1])
        windows, b = pixels.as_strided(shape, (rows, *jumps, *steps, 1)), grad.flatten(2)
        entries, places = weight[0].numel(), b.shape[2]
        result = grad.new_empty((len(x), len(weight), entries))
        for part, buffer in _buffers(windows, entries * places):
            torch.bmm(b[part], buffer.copy_(windows[part]).view(-1, places, entries), out=result[part])
        return result.view(len(x), len(weight), *self.kernel, -1).movedim(-1, 2)

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
        """A copy of some samples' windows after the other, and a product of matrices for each and group."""
        windows, b = self.windows(self.padded(x), grad.shape[2:]), grad.flatten(2)
        entries, places, outputs = weight[0].numel(), b.shape[2], weight.shape[0] // self.groups
        result = grad.new_empty((len(x) * self.groups, outputs, entries))
        for part, buffer in _buffers(windows, self.groups * entries * places):
            rows = slice(part.start * self.groups, part.stop * self.groups)
            a = buffer.copy_(windows[part]).view(-1, entries, places)
            torch.bmm(b[part].reshape(-1, outputs, places), a.transpose(1, 2), out=result[rows])
        return result.view(len(x), *weight.shape)

    def squares(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """What :func:`gram_squares` returns, of every sample's weight gradient."""
        box = Box(x.shape[2:], grad.shape[2:], self.stride)
        found = [(x.new_zeros(0, dtype=torch.float64),) * 2]
        for part in _pieces(len(x), self.groups * box.places**2):
            b = gram(box.columns(self._apart(grad[part])))
            found.append(gram_squares(self.window_grams(x[part], box), b, rows=len(b) // self.groups))
        values, lengths = zip(*found, strict=True)
        return torch.cat(values), torch.cat(lengths)

    def window_grams(self, x: Tensor, box: Box) -> Tensor:
        """AᵀA of every sample and group, of shape (rows * groups, places, places)."""
        along = [
            shifts(*dimension)
            for dimension in zip(self.kernel, self.stride, self.padding, self.dilation, strict=True)
        ]
        return window_grams(self._apart(x), box, along)

    def _apart(self, x: Tensor) -> Tensor:
        """Every sample's groups, one after the other."""
        return x.reshape(len(x) * self.groups, -1, *x.shape[2:])


def _buffers(windows: Tensor, floats: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows in pieces, each with memory for a copy of its windows; all pieces share it."""
    pieces = list(_pieces(len(windows), floats))
    shared = windows.new_empty((max((p.stop - p.start for p in pieces), default=0), *windows.shape[1:]))
    return ((part, shared[: part.stop - part.start]) for part in pieces)


def _pieces(rows: int, floats: int, *, most: int = _PIECE) -> Iterator[slice]:
    """Rows in pieces whose temporaries have at most ``most`` floats."""
    step = max(1, most // max(1, floats))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))
