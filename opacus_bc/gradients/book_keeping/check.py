"""Looks, on a few rows of the first batches, whether the book says what autograd says of the model.

A pass is evidence and no proof: the rows are those of this batch, and rules that fail on others are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus_bc.draws.ledger import Delivery
from opacus_bc.gradients.book_keeping.book import Book, BookKeepingError
from opacus_bc.gradients.book_keeping.recording import Recording
from opacus_bc.mechanism.clipping import HALF
from opacus_bc.mechanism.randomness import generators_within, put_streams, take_streams
from opacus_bc.public.running import untouched_buffers

_ROWS = 4
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # autocast rounds gradients to three digits
_HALF_TOLERANCE = 0.1
_UNSEEN = 1e-6  # of all parameters' gradient: a tenth of the margin that clipping takes off its bounds


class _FewRows:
    """A ledger that has delivered a few rows."""

    def __init__(self, rows: int) -> None:
        self._delivery = Delivery(
            serial=0,
            pass_index=0,
            size=rows,
            set_size=rows,
            ends_set=True,
            ends_draw=True,
            placeholder=False,
        )

    def sole(self) -> Delivery:
        """See :meth:`opacus_bc.draws.ledger.DrawLedger.sole`."""
        return self._delivery


def check_exactness(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    names: Mapping[nn.Parameter, str],
    rows: int,
    instantiate: bool | None = None,
) -> bool:
    """Compare the book's weighted sum of a few samples' gradients with autograd's on the same rows.

    **Formal guarantee**: weights, gradients, buffers, inputs and random streams are what they were.

    Args:
        module: The model; it must not be recorded meanwhile.
        args: Its arguments, of which tensors with ``rows`` rows are cut.
        kwargs: Its named arguments.
        names: The parameters and their names.
        rows: How many samples the batch has.
        instantiate: As the book of the batch has it.

    Returns:
        Whether the batch could be judged: a sample whose gradient is not finite spoils the sum of all.

    Raises:
        BookKeepingError: They differ: no per-sample gradient of this model can be trusted.
    """
    few = min(_ROWS, rows)
    lengths = set(_lengths((tuple(args), dict(kwargs))))
    if lengths and rows not in lengths:
        raise BookKeepingError(
            f"the model was called with {min(lengths)} rows for a batch of {rows} samples that the loader "
            "delivered: call it once on the whole batch. To use smaller pieces iterate over "
            "opacus_bc.BatchMemoryManager's loader; rows that are no samples need clipping='batch'"
        )
    first, second = (_cut((tuple(args), dict(kwargs)), rows, few) for _ in range(2))  # a forward may write
    trained = [p for p in names if p.requires_grad and p.grad is None]
    book = Book(names, lambda: trained, _FewRows(few), instantiate=instantiate, quiet=True)
    generators = generators_within(module)
    streams = take_streams(generators)
    try:
        with untouched_buffers(module):  # until after the backward passes, which may need them
            book.open()
            book.mark(first)
            with Recording(book):
                recorded = _outputs(module(*first[0], **first[1]))
            if not recorded or any(each.dim() == 0 or len(each) != few for each in recorded):
                return True  # a loss, or no rows: from outside nothing tells the samples apart
            put_streams(streams, generators)
            plain = _outputs(module(*second[0], **second[1]))
            found, expected = _both_ways(book, trained, recorded, plain)
    finally:
        put_streams(streams, generators)
    if not all(bool(each.isfinite().all()) for each in expected):
        return False
    half = any(each.dtype in HALF for each in plain)
    whole = torch.stack([torch.linalg.vector_norm(g.double()).cpu() for g in expected]).norm()
    for p, ours, autograds in zip(trained, found, expected, strict=True):
        allowed = _HALF_TOLERANCE if half else _TOLERANCE.get(p.dtype, _HALF_TOLERANCE)
        size = torch.linalg.vector_norm(autograds.double())
        # A gradient that is zero but for rounding (a bias before GroupNorm) has no digits to compare.
        nothing = 1e-7 + _UNSEEN * float(whole)
        if not bool(torch.linalg.vector_norm((ours - autograds).double()) <= allowed * size + nothing):
            raise BookKeepingError(
                f"the per-sample gradients of {names[p]} do not add up to autograd's on {few} rows of this "
                "batch: this model uses it in a way that one backward cannot tell apart by samples (rows "
                "that are not samples, a hook that changes gradients, a custom operation). Nothing was "
                "released; use grad_sample_mode='hooks' or clipping='batch'"
            )
    return True


def _both_ways(
    book: Book, trained: Sequence[nn.Parameter], recorded: Sequence[Tensor], plain: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """A sum of the rows' gradients with random weights: the book's, and autograd's."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(len(plain[0]), generator=generator) + 0.5
    directions = [torch.randn(each.shape, generator=generator).to(each) for each in plain]
    _along(recorded, directions).backward()  # type: ignore[no-untyped-call]  # torch's
    weighed = [d * weights.to(d).view(-1, *(1 for _ in d.shape[1:])) for d in directions]
    autograds = torch.autograd.grad(_along(plain, weighed), trained, allow_unused=True)
    entries = book.read(trained, statistics=False)
    found = [entries[p].weighted_sum(weights.to(p.device)) if p in entries else _zeros(p) for p in trained]
    return found, [_zeros(p) if g is None else g for p, g in zip(trained, autograds, strict=True)]


def _zeros(p: Tensor) -> Tensor:
    return torch.zeros_like(p, requires_grad=False)


def _cut(value: Any, rows: int, few: int) -> Any:
    if isinstance(value, Tensor):
        part = value[:few] if value.dim() and len(value) == rows else value
        return part.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _cut(each, rows, few) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(each, rows, few) for each in value)
    return value


def _lengths(value: Any) -> Iterator[int]:
    """How many rows the tensors among a model's arguments have."""
    if isinstance(value, Tensor) and value.dim():
        yield value.shape[0]
    elif isinstance(value, Mapping):
        yield from _lengths(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _lengths(each)


def _outputs(value: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output that have a gradient."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [each for entry in value for each in _outputs(entry)] if isinstance(value, (tuple, list)) else []


def _along(outputs: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    products: list[Tensor] = [(o * d).sum() for o, d in zip(outputs, directions, strict=True)]
    return torch.stack(products).sum()
