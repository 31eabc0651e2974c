"""Kept results: one small JSON file a cell, named by a hash of everything the result depends on.

Files appear whole or not at all (written beside, then renamed), so a run may be killed at any moment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from opacus_bc.engine.resume.files import write_atomically

FORMAT = 1  # raised when old results can no longer be read or compared
# Metadata of a field that was added later: at its default it leaves a configuration's key what it was.
LATER: Mapping[str, bool] = MappingProxyType({"later": True})


def key(config: Any) -> str:
    """A name for a frozen dataclass: equal configurations have equal keys, others do not.

    >>> from opacus_bc.experiments.training.methods import Layerwise
    >>> key(Layerwise()) == key(Layerwise(layers="module")) != key(Layerwise(layers=4))
    True
    >>> key(0.02502743853090997) == key(0.025027438530910787)
    True
    """
    text = json.dumps({"format": FORMAT, type(config).__name__: _described(config)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _described(value: Any) -> Any:
    if isinstance(value, float):  # the last digits of a calibrated noise are those of one machine
        return float(f"{value:.12g}")
    if not is_dataclass(value):
        return value
    found = {field: getattr(value, field.name) for field in fields(value)}
    return {
        field.name: _described(held)
        for field, held in found.items()
        if not (field.metadata.get("later") and held == field.default)
    }


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, whatever happens, and the folders it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.writelines([content]), mode=0o666)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinities are refused because JSON has none."""
    write_file(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The content of a kept file, or None if there is none or it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def write_checkpoint(path: Path, state: Any) -> None:
    """Write tensors and plain values atomically."""
    write_atomically(path, lambda file: torch.save(state, file), mode=0o666)


def read_checkpoint(path: Path) -> Any:
    """What `write_checkpoint` wrote, or None; nothing but tensors and plain values is ever unpickled."""
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True)
    except Exception:  # a damaged file fails in any way it likes: the cell starts again
        return None


class Store:
    """A folder of results.

    Attributes:
        root: Where tables and pictures go.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_writable(self) -> None:
        """Fail now rather than after hours of training.

        Raises:
            ValueError: The folder cannot be made, or nothing can be written into it.
        """
        try:
            write_file(self.root / ".writable", b"")
            (self.root / ".writable").unlink()
        except OSError as error:
            raise ValueError(f"--out {self.root}: cannot write there ({error.strerror or error})") from error

    def cell(self, config: Any) -> Path:
        """Where the result of a cell is kept."""
        return self.root / "cells" / f"{key(config)}.json"

    def checkpoint(self, config: Any) -> Path:
        """Where an unfinished cell stands."""
        return self.root / "cells" / f"{key(config)}.pt"

    def drop_checkpoint(self, config: Any) -> None:
        """The cell is finished: nobody needs its checkpoint, nor what lies beside it."""
        checkpoint = self.checkpoint(config)
        for path in checkpoint.parent.glob(f"{checkpoint.name}*"):
            path.unlink()

    def cost(self, config: Any) -> Path:
        """Where the measured cost of a method is kept; the name changes with what is counted."""
        return self.root / "costs" / f"{key(config)}-2.json"
