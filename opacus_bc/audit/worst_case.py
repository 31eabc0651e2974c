"""The vectorised audit: many repetitions of the worst case in seconds, through the real optimizer.

Whether a repetition's canary is drawn at a step comes from the real sampler, which draws out of a data set
with one canary for each repetition: under Poisson sampling these are independent, and so are the entries of
the noise. What a step with, and one without the canary releases comes from the real optimizer, which gets the
two mini-sets through the real loader and writes both into the real accountant, whose entry is the claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Unpack

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2
from torch import Tensor

from opacus_bc.audit.bounds import Scores
from opacus_bc.audit.claims import VERDICT_LEVEL, AuditResult, Claim, Row, judge
from opacus_bc.audit.scores import Attack, Floats, learn_projection, likelihood_ratio, repeated_noise
from opacus_bc.audit.toys import PrivateToy, Toy, make_toy
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.plan import SMALLEST_MINI_SET, SamplingPlan
from opacus_bc.draws.sources import Draw, with_views

Booleans = npt.NDArray[np.bool_]

_LESSON = 200_000  # releases are enough to learn a projection from


class Repeated:
    """A draw source that draws the same again and again."""

    def __init__(self, plan: SamplingPlan, draw: Draw) -> None:
        self.plan = plan
        self.draw = draw

    def __iter__(self) -> Iterator[Draw]:
        return repeat(self.draw, self.plan.steps_per_epoch)


def releases(
    private: PrivateToy,
    *,
    with_canary: bool,
    draws: int,
    steps_per_draw: int = 1,
    each: int = SMALLEST_MINI_SET,
) -> Floats:
    """The noised sums of ``draws`` draws of the same content: shape ``(steps, width, features)``.

    Args:
        private: The toy.
        with_canary: Whether the canary is in every draw.
        draws: How many.
        steps_per_draw: 1, or more to see whether a second step on one draw is refused.
        each: Copies in a mini-set.

    Raises:
        NoFreshBatchError: From the optimizer, when a draw is used twice.
    """
    content = private.contents(with_canary=with_canary, each=each)
    start = len(private.movements)
    end = start + draws * steps_per_draw
    if private.toy.individual:
        content = [[index for mini_set in content for index in mini_set]]
    while len(private.movements) < end:
        for x in _delivered(private, content):
            for _ in range(steps_per_draw):
                private.step(x)
            if len(private.movements) == end:
                break
    return private.released(start)


def _delivered(private: PrivateToy, content: Draw) -> Iterator[Tensor]:
    """A pass of the real loader over other draws, in which a sample has as many views as in its own."""
    draws = with_views(Repeated(private.loader.plan, content))
    loader = PrivateDataLoader(
        private.loader, draws=draws, ledger=private.loader.ledger, part=private.loader.part
    )
    for x, _ in loader:
        yield x


def participation(private: PrivateToy, repetitions: int, draws: int) -> Booleans:
    """At which draws each repetition's canary takes part: shape ``(draws, repetitions)``."""
    toy = private.toy
    out = np.zeros((draws, repetitions), dtype=np.bool_)
    if toy.sampling == "shuffle":  # the order is public, so all repetitions share it
        for t, draw in zip(range(draws), _endless(private), strict=False):
            out[t] = any(private.canary in part for part in draw)
        return out
    if toy.sampling == "partition":
        # The mini-sets of one partition are drawn together, so each repetition needs draws of its own.
        at = iter(_endless(private))
        canary = private.canary
        holds = {id(part): canary in part for part in private.loader.draws.mini_sets}
        for r in range(repetitions):
            for t in range(draws):
                out[t, r] = any(holds[id(part)] for part in next(at))
        return out
    for t, draw in zip(range(draws), _endless(private), strict=False):
        drawn = np.concatenate([np.asarray(part, dtype=np.int64) for part in draw])
        out[t, drawn[drawn >= private.canary] - private.canary] = True
    return out


def _endless(private: PrivateToy) -> Iterator[Draw]:
    while True:
        yield from private.loader.draws


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What an adversary sees of many repetitions side by side, and what was claimed.

    Attributes:
        taken: Whether a repetition's canary takes part, shape ``(steps, repetitions)``.
        with_canary: Releases of steps with the canary, shape ``(steps, repetitions, features)``.
        without: Releases of steps without.
        claim: What the accountant has booked for it.
        noise_stds: The noise that the optimizer states for each feature.
    """

    taken: Booleans
    with_canary: Floats
    without: Floats
    claim: Claim
    noise_stds: Floats


def observe(toy: Toy, *, repetitions: int, seed: int = 0, steps_per_draw: int = 1) -> Observed:
    """Participation, releases and booking of a worst case; see the module.

    Args:
        toy: What is audited.
        repetitions: With the canary, and as many without.
        seed: Of everything random.
        steps_per_draw: A loop that steps that often on one batch; the optimizer must refuse more than 1.
    """
    shuffled = toy.sampling == "shuffle"
    alone = shuffled or toy.sampling == "partition"
    present = make_toy(toy, canaries=1 if alone else repetitions, width=repetitions, seed=2 * seed)
    absent = make_toy(toy, canaries=1, width=repetitions, seed=2 * seed + 1)
    draws = toy.steps * (toy.steps_per_epoch if shuffled else 1) // steps_per_draw
    taken = participation(present, repetitions, draws).repeat(steps_per_draw, axis=0)
    return Observed(
        taken=taken,
        with_canary=releases(present, with_canary=True, draws=draws, steps_per_draw=steps_per_draw),
        without=releases(absent, with_canary=False, draws=draws, steps_per_draw=steps_per_draw),
        claim=Claim.booked(present.engine, scale=repetitions**0.5),
        noise_stds=present.noise_stds(),
    )


def attacks(
    mu: float, rate: float, steps: int, steps_per_draw: int, mirrored_after: int
) -> dict[str, Attack]:
    """The statistics that are tried; one half of the repetitions decides which is used."""
    found = {"likelihood ratio": likelihood_ratio(mu, rate, steps_per_draw=steps_per_draw)}
    if steps > 1 and rate < 1:
        found["repeated noise"] = repeated_noise(mu, lag=1)
    if mirrored_after:
        found["noise of the first steps"] = repeated_noise(mu, lag=mirrored_after, sign=-1.0)
    return found


def judge_observed(
    seen: Observed, *, steps_per_draw: int = 1, mirrored_after: int = 0, **row: Unpack[Row]
) -> AuditResult:
    """Learn the best statistic on one half of the repetitions, judge the claim by the other.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`.

    Args:
        seen: What was observed.
        steps_per_draw: See :func:`observe`.
        mirrored_after: From this step on the loss has the opposite sign; 0 for a run without that.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    # Every second repetition learns, as in Scores.halves; the others judge.
    projection = learn_projection(_lesson(seen.without), _lesson(seen.with_canary))
    x_out, x_in = (np.stack([projection(step) for step in sums]) for sums in (seen.without, seen.with_canary))
    # Both kinds of repetition may share steps without the canary: each error rate has limits of its own.
    x_present, x_absent = np.where(seen.taken, x_in, x_out), x_out
    rate = seen.claim.sample_rate
    if seen.claim.sampling == "shuffle":  # the adversary looks at the steps that have the canary
        x_present, x_absent = x_present[seen.taken[:, 0]], x_absent[seen.taken[:, 0]]
        rate = 1.0
    tried = attacks(projection.mu, rate, len(x_absent), steps_per_draw, mirrored_after)
    candidates = {attack: Scores(score(x_present), score(x_absent)) for attack, score in tried.items()}
    # Content without the canary is the same at every step: what varies is noise and nothing else.
    ratios = seen.without[0].std(axis=0, ddof=1, dtype=np.float64) / seen.noise_stds
    level = VERDICT_LEVEL / row.get("audits", 1)
    return replace(
        judge(candidates, seen.claim, **row),
        noise_ratio=float(ratios[np.argmax(np.abs(np.log(np.maximum(ratios, 1e-300))))]),
        differs=noise_differs(ratios, seen.without.shape[1], level),
    )


def audit_worst_case(
    toy: Toy, *, repetitions: int, seed: int = 0, steps_per_draw: int = 1, **row: Unpack[Row]
) -> AuditResult:
    """Audit the real clipping, noise, sampling and booking of a worst case.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`.

    Args:
        toy: What is audited.
        repetitions: With the canary, and as many without.
        seed: Of everything random.
        steps_per_draw: A loop that steps that often on one batch; the optimizer must refuse more than 1.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    seen = observe(toy, repetitions=repetitions, seed=seed, steps_per_draw=steps_per_draw)
    return judge_observed(seen, steps_per_draw=steps_per_draw, **row)


def _lesson(sums: Floats) -> Floats:
    """Releases to learn from: of every second repetition, a few steps."""
    steps = max(1, _LESSON // sums.shape[1])
    return sums[:steps, ::2].reshape(-1, sums.shape[2])


def noise_differs(ratios: Floats, count: int, level: float) -> bool:
    """Whether some layer's noise has not the standard deviation that its block states.

    Args:
        ratios: Measured over stated standard deviation of every layer.
        count: Entries of a layer.
        level: **Formal guarantee**: true for Gaussian noise as stated with at most this probability
            (chi-squared, both sides, all layers).
    """
    statistic = (count - 1) * ratios**2
    each = level / (2 * len(ratios))
    return bool(np.any((statistic < chi2.ppf(each, count - 1)) | (statistic > chi2.isf(each, count - 1))))
