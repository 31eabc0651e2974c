"""The vectorised audit: many repetitions of the worst case in seconds, through the real optimizer.

Whether a repetition's canary is drawn at a step comes from the real sampler, which draws out of a data set
with one canary for each repetition: under Poisson sampling these are independent, and so are the entries of
the noise. What a step with, and one without the canary releases comes from the real optimizer, which gets the
two mini-sets through the real loader and writes both into the real accountant, whose entry is the claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from opacus_bc.audit.bounds import Scores
from opacus_bc.audit.claims import VERDICT_LEVEL, AuditResult, Claim, judge
from opacus_bc.audit.scores import Attack, Floats, learn_projection, likelihood_ratio, repeated_noise
from opacus_bc.audit.toys import PrivateToy, Toy, make_toy
from opacus_bc.loader import PrivateDataLoader
from opacus_bc.sampling import Draw, SamplingPlan

Booleans = npt.NDArray[np.bool_]

_LESSON = 200_000  # releases are enough to learn a projection from


class Repeated:
    """A draw source that draws the same again and again."""

    def __init__(self, plan: SamplingPlan, draw: Draw) -> None:
        self.plan = plan
        self.draw = draw

    def __iter__(self) -> Iterator[Draw]:
        return repeat(self.draw, self.plan.steps_per_epoch)


def releases(private: PrivateToy, *, with_canary: bool, draws: int, steps_per_draw: int = 1) -> Floats:
    """The noised sums of ``draws`` draws of the same content: shape ``(steps, width, layers)``.

    Args:
        private: The toy.
        with_canary: Whether the canary is in every draw.
        draws: How many.
        steps_per_draw: 1, or more to see whether a second step on one draw is refused.

    Raises:
        RuntimeError: From the optimizer, when a draw is used twice.
    """
    content = private.contents(with_canary=with_canary)
    sums: list[Floats] = []
    if private.toy.individual:
        batch = [index for mini_set in content for index in mini_set]
        counted = iter(private.loader.batch_sampler)
        for _ in range(draws):
            try:
                next(counted)  # a step is refused unless something was drawn for it
            except StopIteration:
                counted = iter(private.loader.batch_sampler)
                next(counted)
            for _ in range(steps_per_draw):
                private.backward(private.data[batch])
                private.optimizer.step()
                sums.append(private.released())
        return np.stack(sums)
    loader = PrivateDataLoader(
        private.loader, draws=Repeated(private.loader.plan, content), ledger=private.loader.ledger
    )
    while len(sums) < draws * steps_per_draw:
        for place, (x, _) in enumerate(loader, start=1):
            for _ in range(steps_per_draw):
                private.backward(x)
                private.optimizer.step()
                if place % private.toy.mini_sets == 0:
                    sums.append(private.released())
            if len(sums) == draws * steps_per_draw:
                break
    return np.stack(sums)


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
        if private.toy.individual:
            for batch in private.loader.batch_sampler:
                yield [list(batch)]
        else:
            yield from private.loader.draws


def attacks(mu: float, rate: float, steps: int, steps_per_draw: int) -> dict[str, Attack]:
    """The statistics that are tried; one half of the repetitions decides which is used."""
    found = {"likelihood ratio": likelihood_ratio(mu, rate, steps_per_draw=steps_per_draw)}
    if steps > 1 and rate < 1:
        found["repeated noise"] = repeated_noise(mu, lag=1)
    return found


def audit_worst_case(
    toy: Toy,
    *,
    name: str,
    repetitions: int,
    delta: float = 1e-5,
    audits: int = 1,
    seed: int = 0,
    steps_per_draw: int = 1,
    note: str = "",
) -> AuditResult:
    """Audit the real clipping, noise, sampling and booking of a worst case.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`.

    Args:
        toy: What is audited.
        name: For the report.
        repetitions: With the canary, and as many without.
        delta: At which delta epsilons are compared.
        audits: How many audits share the verdict's error probability.
        seed: Of everything random.
        steps_per_draw: A loop that steps that often on one batch; the optimizer must refuse more than 1.
        note: For the report.
    """
    shuffled = toy.sampling == "shuffle"
    alone = shuffled or toy.sampling == "partition"
    present = make_toy(toy, canaries=1 if alone else repetitions, width=repetitions, seed=2 * seed)
    absent = make_toy(toy, canaries=1, width=repetitions, seed=2 * seed + 1)
    draws = toy.steps * (toy.steps_per_epoch if shuffled else 1) // steps_per_draw
    taken = participation(present, repetitions, draws).repeat(steps_per_draw, axis=0)
    with_canary = releases(present, with_canary=True, draws=draws, steps_per_draw=steps_per_draw)
    without = releases(absent, with_canary=False, draws=draws, steps_per_draw=steps_per_draw)
    claim = Claim.booked(present.engine, steps=toy.steps, scale=repetitions**0.5)

    # Every second repetition learns, as in Scores.halves; the others judge.
    projection = learn_projection(_lesson(without), _lesson(with_canary))
    x_out, x_in = projection(without), projection(with_canary)
    # Both kinds of repetition may share steps without the canary: each error rate has limits of its own.
    x_present, x_absent = np.where(taken, x_in, x_out), x_out
    if shuffled:  # the adversary looks at the steps that have the canary
        x_present, x_absent = x_present[taken[:, 0]], x_absent[taken[:, 0]]
    rate = 1.0 if shuffled else claim.sample_rate
    candidates = {
        attack: Scores(score(x_present), score(x_absent))
        for attack, score in attacks(projection.mu, rate, toy.steps, steps_per_draw).items()
    }
    # Content without the canary is the same at every step: what varies is noise and nothing else.
    ratios = without[0].std(axis=0, ddof=1) / present.noise_stds()
    return replace(
        judge(candidates, claim, name=name, delta=delta, audits=audits, note=note),
        noise_ratio=float(ratios[np.argmax(np.abs(np.log(np.maximum(ratios, 1e-300))))]),
        differs=noise_differs(ratios, repetitions, VERDICT_LEVEL / audits),
    )


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
