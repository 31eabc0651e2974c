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
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.engine.run import Run
from opacus_bc.public.data import PublicDataDescription, describe

FORMATS = ("text", "markdown", "json")
# Above this epsilon an attacker's success is not bounded in any useful way.
MEANINGLESS_EPSILON = 50.0

_ASSUMPTIONS = (
    "the number of steps and every noise, clipping and learning-rate schedule were fixed without looking at "
    "the private data or at this run's results on it",
    "nobody learns the random seeds of noise and sampling, nor those of dropout and augmentation "
    "(torch.manual_seed before training)",
    "public data, the data set's size and the hyper-parameters are public; hyper-parameters that were tuned "
    "on the private data cost more",
    "training forwards carry nothing of the private data over to later steps in plain attributes, and "
    "nothing but the private optimizer moves trained parameters",
)
_OF_SAMPLES = ("one person is one sample: several samples of one person are protected as a group",)
_OF_INDIVIDUAL_CLIPPING = (
    "one row of a batch is one sample, the loss is the samples' mean or sum as loss_reduction says, and a "
    "sample's loss and its way through the model do not depend on other samples (rows are counted in every "
    "step, forwards are probed in the first ones: evidence, no proof; weighted means, ignore_index, "
    "contrastive losses, MixUp and padding to a batch's longest sample that the model does not mask break it "
    "unseen)",
)
_OF_SEVERAL_ROWS = (
    "the training loop leaves the rows of a batch in the order in which they were delivered: a user's "
    "samples, or a sample's views, are found by their place",
)
_OF_PRIVATE_STATISTICS = (
    "in evaluation mode a sample's activations do not depend on other samples (probed before each release of "
    "running statistics: evidence, no proof)",
)
_OF_USERS = (
    "every sample has the id of the one user whom it is about, and the number of users and the most samples "
    "of a user in a step are public",
)
_NOT_COVERED = (
    "training losses, gradient norms, batch sizes, logs and intermediate quantities other than the weights, "
    "and pickles of a model between backward and step",
    "validation or early stopping on private data, and constants computed from them (scaling, vocabulary)",
    "the public data, which is not protected at all",
)
_ROUNDING = (
    "the rounding of Opacus's own float32 norms, by which a clipped gradient can exceed its bound slightly",
)
_INSECURE = "ordinary pseudo-random generator (not cryptographic): whoever knows or guesses the seed voids it"


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
    protects: str  # "sample" or "user": whom dataset_size counts
    batch_norm: str
    protected: bool
    public_data: tuple[PublicDataDescription, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything a statement says."""

    runs: tuple[RunFacts, ...]
    accountant: str
    steps: int
    delta: float
    epsilon: float
    certified_epsilon: float | None  # by "fdp" where the accountant is only an approximation
    mu: float | None  # of the Gaussian DP that the run is no worse than wherever delta is at least this one
    step_noise: tuple[float, float] | None  # least and largest sigma_eff: a scheduler may have moved it
    releases: tuple[float, ...]  # sigma_eff of releases besides the steps
    secure_noise: bool
    assumptions: tuple[str, ...] = _ASSUMPTIONS + _OF_SAMPLES
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
        assumptions=_assumptions(runs),
        not_covered=_NOT_COVERED + (() if all(r.optimizer.certified_norms for r in runs) else _ROUNDING),
    )


def _assumptions(runs: Sequence[Run]) -> tuple[str, ...]:
    found: tuple[str, ...] = _ASSUMPTIONS
    if any(run.plan.individual for run in runs):
        found += _OF_INDIVIDUAL_CLIPPING
    if any(run.plan.individual and run.plan.rows_of_unit > 1 for run in runs):
        found += _OF_SEVERAL_ROWS
    found += _OF_USERS if any(run.plan.unit == "user" for run in runs) else _OF_SAMPLES
    if any(run.policy.name == "private" for run in runs):
        found += _OF_PRIVATE_STATISTICS
    return found


def _is_release(entry: Any) -> bool:
    return len(entry) > 3 and entry[3] in RELEASES


def _certified(history: list[Any], delta: float) -> float:
    certified = FDPAccountant()
    certified.history = list(history)
    return float(certified.get_epsilon(delta))


def _run_facts(run: Run) -> RunFacts:
    plan, policy, optimizer = run.plan, run.policy, run.optimizer
    blocks = optimizer.blocks()
    bounds = sorted({round(block.sensitivity, 6) for block in blocks})
    if run.clipping == "per_layer":
        bounds = [math.hypot(*(block.sensitivity for block in blocks))]  # one release, of one vector
    public = [policy.describe_public()] if policy.public and policy.layers else []
    if run.alc_loader is not None and (not public or run.alc_loader is not policy.public.loader):  # type: ignore[union-attr]  # public data imply a loader
        public.append(describe(run.alc_loader))
    return RunFacts(
        mechanism=_mechanism(run),
        unit=unit_text(plan),
        sensitivity=f"{bounds[0]:g}" if len(bounds) == 1 else f"{bounds[0]:g} to {bounds[-1]:g}",
        groups=1 if run.clipping == "per_layer" else len(blocks),
        noise_multiplier=float(optimizer.noise_multiplier),
        effective_noise_multiplier=optimizer.effective_noise_multiplier,
        sampling=plan.kind,
        adjacency=plan.neighbours,
        sample_rate=plan.sample_rate,
        dataset_size=plan.dataset_size,
        protects=plan.protected,
        batch_norm=policy.keeper.describe(),
        protected=policy.protected,
        public_data=tuple(p for p in public if p is not None),
    )


def _mechanism(run: Run) -> str:
    plan = run.plan
    if plan.unit == "mini-set":
        return f"batch clipping of {counted(plan.mini_sets, 'mini-set')} of {_size_text(plan)} a step"
    if plan.unit == "user":
        vector = "one vector for each drawn user"
        return f"batch clipping, {vector}" if not plan.individual else f"individual clipping, {vector}"
    mean = "" if plan.views == 1 else f" of the mean of {plan.views} views of a sample"
    return f"individual clipping{mean} ({run.clipping!r})"


def unit_text(plan: SamplingPlan) -> str:
    """Who is protected, in words."""
    if plan.unit == "user":
        return f"one user with all their samples, at most {plan.cap} per step"
    return "one sample" if plan.views == 1 else "one sample with all its views"


def _size_text(plan: SamplingPlan) -> str:
    """How many samples are clipped together: with Poisson sampling that varies around its mean."""
    if plan.kind != "poisson":
        return counted(plan.mini_set_size, "sample")
    return f"{plan.dataset_size / plan.mini_sets / plan.steps_per_epoch:.4g} samples in expectation"


def render(facts: Facts, *, format: str = "text") -> str:
    """Write the facts down in one of ``FORMATS``."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
    if format == "json":
        return json.dumps({**asdict(facts), "verdict": verdict(facts)}, indent=2)
    sections = _sections(facts)
    if format == "text":
        return "\n".join(f"{title}: {body}." for title, body in sections)
    rows = [f"| {_cell(title)} | {_cell(body)} |" for title, body in sections]
    return "\n".join(["## Privacy statement", "", "| | |", "|---|---|", *rows])


def _cell(text: str) -> str:
    """A cell of a Markdown table: a bar would end it."""
    return text.replace("|", "\\|").replace("\n", " ")


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
    pair = f"({rounded_up(worst)}, {facts.delta:g})"
    users = " of users with all their samples" if any(r.protects == "user" for r in facts.runs) else ""
    return f"{pair}-differential privacy{users} for the weights of the released model"


def _sections(facts: Facts) -> list[tuple[str, str]]:
    sections = [("Guarantee", verdict(facts))]
    for i, run in enumerate(facts.runs):
        number = f" {i + 1}" if len(facts.runs) > 1 else ""
        described = {
            "Mechanism": f"{run.mechanism}, Gaussian noise, {counted(run.groups, 'clip group')}",
            "Unit and sensitivity": f"{run.unit} ({run.adjacency}); L2-sensitivity {run.sensitivity}; noise "
            f"multiplier now {run.noise_multiplier:g}, effective {run.effective_noise_multiplier:g}",
            "Sampling": f"{run.sampling}, rate {run.sample_rate:g}, {run.dataset_size} private "
            f"{run.protects}s",
            "BatchNorm": run.batch_norm,
            "Public data": _public_text(run.public_data),
        }
        sections += [(title + number, body) for title, body in described.items()]
    accounted = counted(facts.steps, "step")
    if facts.step_noise is not None:
        low, high = facts.step_noise
        accounted += f" with sigma_eff {low:g}" + (f" to {high:g}" if high > low else "")
    if facts.releases:
        sigmas = ", ".join(f"{sigma:g}" for sigma in facts.releases)
        releases = counted(len(facts.releases), "release")
        accounted += f" and {releases} of running statistics (sigma_eff {sigmas})"
    return [
        *sections,
        ("Accounted", f"{accounted}, accountant {facts.accountant!r}"),
        ("Epsilon", _epsilon_text(facts)),
        ("Noise", "cryptographic generator" if facts.secure_noise else _INSECURE),
        ("Assumes", "; ".join(facts.assumptions)),
        ("Not covered", "; ".join(facts.not_covered)),
    ]


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "step"), counted(0, "step")
    ('1 step', '0 steps')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _epsilon_text(facts: Facts) -> str:
    text = f"{rounded_up(facts.epsilon, 6)} at delta = {facts.delta:g}"
    if facts.certified_epsilon is not None:
        certified = rounded_up(facts.certified_epsilon, 6)
        text += f" (an approximation, no bound; the certified value is {certified})"
    if facts.mu is not None:
        mu = rounded_up(facts.mu)
        text += f"; no worse than Gaussian DP with mu = {mu} wherever delta >= {facts.delta:g}"
    return text


def _public_text(public: Sequence[PublicDataDescription]) -> str:
    parts = []
    for data in public:
        size = "a stream" if data.size is None else f"{data.size} samples"
        parts.append(f"{size}, sha256 {data.sha256[:16]} (of {data.hashed} samples), not protected")
    return "; ".join(parts) or "none"
