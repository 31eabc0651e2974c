"""Runs that were broken off, saved and resumed: noise and draws must be fresh or go on, and the booking too.

The second half of a run is made by another model, optimizer, loader and engine, set up with the seeds of the
first ones, as a script that passes seeded generators does. Without care it would draw the same batches and
add the same noise once more. An exact repetition of the first half would give nothing away, so
the loss changes its sign after the resume (the adversary chooses it): noise that comes back then cancels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np

from opacus_bc.audit.claims import AuditResult, Claim, Row
from opacus_bc.audit.scores import Floats
from opacus_bc.audit.toys import PrivateToy, Toy, make_toy
from opacus_bc.audit.worst_case import Booleans, Observed, judge_observed, participation, releases


def resume(private: PrivateToy, again: Callable[[], PrivateToy], *, exact: bool) -> PrivateToy:
    """Save a toy, set it up ``again`` and load what was saved.

    Args:
        private: The toy, between two draws.
        again: Makes it private as the script has done before.
        exact: Whether the generators' states are saved and loaded too.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        private.engine.save_checkpoint(
            path=path, module=private.model, optimizer=private.optimizer, exact=exact
        )
        other = again()
        other.engine.load_checkpoint(path=path, module=other.model, optimizer=other.optimizer)
    return other


def _in_two_parts(
    toy: Toy, *, with_canary: bool, repetitions: int, seed: int, exact: bool
) -> tuple[PrivateToy, Booleans, Floats]:
    """The resumed toy, and participation and releases of both parts."""

    def make() -> PrivateToy:
        return make_toy(toy, canaries=repetitions if with_canary else 1, width=repetitions, seed=seed)

    private = make()
    taken: list[Booleans] = []
    sums: list[Floats] = []
    for draws in (toy.steps // 2, toy.steps - toy.steps // 2):
        if sums:
            private = replace(resume(private, make, exact=exact), sign=-1.0)
        taken.append(participation(private, repetitions, draws) if with_canary else np.zeros(0, np.bool_))
        sums.append(releases(private, with_canary=with_canary, draws=draws))
    return private, np.concatenate(taken), np.concatenate(sums)


def audit_resumed(
    toy: Toy, *, repetitions: int, exact: bool, seed: int = 0, **row: Unpack[Row]
) -> AuditResult:
    """The worst case, with half of the steps before and half after a resume.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`. What is claimed is what the accountant
    says after the last step, in the process that was resumed.

    Args:
        toy: What is audited; Poisson sampling.
        repetitions: With the canary, and as many without.
        exact: Resume bit by bit, or with randomness from the operating system (no seed then repeats the
            audit).
        seed: Of everything else random.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    present, taken, with_canary = _in_two_parts(
        toy, with_canary=True, repetitions=repetitions, seed=2 * seed, exact=exact
    )
    _, _, without = _in_two_parts(
        toy, with_canary=False, repetitions=repetitions, seed=2 * seed + 1, exact=exact
    )
    seen = Observed(
        taken=taken,
        with_canary=with_canary,
        without=without,
        claim=Claim.booked(present.engine, scale=repetitions**0.5),
        noise_stds=present.noise_stds(),
    )
    return judge_observed(seen, mirrored_after=toy.steps // 2, **row)
