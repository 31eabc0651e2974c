"""Ours next to theirs: rows, differences and verdicts, computed from kept results and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opacus_bc.experiments.reproduce.runs import family
from opacus_bc.experiments.reproduce.specs import (
    VARIANTS,
    Claim,
    Published,
    Run,
    Spec,
    Variant,
    cell_of,
    variants_of,
)
from opacus_bc.experiments.training.result import spent

Results = Mapping[str, list[dict[str, Any]]]
CLOSE = 3.0  # points within which a number counts as reached: the paper gives single runs without a spread


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of a figure in one variant.

    Attributes:
        ours: Test accuracy after ``epoch`` epochs, the mean over seeds; None if nothing was run.
        spread: Standard deviation over seeds; None for fewer than two.
        best: The best epoch up to then (the paper reports the best one in places), mean over seeds.
        epoch: Epochs of ours.
        limit: Training images, if not all were used.
        paper: The paper's number, if it prints one.
        epsilon: Certified, at ``epoch``; None where there is none.
        privacy: What the row may claim, in words.
        curves: Accuracies by epoch, one list a seed.
    """

    spec: Spec
    run: Run
    variant: Variant
    ours: float | None
    spread: float | None
    best: float | None
    seeds: int
    epoch: int
    limit: int | None
    paper: Published | None
    epsilon: float | None
    privacy: str
    curves: tuple[tuple[float, ...], ...]

    @property
    def difference(self) -> float | None:
        """Ours minus theirs, in points."""
        return None if self.ours is None or self.paper is None else self.ours - self.paper.value

    @property
    def comparable(self) -> bool:
        """Whether epochs and data are those of the paper."""
        return self.paper is not None and self.limit is None and self.epoch == self.paper.epoch

    @property
    def verdict(self) -> Literal["", "not run", "reached", "above", "below", "partial run"]:
        """Where our number stands; a run with fewer epochs or images says nothing about the paper's."""
        if self.paper is None:
            return ""
        if self.difference is None:
            return "not run"
        if not self.comparable:
            return "partial run"
        if abs(self.difference) <= CLOSE:
            return "reached"
        return "above" if self.difference > 0 else "below"


def rows_of(spec: Spec, results: Results, variants: tuple[Variant, ...] = tuple(VARIANTS)) -> list[Row]:
    """All rows of a figure: one for each run, variant, published number and amount of data."""
    rows: list[Row] = []
    for run in spec.runs:
        for variant in variants_of(run, variants):
            found = results.get(family(cell_of(spec, run, variant)), [])
            limits = sorted({r["cell"]["limit"] for r in found}, key=lambda n: (n is not None, n or 0))
            for limit in limits or [None]:
                group = [r for r in found if r["cell"]["limit"] == limit]
                for published in run.paper or (None,):
                    rows.append(_row(spec, run, variant, group, limit, published))
    return rows


def _row(
    spec: Spec,
    run: Run,
    variant: Variant,
    group: Sequence[dict[str, Any]],
    limit: int | None,
    paper: Published | None,
) -> Row:
    goal = paper.epoch if paper else spec.epochs
    epoch = min((min(len(r["accuracies"]), goal) for r in group), default=0)
    curves = tuple(tuple(r["accuracies"][:epoch]) for r in group)
    ends = [curve[-1] for curve in curves]
    epsilons = [_epsilon(r, epoch) for r in group]
    return Row(
        spec=spec,
        run=run,
        variant=variant,
        ours=statistics.fmean(ends) if ends else None,
        spread=statistics.stdev(ends) if len(ends) > 1 else None,
        best=statistics.fmean(max(curve) for curve in curves) if curves else None,
        seeds=len(ends),
        epoch=epoch,
        limit=limit,
        paper=paper,
        epsilon=max((e for e in epsilons if e is not None), default=None) if None not in epsilons else None,
        privacy=_privacy(run, variant),
        curves=curves,
    )


def _privacy(run: Run, variant: Variant) -> str:
    if run.mode == "none":
        return "none"
    if variant == "sound":
        return "certified"
    return "leaks BatchNorm statistics" if variant == "unprotected" else "not private"


def _epsilon(result: dict[str, Any], epoch: int) -> float | None:
    """Certified epsilon after some epochs; only for runs whose whole release is protected."""
    if not result.get("protected") or result.get("epsilon") is None:
        return None
    total = len(result["accuracies"])
    if epoch == total:
        return float(result["epsilon"])
    history = tuple(tuple(entry) for entry in result["history"])
    return spent(history, float(result["cell"]["delta"]), epoch, total)


def check(claim: Claim, rows: Sequence[Row], variant: Variant) -> str:
    """Whether our runs of one variant show what the paper says: holds, fails, or is not known yet.

    Runs are compared on the same amount of data (all of it, if possible), at the last epoch that all have.
    """
    labels = claim.labels
    if not labels:
        return "in words only"
    usable = [row for row in rows if row.curves and (row.variant == variant or row.run.mode == "none")]
    for limit in sorted({row.limit for row in usable}, key=lambda n: (n is not None, -(n or 0))):
        longest = {
            row.run.label: row
            for row in sorted(usable, key=lambda row: row.epoch)
            if row.limit == limit and row.run.label in labels
        }
        if len(longest) < len(labels):
            continue
        epoch = min(row.epoch for row in longest.values())
        ends = [statistics.fmean(curve[epoch - 1] for curve in longest[label].curves) for label in labels]
        note = "" if limit is None else f" on {limit:,} images"
        return f"{claim.judge(ends)} at epoch {epoch}{note}"
    return "not run"


def slow_norms(result: dict[str, Any]) -> tuple[int, int]:
    """Of how many tensors the gradient norm has kept more than half of its first value, and of how many."""
    first, last = result["layer_norms"][0], result["layer_norms"][-1]
    return sum(last[name] > value / 2 for name, value in first.items()), len(first)
