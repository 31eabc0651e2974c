"""Who may move weights with a torch optimizer: the private optimizer around it, after a release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from opacus_bc.mechanism.warn import users_level

FOREIGN = (
    "this is the optimizer that was passed to make_private, and nothing has been clipped, noised or counted "
    "for this step: call step() of the optimizer that make_private returned. Nothing was moved"
)
CHANGED = (
    "a gradient is not what was released: something wrote it after clipping and noise. Call backward() "
    "before step(), and change released gradients in a hook of optimizer.attach_step_hook. Nothing was moved"
)
SUPERSEDED = (
    "make_private was called again with this optimizer: step the private optimizer that the newer call "
    "returned"
)


def _nothing() -> None:
    """What happens after a step if nobody has to be told."""


class Licence:
    """The licence of one private optimizer to move weights with the torch optimizer inside.

    **Formal guarantee**: between :meth:`take_over` and :meth:`close`, the torch optimizer moves weights only
    by the very gradients that were there at :meth:`grant`, once; anything else raises before anything moves.

    **Edge cases**: a subclass whose ``step`` calls its parent's may run torch's step hooks twice; the second
    time counts nothing.

    Attributes:
        steps_taken: How often the torch optimizer has moved the weights.
        planned_steps: For how many the noise was calibrated, if it was.
        moved: The parameters that a release has moved.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.steps_taken = 0
        self.planned_steps: int | None = None
        self.moved: set[Tensor] = set()
        self._release: dict[Tensor, tuple[Tensor | None, int]] | None = None
        self._closed: str | None = None
        self._after_step: Callable[[], None] = _nothing
        self._handles: list[Any] = []

    def holder(self) -> Licence | None:
        """The licence that the torch optimizer obeys now, if it obeys one."""
        hooks = self.inner._optimizer_step_pre_hooks.values()
        owners = (getattr(hook, "__self__", None) for hook in hooks)
        return next((owner for owner in owners if isinstance(owner, Licence)), None)

    def take_over(self, after_step: Callable[[], None] = _nothing) -> None:
        """From now on nobody without this licence moves weights with the torch optimizer.

        Args:
            after_step: Called when the weights have moved.
        """
        former = self.holder()
        if former is not None:
            former.close(SUPERSEDED)
        self._after_step = after_step
        self._handles = [
            self.inner.register_step_pre_hook(self._before_inner_step),
            self.inner.register_step_post_hook(self._after_inner_step),
        ]

    def close(self, reason: str, *, release_inner: bool = True) -> None:
        """Refuse every further step, saying why.

        Args:
            reason: What the error says.
            release_inner: Whether the torch optimizer may move weights again by itself.
        """
        self._closed = self._closed or reason
        while release_inner and self._handles:
            self._handles.pop().remove()

    def begin_step(self) -> None:
        """A step begins, for which nothing is released yet.

        Raises:
            RuntimeError: The licence is closed.
        """
        if self._closed is not None:
            raise RuntimeError(self._closed)
        self.revoke()

    def revoke(self) -> None:
        """What was released is not to be used any more."""
        self._release = None

    def grant(self) -> None:
        """A release is in ``.grad``, noised and booked: the torch optimizer may step once, by it alone."""
        self._release = {p: (p.grad, 0 if p.grad is None else p.grad._version) for p in self._parameters()}

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.inner.param_groups))

    def _before_inner_step(self, _inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._closed is not None:
            raise RuntimeError(self._closed)
        closures = (*args[1:], kwargs.get("closure"))  # args begins with the optimizer itself
        if self._release is None or any(closure is not None for closure in closures):
            raise RuntimeError(FOREIGN)
        for p in self._parameters():
            released, version = self._release.get(p, (None, 0))
            if p.grad is not released or (released is not None and released._version != version):
                raise RuntimeError(CHANGED)

    def _after_inner_step(self, *_: Any) -> None:
        if self._release is None:
            return
        self.moved.update(p for p, (grad, _) in self._release.items() if grad is not None)
        self._release = None
        self.steps_taken += 1
        self._after_step()
        if self.planned_steps is not None and self.steps_taken == self.planned_steps + 1:
            warnings.warn(
                f"step {self.steps_taken} is beyond the {self.planned_steps} that noise_multiplier was "
                "calibrated for: epsilon grows above target_epsilon, and get_epsilon says how far",
                stacklevel=users_level(),
            )
