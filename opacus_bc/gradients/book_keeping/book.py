"""The book of one delivered batch: every sample's gradient of every parameter, as backward writes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from opacus_bc.draws.ledger import Delivery
from opacus_bc.gradients.book_keeping.products import (
    ConvolutionProduct,
    Entry,
    LinearProduct,
    OwnRows,
    Rows,
    Term,
    WithTerms,
    with_terms,
)
from opacus_bc.mechanism.precision import without_autocast
from opacus_bc.mechanism.warn import users_level

Note = Callable[..., None]
Map = Callable[[Tensor], Tensor]
CHECKPOINTED = (
    "torch.utils.checkpoint repeats a part of the forward pass in backward, where nobody watches the "
    "parameters: run the model without it, or use clipping='batch'"
)


class BookKeepingError(RuntimeError):
    """A forward or backward whose per-sample gradients cannot be told; raised before anything is released."""


class Deliveries(Protocol):
    """Knows which batch the next step may use: the ledger."""

    def sole(self) -> Delivery | None:
        """The one delivery that a step may use, or None."""
        ...


class Book:
    """Collects per-sample gradients between a batch's delivery and its step.

    **Formal guarantee**: an entry's rows are those of the delivered batch, in its order: a use of a parameter
    whose output has another number of rows raises in the forward pass. Entries of one parameter are added
    before its norm is taken. Nothing survives :meth:`forget`.

    **Edge cases**: while nothing, or a placeholder, is delivered the book is closed: gradients are plain
    autograd's, and no step uses them. ``torch.autograd.grad`` towards inputs writes nothing.

    Args:
        names: The model's parameters and their names.
        trained: The parameters that the optimizer trains now.
        ledger: The record of deliveries.
        instantiate: Whether norms are taken of instantiated gradients; None: where that is cheaper.
        quiet: Whether nothing is said of functions that are differentiated row by row.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        trained: Callable[[], Iterable[nn.Parameter]],
        ledger: Deliveries,
        *,
        instantiate: bool | None = None,
        quiet: bool = False,
    ) -> None:
        self.instantiate = instantiate
        self._quiet, self._told = quiet, set[str]()
        self.names = {id(p): name for p, name in names.items()}
        self._parameters = list(names)  # keeps the ids their own
        self._trained = trained
        self._ledger = ledger
        self._anchor = torch.zeros((), requires_grad=True)
        self._arrival = _node_of(self._anchor)
        self._delivery: Delivery | None = None
        self._wanted: set[int] = set()
        self._seen: set[int] = set()  # all that was ever wanted
        self._entries: dict[int, Entry] = {}
        self._terms: dict[int, tuple[Term, ...]] = {}
        self.dtypes: set[torch.dtype] = set()  # of the gradients that backward has shown
        self._unfinished: set[int] = set()  # backward passes that have written something
        self._twins: dict[int, Tensor] = {}
        self._derived: dict[int, Tensor] = {}
        self._samples = WeakTensorKeyDictionary()

    # -- opening and closing --------------------------------------------------------------------------------

    def open(self) -> bool:
        """Whether a forward pass is recorded now; one that begins belongs to the outstanding delivery."""
        delivery = self._ledger.sole()
        if delivery is None or delivery.placeholder:
            return False
        if delivery is not self._delivery:
            self.forget()
            self._delivery = delivery
        self._wanted = {id(p) for p in self._trained() if p.requires_grad}
        return True

    def grown(self) -> bool:
        """Whether parameters are trained now that were not in the first forward passes; says so once."""
        grown = bool(self._seen and self._wanted - self._seen)
        self._seen |= self._wanted
        return grown

    @property
    def delivery(self) -> Delivery | None:
        """The batch that is recorded."""
        return self._delivery

    @property
    def rows(self) -> int:
        """How many samples the delivered batch has."""
        return 0 if self._delivery is None else self._delivery.size

    def clear(self) -> None:
        """Drop what backward passes have written, as ``zero_grad()`` drops gradients."""
        self._entries, self._terms, self._unfinished, self.dtypes = {}, {}, set(), set()
        for twin in self._twins.values():
            twin.grad = None

    def forget(self) -> None:
        """Drop everything that was computed from the batch."""
        self.clear()
        self._delivery = None
        self._twins, self._derived = {}, {}
        self._samples = WeakTensorKeyDictionary()

    # -- which tensor is what -------------------------------------------------------------------------------

    def is_parameter(self, value: object) -> bool:
        """Whether gradients of this tensor are the book's: a trainable parameter, or a function of some."""
        return isinstance(value, Tensor) and (
            id(value) in self._derived or (id(value) in self.names and value.requires_grad)
        )

    def is_own(self, value: object) -> bool:
        """Whether it is a trainable parameter of the model itself, and no function of some."""
        return isinstance(value, Tensor) and id(value) in self.names and self.is_parameter(value)

    def is_sample(self, value: object) -> bool:
        """Whether this tensor was computed from the batch."""
        return isinstance(value, Tensor) and not self.is_parameter(value) and self.is_of_batch(value)

    def is_of_batch(self, value: Tensor) -> bool:
        """Whether this tensor, which is no parameter, was computed from the batch."""
        return value.requires_grad or value in self._samples

    def mark(self, value: object) -> None:
        """Note that a tensor (or several) was computed from the batch; one with a gradient shows that."""
        if isinstance(value, Tensor):
            if not value.requires_grad or self.is_parameter(value):
                self._samples[value] = True
        elif isinstance(value, (tuple, list)):
            for each in value:
                self.mark(each)
        elif isinstance(value, Mapping):
            self.mark(list(value.values()))

    def plain(self, value: Any) -> Any:
        """A parameter's value without its gradient; anything else as it is."""
        return value.detach() if self.is_parameter(value) else value

    def wants(self, value: object) -> bool:
        """Whether per-sample gradients of this parameter will be asked for."""
        return isinstance(value, Tensor) and (id(value) in self._derived or id(value) in self._wanted)

    def twin(self, value: Any) -> Any:
        """A leaf in a parameter's place, from which functions of parameters alone are computed."""
        if not self.is_parameter(value) or id(value) in self._derived:
            return value
        if id(value) not in self._twins:
            self._twins[id(value)] = value.detach().requires_grad_()
        return self._twins[id(value)]

    def derive(self, value: Any) -> Any:
        """Note what was computed from parameters alone."""
        if isinstance(value, Tensor) and value.requires_grad:
            self._derived[id(value)] = value
        elif isinstance(value, (tuple, list)):
            for each in value:
                self.derive(each)
        return value

    def name_of(self, value: Tensor) -> str:
        """A parameter's name."""
        return self.names.get(id(value), "a function of parameters")

    def tell_of_rows(self, function: str, parameter: Tensor) -> None:
        """Say once of every function that it has no rule."""
        if self._quiet or function in self._told:
            return
        self._told.add(function)
        warnings.warn(
            f"{self.name_of(parameter)} meets the batch in {function}, which has no rule of its own: it is "
            "differentiated row by row, which is exact and slower",
            stacklevel=users_level(),
        )

    # -- writing --------------------------------------------------------------------------------------------

    def tap(self, output: Tensor, note: Note, *saved: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Have ``note(gradient, *saved)`` called when backward reaches ``output``; returns it as ``shape``.

        Raises:
            BookKeepingError: What is returned does not have a row for each sample.
        """
        shape = output.shape if shape is None else torch.Size(shape)
        self._check_rows(shape)
        fresh = output.clone() if output._is_view() else output
        held = (each.detach() for each in saved)
        tapped: Tensor = _Tap.apply(fresh, self._anchor, None, None, self._noting(note), *held)
        result = tapped if tapped.shape == shape else tapped.view(shape)
        self.mark(result)
        return result

    def tap_of(self, source: Tensor, function: Map, backward: Map, note: Note, *saved: Tensor) -> Tensor:
        """:meth:`tap` of ``function(source)``, whose ``backward`` takes gradients of it to ``source``."""
        self._check_rows(source.shape)
        held = (each.detach() for each in saved)
        result: Tensor = _Tap.apply(source, self._anchor, function, backward, self._noting(note), *held)
        self.mark(result)
        return result

    def _check_rows(self, shape: torch.Size) -> None:
        if not shape or shape[0] != self.rows:
            raise BookKeepingError(
                f"a layer returned {shape[0] if shape else 'no'} rows for a batch of {self.rows} samples: "
                "individual clipping needs one row for each sample in every layer. Frames, views or tokens "
                "that are folded into the batch, and layers that run once for the whole batch, are not "
                "samples; clipping='batch' does not need that, and grad_sample_mode='hooks' lets Opacus's "
                "recurrent layers drop the rows of packed sequences that have ended"
            )
        if _recomputed_later():
            raise BookKeepingError(CHECKPOINTED)

    def _noting(self, note: Note) -> Note:
        """``note``, for the batch that is recorded now and in backward passes that reach parameters."""
        delivery = self._delivery

        def noting(grad: Tensor, *held: Tensor) -> None:
            if self._delivery is not delivery:
                raise BookKeepingError(
                    "backward went through a forward pass of an earlier batch: repeat the forward pass, or "
                    "detach what it left behind"
                )
            if torch._C._will_engine_execute_node(self._arrival):  # not in autograd.grad towards an input
                self._begin_backward()
                self.dtypes.add(grad.dtype)
                without_autocast(note, grad, *held)  # rows in half precision have norms in half precision

        return noting

    def _begin_backward(self) -> None:
        """Note which backward pass is writing, until it has come to its end."""
        number = torch._C._current_graph_task_id()
        if number not in self._unfinished:
            unfinished = self._unfinished
            unfinished.add(number)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: unfinished.discard(number))

    def add(self, parameter: Tensor, entry: Entry) -> None:
        """Write down all samples' gradients of one use of a parameter."""
        before = self._entries.get(id(parameter))
        if isinstance(before, OwnRows) and isinstance(entry, OwnRows):
            entry = OwnRows(before.values + entry.values)
        elif before is not None:
            entry = Rows(before.rows() + entry.rows())
        self._entries[id(parameter)] = entry

    def add_term(self, parameter: Tensor, factors: Tensor, direction: Tensor) -> None:
        """Write down what the samples add to a parameter's gradient through public statistics."""
        self._terms[id(parameter)] = (*self._terms.get(id(parameter), ()), Term(factors, direction))

    # -- reading --------------------------------------------------------------------------------------------

    def read(
        self, parameters: Iterable[nn.Parameter], *, statistics: bool = True
    ) -> dict[nn.Parameter, Entry]:
        """The entries of those parameters that backward has reached.

        Args:
            parameters: Those that are asked for.
            statistics: Whether entries contain what samples add through public statistics.

        Raises:
            BookKeepingError: There is none, or a parameter has a gradient that was made without the book.
        """
        parameters = list(parameters)
        outside = [p for p in parameters if p.grad is not None]
        outside += [p for p in parameters if getattr(self._twins.get(id(p)), "grad", None) is not None]
        if outside:
            raise BookKeepingError(
                f"{self.name_of(outside[0])} has a gradient that was not made sample by sample: the "
                "parameter is used outside of the forward pass of the model (in the loss, by a submodule "
                "that is called by itself, or in an operation that is not torch's). Call the model itself, "
                "or use grad_sample_mode='hooks'"
            )
        if self._unfinished:
            raise BookKeepingError(
                "a backward pass of this batch raised, and what it has written is not all: call "
                "optimizer.zero_grad() and repeat the forward and the backward pass"
            )
        self._pull_back()
        if not statistics:
            self._terms = {}
        found = {p: self._with_terms(id(p)) for p in parameters if id(p) in self._entries}
        if not found:
            raise BookKeepingError(
                "optimizer.step() found no gradient: call loss.backward() on this batch first, and "
                "optimizer.zero_grad() not between backward() and step()"
            )
        return found

    def _with_terms(self, key: int) -> Entry:
        entry, terms = self._entries[key], self._terms.get(key, ())
        if not terms:
            return entry
        if isinstance(entry, (LinearProduct, ConvolutionProduct)):
            return WithTerms(entry, terms)
        return Rows(with_terms(entry.rows(), terms))

    def _pull_back(self) -> None:
        """Turn entries of functions of parameters into entries of the parameters, by the chain rule."""
        leaves = [(id(p), self._twins[id(p)]) for p in self._parameters if id(p) in self._twins]
        for key, value in self._derived.items():
            entry = self._entries.pop(key, None)
            if entry is None:
                continue
            for (owner, _), grad in zip(leaves, _chained(value, leaves, entry), strict=True):
                if grad is not None:
                    before = self._entries.get(owner)
                    self._entries[owner] = Rows(grad if before is None else before.rows() + grad)


def _chained(value: Tensor, leaves: Sequence[tuple[int, Tensor]], entry: Entry) -> list[Tensor | None]:
    """All samples' gradients of the leaves from those of a function of them.

    Raises:
        BookKeepingError: The function has a row for each sample, and the rows are not alike.
    """
    if isinstance(entry, OwnRows):
        _refuse_different_rows(value, leaves, entry)
    return _pulled(value, leaves, entry)


def _refuse_different_rows(value: Tensor, leaves: Sequence[tuple[int, Tensor]], entry: OwnRows) -> None:
    """Rows that differ as functions of the parameters tell a sample by its place in the batch.

    Then a sample that joins the batch would move the others' places, and their gradients with it.
    """
    direction = torch.randn(entry.values.shape[1:], generator=torch.Generator().manual_seed(0))
    alike = OwnRows(direction.to(entry.values).expand_as(entry.values))
    for grad in _pulled(value, leaves, alike):
        if grad is not None and not torch.allclose(grad, grad[:1].expand_as(grad), rtol=1e-4, atol=1e-6):
            raise BookKeepingError(
                "a function of parameters has a different row for each place in the batch, so that a "
                "sample's gradient depends on where it stands: use the same row for all samples"
            )


def _pulled(value: Tensor, leaves: Sequence[tuple[int, Tensor]], entry: Entry) -> list[Tensor | None]:
    parts = entry.parts() if isinstance(entry, OwnRows) else [entry.rows()]
    inputs = [leaf for _, leaf in leaves]
    found = [
        torch.autograd.grad(value, inputs, part, retain_graph=True, allow_unused=True, is_grads_batched=True)
        for part in parts
    ]
    return [None if grads[0] is None else torch.cat(grads) for grads in zip(*found, strict=True)]


def _recomputed_later() -> bool:
    """Whether ``torch.utils.checkpoint`` drops what is saved now, to compute it anew in backward.

    With an older torch it notices by itself that other tensors are saved then, and raises in backward.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # since torch 2.8
    hooks = None if top is None else top(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _node_of(leaf: Tensor) -> torch.autograd.graph.Node:
    """The autograd node that gradients of a leaf arrive at."""
    above = leaf.view_as(leaf).grad_fn
    assert above is not None
    node = above.next_functions[0][0]
    assert node is not None
    return node


class _Tap(torch.autograd.Function):
    """Shows the gradient of a tensor to the book: of one that is handed on, or of a function of it.

    A tensor that is handed on may be overwritten afterwards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        function: Map | None,
        backward: Map | None,
        note: Note,
        *saved: Tensor,
    ) -> Tensor:
        ctx.note, ctx.backward = note, backward
        ctx.save_for_backward(*saved)
        if function is not None:
            return function(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        ctx.note(grad, *saved)
        passed_on = None
        if ctx.needs_input_grad[0]:
            passed_on = grad if ctx.backward is None else ctx.backward(grad)
        return (passed_on, None, None, None, None, *(None for _ in saved))
