"""The slower audits: every repetition is a whole run, from ``make_private`` to the last step.

They see what the vectorised audit takes for granted: how the real loader draws and delivers, empty batches,
the order of the data, seeds, and everything else that a finished model carries. :func:`audit_training` does
the same with a training function of yours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.accounting import TradeOffCurve
from opacus_bc.audit.bounds import Scores
from opacus_bc.audit.claims import AuditResult, Claim, Row, judge
from opacus_bc.audit.modes import MODES, USERS
from opacus_bc.audit.scores import Attack, Floats, likelihood_ratio, silent_steps
from opacus_bc.audit.toys import PrivateToy, Toy, make_toy, repeat_noise, samples
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.engine.privacy_engine import PrivacyEngine

Train = Callable[[bool, int], float]
Progress = Callable[[Iterable[int]], Iterable[int]]


def _silent(numbers: Iterable[int]) -> Iterable[int]:
    return numbers


def audit_training(
    train: Train,
    claim: Claim | TradeOffCurve,
    *,
    runs: int,
    name: str = "training",
    delta: float = 1e-5,
    audits: int = 1,
    first_seed: int = 0,
    progress: Progress = _silent,
    note: str = "",
) -> AuditResult:
    """Audit a training procedure, yours or a toy's, by running it many times with and without a canary.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`, provided

    * the two data sets differ by one sample as the claim's adjacency says (add or remove one for Poisson
      sampling, replace one otherwise), and by nothing else,
    * runs are independent: ``train`` seeds weights, data order and noise from its second argument, which
      never repeats, or from nothing at all,
    * a score is a function of what is released (the final model, or all steps if these are published), not
      of the data or of which of the two it was,
    * the number of steps is that of the claim.

    A score far from optimal, or a canary that does not use up the sensitivity, only makes the bound lower. A
    bound close to zero says that *this* attack failed and nothing about others.

    Args:
        train: ``train(with_canary, seed)`` trains once and returns a score, larger where the canary seems in.
        claim: What is claimed of every run: a :class:`Claim`, or ``engine.get_tradeoff()``.
        runs: Runs with, and as many without the canary; half of each choose the threshold.
        name: For the report.
        delta: At which delta epsilons are compared.
        audits: How many audits share the verdict's error probability.
        first_seed: Runs get different seeds from here on.
        progress: Wraps the iterable of run numbers, e.g. ``tqdm``.
        note: For the report.
    """
    scores = _collect(train, runs, first_seed, progress)
    return judge({"your score": scores}, claim, name=name, delta=delta, audits=audits, note=note)


def _check_runs(runs: int) -> None:
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 4:
        raise ValueError(f"runs must be a whole number >= 4, got {runs!r}")


def audit_loop(
    toy: Toy,
    with_canary: Tensor,
    without: Tensor,
    *,
    runs: int,
    attacks: dict[str, Attack] | None = None,
    seed: int = 0,
    progress: Progress = _silent,
    **row: Unpack[Row],
) -> AuditResult:
    """Audit the real loop on two data sets: make private, train for T steps, look at every step.

    Args:
        toy: What is audited; one layer.
        with_canary: The samples of the one data set.
        without: Those of the other.
        runs: Runs of each kind.
        attacks: Statistics of the standardised outputs ``(steps, repetitions)``; by default the likelihood
            ratio of the worst case and a count of steps without noise.
        seed: Runs get different seeds from here on.
        progress: Wraps the iterable of run numbers.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    _check_runs(runs)
    outputs = np.empty((2, toy.steps, runs))
    claims: set[Claim] = set()
    for i in progress(range(runs)):
        for which, data in enumerate((without, with_canary)):
            private = make_toy(toy, canaries=0, copies=len(data), data=data, seed=seed + 2 * i + which)
            outputs[which, :, i] = train_toy(private)
            claims.add(Claim.booked(private.engine))
    if len(claims) != 1:
        raise ValueError(f"the runs are not booked alike: {claims}")
    claim = claims.pop()
    if attacks is None:
        mu = 1 / claim.noise_multiplier
        attacks = {
            "likelihood ratio": likelihood_ratio(mu, claim.sample_rate),
            "silent steps": silent_steps(),
        }
    candidates = {key: Scores(attack(outputs[1]), attack(outputs[0])) for key, attack in attacks.items()}
    return judge(candidates, claim, **row)


def train_toy(private: PrivateToy) -> Floats:
    """The user's loop until T steps are made; what each released, as ``(<o, u> + k C) / tau``."""
    toy = private.toy
    while len(private.movements) < toy.steps:
        for x, _ in private.loader:
            private.step(x)
            if len(private.movements) == toy.steps:
                break
    start = 0.0 if toy.individual else toy.mini_sets * toy.max_grad_norm
    return (private.released()[:, 0, 0].astype(np.float64) + start) / float(private.noise_stds()[0])


def audit_worst_case_loop(toy: Toy, *, copies: int | None = None, **settings: Any) -> AuditResult:
    """The worst case through the whole loop; ``copies`` as in :func:`opacus_bc.audit.toys.make_toy`."""
    number = 40 * toy.mini_sets * toy.steps_per_epoch if copies is None else copies
    everything = samples(toy, number, 1)
    return audit_loop(toy, everything, everything[:-1], **settings)


def audit_chunks(*, noise_multiplier: float = 4.0, mini_sets: int = 8, **settings: Any) -> AuditResult:
    """Whether one more sample moves the others between mini-sets: data in which that would matter.

    Magnitudes fall and signs alternate, so that the first of a pair decides; with one sample in front and
    consecutive pairs every pair's sign flips: a shift of (2k - 1) C instead of 2C.
    """
    number = 2 * mini_sets - 1
    falling = torch.tensor([[1e18 * (-1.0) ** i * 0.1**i] for i in range(number)])
    front = torch.cat([-10 * falling[:1], falling])
    toy = Toy(method="GBC", noise_multiplier=noise_multiplier, mini_sets=mini_sets)
    return audit_loop(toy, front, falling, attacks={"sum": _negative_sum}, **settings)


def _negative_sum(x: Floats) -> Floats:
    return np.asarray(-x.sum(0))


def audit_buffers(
    *,
    runs: int,
    method: str = "BC + BatchNorm, public",
    steps: int = 4,
    noise_multiplier: float = 1.0,
    seed: int = 0,
    progress: Progress = _silent,
    **row: Unpack[Row],
) -> AuditResult:
    """Whether the running statistics of a finished model give a canary away.

    Args:
        runs: Runs of each kind.
        method: A row of :data:`opacus_bc.audit.modes.MODES` or ``USERS`` with BatchNorm. It is trained, and
            what ships is looked at; with the policy ``"private"`` statistics of the private data are released
            once, with noise, and these are looked at.
        steps: Steps of training; none for ``"private"``.
        noise_multiplier: sigma of the steps, or of the release.
        seed: Runs get different seeds from here on.
        progress: Wraps the iterable of run numbers.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    mode = {**MODES, **USERS}[method]
    how = mode.arguments(size=65, bound=1.0)
    users = mode.unit == "user"
    differentiated = mode.batch_norm == "differentiated"
    if mode.batch_norm == "public" or differentiated:
        public = DataLoader(TensorDataset(torch.linspace(-2, 2, 32)[:, None]), batch_size=16)
        how["batch_norm"] = PublicStatistics(loader=public, differentiate=differentiated)
    ordinary = torch.cat([torch.ones(32, 1), -torch.ones(32, 1)])
    canary = torch.full((3 if users else 1, 1), 1e3)  # a user of two rows in a step, as all others
    curves: list[TradeOffCurve] = []

    def train(with_canary: bool, number: int) -> float:
        torch.manual_seed(number)
        x = torch.cat([ordinary, canary]) if with_canary else ordinary
        protected = (64 // 2 if users else 64) + with_canary
        if users:
            how.update(unit=[min(i // 2, 32) for i in range(len(x))], mini_batch_size=2)
        norm: Any = nn.BatchNorm1d(1)
        # Statistics of the data themselves, or behind a layer into which they are differentiated.
        model = nn.Sequential(nn.Linear(1, 1), norm) if differentiated else nn.Sequential(norm)
        engine = PrivacyEngine()
        net, optimizer, loader = engine.make_private(
            module=model.append(nn.Linear(1, 1)),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            # The same public constants for both data sets: 64 or 65 samples, 32 or 33 users, two steps.
            data_loader=DataLoader(
                TensorDataset(x),
                batch_size=20 if users else 40,
                generator=torch.Generator().manual_seed(number),
            ),
            noise_multiplier=noise_multiplier,
            **how,
        )
        repeat_noise(optimizer, number)
        if mode.batch_norm == "private":
            engine.recalibrate_batch_norm(noise_multiplier=noise_multiplier)
        else:
            _train(net, optimizer, loader, steps)
        curves[:] = [engine.get_tradeoff()]
        if mode.batch_norm == "private":
            # The canary's clipped vector of moments points along the second moment. The normaliser is a
            # public constant, the same for both data sets: undo it.
            return float(norm.running_var + norm.running_mean**2) * protected
        engine.finalize(net)
        return float(norm.running_mean.abs() + norm.running_var)

    scores = _collect(train, runs, seed, progress)
    setting = f"BatchNorm, {'public, differentiated' if differentiated else mode.batch_norm} statistics"
    return judge({"running statistics": scores}, curves[0], setting=setting, **row)


def _collect(train: Train, runs: int, seed: int, progress: Progress) -> Scores:
    _check_runs(runs)
    pairs = [(train(True, seed + 2 * i), train(False, seed + 2 * i + 1)) for i in progress(range(runs))]
    present, absent = np.array(pairs).T
    return Scores(present, absent)


def _train(model: nn.Module, optimizer: Any, loader: Iterable[Sequence[Tensor]], steps: int) -> None:
    done = 0
    while done < steps:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
