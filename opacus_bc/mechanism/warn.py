"""Warnings point at the user's line, however deep in this package they are raised."""

from __future__ import annotations

import sys

_NOT_THE_USERS = ("opacus_bc", "opacus", "torch")


def users_level() -> int:
    """The ``stacklevel`` of the user's line for a warning that the caller raises."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level
