"""The part of the engine that saves and resumes."""

from __future__ import annotations

import copy
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from opacus_bc import checkpoint as ck
from opacus_bc._opacus import DPOptimizer
from opacus_bc.random_state import draw_fresh_randomness, load_random_state, random_state
from opacus_bc.release_engine import ReleaseEngine, unwrap
from opacus_bc.run import Run
from opacus_bc.run_state import between_draws, check_run_state, load_run_state, restart_draws, run_state

_SCHEDULERS = ("noise_scheduler", "grad_clip_scheduler", "lr_scheduler")
_STOCK = (
    "the checkpoint is Opacus's own, or of a model that was not private: module, optimizer and accountant "
    "are loaded. It lacks the step, the noise multiplier and bounds that schedulers had reached, ALC's and "
    "BatchNorm's state and the place in the pass; they stay as make_private set them, and randomness is fresh"
)


class CheckpointEngine(ReleaseEngine):
    """``save_checkpoint`` and ``load_checkpoint`` with Opacus's arguments, for an exact resume."""

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
        lr_scheduler: Any = None,
        exact: bool = False,
    ) -> None:
        """Save everything that a resume needs, atomically.

        Weights, optimizer, schedulers, accountant, ALC, BatchNorm and the step go into ``path``; none of it
        is more than what the accountant has counted. A resume draws fresh randomness, and epsilon is right.

        With ``exact=True`` generator states go into ``path + ".secret"`` (mode 0600), and a resume that finds
        them goes on bit by bit. Whoever holds that file knows past and future noise, so do not hand it out.
        With ``secure_mode=True`` it is never written.

        **Edge cases**: of several ranks rank 0 writes, and its file serves all of them. A pass that is under
        way is continued by the first pass after the resume (a shuffled one starts anew and is booked as a new
        pass). Where a batch has been drawn and not used, no resume could be exact: a warning says so, and no
        generator states are written. Two continuations of one checkpoint that are both looked at have spent
        both; no accountant sees that. If they used the ``.secret`` file and differ in anything (step size,
        loss, augmentation), they share their noise, which then cancels, and no epsilon covers that: ask for
        ``exact=True`` only to repeat the very same run.

        Args:
            path: Where to; an open binary file is possible, without atomicity and generator states.
            module: What ``make_private`` returned, or the module inside.
            optimizer: The private optimizer.
            noise_scheduler: Opacus's noise scheduler.
            grad_clip_scheduler: Opacus's scheduler of the clip bound.
            checkpoint_dict: More to save: tensors, plain values and containers of these.
            module_state_dict_kwargs: For ``module.state_dict``.
            torch_save_kwargs: For ``torch.save``.
            lr_scheduler: torch's learning rate scheduler.
            exact: Whether to write generator states.

        Raises:
            CheckpointError: Something could not be loaded again, so nothing is written.
            MovingBufferError: A buffer holds private statistics.
            RuntimeError: The model was finalized, or weights moved without the accountant.
        """
        run = self._run_of(module, optimizer)
        _refuse_shards(run)
        if run is not None and run.policy.finished:
            raise RuntimeError(
                "this model was finalized: save a checkpoint before finalize(), and the finished model with "
                "torch.save(released.state_dict(), path)"
            )
        self._check_booked()
        if run is not None:
            run.policy.check_buffers()
            if run.ranks is not None and run.ranks.rank != 0:
                return
        schedulers = (noise_scheduler, grad_clip_scheduler, lr_scheduler)
        extra = {
            **(checkpoint_dict or {}),
            "privacy_accountant_state_dict": self.accountant.state_dict(),
            **{
                f"{name}_state_dict": _scheduler_state(scheduler)
                for name, scheduler in zip(_SCHEDULERS, schedulers, strict=True)
                if scheduler is not None
            },
        }
        ck.check_plain(extra)
        content = {**extra, "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {}))}
        if optimizer is not None:
            content["optimizer_state_dict"] = optimizer.state_dict()
        self._renew_identity()
        own = {"run": None if run is None else run_state(run), "engine": self._identity}
        content = ck.sealed(content, own)

        def write(file: Any) -> None:
            torch.save(content, file, **(torch_save_kwargs or {}))

        if not isinstance(path, (str, os.PathLike)):
            write(path)
            return
        exact = exact and not self.secure_mode and self._can_be_exact(run)
        if exact:
            ck.write_secret(path, content[ck.KEY]["id"], random_state(run))
        ck.write_atomically(path, write, mode=0o666)
        if not exact:  # states of an overwritten checkpoint serve nobody but an attacker
            ck.secret_path(path).unlink(missing_ok=True)

    def _can_be_exact(self, run: Run | None) -> bool:
        if run is None or between_draws(run):
            return True
        warnings.warn(
            "a batch was drawn that no step has used (save right after optimizer.step(); loader workers draw "
            "ahead within a pass): this checkpoint resumes with fresh randomness, not bit by bit",
            stacklevel=3,
        )
        return False

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        lr_scheduler: Any = None,
    ) -> dict[str, Any]:
        """Resume: call ``make_private`` as in the run that was saved, then this.

        With the ``.secret`` file of :meth:`save_checkpoint` beside it the run goes on bit by bit; without it
        every random stream is seeded anew from the operating system, so that no noise is used twice.

        **Formal guarantee**: either everything is loaded, or an exception is raised and module, optimizer,
        schedulers, accountant and random streams are what they were. No code from the file is run.

        Args:
            path: A checkpoint of this engine or of Opacus's.
            module: See :meth:`save_checkpoint`.
            optimizer: See :meth:`save_checkpoint`.
            noise_scheduler: See :meth:`save_checkpoint`.
            grad_clip_scheduler: See :meth:`save_checkpoint`.
            module_load_dict_kwargs: For ``module.load_state_dict``.
            torch_load_kwargs: For ``torch.load``; ``weights_only`` is always True.
            lr_scheduler: See :meth:`save_checkpoint`.

        Returns:
            The checkpoint without what was loaded from the optimizer and the schedulers.

        Raises:
            CheckpointError: The file is truncated, was changed, or is no checkpoint.
            ValueError: It belongs to another set-up, or this engine has booked steps that it lacks.
        """
        _refuse_shards(self._run_of(module, optimizer))
        content = ck.read(path, **(torch_load_kwargs or {}))
        own = content.get(ck.KEY)
        run, state = self._run_of(module, optimizer), own["run"] if own else None
        if run is not None and state is not None:
            check_run_state(run, state)
        self._check_history(content["privacy_accountant_state_dict"], own, run)
        secret = ck.read_secret(path, own["id"]) if own and not self.secure_mode else None
        if run is not None and run.ranks is not None:
            run.ranks.check_same("the checkpoint", own["id"] if own else None)
            secret = secret if run.ranks.all(secret is not None) else None
        parts = _Parts(
            module=module,
            optimizer=optimizer,
            schedulers=(noise_scheduler, grad_clip_scheduler, lr_scheduler),
            accountant=self.accountant,
            run=run,
            load_kwargs=module_load_dict_kwargs or {},
        )
        parts.replace(content, state, secret)
        self._identity = (own or {}).get("engine", self._identity)
        self._adopted = list(self.accountant.history)
        if state is None and (own is None or run is not None):
            warnings.warn(_STOCK, stacklevel=2)
        for name in ("optimizer", *_SCHEDULERS):
            content.pop(f"{name}_state_dict", None)
        return content

    def _check_history(
        self, state: Mapping[str, Any], own: Mapping[str, Any] | None, run: Run | None
    ) -> None:
        self._renew_identity()
        booked = [tuple(entry) for entry in self.accountant.history]
        # Equal histories of two engines are two spendings; of one engine with two models they are one.
        mine = own is not None and own.get("engine") == self._identity
        lossless = not booked or (mine and booked == [tuple(entry) for entry in state["history"]])
        if not (lossless if run is None or run.ranks is None else run.ranks.all(lossless)):
            raise ValueError(
                f"this engine has booked {sum(int(entry[2]) for entry in booked)} steps, which the "
                "checkpoint's accountant would replace: load it into a new PrivacyEngine"
            )

    def _renew_identity(self) -> None:
        """What was booked after a load is this engine's own: another continuation does not know it."""
        if self._adopted is not None and self._adopted != list(self.accountant.history):
            self._identity, self._adopted = secrets.token_hex(16), None

    def _run_of(self, module: nn.Module, optimizer: DPOptimizer | None) -> Run | None:
        for run in reversed(self._runs):
            if run.optimizer is optimizer or unwrap(run.policy.root) is unwrap(module):
                return run
        return None


def _refuse_shards(run: Run | None) -> None:
    """One file with one rank's generator states would give all shards the same noise after a resume."""
    if run is not None and run.sharded:
        raise NotImplementedError(
            "checkpoints of fully_shard models are not built: save the module's and the optimizer's states "
            "with torch.distributed.checkpoint, engine.accountant.state_dict() beside them, and call "
            "torch.seed() before make_private when you resume: a script that seeds itself would add the same "
            "noise again"
        )


class _Parts:
    """Everything that a checkpoint is loaded into."""

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: DPOptimizer | None,
        schedulers: tuple[Any, ...],
        accountant: Any,
        run: Run | None,
        load_kwargs: dict[str, Any],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.schedulers = schedulers
        self.accountant = accountant
        self.run = run
        self.load_kwargs = load_kwargs

    def replace(
        self, content: dict[str, Any], state: dict[str, Any] | None, secret: dict[str, Any] | None
    ) -> None:
        """Load all of it, or leave everything as it is."""
        undo = self._undo()
        try:
            self._load(content, state)
            if secret is None:
                draw_fresh_randomness(self.run)
            else:
                load_random_state(self.run, secret)
        except BaseException:
            undo()
            raise
        if self.run is not None:
            restart_draws(self.run, state)

    def _load(self, content: dict[str, Any], state: dict[str, Any] | None) -> None:
        weights = _named_as_in(self.module, content["module_state_dict"])
        self.module.load_state_dict(weights, **self.load_kwargs)
        self.accountant.load_state_dict(content["privacy_accountant_state_dict"])
        held = content.get("optimizer_state_dict")
        if self.optimizer is not None and held:
            self.optimizer.load_state_dict(held)
        elif (self.optimizer is None) == bool(held):
            warnings.warn(
                f"the checkpoint has {'an' if held else 'no'} optimizer state, and "
                f"{'no' if self.optimizer is None else 'an'} optimizer was passed to load_checkpoint",
                stacklevel=4,
            )
        if self.run is not None:
            load_run_state(self.run, state)
        for name, scheduler in zip(_SCHEDULERS, self.schedulers, strict=True):
            kept = content.get(f"{name}_state_dict")
            if scheduler is not None and kept:
                scheduler.load_state_dict(kept)
            elif (scheduler is None) == bool(kept):
                warnings.warn(
                    f"the checkpoint has {'a' if kept else 'no'} {name} state, and "
                    f"{'none' if kept else 'a scheduler'} was passed to load_checkpoint",
                    stacklevel=4,
                )

    def _undo(self) -> Callable[[], None]:
        run, optimizer = self.run, self.optimizer
        state = None if run is None else copy.deepcopy(run_state(run))
        module = copy.deepcopy(dict(self.module.state_dict()))
        inner = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
        history = copy.deepcopy(self.accountant.history)
        schedulers = [copy.copy(s.__dict__) for s in self.schedulers if s is not None]
        buffers = None if run is None else run.policy._before
        randomness = random_state(run)

        def undo() -> None:
            self.module.load_state_dict(module)
            self.accountant.history = history
            if optimizer is not None:
                optimizer.load_state_dict(inner)
            if run is not None:
                load_run_state(run, state)
                run.policy._before = buffers or []
            for scheduler, held in zip(filter(None, self.schedulers), schedulers, strict=True):
                scheduler.__dict__.update(held)
            load_random_state(run, randomness)

        return undo


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
