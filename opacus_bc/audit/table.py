"""The list of all audits: every mode of the table, and the runs that it takes to see the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from opacus_bc.audit.adaptive import AdaptiveToy, audit_adaptive
from opacus_bc.audit.canaries import audit_many_canaries
from opacus_bc.audit.claims import AuditResult, Claim
from opacus_bc.audit.modes import MODES, OF_CONSTANTS, USERS, Mode
from opacus_bc.audit.ranks import audit_ranks
from opacus_bc.audit.resumed import audit_resumed
from opacus_bc.audit.toys import Toy, make_toy, single_round
from opacus_bc.audit.training import audit_buffers, audit_chunks, audit_worst_case_loop
from opacus_bc.audit.units import UserToy, audit_users, single_user_round
from opacus_bc.audit.worst_case import audit_worst_case, releases
from opacus_bc.draws.ledger import NoFreshBatchError

Audit = Callable[..., AuditResult]

_FIFTY: dict[str, Any] = {"steps": 50, "steps_per_epoch": 10}
_TEN: dict[str, Any] = {"steps": 10, "steps_per_epoch": 5}
_SHUFFLED: dict[str, Any] = {"sampling": "shuffle", "steps": 3, "steps_per_epoch": 4}
NO_SMALL_BATCHES = "three samples, half of the batches empty"


def worst_cases(repetitions: int) -> dict[str, Audit]:
    """Vectorised audits: name and a function of delta, audits and seed.

    Every mode for a single round; sampled steps and shuffled passes for one of each way to make gradients.
    """
    few, many = repetitions // 50, 2 * repetitions
    toys = {_round(name): (single_round(name), _number(mode, repetitions)) for name, mode in MODES.items()}
    toys |= {
        f"{method}, through the statistics": (single_round(method, through_statistics=True), repetitions // 4)
        for method in ("IC + BatchNorm, differentiated", "BK + BatchNorm, differentiated")
    }
    toys |= {
        "BC": (Toy(method="BC", **_FIFTY), many),
        "GBC": (Toy(method="GBC", mini_sets=4, **_FIFTY), many),
        "IC": (Toy(method="IC", **_FIFTY), many),
        "BK": (Toy(method="BK", **_FIFTY), many),
        "BC + ALC": (Toy(method="BC + ALC", layers=4, noise_multiplier=2.0, **_FIFTY), many),
        "BK + BatchNorm, differentiated": (
            Toy(method="BK + BatchNorm, differentiated", **_FIFTY),
            repetitions // 5,
        ),
        "BK of views": (Toy(method="BK of views", **_FIFTY), repetitions // 5),
        "BC, partition": (Toy(method="BC", sampling="partition", steps_per_epoch=10, steps=20), few),
        **{f"{name}, shuffle": (Toy(method=name, **_SHUFFLED), repetitions) for name in ("BC", "IC", "BK")},
    }
    return {
        name: _named(audit_worst_case, toy, name=name, repetitions=number)
        for name, (toy, number) in toys.items()
    }


def _round(method: str) -> str:
    return f"{method}, {'one round' if MODES[method].batch_norm is None else 'four rounds'}"


def _number(mode: Mode, repetitions: int) -> int:
    """A repetition with BatchNorm is four rounds of a wider model: a quarter is enough."""
    return repetitions if mode.batch_norm is None else repetitions // 4


def interrupted(repetitions: int) -> dict[str, Audit]:
    """Vectorised audits of runs that are saved and resumed half-way."""
    how = {"resumed bit by bit": True, "resumed with fresh randomness": False}
    return {
        f"{method}, {name}": _named(
            audit_resumed,
            Toy(method=method, **_FIFTY),
            name=f"{method}, {name}",
            repetitions=repetitions,
            exact=exact,
        )
        for method in ("BC", "BK")
        for name, exact in how.items()
    }


def of_users(repetitions: int) -> dict[str, Audit]:
    """Vectorised audits of runs that protect users: every sample of one user is the adversary's."""
    toys = {name: (single_user_round(name), _number(mode, repetitions)) for name, mode in USERS.items()}
    toys["BK of users, in chunks"] = (UserToy(method="BK of users", rows_at_once=5), repetitions)
    toys |= {
        f"{name}, sampled": (UserToy(method=name, **_TEN), repetitions // 5)
        for name in ("BK of users", "GBC of users")
    }
    return {
        name: _named(audit_users, toy, name=name, repetitions=number) for name, (toy, number) in toys.items()
    }


def several_processes(repetitions: int) -> dict[str, Audit]:
    """Vectorised audits of two ranks: not among the quick ones, since each rank imports torch anew."""
    toys = {
        "BC, two processes": Toy(method="BC", **_FIFTY),
        "GBC, two processes": Toy(method="GBC", mini_sets=4, **_FIFTY),
        **{
            f"{method}, two processes": Toy(method=method, **_FIFTY)
            for method in ("BK", "BK of views", "IC, Opacus's arithmetic")
        },
    }
    return {name: _named(audit_ranks, toy, name=name, repetitions=repetitions) for name, toy in toys.items()}


def adaptive(repetitions: int) -> dict[str, partial[AuditResult]]:
    """Opacus's adaptive clipping where it has a claim: without sampling."""
    name = "IC, Opacus's adaptive"
    toys = {f"{name}, shuffle": (AdaptiveToy(), repetitions)}
    few = repetitions // 4  # one pass after the other, and not side by side
    toys |= {
        f"{name}, {gradients}, shuffle": (AdaptiveToy(gradients=gradients), few)
        for gradients in ("functorch", "ew")
    }
    toys |= {
        f"{name} + BatchNorm, {policy}, shuffle": (AdaptiveToy(batch_norm=policy), few)
        for policy in OF_CONSTANTS
    }
    return {
        name: _named(audit_adaptive, toy, name=name, repetitions=number)
        for name, (toy, number) in toys.items()
    }


def whole_runs(runs: int, canaries: int) -> dict[str, Audit]:
    """Audits through the whole training loop, and those of one run with many canaries."""
    twice: dict[str, Any] = {"steps_per_epoch": 2, "steps": 4, "noise_multiplier": 0.7}
    small = Toy(method="BC", steps_per_epoch=2, steps=40, noise_multiplier=50.0)
    every: dict[str, tuple[Audit, dict[str, Any]]] = {
        **{
            f"{method}, full loop": (
                audit_worst_case_loop,
                {"toy": Toy(method=method, **twice), "copies": 30, "runs": runs},
            )
            for method in ("BC", "IC", "BK")
        },
        "empty batches": (
            audit_worst_case_loop,
            {"toy": small, "copies": 3, "runs": max(40, runs // 5), "note": NO_SMALL_BATCHES},
        ),
        "mini-sets keep apart": (audit_chunks, {"runs": runs, "note": "one sample in front of all others"}),
        **{
            f"{method}, running statistics": (
                audit_buffers,
                {"method": method, "runs": max(50, runs // 2), "noise_multiplier": 8.0},
            )
            for method in (
                "BC + BatchNorm, public",
                "IC + BatchNorm, differentiated",
                "BK + BatchNorm, differentiated",
            )
        },
        **{
            f"{method}, running statistics": (
                audit_buffers,
                {"method": method, "runs": runs, "noise_multiplier": 0.5},
            )
            for method in ("BC + BatchNorm, private", "GBC of users + BatchNorm, private")
        },
        **{
            f"{method}, one run": (
                audit_many_canaries,
                {"method": method, "canaries": canaries, "noise_multiplier": 1.0, **_FIFTY},
            )
            for method in ("IC", "BK")
        },
        "GBC, one run": (
            audit_many_canaries,
            {
                "canaries": canaries // 4,
                "steps": 4,
                "steps_per_epoch": 2,
                "noise_multiplier": 0.25,
                "mini_sets": canaries // 4,
                "note": "k = number of canaries",
            },
        ),
    }
    return {name: _named(audit, name=name, **settings) for name, (audit, settings) in every.items()}


def _named(audit: Audit, *args: Any, **settings: Any) -> partial[AuditResult]:
    return partial(audit, *args, **settings)


def second_step(**common: Any) -> AuditResult:
    """A loop that steps twice on one batch: the optimizer must refuse, so that nothing more is given away.

    If it does not, the loop is audited. Whatever else goes wrong is not taken for a refusal.
    """
    toy = Toy(method="BC", noise_multiplier=0.7, **_FIFTY)
    name = "BC, two steps on one batch"
    private = make_toy(toy, canaries=1)
    try:
        releases(private, with_canary=True, draws=1, steps_per_draw=2)
    except NoFreshBatchError:
        claim = Claim.booked(private.engine)
        return AuditResult(
            name=name,
            setting=claim.describe(),
            delta=common["delta"],
            claimed_epsilon=claim.epsilon(common["delta"]),
            audited_epsilon=0.0,
            repetitions=1,
            attack="none",
            violation=bool(private.inner.moved().any()) or len(private.movements) != claim.steps,
            note="the second is refused by the optimizer",
        )
    return audit_worst_case(toy, name=name, repetitions=20_000, steps_per_draw=2, **common)


def all_audits(*, quick: bool) -> dict[str, Audit]:
    """What the command runs, in its order."""
    return {
        **worst_cases(100_000 if quick else 1_000_000),
        **adaptive(2000 if quick else 20_000),
        **of_users(50_000 if quick else 200_000),
        **interrupted(50_000 if quick else 500_000),
        **({} if quick else several_processes(100_000)),
        "BC, two steps on one batch": second_step,
        **whole_runs(150 if quick else 4000, 2000 if quick else 10_000),
    }
