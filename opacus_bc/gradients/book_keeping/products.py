"""All samples' gradients of one parameter: instantiated, or as a product that is never formed.

An entry answers three questions: every sample's norm (never too small), the sum of the samples' gradients
with given weights, and the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from opacus_bc.gradients.book_keeping.convolution import Convolution
from opacus_bc.gradients.book_keeping.grams import gram, gram_squares, margin_units
from opacus_bc.gradients.book_keeping.sums import (
    LONG,
    SHORT,
    length_of_sums,
    short_products,
    units_of_sums,
    weighted_sum,
)
from opacus_bc.mechanism.clipping import row_norms

_PIECE = 2**22  # floats that are instantiated at once
_TOLERATED = 0.02  # of a squared norm: by how much its upper bound may exceed it
_NOTHING = 1e-20  # a squared norm below which nobody asks how much its upper bound exceeds it
_SUM_UNITS = 8.0  # the least that is allowed for: two sums of a few products each
_COVERED = 34.0  # units that the margins of squared norms and of clip bounds cover together
_STEADY = 16.0  # clip bounds: terms beyond which a sample's own gradient and its terms are added up by itself
_KERNEL = 2 * LONG  # products that a kernel for many columns adds one after the other (measured: below 400)


class Entry(Protocol):
    """All samples' gradients of one parameter."""

    def norms(self) -> Tensor:
        """Every sample's norm in float64, within the rounding of :func:`row_norms` or above."""
        ...

    def weighted_sum(self, weights: Tensor, bound: float | None = None) -> Tensor:
        """The sum over samples of weight times gradient, in the parameter's shape.

        Args:
            weights: One for each sample.
            bound: How long a sample's weighted gradient is at most, if the caller knows.
        """
        ...

    def rows(self) -> Tensor:
        """Every sample's gradient, one after the other."""
        ...

    def only(self, keep: Tensor) -> Entry:
        """The samples where ``keep`` is true."""
        ...


@dataclass(frozen=True)
class Rows:
    """Instantiated gradients, of shape (samples, *parameter.shape)."""

    values: Tensor

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        return row_norms(self.values)

    def weighted_sum(self, weights: Tensor, bound: float | None = None) -> Tensor:
        """See :class:`Entry`."""
        return weighted_sum(weights.to(self.values.dtype), self.values)

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        return self.values

    def only(self, keep: Tensor) -> Rows:
        """See :class:`Entry`."""
        return Rows(self.values[keep])


@dataclass(frozen=True)
class Joined:
    """Small instantiated gradients of several parameters side by side: one call serves all of them.

    Attributes:
        entry: Shape (samples, all their entries).
        shapes: Of the parameters.
    """

    entry: Rows
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, members: Sequence[Rows]) -> Joined:
        """Put entries side by side."""
        shapes = tuple(member.values.shape[1:] for member in members)
        flat = [
            m.values.reshape(len(m.values), shape.numel()) for m, shape in zip(members, shapes, strict=True)
        ]
        return cls(Rows(torch.cat(flat, 1)), shapes)

    def only(self, keep: Tensor) -> Joined:
        """The samples where ``keep`` is true."""
        return Joined(self.entry.only(keep), self.shapes)

    def weighted_sums(self, weights: Tensor) -> list[Tensor]:
        """Every parameter's sum over samples of weight times gradient."""
        parts = torch.split(self.entry.weighted_sum(weights), [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True)
class OwnRows:
    """Gradients of a function of parameters that has a row for each sample, of which each uses its own.

    A class token is repeated for every sample; a recurrent layer multiplies a first state of zeros.

    Attributes:
        values: Every sample's gradient of its own row; of the other rows it is zero.
    """

    values: Tensor

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        return row_norms(self.values)

    def weighted_sum(self, weights: Tensor, bound: float | None = None) -> Tensor:
        """See :class:`Entry`."""
        return weights.to(self.values.dtype).view(-1, *(1 for _ in self.values.shape[1:])) * self.values

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        return torch.cat(list(self.parts()))

    def parts(self) -> Iterator[Tensor]:
        """The rows in pieces: they are almost all zeros, and as many as the samples' square."""
        samples = torch.arange(len(self.values), device=self.values.device)
        for some in torch.split(samples, max(1, _PIECE // max(1, self.values.numel()))):
            part = self.values.new_zeros(len(some), *self.values.shape)
            part[some - some[0], some] = self.values[some]
            yield part

    def only(self, keep: Tensor) -> Rows:
        """See :class:`Entry`."""
        return Rows(self.rows()[keep])


class Product(Entry, Protocol):
    """Gradients of a weight whose rows meet inputs and gradients of outputs, position by position."""

    def squares(self) -> tuple[Tensor, Tensor]:
        """Every sample's squared norm as computed, and the square of the sum of its terms' lengths."""
        ...

    def along(self, direction: Tensor) -> Tensor:
        """Inner products with a weight, row by row of the weight: shape (samples, rows of the weight)."""
        ...

    def wide_sum(self, weights: Tensor) -> Tensor:
        """:meth:`weighted_sum` in float64, of float32 sums over few samples."""
        ...

    @property
    def grads(self) -> Tensor:
        """Gradients of the outputs."""
        ...

    @property
    def rounding(self) -> float:
        """By how many eps of the terms' lengths the sum of a sample's terms may be off."""
        ...

    @property
    def square_rounding(self) -> float:
        """By how many eps of the squared lengths a squared norm may be off."""
        ...

    def only(self, keep: Tensor) -> Product:
        """See :class:`Entry`."""
        ...


@dataclass(frozen=True)
class LinearProduct:
    """Gradients of a linear layer's weight: inputs (samples, T, in), output gradients (samples, T, out).

    Attributes:
        inputs: Of the layer.
        grads: Of its outputs.
        shape: The weight's.
        short: Whether sums are made of short ones whatever the weight's shape; where it has few rows or
            columns they always are.
    """

    inputs: Tensor
    grads: Tensor
    shape: torch.Size
    short: bool = False

    def squares(self) -> tuple[Tensor, Tensor]:
        """See :class:`Product`."""
        if self.inputs.shape[1] == 1:
            exact = self._factors().square()
            return exact, exact
        a, b = (gram(each.transpose(1, 2)) for each in (self.inputs, self.grads))
        return gram_squares(a, b, rows=len(self.inputs))

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        if self.inputs.shape[1] == 1:
            return self._factors()
        return norms_from_above(self, *self.squares())

    def _factors(self) -> Tensor:
        # In float64: squares of what a huge input meets are too small for float32, and their product is not.
        a: Tensor = torch.linalg.vector_norm(self.inputs, dim=(1, 2), dtype=torch.float64)
        b: Tensor = torch.linalg.vector_norm(self.grads, dim=(1, 2), dtype=torch.float64)
        return a * b

    def along(self, direction: Tensor) -> Tensor:
        """See :class:`Product`."""
        columns = different_rows(direction).flatten(1).T
        met = short_products(self.inputs.flatten(0, 1).T[None], columns[None])[0]
        return (met.view(*self.inputs.shape[:2], -1) * self.grads).sum(1)

    def wide_sum(self, weights: Tensor) -> Tensor:
        """See :class:`Product`."""
        total = torch.zeros(self.shape, dtype=torch.float64, device=self.grads.device)
        for start in range(0, len(weights), SHORT):
            part = slice(start, start + SHORT)
            some = replace(self, inputs=self.inputs[part], grads=self.grads[part])
            total += some.weighted_sum(weights[part])
        return total

    def weighted_sum(self, weights: Tensor, bound: float | None = None) -> Tensor:
        """See :class:`Entry`."""
        scaled = (self.grads * weights.to(self.grads.dtype)[:, None, None]).flatten(0, 1)
        inputs = self.inputs.flatten(0, 1)
        if self._short or (self.inputs.shape[1] == 1 and len(inputs) > SHORT):
            return short_products(scaled[None], inputs[None]).view(self.shape)
        return (scaled.T @ inputs).view(self.shape)

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        if self._short:
            return short_products(self.grads, self.inputs).view(-1, *self.shape)
        return torch.bmm(self.grads.transpose(1, 2), self.inputs).view(-1, *self.shape)

    @property
    def rounding(self) -> float:
        """See :class:`Product`."""
        length = self._length if self._short else _KERNEL
        return units_of_sums(self.inputs.shape[1], length)

    @property
    def square_rounding(self) -> float:
        """See :class:`Product`."""
        return margin_units(self.inputs.shape[2], self.grads.shape[2])

    @property
    def _length(self) -> int:
        return length_of_sums(self.grads.shape[2], self.inputs.shape[2])

    @property
    def _short(self) -> bool:
        """Of a sample with one position there is nothing to add up."""
        return self.short or (self.inputs.shape[1] > 1 and self._length == SHORT)

    def only(self, keep: Tensor) -> LinearProduct:
        """See :class:`Entry`."""
        return replace(self, inputs=self.inputs[keep], grads=self.grads[keep])


@dataclass(frozen=True)
class ConvolutionProduct:
    """Gradients of a convolution's weight, from its inputs and the gradients of its outputs.

    Attributes:
        convolution: Its shape.
        inputs: Of the layer.
        grads: Of its outputs.
        weight: Of the layer.
        short: Whether sums over many rows are made of sums over few.
    """

    convolution: Convolution
    inputs: Tensor
    grads: Tensor
    weight: Tensor
    short: bool = False

    def squares(self) -> tuple[Tensor, Tensor]:
        """See :class:`Product`."""
        return self.convolution.squares(self.inputs, self.grads)

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        return norms_from_above(self, *self.squares())

    def along(self, direction: Tensor) -> Tensor:
        """See :class:`Product`."""
        met = self.convolution.forward(self.inputs, different_rows(direction))
        return (met * self.grads).flatten(2).sum(2)

    def wide_sum(self, weights: Tensor) -> Tensor:
        """See :class:`Product`."""
        return self._in_pieces(self._scaled(weights))

    def weighted_sum(self, weights: Tensor, bound: float | None = None) -> Tensor:
        """See :class:`Entry`."""
        scaled = self._scaled(weights)
        if not self.short or len(scaled) <= SHORT:
            return self.convolution.weight_gradient(self.inputs, scaled, self.weight)
        return self._in_pieces(scaled).to(scaled.dtype)

    def _scaled(self, weights: Tensor) -> Tensor:
        shape = (-1, *(1 for _ in self.grads.shape[1:]))
        return self.grads * weights.to(self.grads.dtype).view(shape)  # a copy: others may hold the gradient

    def _in_pieces(self, scaled: Tensor) -> Tensor:
        total = torch.zeros_like(self.weight, dtype=torch.float64)
        for x, g in zip(torch.split(self.inputs, SHORT), torch.split(scaled, SHORT), strict=True):
            total += self.convolution.weight_gradient(x, g, self.weight)
        return total

    @property
    def rounding(self) -> float:
        """See :class:`Product`. Kernels of convolutions add all positions one after the other (measured)."""
        positions = self.grads.shape[2:].numel()
        return units_of_sums(positions, positions)

    @property
    def square_rounding(self) -> float:
        """See :class:`Product`."""
        groups = self.convolution.groups
        return margin_units(self.inputs.shape[1] // groups, self.grads.shape[1] // groups)

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        return self.convolution.sample_gradients(self.inputs, self.grads, self.weight)

    def only(self, keep: Tensor) -> ConvolutionProduct:
        """See :class:`Entry`."""
        return replace(self, inputs=self.inputs[keep], grads=self.grads[keep])


def norms_from_above(entry: Product | WithTerms, squares: Tensor, lengths: Tensor) -> Tensor:
    """Norms from squared norms whose terms may cancel.

    **Formal guarantee**: no norm is too small: neither for the sample's gradient nor for what
    ``weighted_sum`` makes of it, which rounds in another order. Norms are too large by a per cent at most,
    and by what float32 may make of the terms: up to 1e-6 of their lengths for few positions, 6e-5 for many.
    Samples whose terms cancel so far that their squared norms would say less are instantiated.
    """
    units = max(_SUM_UNITS, 2 * entry.rounding)  # of the rows, and of the weighted sum
    precision = torch.finfo(entry.grads.dtype).eps
    allowed = entry.square_rounding * precision * lengths
    above = squares.clamp(min=0.0) + allowed
    norms = above.sqrt()
    if entry.rounding > _COVERED:
        norms = norms + (entry.rounding - _COVERED) * precision * lengths.sqrt()
    doubtful = above.isfinite() & (allowed > _TOLERATED * above) & (lengths > _NOTHING)
    if bool(doubtful.any()):
        rounding = units * precision * lengths[doubtful].sqrt()
        norms[doubtful] = row_norms(entry.only(doubtful).rows()) + rounding
    return norms


def different_rows(direction: Tensor) -> Tensor:
    """The first row of a weight that is one row expanded; any other weight as it is."""
    return direction[:1] if len(direction) > 1 and direction.stride(0) == 0 else direction


@dataclass(frozen=True)
class Term:
    """What a sample adds to a weight's gradient through public statistics: factors times a public direction.

    Attributes:
        factors: One for each sample and row of the weight.
        direction: In the shape of the weight; a row that is expanded where all are the same.
    """

    factors: Tensor
    direction: Tensor

    def rows(self) -> Tensor:
        """Every sample's gradient, one after the other."""
        return self.factors.view(*self.factors.shape, *(1 for _ in self.direction.shape[1:])) * self.direction

    def wide_sum(self, weights: Tensor) -> Tensor:
        """The sum over samples of weight times gradient, in float64."""
        factors = weights.double() @ self.factors.double()
        return factors.view(-1, *(1 for _ in self.direction.shape[1:])) * self.direction.double()

    @cached_property
    def squares(self) -> Tensor:
        """Every sample's squared norm."""
        return self.inner(self)

    def inner(self, other: Term) -> Tensor:
        """Every sample's inner product with another term's gradient."""
        mine, others = (different_rows(each.direction).double() for each in (self, other))
        rows = (mine * others).flatten(1).sum(1)
        return (self.factors.double() * other.factors.double()) @ rows.expand(len(self.direction))

    def only(self, keep: Tensor) -> Term:
        """The samples where ``keep`` is true."""
        return Term(self.factors[keep], self.direction)


@dataclass(frozen=True)
class WithTerms:
    """A product and what the samples add to it through public statistics: norms need no rows.

    ``|own + sum_j f_j J_j|² = |own|² + 2 sum_j <own, f_j J_j> + |sum_j f_j J_j|²``, where ``<own_k, J_jk>``
    of row k is the layer's own forward with J_j for its weight, times the gradients of its outputs.
    """

    product: Product
    terms: tuple[Term, ...]

    @property
    def grads(self) -> Tensor:
        """Gradients of the outputs."""
        return self.product.grads

    @property
    def rounding(self) -> float:
        """See :class:`Product`."""
        return self.product.rounding

    @property
    def square_rounding(self) -> float:
        """See :class:`Product`."""
        return self.product.square_rounding

    def norms(self) -> Tensor:
        """See :class:`Entry`."""
        squares, lengths = self.product.squares()
        squares, longest = squares.clone(), lengths.sqrt()
        for i, term in enumerate(self.terms):
            squares += 2.0 * (self.product.along(term.direction) * term.factors).sum(1, dtype=torch.float64)
            for other in self.terms[:i]:
                squares += 2.0 * term.inner(other)
            squares += term.squares
            longest = longest + term.squares.sqrt()
        return norms_from_above(self, squares, longest.square())

    def weighted_sum(self, weights: Tensor, bound: float | None = None) -> Tensor:
        """See :class:`Entry`.

        **Formal guarantee**: what rounding makes of the sum does not grow with what cancels in it beyond
        ``_STEADY`` clip bounds a sample: own gradients and terms of all samples are rounded once, when they
        have cancelled (before that only in float32 sums over few samples), and samples whose terms are longer
        are added up by themselves, as rows.
        """
        if bound is None:
            bound = float((self.norms() * weights).max()) if len(weights) else 0.0
        lengths = torch.stack([term.squares.sqrt() for term in self.terms]).sum(0)
        apart = lengths * weights > _STEADY * bound
        rest = self if not bool(apart.any()) else self.only(~apart)
        steady = weights if rest is self else weights[~apart]
        total = rest.product.wide_sum(steady)
        for term in rest.terms:
            total += term.wide_sum(steady)
        if rest is not self:
            entries = max(1, total.numel())
            for some in torch.split(apart.nonzero()[:, 0], max(1, _PIECE // entries)):
                total += weighted_sum(weights[some].to(self.grads.dtype), self.only(some).rows())
        return total.to(self.grads.dtype)

    def rows(self) -> Tensor:
        """See :class:`Entry`."""
        return with_terms(self.product.rows(), self.terms)

    def only(self, keep: Tensor) -> WithTerms:
        """See :class:`Entry`."""
        return WithTerms(self.product.only(keep), tuple(term.only(keep) for term in self.terms))


def with_terms(rows: Tensor, terms: tuple[Term, ...]) -> Tensor:
    """Instantiated gradients and what statistics add to them."""
    for term in terms:
        rows = torch.addcmul(rows, *_broadcast(term))
    return rows


def _broadcast(term: Term) -> tuple[Tensor, Tensor]:
    factors = term.factors.view(*term.factors.shape, *(1 for _ in term.direction.shape[1:]))
    return factors, term.direction
