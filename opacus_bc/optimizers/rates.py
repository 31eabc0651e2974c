"""Learning rates that move while the weights do not: a scheduler that follows the deliveries of a loop."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer

from opacus_bc.mechanism.warn import users_level

TOO_FAST = (
    "the learning rate changed between two deliveries of one draw, while the weights did not move: a "
    "scheduler follows the loop, and the loop turns several times for each step (mini-sets, chunks). Its "
    "schedule runs too fast by that factor. Call scheduler.step() only `if optimizer.weights_moved`, use "
    "opacus_bc.WarmupCosine, or with Lightning let your module inherit from "
    "opacus_bc.integrations.lightning.StepsByMoves"
)


class RateWatch:
    """Warns once where learning rates change within a draw.

    **Edge cases**: what is compared are public constants, the rates alone. A schedule whose rates are equal
    within a draw and change between two (one call too many for each draw) is not noticed.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, tuple[float, ...]] | None = None
        self._warned = False

    def look(self, serial: int, optimizer: Optimizer) -> None:
        """A delivery of draw ``serial`` is about to be used."""
        if self._warned:
            return
        now = serial, tuple(_rate(group) for group in optimizer.param_groups)
        if self._seen is not None and self._seen[0] == serial and self._seen[1] != now[1]:
            self._warned = True
            warnings.warn(TOO_FAST, stacklevel=users_level())
        self._seen = now


def _rate(group: dict[str, Any]) -> float:
    return float(group.get("lr", 0.0))  # some optimizers keep it in a tensor, some have none
