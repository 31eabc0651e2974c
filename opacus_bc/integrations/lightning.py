"""Lightning: schedulers that step when the weights move, and logs that hold nothing of the private data.

Needs the extra ``lightning``. The private optimizer and loader go into a Lightning module and its trainer as
they are (``configure_optimizers`` returns the optimizer, ``trainer.fit`` gets the loader).
"""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Lightning imports warns of its own deprecations
    from lightning.pytorch import Callback, LightningModule, Trainer

from opacus_bc.engine.privacy_engine import PrivacyEngine
from opacus_bc.optimizers.private import PrivateOptimizer


class StepsByMoves(LightningModule):
    """A Lightning module whose schedulers with ``interval="step"`` step when the weights have moved.

    Lightning steps them once for each batch that the loader delivers. Under general batch clipping a step of
    the optimizer takes k of these, so that a schedule would be over k times too early.

    Inherit from it instead of from ``LightningModule``; ``configure_optimizers`` stays what it is.

    **Edge cases**: schedulers with ``interval="epoch"`` and those of plain torch optimizers step as ever.
    Leave ``frequency`` at 1: Lightning counts it in deliveries. With ``automatic_optimization = False``
    Lightning steps no scheduler; do it yourself, ``if optimizer.weights_moved``.
    """

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Called by Lightning; steps where the weights have moved."""
        optimizer = scheduler.optimizer
        by_step = any(
            config.scheduler is scheduler and config.interval == "step"
            for config in self.trainer.lr_scheduler_configs
        )
        if by_step and isinstance(optimizer, PrivateOptimizer) and not optimizer.weights_moved:
            return
        super().lr_scheduler_step(scheduler, metric)


class LogPrivacy(Callback):
    """Logs :meth:`opacus_bc.PrivacyEngine.loggable` after every epoch, and nothing else.

    **Formal guarantee**: what it logs follows from public constants, released weights and public data.

    Args:
        engine: The engine that made the model private.
        delta: At which epsilon is logged.
        prefix: Stands before the names.
    """

    def __init__(self, engine: PrivacyEngine, delta: float, *, prefix: str = "privacy/") -> None:
        self._engine, self._delta, self._prefix = engine, delta, prefix

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called by Lightning."""
        found = self._engine.loggable(self._delta)
        pl_module.log_dict({f"{self._prefix}{name}": float(value) for name, value in found.items()})
