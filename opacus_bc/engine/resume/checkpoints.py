"""Saving and resuming: what goes into a checkpoint, and the checks before anything is loaded."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from opacus_bc.engine.resume import files
from opacus_bc.engine.resume.parts import SCHEDULERS, Parts
from opacus_bc.engine.resume.randomness import random_state
from opacus_bc.engine.resume.state import check_run_state, run_state
from opacus_bc.engine.run import Run
from opacus_bc.mechanism.warn import users_level

_STOCK = (
    "the checkpoint is Opacus's own, or of a model that was not private: module, optimizer and accountant "
    "are loaded. It lacks the step, the noise multiplier and bounds that schedulers had reached, ALC's and "
    "BatchNorm's state and the place in the pass; they stay as make_private set them, and randomness is fresh"
)


def check_savable(run: Run | None) -> None:
    """Refuse to save what could not be resumed: a model in shards, or a finalized one."""
    _refuse_shards(run)
    if run is not None and run.policy.finished:
        raise RuntimeError(
            "this model was finalized: save a checkpoint before finalize(), and the finished model with "
            "torch.save(released.state_dict(), path)"
        )


def _refuse_shards(run: Run | None) -> None:
    """One file with one rank's generator states would give all shards the same noise after a resume."""
    if run is not None and run.sharded:
        raise NotImplementedError(
            "checkpoints of fully_shard models are not built: save the module's and the optimizer's states "
            "with torch.distributed.checkpoint, and engine.accountant.state_dict() beside them"
        )


class Checkpoints:
    """The checkpoints of one engine: they carry the identity of its budget.

    Two engines with equal histories have spent twice; one engine with two models has spent once. A checkpoint
    says whose history it holds.
    """

    def __init__(self) -> None:
        self._identity = secrets.token_hex(16)
        self._adopted: list[Any] | None = None  # came with another engine's identity

    def save(
        self,
        path: Any,
        parts: Parts,
        *,
        extra: Mapping[str, Any],
        module_state: Mapping[str, Any],
        exact: bool,
        torch_save_kwargs: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint; see :meth:`opacus_bc.PrivacyEngine.save_checkpoint`."""
        plain = files.plain_numbers({**extra, **parts.plain_state()})
        held = None if parts.optimizer is None else files.plain_numbers(parts.optimizer.state_dict())
        files.check_plain(plain if held is None else {**plain, "optimizer's groups": held["param_groups"]})
        content = {**plain, "module_state_dict": module_state}
        if held is not None:
            content["optimizer_state_dict"] = held
        self._renew_identity(parts.accountant)
        own = {"run": None if parts.run is None else run_state(parts.run), "engine": self._identity}
        content = files.sealed(content, own)

        def write(file: Any) -> None:
            torch.save(content, file, **torch_save_kwargs)

        if not isinstance(path, (str, os.PathLike)):
            write(path)
            return
        if parts.run is not None and parts.run.users is not None:
            files.write_beside(path, files.OWNERS, content[files.KEY]["id"], parts.run.users.fingerprint())
        exact = exact and _can_be_exact(parts.run)
        if exact:
            files.write_beside(path, files.SECRET, content[files.KEY]["id"], random_state(parts.run))
        files.write_atomically(path, write, mode=0o666)
        if not exact:  # states of an overwritten checkpoint serve nobody but an attacker
            files.secret_path(path).unlink(missing_ok=True)

    def load(
        self,
        path: Any,
        parts: Parts,
        *,
        module_load_kwargs: Mapping[str, Any],
        torch_load_kwargs: Mapping[str, Any],
        secret: bool,
    ) -> dict[str, Any]:
        """Read a checkpoint into ``parts``; see :meth:`opacus_bc.PrivacyEngine.load_checkpoint`."""
        run = parts.run
        _refuse_shards(run)
        content = files.read(path, **torch_load_kwargs)
        own = content.get(files.KEY)
        state = own["run"] if own else None
        if run is not None and own and state is not None:
            check_run_state(run, state)
            _check_owners(run, path, own["id"])
        self._check_history(content["privacy_accountant_state_dict"], own, parts)
        streams = files.read_secret(path, own["id"]) if own and secret else None
        if run is not None and run.ranks is not None:
            run.ranks.check_same("the checkpoint", own["id"] if own else None)
            streams = streams if run.ranks.all(streams is not None) else None
        parts.replace(content, state, streams, module_load_kwargs)
        self._identity = (own or {}).get("engine", self._identity)
        self._adopted = list(parts.accountant.history)
        if state is None and (own is None or run is not None):
            warnings.warn(_STOCK, stacklevel=users_level())
        for name in ("optimizer", *SCHEDULERS):
            content.pop(f"{name}_state_dict", None)
        return content

    def _check_history(self, state: Mapping[str, Any], own: Mapping[str, Any] | None, parts: Parts) -> None:
        self._renew_identity(parts.accountant)
        booked = [tuple(entry) for entry in parts.accountant.history]
        mine = own is not None and own.get("engine") == self._identity
        lossless = not booked or (mine and booked == [tuple(entry) for entry in state["history"]])
        ranks = None if parts.run is None else parts.run.ranks
        if not (lossless if ranks is None else ranks.all(lossless)):
            raise ValueError(
                f"this engine has booked {sum(int(entry[2]) for entry in booked)} steps, which the "
                "checkpoint's accountant would replace: load it into a new PrivacyEngine"
            )

    def _renew_identity(self, accountant: Any) -> None:
        """What was booked after a load is this engine's own: another continuation does not know it."""
        if self._adopted is not None and self._adopted != list(accountant.history):
            self._identity, self._adopted = secrets.token_hex(16), None


def _check_owners(run: Run, path: Any, identity: str) -> None:
    """Refuse to go on with other users than those of the checkpoint, who were protected so far."""
    if run.users is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        warnings.warn(
            "the checkpoint does not lie under a path, so nothing tells whether unit= names the same users "
            "as before: epsilon holds only if it does",
            stacklevel=users_level(),
        )
        return
    before = files.read_beside(path, files.OWNERS, identity)
    if before is None:
        raise ValueError(
            f"{files.beside(path, files.OWNERS)} is missing, which tells whether unit= names the same users "
            "as before: copy it together with the checkpoint"
        )
    if before != run.users.fingerprint():
        raise ValueError(
            "unit= does not give the samples to the same users as in the checkpoint, so nobody would be "
            "protected by both parts of the training: pass the same ids for the same data"
        )


def _can_be_exact(run: Run | None) -> bool:
    if run is None or run.loader.ledger.between_draws:
        return True
    warnings.warn(
        "a batch was drawn that no step has used (save right after optimizer.step(); loader workers draw "
        "ahead within a pass): this checkpoint resumes with fresh randomness, not bit by bit",
        stacklevel=users_level(),
    )
    return False
