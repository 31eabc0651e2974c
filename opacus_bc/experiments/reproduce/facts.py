"""Facts that are computed at once, without any training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Value = float | str


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something that the paper prints or implies, and what we compute.

    Attributes:
        key: Its name in the page.
        name: What it is.
        paper: What the paper prints; None where it prints nothing.
        ours: Computes our value.
    """

    key: str
    name: str
    paper: Value | None
    ours: Callable[[], Value]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table of facts."""

    id: str
    title: str
    where: str
    facts: tuple[Fact, ...]
