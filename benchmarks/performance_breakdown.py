"""What a step of individual clipping in one backward is made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from opacus_bc.gradients.book_keeping.book import _Tap
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.optimizers import book_keeping

PLAIN, METHOD = "plain SGD", "IC + public BatchNorm, bk"
PHASES = ("forward", "backward", "rows kept", "norms", "weighted gradients", "noise", "rest")
PARTS: tuple[tuple[Any, str, str], ...] = (
    (nn.Module, "__call__", "forward"),
    (torch.Tensor, "backward", "backward"),
    (_Tap, "backward", "rows kept"),
    (book_keeping, "_join_small", "norms"),
    (book_keeping, "_norms", "norms"),
    (book_keeping, "_weighted_sums", "weighted gradients"),
    (TorchNoise, "add_", "noise"),
)


class Watch:
    """CPU time of every phase; what a phase contains of another one counts there."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._running = [("rest", 0.0)]

    def _book(self) -> None:
        phase, since = self._running[-1]
        now = time.process_time()
        self.seconds[phase] += now - since
        self._running[-1] = (phase, now)

    @contextmanager
    def step(self) -> Iterator[None]:
        """While a step runs."""
        self._running = [("rest", time.process_time())]
        yield
        self._book()

    def watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, whose time belongs to ``phase``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._book()
            self._running.append((phase, time.process_time()))
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._running.pop()
                self._running[-1] = (self._running[-1][0], time.process_time())

        return call


def breakdown(
    network: str, rounds: int, stepper: Callable[[str, str], Callable[[], None]]
) -> list[dict[str, Any]]:
    """Every phase's share, over a whole step of plain SGD; steps take turns, and medians are taken."""
    steps = {method: stepper(method, network) for method in (PLAIN, METHOD)}
    for _ in range(4):  # the first ones are checked
        for step in steps.values():
            step()
    found: dict[str, list[dict[str, float]]] = {method: [] for method in steps}
    for _ in range(rounds):
        for method, step in steps.items():
            watch = Watch()
            with ExitStack() as patches:
                for owner, name, phase in PARTS:
                    timed: Any = watch.watched(getattr(owner, name), phase)
                    if owner is _Tap:
                        timed = staticmethod(timed)
                    patches.enter_context(patch.object(owner, name, timed))
                with watch.step():
                    step()
            found[method].append(watch.seconds)
    plain = statistics.median(sum(seconds.values()) for seconds in found[PLAIN])
    rows = []
    for method, seen in found.items():
        shares = {phase: statistics.median(one[phase] for one in seen) / plain for phase in PHASES}
        rows.append({"network": network, "method": method, "rounds": rounds, "shares": shares})
        print(network, method, {phase: round(share, 3) for phase, share in shares.items()}, flush=True)
    return rows
