"""Learning rates that go by the steps that were taken, and not by the deliveries of a loop."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from opacus_bc.mechanism.numbers import check_count
from opacus_bc.optimizers.private import PrivateOptimizer


def warmup_cosine(step: int, *, total_steps: int, warmup_steps: int, final: float) -> float:
    """The factor on the learning rate of a step, counted from 0: a straight rise, then half a cosine.

    >>> [round(warmup_cosine(t, total_steps=6, warmup_steps=2, final=0.0), 3) for t in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))


class WarmupCosine(LambdaLR):
    """Warm-up and cosine decay of the learning rate, by the number of times the weights have moved.

    Call ``step()`` after every ``optimizer.step()``, as with torch's schedulers. Under general batch
    clipping, or in chunks, most of these do not move the weights, and then nothing changes. With a plain
    torch optimizer every call counts.

    **Edge cases**: beyond ``total_steps`` the rate stays at ``final`` times the learning rate. After
    ``load_checkpoint`` it goes on from the steps that were taken.

    Args:
        optimizer: What ``make_private`` returned, or a torch optimizer.
        total_steps: ``epochs * loader.steps_per_epoch``.
        warmup_steps: Steps until the optimizer's own learning rate is reached.
        final: What is left of it in the end.

    Raises:
        ValueError: A number of steps is not a whole number, or the warm-up is longer than the whole.
    """

    def __init__(
        self, optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0, final: float = 0.0
    ) -> None:
        check_count("total_steps", total_steps)
        check_count("warmup_steps", warmup_steps, least=0)
        if warmup_steps >= total_steps:
            raise ValueError(f"warmup_steps={warmup_steps} must be below total_steps={total_steps}")
        if not 0.0 <= final <= 1.0:
            raise ValueError(f"final must be between 0 and 1, got {final!r}")

        def factor(step: int) -> float:
            return warmup_cosine(step, total_steps=total_steps, warmup_steps=warmup_steps, final=final)

        super().__init__(optimizer, factor)

    def step(self, epoch: Any = None) -> None:
        """Set the learning rate of the next step; nothing changes where the weights have not moved."""
        if isinstance(self.optimizer, PrivateOptimizer):
            self.last_epoch = self.optimizer.steps_taken - 1
        super().step()
