"""All samples' gradients of one parameter: instantiated, or as a product that is never formed.

An entry answers three questions: every sample's norm (never too small), the sum of the samples' gradients
with given weights, and the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.grams import gram, gram_norms
from opacus_bc.mechanism.clipping import row_norms

_TOLERATED = 0.02  # of a squared norm: by how much its upper bound may exceed it


class Entry(Protocol):
    """All samples' gradients of one parameter."""

    def norms(self) -> Tensor:
        """Every sample's norm in float64, never too small by more than float rounding of a short sum."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over samples of weight times gradient, in the parameter's shape."""
        ...

    def rows(self) -> Tensor:
        """Every sample's gradient, one after the other."""
        ...

    def without(self, keep: Tensor) -> Entry:
        """The samples where ``keep`` is true."""
        ...


@dataclass(frozen=True)
class Rows:
    """Instantiated gradients, of shape (samples, *parameter.shape)."""

    values: Tensor

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        return row_norms(self.values)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`Entry`."""
        flat = self.values.flatten(1) if self.values.dim() > 1 else self.values[:, None]
        return (weights.to(flat.dtype) @ flat).view(self.values.shape[1:])

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        return self.values

    def without(self, keep: Tensor) -> Rows:
        """See :class:`Entry`."""
        return Rows(self.values[keep])


@dataclass(frozen=True)
class LinearProduct:
    """Gradients of a linear layer's weight: inputs (samples, T, in), output gradients (samples, T, out)."""

    inputs: Tensor
    grads: Tensor
    shape: torch.Size  # the weight's

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        if self.inputs.shape[1] == 1:
            return row_norms(self.inputs) * row_norms(self.grads)
        a, b = (gram(each.transpose(1, 2)) for each in (self.inputs, self.grads))
        values, margins = gram_norms(a, b, rows=len(self.inputs))
        return bounded_norms(values, margins, lambda doubtful: self.without(doubtful).rows())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`Entry`."""
        scaled = self.grads * weights.to(self.grads.dtype)[:, None, None]
        return (scaled.flatten(0, 1).T @ self.inputs.flatten(0, 1)).view(self.shape)

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        return torch.bmm(self.grads.transpose(1, 2), self.inputs).view(-1, *self.shape)

    def without(self, keep: Tensor) -> LinearProduct:
        """See :class:`Entry`."""
        return LinearProduct(self.inputs[keep], self.grads[keep], self.shape)


@dataclass(frozen=True)
class ConvolutionProduct:
    """Gradients of a convolution's weight, from its inputs and the gradients of its outputs."""

    convolution: Convolution
    inputs: Tensor
    grads: Tensor
    weight: Tensor

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        values, margins = self.convolution.squared_norms(self.inputs, self.grads)
        return bounded_norms(values, margins, lambda doubtful: self.without(doubtful).rows())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`Entry`."""
        shape = (-1, *(1 for _ in self.grads.shape[1:]))
        scaled = self.grads * weights.to(self.grads.dtype).view(shape)  # a copy: others may hold the gradient
        return self.convolution.weight_gradient(self.inputs, scaled, self.weight)

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        return self.convolution.sample_gradients(self.inputs, self.grads, self.weight)

    def without(self, keep: Tensor) -> ConvolutionProduct:
        """See :class:`Entry`."""
        return ConvolutionProduct(self.convolution, self.inputs[keep], self.grads[keep], self.weight)


def bounded_norms(values: Tensor, margins: Tensor, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Norms from squared norms and how much too small these may be.

    **Formal guarantee**: no norm is too small, and none is too large by more than a per cent: samples whose
    terms cancel so far that rounding could be more than that are instantiated.
    """
    above = values.clamp(min=0.0) + margins
    norms = above.sqrt()
    doubtful = above.isfinite() & (margins > _TOLERATED * above)
    if bool(doubtful.any()):
        norms[doubtful] = row_norms(rows_of(doubtful))
    return norms
