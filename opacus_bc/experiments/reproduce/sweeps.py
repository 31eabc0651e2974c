"""Runs of a figure that differ in one setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from opacus_bc.experiments.reproduce.specs import Published, Run

BATCHES = (64, 128, 256, 512, 1024)
Setting = Literal["clip", "sigma", "batch_size"]
_SYMBOLS: Mapping[Setting, str] = {"clip": "C", "sigma": "σ", "batch_size": "m"}


def prints(value: float, *, epoch: int = 50, about: bool = False) -> tuple[Published, ...]:
    """One number that the paper prints."""
    return (Published(value=value, epoch=epoch, about=about),)


def sweep(
    base: Run,
    setting: Setting,
    values: Sequence[float],
    paper: Mapping[float, tuple[Published, ...]] | None = None,
    *,
    core: Sequence[float] = (),
    suffix: str = "",
) -> tuple[Run, ...]:
    """``base`` at every value of a setting, with the numbers that the paper prints for some of them.

    >>> [run.label for run in sweep(Run(label=""), "clip", (0.05, 0.2))]
    ['C = 0.05', 'C = 0.2']
    """

    def at(value: float) -> Run:
        changes: dict[str, Any] = {setting: value}
        return replace(
            base,
            label=f"{_SYMBOLS[setting]} = {value:g}{suffix}",
            x=value,
            paper=(paper or {}).get(value, ()),
            core=value in core,
            **changes,
        )

    return tuple(at(value) for value in values)


def schedules(base: Run, paper: tuple[Published, ...]) -> tuple[Run, ...]:
    """The four panels of figures 15 to 17: constant or diminishing step size (css, dss) and bound C.

    The paper prints a number, or the best one, for constant step size and constant bound.
    """
    return tuple(
        replace(
            base,
            label=f"{step}, {bound} C",
            lr_decay=1.0 if step == "css" else 0.9,
            clip_decay=1.0 if bound == "constant" else 0.9,
            paper=paper if (step, bound) == ("css", "constant") else (),
            core=(step, bound) == ("css", "constant"),
        )
        for step in ("css", "dss")
        for bound in ("constant", "diminishing")
    )
