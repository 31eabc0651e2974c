"""Keywords that belong to another method: whoever gives them is told which."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def refusing(*names: str, way_out: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: a call with any of these keywords is a TypeError that says ``way_out``.

    It is raised before Python looks for arguments that are missing, which are those of the other method.

    >>> @refusing("epochs", way_out="ask fit()")
    ... def step(*, lr): ...
    >>> step(epochs=3)
    Traceback (most recent call last):
    TypeError: step() got epochs=: ask fit()
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if given := [f"{name}=" for name in names if name in kwargs]:
                raise TypeError(f"{method.__name__}() got {', '.join(given)}: {way_out}")
            return method(*args, **kwargs)

        return checked

    return decorate


takes_no_budget = refusing(
    *("target_epsilon", "target_delta", "epochs"),
    way_out="it takes noise_multiplier=. make_private_with_epsilon() finds the noise_multiplier of a budget",
)
takes_no_noise_multiplier = refusing(
    "noise_multiplier", way_out="it finds noise_multiplier itself. make_private() takes one"
)
