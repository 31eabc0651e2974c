"""What is claimed of a run, and what an audit found: the two sides of a row in the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Required, TypedDict

import numpy as np

from opacus_bc.accounting import FDPAccountant, TradeOffCurve
from opacus_bc.accounting.events import base_kind, check_count, check_delta, check_entry, check_sampling
from opacus_bc.audit.bounds import (
    Rates,
    Scores,
    choose,
    epsilon_bound,
    held_out_rates,
    largest_noise,
    mu_bound,
    share_of,
)
from opacus_bc.mechanism.names import SAMPLINGS, Sampling

REPORT_LEVEL = 0.05
VERDICT_LEVEL = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What the accountant was told of a run.

    Attributes:
        noise_multiplier: sigma_eff.
        sample_rate: q.
        steps: Steps; for ``sampling="shuffle"`` passes over the data.
        sampling: How mini-sets are drawn.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    sampling: Sampling = "poisson"

    @classmethod
    def booked(cls, engine: Any, *, scale: float = 1.0) -> Claim:
        """What the engine's accountant has booked: all of its steps, or passes, and nothing else.

        Args:
            engine: A :class:`opacus_bc.PrivacyEngine` that has made at least one step.
            scale: The audit looks at a projection of the release whose sensitivity is 1/scale of the whole's.

        Raises:
            ValueError: Nothing is booked, or steps of several kinds: use ``engine.get_tradeoff()`` then.
        """
        booked = [check_entry(entry) for entry in engine.accountant.history]
        entries = [(*entry[:3], base_kind(entry[3])) for entry in booked]  # of samples, or of users
        kinds = {(sigma, rate, sampling) for sigma, rate, _, sampling in entries}
        if len(kinds) != 1 or entries[0][3] not in SAMPLINGS:
            raise ValueError(f"a claim needs steps of one kind, the accountant has booked {entries}")
        ((sigma, rate, sampling),) = kinds
        return cls(
            noise_multiplier=sigma * scale,
            sample_rate=rate,
            steps=len(entries) if sampling == "shuffle" else sum(entry[2] for entry in entries),
            sampling=check_sampling(sampling),
        )

    def accountant(self) -> FDPAccountant:
        """An accountant that has booked this and nothing else."""
        accountant = FDPAccountant()
        accountant.history = [(self.noise_multiplier, self.sample_rate, self.steps, self.sampling)]
        if self.sampling == "shuffle":
            accountant.history = [(self.noise_multiplier, self.sample_rate, 1, "shuffle")] * self.steps
        return accountant

    def tradeoff(self) -> TradeOffCurve:
        """The certified trade-off curve."""
        return _tradeoff(self)

    def epsilon(self, delta: float) -> float:
        """The certified epsilon."""
        return float(self.accountant().get_epsilon(delta))

    def describe(self) -> str:
        """The public constants in a few words."""
        if self.sampling == "shuffle":
            return f"shuffle, {self.steps} passes, σ_eff = {self.noise_multiplier:.3g}"
        if self.sample_rate == 1.0:
            return f"T = {self.steps}, no sampling, σ_eff = {self.noise_multiplier:.3g}"
        how = "" if self.sampling == "poisson" else f"{self.sampling}, "
        return f"{how}T = {self.steps}, q = {self.sample_rate:.3g}, σ_eff = {self.noise_multiplier:.3g}"


@lru_cache(maxsize=256)
def _tradeoff(claim: Claim) -> TradeOffCurve:
    return claim.accountant().get_tradeoff()


class Row(TypedDict, total=False):
    """What every audit hands on to :func:`judge`, which explains it, about its row of the report."""

    name: Required[str]
    delta: float
    audits: int
    note: str


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """One audit: what is claimed, what was found, and whether they contradict each other.

    Attributes:
        name: Which audit.
        setting: Its public constants.
        delta: Delta of both epsilons.
        claimed_epsilon: Certified upper bound.
        audited_epsilon: Lower bound at 95 % confidence that assumes nothing about the mechanism.
        claimed_mu: Gaussian parameter of the claim, where the claim is Gaussian.
        audited_mu: Lower bound on it at 95 % confidence.
        family_epsilon: Lower bound at 95 % confidence if the mechanism is a sampled Gaussian of unknown noise
            (every test of it then speaks about the noise, and through it about this delta).
        repetitions: Independent repetitions with the canary, and as many without; or canaries of one run.
        attack: Which statistic was chosen.
        violation: The claim is refuted at ``VERDICT_LEVEL`` divided by the number of audits.
        noise_ratio: Measured over stated noise, of the layer that is furthest off.
        differs: At the same level, some layer's noise is not the one that its block states.
        note: What a reader of the table should know.
    """

    name: str
    setting: str
    delta: float
    claimed_epsilon: float
    audited_epsilon: float
    claimed_mu: float | None = None
    audited_mu: float | None = None
    family_epsilon: float | None = None
    repetitions: int
    attack: str
    violation: bool
    noise_ratio: float | None = None
    differs: bool = False
    note: str = ""
    seconds: float = 0.0
    scores: Scores | None = field(default=None, repr=False, compare=False)
    curve: TradeOffCurve | None = field(default=None, repr=False, compare=False)

    @property
    def verdict(self) -> str:
        """In one word."""
        return "VIOLATION" if self.violation else "DIFFERS" if self.differs else "holds"

    @property
    def ratio(self) -> float:
        """The tightest audited figure over the claimed one: of mu if the claim is Gaussian, of epsilon
        otherwise.
        """
        if self.claimed_mu and self.audited_mu is not None:
            return self.audited_mu / self.claimed_mu
        best = self.audited_epsilon if self.family_epsilon is None else self.family_epsilon
        if self.claimed_epsilon == 0 or math.isinf(self.claimed_epsilon):
            return 0.0 if best == 0 or math.isinf(self.claimed_epsilon) else math.inf
        return best / self.claimed_epsilon

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        hidden = ("scores", "curve")
        own = {key: value for key, value in vars(self).items() if key not in hidden}
        return {**own, "ratio": self.ratio, "verdict": self.verdict}


def judge(
    candidates: Mapping[str, Scores],
    claim: Claim | TradeOffCurve,
    *,
    name: str,
    delta: float = 1e-5,
    audits: int = 1,
    setting: str | None = None,
    note: str = "",
) -> AuditResult:
    """Turn the scores of one or several attacks into a row of the report.

    **Formal guarantee**: each lower bound exceeds the truth with probability at most 5 %; ``violation`` is
    wrong with probability at most ``0.001 / audits``, so over a command of ``audits`` audits it is wrong
    anywhere with probability at most 0.001. Attack and threshold are chosen on one half of the repetitions,
    rates are limited on the other.

    Args:
        candidates: Scores of every attack that was tried, by name.
        claim: What is claimed; a plain curve leaves ``family_epsilon`` out.
        name: Which audit.
        delta: At which delta epsilons are compared.
        audits: How many audits share the verdict's error probability.
        setting: Public constants, in words; by default the claim's.
        note: For the table.
    """
    named = dict(candidates)
    curve = claim.tradeoff() if isinstance(claim, Claim) else claim
    level = VERDICT_LEVEL / audits

    worth = epsilon_bound(delta)
    audited = held_out_rates(named[choose(named, worth, REPORT_LEVEL)], worth, REPORT_LEVEL).worth(worth)

    against = share_of(curve)
    attack = choose(named, against, REPORT_LEVEL)
    rates = held_out_rates(named[attack], against, REPORT_LEVEL)
    strict = held_out_rates(named[choose(named, against, level)], against, level)
    scores = named[attack]
    return AuditResult(
        name=name,
        setting=setting or (claim.describe() if isinstance(claim, Claim) else "given curve"),
        delta=delta,
        claimed_epsilon=claim.epsilon(delta),
        audited_epsilon=audited,
        claimed_mu=curve.mu,
        audited_mu=rates.worth(mu_bound()) if curve.mu is not None else None,
        family_epsilon=_family_epsilon(claim, rates, delta) if isinstance(claim, Claim) else None,
        repetitions=min(len(scores.present), len(scores.absent)),
        attack=attack,
        violation=strict.worth(against) > 1,
        note=note,
        scores=scores,
        curve=curve,
    )


def audit_scores(
    present: Any,
    absent: Any,
    claim: Claim | TradeOffCurve,
    *,
    name: str = "given scores",
    delta: float = 1e-5,
    audits: int = 1,
) -> AuditResult:
    """Audit scores that you have collected: one for each independent run with, or without, the canary.

    **Formal guarantee** and assumptions: those of :func:`opacus_bc.audit.audit_training`.

    Args:
        present: Scores of the runs with the canary, larger where it seems in.
        absent: Scores of the runs without.
        claim: What is claimed of every run: a :class:`Claim`, or ``engine.get_tradeoff()``.
        name: For the report.
        delta: At which delta epsilons are compared.
        audits: How many audits share the verdict's error probability.

    >>> rng = np.random.default_rng(0)
    >>> claim = Claim(noise_multiplier=2.0, sample_rate=1.0, steps=1)  # G_mu with mu = 0.5
    >>> found = audit_scores(rng.normal(1.0, 1, 20_000), rng.normal(0.0, 1, 20_000), claim)
    >>> found.verdict, 0.9 < found.audited_mu < 1.0
    ('VIOLATION', True)
    """
    check_count("audits", audits, 1)
    scores = Scores(np.asarray(present, dtype=np.float64), np.asarray(absent, dtype=np.float64))
    return judge({"given": scores}, claim, name=name, delta=check_delta(delta), audits=audits)


def _family_epsilon(claim: Claim, rates: Rates, delta: float) -> float:
    """Epsilon at the largest noise multiplier that the rates leave possible."""
    if claim.noise_multiplier == 0:
        return 0.0

    def refuted(sigma: float) -> bool:
        curve = replace(claim, noise_multiplier=sigma).tradeoff()
        return rates.worth(share_of(curve)) > 1

    sigma = largest_noise(refuted, claim.noise_multiplier)
    return 0.0 if np.isinf(sigma) else replace(claim, noise_multiplier=sigma).epsilon(delta)
