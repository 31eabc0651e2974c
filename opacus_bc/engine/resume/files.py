"""Checkpoint files: written atomically, checked before use, loaded without running code from them.

A checkpoint is an ordinary ``torch.save`` file with Opacus's keys and one of ours, ``"opacus_bc"``. Generator
states do not go into it: whoever holds them knows past and future noise. They go into a file of their own,
``<path>.secret``, which only its owner can read. The fingerprint of users' ids goes into ``<path>.owners`` in
the same way: with it, who knows all users but one could find out whether that one is there.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from opacus_bc.mechanism.fingerprint import fingerprint

KEY = "opacus_bc"
SECRET, OWNERS = ".secret", ".owners"  # files beside a checkpoint that only its owner can read
FORMAT = 5


class CheckpointError(ValueError):
    """The file is truncated, was changed later, or holds more than tensors and plain values."""


def sealed(content: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` with our own part, which names the checkpoint and holds the fingerprint of everything."""
    own = {"format": FORMAT, "id": secrets.token_hex(16), **own}
    whole = {**content, KEY: own}
    return {**whole, KEY: {**own, "sha256": fingerprint(whole)}}


def plain_numbers(value: Any) -> Any:
    """Containers with Python's numbers in the place of numpy's, which learning rates often are.

    >>> plain_numbers({"lr": np.float64(0.5), "betas": (np.float32(1), 2)})
    {'lr': 0.5, 'betas': (1.0, 2)}
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: plain_numbers(each) for key, each in value.items()}
    return type(value)(map(plain_numbers, value)) if type(value) in (list, tuple) else value


def check_plain(content: Mapping[str, Any]) -> None:
    """Refuse what could not be loaded again: whatever is neither a tensor nor a plain value."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"a checkpoint holds tensors, numbers, strings and containers of these, since loading it must "
            f"not run code; one of {', '.join(content)} has something else: {_first_line(error)}"
        ) from error


def write_atomically(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None], *, mode: int) -> None:
    """Write a file so that under its name there is always the whole old one or the whole new one.

    **Formal guarantee**: on a POSIX file system, whenever the process or the machine stops, ``path`` names
    what it named before or everything that ``write`` wrote; and no reader but those of ``mode``, cut down by
    the process's mask, ever could open it.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name itself must survive a power cut
    finally:
        os.close(directory)


def read(source: Any, **torch_load_kwargs: Any) -> dict[str, Any]:
    """Load a checkpoint, ours or Opacus's, and check that it is whole."""
    if torch_load_kwargs.setdefault("weights_only", True) is not True:
        raise ValueError("weights_only=False would run code from the file: leave it out")
    try:
        content = torch.load(source, **torch_load_kwargs)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{_name(source)} cannot be read: it is truncated, damaged, or holds more than tensors and plain "
            f"values ({_first_line(error)}). Nothing was changed"
        ) from error
    wanted = {"module_state_dict", "privacy_accountant_state_dict"}
    if not isinstance(content, dict) or not wanted <= content.keys():
        raise CheckpointError(f"{_name(source)} is no checkpoint of a PrivacyEngine. Nothing was changed")
    if KEY in content:
        _check_own(source, content)
    return content


def _check_own(source: Any, content: Mapping[str, Any]) -> None:
    own = content[KEY]
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        found = own.get("format") if isinstance(own, dict) else own
        raise CheckpointError(f"{_name(source)} has format {found!r}, this version reads {FORMAT}")
    bare = {key: value for key, value in own.items() if key != "sha256"}
    if fingerprint({**content, KEY: bare}) != own.get("sha256"):
        raise CheckpointError(
            f"{_name(source)} does not match its fingerprint: it was changed after it was written. Nothing "
            "was changed here"
        )


def _name(source: Any) -> str:
    return str(source) if isinstance(source, (str, os.PathLike)) else "the checkpoint"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def beside(path: str | os.PathLike[str], suffix: str) -> Path:
    """Where that is kept which belongs to a checkpoint and must not be in it."""
    return Path(f"{os.fspath(path)}{suffix}")


def secret_path(path: str | os.PathLike[str]) -> Path:
    """Where the generator states of a checkpoint are kept."""
    return beside(path, SECRET)


def write_beside(path: str | os.PathLike[str], suffix: str, identity: str, state: Any) -> None:
    """Add what belongs to the checkpoint ``identity`` that is about to be written to ``path``.

    What belongs to the checkpoint that lies there now is kept beside it, so that a process killed between
    this call and the next still finds the one that matches; older ones are dropped.
    """
    states = {identity: state}
    try:
        current = torch.load(path, weights_only=True, mmap=True)[KEY]["id"]
        states[current] = _read_beside(path, suffix)[current]
    except Exception:  # no file, a stock one, a damaged one: nothing to keep
        states = {identity: state}
    # Its fingerprint stays in this file: seeds have few bits, so a hash elsewhere would give them away.
    content = {"states": states, "sha256": fingerprint(states)}
    write_atomically(beside(path, suffix), lambda file: torch.save(content, file), mode=0o600)


def read_beside(path: Any, suffix: str, identity: str) -> Any:
    """What belongs to the checkpoint ``identity``, or None if there is nothing."""
    if not isinstance(path, (str, os.PathLike)) or not beside(path, suffix).exists():
        return None
    try:
        return _read_beside(path, suffix).get(identity)
    except Exception as error:
        fresh = ". Delete it to resume with fresh randomness; epsilon will be right all the same"
        raise CheckpointError(
            f"{beside(path, suffix)} cannot be read ({_first_line(error)}). Nothing was changed"
            + (fresh if suffix == SECRET else "")
        ) from error


def read_secret(path: Any, identity: str) -> dict[str, Any] | None:
    """The generator states that belong to the checkpoint ``identity``, or None if there are none."""
    states: dict[str, Any] | None = read_beside(path, SECRET, identity)
    return states


def _read_beside(path: str | os.PathLike[str], suffix: str) -> dict[str, Any]:
    content = torch.load(beside(path, suffix), weights_only=True)
    states: dict[str, Any] = content["states"]
    if fingerprint(states) != content["sha256"]:
        raise ValueError("it does not match its fingerprint")
    return states
