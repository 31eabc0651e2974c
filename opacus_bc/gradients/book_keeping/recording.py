"""Watches a model's forward pass for uses of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opacus_bc.gradients.book_keeping.book import Book, BookKeepingError
from opacus_bc.gradients.book_keeping.rules import RULES, row_by_row
from opacus_bc.mechanism.types import Memo, State

COMPILED = (
    "grad_sample_mode='bk' does not go with torch.compile, which would not call the functions that are "
    "watched: pass the plain module, or use clipping='batch'"
)


class Recording(TorchFunctionMode):
    """While a forward pass runs, parameters give the book their per-sample gradients and autograd none.

    Every function of torch that is called in the forward passes here. One that uses a parameter together with
    something computed from the batch is a *use*, which has a rule; one that uses parameters alone (a view, a
    cast, a standardised weight) gives a new parameter, whose gradients the chain rule takes back.
    """

    def __init__(self, book: Book) -> None:
        super().__init__()
        self.book = book

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, book = kwargs or {}, self.book
        given = list(_tensors((*args, *kwargs.values())))
        sampled = any(map(book.is_sample, given))
        if not torch.is_grad_enabled() or not any(map(book.is_parameter, given)):
            result = func(*args, **kwargs)
            if sampled:
                book.mark(result)
            return result
        if not sampled:
            twins = [_with_twins(book, value) for value in args]
            return book.derive(func(*twins, **{key: _with_twins(book, v) for key, v in kwargs.items()}))
        rule = RULES.get(func)
        return row_by_row(book, func, args, kwargs) if rule is None else rule(book, *args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _with_twins(book: Book, value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_with_twins(book, each) for each in value)
    return book.twin(value)


class BookKeeping:
    """Records the forward passes of a model until it is removed.

    **Edge cases**: a copy of the model is not recorded, and a pickle holds nothing of the batch. A model
    inside ``torch.compile`` is refused.
    """

    book: Book | None = None  # what an unpickled one has

    def __init__(self, module: nn.Module, book: Book) -> None:
        self.book = book
        self._running: list[Recording | None] = []
        self._handles = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.book is None:
            return
        if torch.compiler.is_compiling():
            raise BookKeepingError(COMPILED)
        if not torch.is_grad_enabled() or not self.book.open():
            self._running.append(None)
            return
        self.book.mark((args, kwargs))
        recording = Recording(self.book)
        recording.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._running.append(recording)

    def _end(self, *_: Any) -> None:
        recording = self._running.pop() if self.book is not None and self._running else None
        if recording is not None:
            recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        if self.book is not None:
            self.book.forget()

    def __deepcopy__(self, memo: Memo) -> Self:
        return self  # a copy's parameters are not in the book

    def __getstate__(self) -> State:
        return {}
