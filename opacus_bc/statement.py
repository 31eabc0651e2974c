"""The paragraph that a reviewer reads: what was released, what it costs, what it assumes, what it leaves out.

:func:`facts` gathers, :func:`render` writes. Nothing here is a function of private data except through the
accountant's history, which is a function of public constants.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opacus_bc.accounting import FDPAccountant
from opacus_bc.accounting.display import rounded_up
from opacus_bc.accounting.events import RELEASES
from opacus_bc.clipping import Block, effective_noise_multiplier, sensitivity
from opacus_bc.private_statistics import PrivateKeeper
from opacus_bc.public_data import PublicDataDescription, describe
from opacus_bc.run import Run

FORMATS = ("text", "markdown", "json")
# Above this epsilon an attacker's success is not bounded in any useful way.
MEANINGLESS_EPSILON = 50.0

_ASSUMPTIONS = (
    "the number of steps and every noise, clipping and learning-rate schedule were fixed without looking at "
    "the private data or at this run's results on it",
    "nobody learns the random seeds of noise and sampling",
    "public data, the data set's size and the hyper-parameters are public; hyper-parameters that were tuned "
    "on the private data cost more",
)
_NOT_COVERED = (
    "training losses, gradient norms, batch sizes, logs and intermediate quantities other than the weights",
    "validation or early stopping on private data, and constants computed from them (scaling, vocabulary)",
    "the public data, which is not protected at all",
)
_POLICIES = {
    "none": "the model keeps no running statistics",
    "public": "running statistics are re-estimated on public data; private forwards never write them",
    "private": "running statistics are released from private data with Gaussian noise, counted in epsilon",
    "batch": "no running statistics are kept; evaluation normalises with its own batch",
    "frozen": "running statistics are the given ones and were never written",
    "unprotected": "RUNNING STATISTICS LEAK: they were written from raw private batches and are not covered",
}

_PENDING = (
    "running statistics at the current weights are not released yet: finalize() does it, with Gaussian "
    "noise, and adds its cost to the epsilon stated here"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What one ``make_private`` call set up."""

    mechanism: str
    unit: str
    sensitivity: str
    groups: int
    noise_multiplier: float
    effective_noise_multiplier: float
    sampling: str
    adjacency: str
    sample_rate: float
    dataset_size: int
    batch_norm: str
    protected: bool
    public_data: tuple[PublicDataDescription, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything a statement says.

    Attributes:
        epsilon: By the engine's accountant.
        certified_epsilon: By ``"fdp"`` where the accountant is only an approximation, else None.
        mu: The Gaussian-DP parameter that dominates the run, if the accountant knows it.
        step_noise: Smallest and largest effective noise multiplier of a step; a scheduler may have moved it.
        releases: Effective noise multipliers of releases besides the steps.
    """

    runs: tuple[RunFacts, ...]
    accountant: str
    steps: int
    delta: float
    epsilon: float
    certified_epsilon: float | None
    mu: float | None
    step_noise: tuple[float, float] | None
    releases: tuple[float, ...]
    secure_noise: bool
    assumptions: tuple[str, ...] = _ASSUMPTIONS
    not_covered: tuple[str, ...] = _NOT_COVERED


def facts(engine: Any, runs: Sequence[Run], delta: float) -> Facts:
    """Gather what a statement about ``engine`` at ``delta`` has to say."""
    accountant = engine.accountant
    name = accountant.mechanism()
    history: list[Any] = list(accountant.history)
    steps = [entry for entry in history if not _is_release(entry)]
    noise = [float(entry[0]) for entry in steps]
    return Facts(
        runs=tuple(_run_facts(run) for run in runs),
        accountant=name,
        steps=sum(int(entry[2]) for entry in steps),
        delta=delta,
        epsilon=engine.get_epsilon(delta, allow_unprotected=True) if history else 0.0,
        certified_epsilon=_certified(history, delta) if name == "gdp" else None,
        mu=float(accountant.get_mu(delta)) if name == "fdp" and history else None,
        step_noise=(min(noise), max(noise)) if noise else None,
        releases=tuple(float(entry[0]) for entry in history if _is_release(entry)),
        secure_noise=bool(engine.secure_mode),
    )


def _is_release(entry: Any) -> bool:
    return len(entry) > 3 and entry[3] in RELEASES


def _certified(history: list[Any], delta: float) -> float:
    certified = FDPAccountant()
    certified.history = list(history)
    return float(certified.get_epsilon(delta))


def _run_facts(run: Run) -> RunFacts:
    adjacency = "add/remove one" if run.sampling == "poisson" else "replace one"
    size = len(run.data_loader.dataset)  # type: ignore[arg-type]  # map-style: make_private has checked
    batch = run.clipping == "batch"
    sets = max(1, int(run.data_loader.batch_size or 1) // run.mini_set_size)
    blocks: list[Block] = run.optimizer.blocks() if hasattr(run.optimizer, "blocks") else []
    sigma = float(run.optimizer.noise_multiplier)
    if blocks:
        effective = effective_noise_multiplier(blocks)
        bounds = sorted({round(block.sensitivity, 6) for block in blocks})
        delta = f"{bounds[0]:g}" if len(bounds) == 1 else f"{bounds[0]:g} to {bounds[-1]:g}"
    else:
        # Opacus's noise is sigma * C; replacing a sample moves the sum by 2C.
        factor = sensitivity(1.0, unit="sample", adjacency=adjacency)  # type: ignore[arg-type]  # one of Adjacency
        effective = sigma / factor
        delta = f"{factor * _total_bound(run.optimizer.max_grad_norm):g}"
    policy = run.policy
    public = [policy.describe_public()] if policy.public and policy.layers else []
    if run.alc_loader is not None and (not public or run.alc_loader is not policy.public.loader):  # type: ignore[union-attr]  # public data imply a loader
        public.append(describe(run.alc_loader))
    text = _POLICIES[policy.name]
    if isinstance(policy.keeper, PrivateKeeper) and not (policy.finished or policy.keeper.current):
        text = _PENDING
    if policy.name == "public" and policy.individual:
        text = (
            "training and evaluation normalise with statistics of public batches, as constants (new ones "
            f"every {_ordinal(policy.refresh_every)}step in training), so every sample's gradient is its own"
        )
        if policy.public is not None and policy.public.differentiate:
            text += "; it also follows these statistics into the layer directly before"
    return RunFacts(
        mechanism=(
            f"batch clipping of {counted(sets, 'mini-set')} of {_size_text(run, size / sets)} a step"
            if batch
            else f"individual clipping ({run.clipping!r})"
        ),
        unit="one sample",
        sensitivity=delta,
        groups=max(1, len(blocks)),
        noise_multiplier=sigma,
        effective_noise_multiplier=effective,
        sampling=run.sampling,
        adjacency=adjacency,
        sample_rate=1.0 / run.steps_per_epoch,
        dataset_size=size,
        batch_norm=text,
        protected=policy.protected,
        public_data=tuple(p for p in public if p is not None),
    )


def _size_text(run: Run, share: float) -> str:
    """How many samples are clipped together: with Poisson sampling that varies around its mean."""
    if run.sampling != "poisson":
        return counted(run.mini_set_size, "sample")
    return f"{share / run.steps_per_epoch:.4g} samples in expectation"


def _total_bound(max_grad_norm: Any) -> float:
    return math.hypot(*max_grad_norm) if isinstance(max_grad_norm, (list, tuple)) else float(max_grad_norm)


def render(facts: Facts, *, format: str = "text") -> str:
    """Write the facts down.

    Raises:
        ValueError: The format is unknown.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
    if format == "json":
        return json.dumps({**asdict(facts), "verdict": verdict(facts)}, indent=2)
    sections = _sections(facts)
    if format == "markdown":
        lines = ["## Privacy statement", ""]
        lines += [f"- **{title}**: {body}" for title, body in sections]
        return "\n".join(lines)
    return "\n".join(f"{title}: {body}." for title, body in sections)


def verdict(facts: Facts) -> str:
    """The guarantee in one sentence."""
    if any(not run.protected for run in facts.runs):
        return "no guarantee: running statistics leak; the epsilon below is that of the gradients alone"
    if not facts.steps and not facts.releases:
        return "nothing was released yet: no step was made, and the weights are those the model came with"
    worst = max(facts.epsilon, facts.certified_epsilon or 0.0)
    if math.isinf(worst):
        return "no protection: at least one release carried no noise"
    if worst > MEANINGLESS_EPSILON:
        return f"no meaningful protection: epsilon = {rounded_up(worst)} bounds nothing of practical use"
    return (
        f"({rounded_up(worst)}, {facts.delta:g})-differential privacy for the weights of the released model"
    )


def _sections(facts: Facts) -> list[tuple[str, str]]:
    sections = [("Guarantee", verdict(facts))]
    for i, run in enumerate(facts.runs):
        number = f" {i + 1}" if len(facts.runs) > 1 else ""
        groups = counted(run.groups, "clip group")
        sections += [
            (f"Mechanism{number}", f"{run.mechanism}, Gaussian noise, {groups}"),
            (
                f"Unit and sensitivity{number}",
                f"{run.unit} ({run.adjacency}); L2-sensitivity {run.sensitivity}; noise multiplier now "
                f"{run.noise_multiplier:g}, effective {run.effective_noise_multiplier:g}",
            ),
            (
                f"Sampling{number}",
                f"{run.sampling}, rate {run.sample_rate:g}, {run.dataset_size} private samples",
            ),
            (f"BatchNorm{number}", run.batch_norm),
            (f"Public data{number}", _public_text(run.public_data)),
        ]
    accounted = counted(facts.steps, "step")
    if facts.step_noise is not None:
        low, high = facts.step_noise
        accounted += f" with sigma_eff {low:g}" + (f" to {high:g}" if high > low else "")
    if facts.releases:
        sigmas = ", ".join(f"{sigma:g}" for sigma in facts.releases)
        accounted += (
            f" and {counted(len(facts.releases), 'release')} of running statistics (sigma_eff {sigmas})"
        )
    sections += [
        ("Accounted", f"{accounted}, accountant {facts.accountant!r}"),
        ("Epsilon", _epsilon_text(facts)),
        ("Noise", "cryptographic generator" if facts.secure_noise else _INSECURE),
        ("Assumes", "; ".join(facts.assumptions)),
        ("Not covered", "; ".join(facts.not_covered)),
    ]
    return sections


_INSECURE = "ordinary pseudo-random generator (not cryptographic): whoever knows or guesses the seed voids it"


def _ordinal(number: int) -> str:
    """What stands between "every" and "step".

    >>> _ordinal(1), _ordinal(10)
    ('', '10th ')
    """
    suffix = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return "" if number == 1 else f"{number}{suffix} "


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "step"), counted(0, "step")
    ('1 step', '0 steps')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _epsilon_text(facts: Facts) -> str:
    text = f"{rounded_up(facts.epsilon, 6)} at delta = {facts.delta:g}"
    if facts.certified_epsilon is not None:
        text += " (an approximation, no bound; the certified value is "
        text += f"{rounded_up(facts.certified_epsilon, 6)})"
    if facts.mu is not None:
        text += f"; dominated by Gaussian DP with mu = {rounded_up(facts.mu)}"
    return text


def _public_text(public: Sequence[PublicDataDescription]) -> str:
    if not public:
        return "none"
    parts = []
    for data in public:
        size = "a stream" if data.size is None else f"{data.size} samples"
        parts.append(f"{size}, sha256 {data.sha256[:16]} (of {data.hashed} samples), not protected")
    return "; ".join(parts)
