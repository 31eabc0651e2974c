"""What ``make_private`` set up, for whoever has to report on it."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from torch.utils.data import DataLoader

from opacus_bc._opacus import DPOptimizer
from opacus_bc.batch_norm import FINALIZED, BatchNormPolicy
from opacus_bc.public_data import describe
from opacus_bc.ranks import Ranks
from opacus_bc.sampling import DrawSource, Sampling

FOREIGN = (
    "this is the optimizer that was passed to make_private, and nothing has been clipped, noised or counted "
    "for this step: call step() of the optimizer that make_private returned. Nothing was moved"
)


@dataclass(kw_only=True, eq=False)
class Run:
    """One call of ``make_private``: who trains what on which data.

    Attributes:
        policy: What happens to running statistics.
        wrapper: What Opacus wrapped around the module, or the module itself.
        optimizer: The private optimizer.
        data_loader: The user's loader.
        sampling: How steps are drawn.
        clipping: ``"batch"`` or one of Opacus's.
        mini_set_size: Samples that are clipped together.
        alc_loader: The public data of adaptive layerwise clipping, if it is in use.
        draws: Where the steps' draws come from, with batch clipping.
        ranks: The processes that train together, if there are several.
        sharded: Whether the model is in shards (FSDP2).
        attached: What hangs on the module until it is finished; each has ``detach()``.
        steps: How often the underlying optimizer has moved the weights.
        planned_steps: For how many the noise was calibrated, if it was.
        start: Noise multiplier and clip bound as ``make_private`` set them; schedulers move the optimizer's.
        told: Whether the user knows that there are more.
    """

    policy: BatchNormPolicy
    wrapper: Any
    optimizer: DPOptimizer
    data_loader: DataLoader[Any]
    sampling: Sampling
    clipping: str
    mini_set_size: int = 1
    alc_loader: DataLoader[Any] | None = None
    draws: DrawSource | None = None
    ranks: Ranks | None = None
    sharded: bool = False
    attached: tuple[Any, ...] = ()
    steps: int = 0
    planned_steps: int | None = None
    told: bool = False
    start: dict[str, Any] = field(init=False)
    _licensed: bool = field(default=False, init=False)
    _handles: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.start = self.noise_and_bounds()

    def noise_and_bounds(self) -> dict[str, Any]:
        """The optimizer's noise multiplier and clip bounds, as plain numbers."""
        bounds = self.optimizer.max_grad_norm
        return {
            "noise_multiplier": float(self.optimizer.noise_multiplier),
            "max_grad_norm": [*map(float, bounds)] if isinstance(bounds, (list, tuple)) else float(bounds),
        }

    def take_over(self) -> Run | None:
        """From now on nobody but this run's private optimizer moves weights with the torch optimizer inside.

        **Formal guarantee**: a step of the torch optimizer that does not follow a completed ``pre_step`` of
        the private one, which clips, noises and accounts, raises before anything moves.

        **Edge cases**: a subclass whose ``step`` calls its parent's may run torch's step hooks twice; the
        second time counts nothing. ``make_private`` called anew on one torch optimizer: the former run's
        private optimizer refuses further steps.

        Returns:
            The run that had the torch optimizer before, if there was one.
        """
        inner = self.optimizer.original_optimizer
        former = _LATEST.get(id(inner))
        if former is not None:
            former._retire()
        _LATEST[id(inner)] = self
        pre_step = self.optimizer.pre_step

        def licensed(closure: Any = None) -> bool:
            self._licensed = False
            self._licensed = bool(pre_step(closure))
            return self._licensed

        self.optimizer.pre_step = licensed
        self._handles = [
            inner.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_step),
        ]
        return former

    def _retire(self) -> None:
        for handle in self._handles:
            handle.remove()
        if not self.policy.finished:
            self.optimizer.pre_step = _superseded

    def _before_step(self, *_: Any) -> None:
        if self.policy.finished:
            raise RuntimeError(FINALIZED)
        if not self._licensed:
            raise RuntimeError(FOREIGN)

    def _after_step(self, *_: Any) -> None:
        if not self._licensed:
            return
        self._licensed = False
        self.steps += 1
        self.policy.after_step()
        if self.planned_steps is not None and self.steps > self.planned_steps and not self.told:
            self.told = True
            warnings.warn(
                f"step {self.steps} is beyond the {self.planned_steps} that noise_multiplier was calibrated "
                "for: epsilon grows above target_epsilon, and get_epsilon says how far",
                stacklevel=_users_level(),
            )

    @cached_property
    def public_data(self) -> list[str]:
        """Fingerprints of the public data: what was private before a resume must not be public after it."""
        found = [] if self.alc_loader is None else [describe(self.alc_loader)]
        statistics = self.policy.describe_public()
        return [data.sha256 for data in [*found, *([] if statistics is None else [statistics])]]

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a pass; one over the sample rate."""
        return len(self.data_loader)


# By the id of the torch optimizer, which a run keeps alive.
_LATEST: WeakValueDictionary[int, Run] = WeakValueDictionary()


def _superseded(*_: Any) -> NoReturn:
    raise RuntimeError(
        "make_private was called again with this optimizer: step the private optimizer that the newer call "
        "returned"
    )


def _users_level() -> int:
    """The ``stacklevel`` of the user's line: a step reaches us through hooks and wrappers of any depth."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in (
        "opacus_bc",
        "opacus",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    return level
