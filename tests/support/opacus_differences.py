"""Opacus's own tests that fail on this package's engine, each with its reason and the words it fails with."""

from __future__ import annotations

from dataclasses import dataclass

BEGIN, END = "<!-- Opacus's tests: begin -->", "<!-- Opacus's tests: end -->"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Tests that differ for one reason.

    Attributes:
        why: What they expect, and what happens here.
        words: Each failure says one of these.
        tests: Their names, ``Class::test``.
    """

    why: str
    words: tuple[str, ...]
    tests: tuple[str, ...]


DIFFERENCES: tuple[Difference, ...] = ()


def table() -> str:
    """The list for docs/migration.md, between its marks."""
    rows = [f"| {d.why} | {', '.join(f'`{name}`' for name in d.tests)} |" for d in DIFFERENCES]
    return "\n".join([BEGIN, "| what differs | tests of Opacus's |", "|---|---|", *rows, END])
