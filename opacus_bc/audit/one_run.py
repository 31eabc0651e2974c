"""Audits with many canaries in one run: every canary is in or out by a coin of its own.

Two bounds on what such guesses prove, neither of which needs independence between canaries:

* Steinke, Nasr and Jagielski (2023): under (epsilon, delta)-DP the number of correct guesses is at most
  Binomial(r, e^eps / (1 + e^eps)), up to a term in delta.
* Mahloujifar, Melis and Chaudhuri (2024): the same for a whole trade-off curve, which is what a Gaussian
  mechanism has; usually tighter.

With individual clipping canaries with orthogonal gradients do not disturb each other, so one run is as good
as many. With batch clipping (k = 1) all canaries share one clip: m of them move the vector by C/sqrt(m) each
at best, so an audit in one run says next to nothing there. With k mini-sets and few canaries in each it works
again, up to a factor of two: no mini-set can be turned around by every canary at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from opacus_bc.accounting import TradeOffCurve
from opacus_bc.accounting.events import check_count, check_delta
from opacus_bc.audit.bounds import Floats, Scores, largest_noise
from opacus_bc.audit.claims import REPORT_LEVEL, VERDICT_LEVEL, AuditResult, Claim

# Share of the canaries on which a guess is made: the surest fifth on either side.
GUESSED = 0.2


def one_run_p_value(*, canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Probability bound for at least ``correct`` of ``guesses`` right guesses under (epsilon, delta)-DP.

    **Formal guarantee** (Steinke et al. 2023, theorem 5.2): if the run is (epsilon, delta)-DP and every
    canary was included by a fair coin, so many correct guesses have at most the returned probability.
    """
    share = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, share))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    i = np.arange(1, correct + 1)
    below = binom.sf(correct - 1 - i, guesses, share) - tail
    return min(1.0, tail + 2 * canaries * delta * float(np.max(below / i, initial=0.0)))


def one_run_epsilon(*, canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """The largest epsilon that the guesses refute at ``level``; 0 if none."""

    def refuted(epsilon: float) -> bool:
        p = one_run_p_value(canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta)
        return p <= level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def curve_refuted_in_one_run(
    curve: Callable[[Any], Any], *, canaries: int, guesses: int, correct: int, level: float
) -> bool:
    """Whether so many correct guesses have probability at most ``level`` under a symmetric trade-off curve.

    **Formal guarantee** (Mahloujifar et al. 2024, algorithm 3 with two outcomes): if the run is f-DP and
    every canary was included by a fair coin, the answer is true with probability at most ``level``.

    The recursion bounds, for i from ``correct`` down, the joint probabilities r of a correct and h of a wrong
    guess together with at least i correct ones; f carries the one over to the other, and they must add up to
    less than the probability of guessing at all.
    """
    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        raised = max(wrong, float(curve(1.0 - min(right, 1.0))))
        if raised == wrong:
            break
        right, wrong = min(1.0, right + i / (guesses - i) * (raised - wrong)), raised
    return right + wrong >= guesses / canaries


def guess(scores: Floats, included: npt.NDArray[np.bool_], share: float) -> tuple[int, int]:
    """Call the surest canaries in or out; returns how many guesses were made and how many were right."""
    each = max(1, int(len(scores) * share / 2))
    order = np.argsort(scores, kind="stable")
    return 2 * each, int(included[order[-each:]].sum() + (~included[order[:each]]).sum())


def audit_one_run(
    scores: Floats,
    included: npt.NDArray[np.bool_],
    claim: Claim | TradeOffCurve,
    *,
    name: str = "one run",
    delta: float = 1e-5,
    audits: int = 1,
    guessed: float = GUESSED,
    note: str = "",
) -> AuditResult:
    """Audit one run, yours or a toy's, in which every canary was included by a fair coin.

    **Formal guarantee**: each lower bound exceeds the truth with probability at most 5 %, ``violation`` is
    wrong with probability at most ``0.001 / audits``, however the canaries interact, provided

    * every canary was included with probability 1/2 independently, before training,
    * the scores were computed from what the mechanism releases and not from ``included``,
    * ``guessed`` was fixed before looking at the scores.

    Args:
        scores: One for each canary, larger where it seems to be in.
        included: Which ones were.
        claim: What is claimed of the run.
        name: For the report.
        delta: Delta of the epsilons.
        audits: How many audits share the verdict's error probability.
        guessed: Share of the canaries on which a guess is made, half of it on either side.
        note: For the report.
    """
    values, coins = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=np.bool_)
    check_delta(delta)
    if values.ndim != 1 or values.shape != coins.shape or len(values) < 2 or np.isnan(values).any():
        raise ValueError(
            f"scores and included must be equally long and scores not NaN, got {values.shape}, {coins.shape}"
        )
    if not 0 < guessed <= 1:
        raise ValueError(f"guessed must lie between 0 and 1, got {guessed!r}")
    check_count("audits", audits, 1)
    guesses, correct = guess(values, coins, guessed)
    counts = {"canaries": len(values), "guesses": guesses, "correct": correct}
    curve = claim.tradeoff() if isinstance(claim, Claim) else claim
    family: float | None = None
    if isinstance(claim, Claim):
        given = claim

        def refuted(sigma: float) -> bool:
            other = replace(given, noise_multiplier=sigma).tradeoff()
            return curve_refuted_in_one_run(other, **counts, level=REPORT_LEVEL)

        sigma = largest_noise(refuted, given.noise_multiplier)
        family = 0.0 if math.isinf(sigma) else replace(given, noise_multiplier=sigma).epsilon(delta)
    return AuditResult(
        name=name,
        setting=claim.describe() if isinstance(claim, Claim) else "given curve",
        delta=delta,
        claimed_epsilon=claim.epsilon(delta),
        audited_epsilon=one_run_epsilon(**counts, delta=delta, level=REPORT_LEVEL),
        family_epsilon=family,
        repetitions=len(values),
        attack=f"{correct} of {guesses} guesses right",
        violation=curve_refuted_in_one_run(curve, **counts, level=VERDICT_LEVEL / audits),
        note=note,
        scores=Scores(values[coins], values[~coins]),
        curve=curve,
    )
