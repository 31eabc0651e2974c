"""Averages of released weights: post-processing, which costs no privacy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opacus_bc.mechanism.clipping import accumulation_dtype
from opacus_bc.mechanism.types import State
from opacus_bc.optimizers.private import PrivateOptimizer

STEP_WITHIN = (
    "optimizer.step() within `with averaged.applied()`: the model holds averaged weights there, for "
    "evaluation. Leave the block before you train on. Nothing was moved"
)


class AveragedWeights:
    """An exponential moving average of the weights, which follows every move of a private optimizer.

    After the t-th move the average is ``d_t * average + (1 - d_t) * weights`` with
    ``d_t = min(decay, (1 + t) / (10 + t))``, so that the first weights are soon forgotten.

    **Formal guarantee**: it is a function of released weights, so it costs nothing and epsilon covers it.

    **Edge cases**: deliveries that do not move the weights (mini-sets, chunks) do not count. Buffers are not
    averaged: statistics from public data follow the weights that the model holds by themselves. Parameters
    that the optimizer gets later begin with the weights they have then.

    Args:
        optimizer: What ``make_private`` returned.
        decay: Between 0 and 1; about ``1 / (1 - decay)`` moves are averaged.

    Raises:
        ValueError: ``decay`` is not in (0, 1).
    """

    def __init__(self, optimizer: PrivateOptimizer, *, decay: float = 0.99) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay must be between 0 and 1, got {decay!r}: 0.99 averages about 100 steps")
        self.decay = decay
        self.moves = 0
        self._optimizer = optimizer
        self._applied = False
        self._averages: dict[Tensor, Tensor] = {p: _start(p) for p in optimizer.held_parameters()}
        inner = optimizer.original_optimizer
        self._handles = [
            inner.register_step_pre_hook(self._before_move),
            inner.register_step_post_hook(self._after_move),
        ]

    def _before_move(self, *_: Any) -> None:
        if self._applied:
            raise RuntimeError(STEP_WITHIN)

    @torch.no_grad()
    def _after_move(self, *_: Any) -> None:
        if self._optimizer.steps_taken == self.moves:  # a subclass whose step calls its parent's
            return
        self.moves = self._optimizer.steps_taken
        weight = 1.0 - min(self.decay, (1 + self.moves) / (10 + self.moves))
        for p in self._optimizer.held_parameters():
            average = self._averages.setdefault(p, _start(p))
            average.lerp_(p.detach().to(average.dtype), weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs the model holds the averaged weights; a step within it raises."""
        if self._applied:
            raise RuntimeError("the averaged weights are applied already: blocks cannot stand in each other")
        held = {p: p.detach().clone() for p in self._averages}
        self._applied = True
        try:
            self.write()
            yield
        finally:
            _write(held)
            self._applied = False

    def write(self) -> None:
        """Put the averaged weights into the model for good: ``engine.finalize(model)`` then releases them."""
        _write(self._averages)

    def remove(self) -> None:
        """Follow the optimizer no longer; the average stays what it is."""
        while self._handles:
            self._handles.pop().remove()

    def state_dict(self) -> State:
        """For ``save_checkpoint(checkpoint_dict={"averaged": averaged.state_dict()})``."""
        return {"moves": self.moves, "averages": [average.clone() for average in self._averages.values()]}

    def load_state_dict(self, state: State) -> None:
        """Go on where :meth:`state_dict` was taken, over the same parameters.

        Raises:
            ValueError: The state is that of other parameters.
        """
        shapes = [tuple(average.shape) for average in self._averages.values()]
        found = [tuple(average.shape) for average in state["averages"]]
        if found != shapes:
            raise ValueError(f"the averages are of shapes {found}, the optimizer's parameters of {shapes}")
        self.moves = int(state["moves"])
        _write(dict(zip(self._averages.values(), state["averages"], strict=True)))


def _start(p: Tensor) -> Tensor:
    return p.detach().to(accumulation_dtype(p.dtype), copy=True)


@torch.no_grad()
def _write(values: dict[Tensor, Tensor]) -> None:
    """Copy in place, so that whoever watches the weights' versions notices."""
    for p, value in values.items():
        p.copy_(value)
