"""Hangs book-keeping on a model: its forward passes are recorded, the first ones checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import _get_current_function_mode

from opacus_bc.gradients.book_keeping.book import Book, BookKeepingError
from opacus_bc.gradients.book_keeping.check import check_exactness
from opacus_bc.gradients.book_keeping.recording import COMPILED, Recording
from opacus_bc.mechanism.types import Memo, State
from opacus_bc.parallel.wrappers import is_compiled

_CHECKED = 3  # forward passes


def _nothing() -> None:
    """Nobody else looks at thawed layers."""


class BookKeeping:
    """Records the forward passes of a model until it is removed.

    The first forward passes are checked on a few rows (:func:`check_exactness`), and those after layers were
    thawed; ``when_grown`` is called then.

    **Edge cases**: a copy of the model is not recorded, and a pickle holds nothing of the batch. A model
    inside ``torch.compile`` is refused.
    """

    book: Book | None = None  # what an unpickled one has

    def __init__(
        self,
        module: nn.Module,
        book: Book,
        names: Mapping[nn.Parameter, str],
        when_grown: Callable[[], None] = _nothing,
    ) -> None:
        self.book = book
        self.hooks_enabled = True
        self._names = names
        self._checks_left = _CHECKED
        self._when_grown = when_grown
        self._running: list[Recording | None] = []
        self._handles = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.book is None:
            return
        # The book sees by itself that gradients come another way: the walk only says why, in first passes.
        if _compiling() or (self._checks_left > 0 and is_compiled(module)):
            raise BookKeepingError(COMPILED)
        self._drop_interrupted()
        if not (self.hooks_enabled and torch.is_grad_enabled() and self.book.open()):
            self._running.append(None)
            return
        if self.book.grown():  # layers that were frozen in the first forward passes were not looked at
            self._checks_left = _CHECKED
            self._when_grown()
        if self._checks_left > 0:
            self._check(module, args, kwargs)
        self.book.mark((args, kwargs))
        recording = Recording(self.book)
        recording.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._running.append(recording)

    def disable_hooks(self) -> None:
        """Record nothing for the time being: public data pass, between a batch's backward and its step."""
        self.hooks_enabled = False

    def enable_hooks(self) -> None:
        """Record again."""
        self.hooks_enabled = True

    def _drop_interrupted(self) -> None:
        """End what a KeyboardInterrupt has left running: torch calls no hook after one."""
        while self._running and (left := self._running[-1]) is not None and left.over:
            self._running.pop()
            if _get_current_function_mode() is left:  # type: ignore[no-untyped-call]  # torch's
                left.__exit__(None, None, None)

    def _check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        book, self.book = self.book, None  # the forward passes of the check are not the batch's
        assert book is not None
        try:
            self._checks_left -= check_exactness(
                module, args, kwargs, names=self._names, rows=book.rows, instantiate=book.instantiate
            )
        finally:
            self.book = book

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


def _compiling() -> bool:
    """Whether torch.compile traces now, or will trace what is called next.

    It runs a hook that it cannot trace by itself, and goes on tracing behind it.
    """
    if torch.compiler.is_compiling():
        return True
    frames = torch._C._dynamo.eval_frame
    return callable(getattr(frames, "get_eval_frame_callback", lambda: None)())
