"""Everything that a checkpoint is taken from and loaded into: all of it, or nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from opacus_bc._opacus import DPOptimizer
from opacus_bc.engine.resume.randomness import draw_fresh_randomness, load_random_state, random_state
from opacus_bc.engine.resume.state import load_run_state, restart_draws, run_state
from opacus_bc.engine.run import Run
from opacus_bc.mechanism.warn import users_level

SCHEDULERS = ("noise_scheduler", "grad_clip_scheduler", "lr_scheduler")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the user passes to ``save_checkpoint`` and ``load_checkpoint``, and what the engine adds."""

    module: nn.Module
    optimizer: DPOptimizer | None
    schedulers: tuple[Any, ...]  # in the order of SCHEDULERS
    accountant: Any
    run: Run | None  # what make_private set up for the module, if it did

    def plain_state(self) -> dict[str, Any]:
        """Accountant and schedulers."""
        return {
            "privacy_accountant_state_dict": self.accountant.state_dict(),
            **{
                f"{name}_state_dict": _scheduler_state(scheduler)
                for name, scheduler in zip(SCHEDULERS, self.schedulers, strict=True)
                if scheduler is not None
            },
        }

    def replace(
        self,
        content: Mapping[str, Any],
        state: dict[str, Any] | None,
        streams: dict[str, Any] | None,
        module_load_kwargs: Mapping[str, Any],
    ) -> None:
        """Load all of it, or leave everything as it is; without ``streams`` randomness is fresh."""
        undo = self._undo()
        try:
            self._load(content, state, module_load_kwargs)
            if streams is None:
                draw_fresh_randomness(self.run)
            else:
                load_random_state(self.run, streams)
        except BaseException:
            undo()
            raise
        if self.run is not None:
            restart_draws(self.run, state)

    def _load(
        self, content: Mapping[str, Any], state: dict[str, Any] | None, module_load_kwargs: Mapping[str, Any]
    ) -> None:
        weights = _named_as_in(self.module, content["module_state_dict"])
        self.module.load_state_dict(weights, **module_load_kwargs)
        self.accountant.load_state_dict(content["privacy_accountant_state_dict"])
        held = content.get("optimizer_state_dict")
        if self.optimizer is not None and held:
            _torchs(self.optimizer).load_state_dict(held)
        elif (self.optimizer is None) == bool(held):
            has, passed = ("an", "no") if held else ("no", "an")
            _warn_of_mismatch(f"{has} optimizer", f"{passed} optimizer")
        if self.run is not None:
            load_run_state(self.run, state)
        for name, scheduler in zip(SCHEDULERS, self.schedulers, strict=True):
            kept = content.get(f"{name}_state_dict")
            if scheduler is not None and kept:
                scheduler.load_state_dict(kept)
            elif (scheduler is None) == bool(kept):
                has, passed = ("a", "none") if kept else ("no", "a scheduler")
                _warn_of_mismatch(f"{has} {name}", passed)

    def _undo(self) -> Callable[[], None]:
        run, optimizer = self.run, self.optimizer
        state = None if run is None else copy.deepcopy(run_state(run))
        module = copy.deepcopy(dict(self.module.state_dict()))
        inner = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
        history = copy.deepcopy(self.accountant.history)
        schedulers = [copy.copy(s.__dict__) for s in self.schedulers if s is not None]
        before = None if run is None else run.policy.snapshot()
        randomness = random_state(run)

        def undo() -> None:
            self.module.load_state_dict(module)
            self.accountant.history = history
            if optimizer is not None:
                _torchs(optimizer).load_state_dict(inner)
            if run is not None and before is not None:
                load_run_state(run, state)
                run.policy.put_back(before)
            for scheduler, held in zip(filter(None, self.schedulers), schedulers, strict=True):
                scheduler.__dict__.update(held)
            load_random_state(run, randomness)

        return undo


def _warn_of_mismatch(saved: str, passed: str) -> None:
    warnings.warn(
        f"the checkpoint has {saved} state, and {passed} was passed to load_checkpoint",
        stacklevel=users_level(),
    )


def _named_as_in(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """``weights`` with the prefix of Opacus's wrapper added or removed, if ``module`` then knows them all."""
    prefix, names = "_module.", set(module.state_dict())
    for renamed in (
        {name.removeprefix(prefix): value for name, value in weights.items()},
        {prefix + name: value for name, value in weights.items()},
    ):
        if set(weights) != names == set(renamed):
            return renamed
    return weights


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    """The scheduler's state without its functions, which a checkpoint cannot hold and a script has anyway."""
    return {key: value for key, value in scheduler.state_dict().items() if not callable(value)}


def _torchs(optimizer: Any) -> Any:
    """The torch optimizer inside: the private one warns of states that come without their steps' epsilon."""
    return getattr(optimizer, "original_optimizer", optimizer)
