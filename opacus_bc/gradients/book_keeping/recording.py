"""Watches a model's forward pass for uses of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opacus_bc.gradients.book_keeping.book import Book
from opacus_bc.gradients.book_keeping.rules import RULES, row_by_row

COMPILED = (
    "grad_sample_mode='bk' does not go with torch.compile, which would not call the functions that are "
    "watched: pass the plain module, or use grad_sample_mode='hooks' or clipping='batch'"
)
SCRIPTED = (
    "grad_sample_mode='bk' does not go with TorchScript, whose functions cannot be watched: pass the plain "
    "modules, or use clipping='batch' (or grad_sample_mode='hooks' where the scripted part is frozen)"
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
        self._delivery = book.delivery

    @property
    def over(self) -> bool:
        """Whether the batch whose forward pass this was has been used or dropped."""
        return self.book.delivery is not self._delivery

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, book = kwargs or {}, self.book
        if self.over:  # an interrupted forward pass has left it behind
            return func(*args, **kwargs)
        uses = sampled = False
        for value in _tensors((*args, *kwargs.values())):
            if book.is_parameter(value):
                uses = True
            elif not sampled:
                sampled = book.is_of_batch(value)
        if not uses or not torch.is_grad_enabled():
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
