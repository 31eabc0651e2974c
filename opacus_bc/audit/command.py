"""The command ``opacus-bc audit``: a list of audits, run one after the other."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from opacus_bc.accounting.events import check_count, check_delta
from opacus_bc.audit import report
from opacus_bc.audit.canaries import audit_many_canaries
from opacus_bc.audit.claims import AuditResult, Claim
from opacus_bc.audit.ranks import audit_ranks
from opacus_bc.audit.resumed import audit_resumed
from opacus_bc.audit.toys import Toy, make_toy
from opacus_bc.audit.training import audit_buffers, audit_chunks, audit_worst_case_loop
from opacus_bc.audit.worst_case import audit_worst_case, releases
from opacus_bc.draws.ledger import NoFreshBatchError

Audit = Callable[..., AuditResult]

_FIFTY: dict[str, Any] = {"steps": 50, "steps_per_epoch": 10}
NO_SMALL_BATCHES = "three samples, half of the batches empty"


def worst_cases(repetitions: int) -> dict[str, Audit]:
    """Vectorised audits: name and a function of delta, audits and seed."""
    few, many = repetitions // 50, 2 * repetitions
    toys: dict[str, tuple[Toy, int]] = {
        "BC, one round": (Toy(method="BC"), repetitions),
        "GBC, one round": (Toy(method="GBC", mini_sets=4), repetitions),
        "IC, one round": (Toy(method="IC"), repetitions),
        "BC + ALC, one round": (Toy(method="ALC", layers=4, noise_multiplier=2.0), repetitions),
        "BC + ALC by scaling, one round": (Toy(method="ALC scale", layers=4), repetitions),
        "IC + ALC, one round": (Toy(method="IC + ALC", layers=4, noise_multiplier=2.0), repetitions),
        "IC + public BatchNorm, differentiated": (
            Toy(method="IC + BatchNorm", noise_multiplier=2.0, steps=4),
            repetitions // 2,
        ),
        "BC": (Toy(method="BC", **_FIFTY), many),
        "GBC": (Toy(method="GBC", mini_sets=4, **_FIFTY), many),
        "IC": (Toy(method="IC", **_FIFTY), many),
        "BC + ALC": (Toy(method="ALC", layers=4, noise_multiplier=2.0, **_FIFTY), many),
        "BC, partition": (Toy(method="BC", sampling="partition", steps_per_epoch=10, steps=20), few),
        "BC, shuffle": (Toy(method="BC", sampling="shuffle", steps_per_epoch=4, steps=3), repetitions),
        "IC, shuffle": (Toy(method="IC", sampling="shuffle", steps_per_epoch=4, steps=3), repetitions),
    }
    return {
        name: _named(audit_worst_case, toy, name=name, repetitions=number)
        for name, (toy, number) in toys.items()
    }


def interrupted(repetitions: int) -> dict[str, Audit]:
    """Vectorised audits of runs that are saved and resumed half-way."""
    how = {"BC, resumed bit by bit": True, "BC, resumed with fresh randomness": False}
    toy = Toy(method="BC", **_FIFTY)
    return {
        name: _named(audit_resumed, toy, name=name, repetitions=repetitions, exact=exact)
        for name, exact in how.items()
    }


def several_processes(repetitions: int) -> dict[str, Audit]:
    """Vectorised audits of two ranks: not among the quick ones, since each rank imports torch anew."""
    toys = {
        "BC, two processes": Toy(method="BC", **_FIFTY),
        "GBC, two processes": Toy(method="GBC", mini_sets=4, **_FIFTY),
    }
    return {name: _named(audit_ranks, toy, name=name, repetitions=repetitions) for name, toy in toys.items()}


def whole_runs(runs: int, canaries: int) -> dict[str, Audit]:
    """Audits through the whole training loop, and those of one run with many canaries."""
    twice: dict[str, Any] = {"steps_per_epoch": 2, "steps": 4, "noise_multiplier": 0.7}
    small = Toy(method="BC", steps_per_epoch=2, steps=40, noise_multiplier=50.0)
    every: dict[str, tuple[Audit, dict[str, Any]]] = {
        "BC, full loop": (
            audit_worst_case_loop,
            {"toy": Toy(method="BC", **twice), "copies": 30, "runs": runs},
        ),
        "IC, full loop": (
            audit_worst_case_loop,
            {"toy": Toy(method="IC", **twice), "copies": 30, "runs": runs},
        ),
        "empty batches": (
            audit_worst_case_loop,
            {"toy": small, "copies": 3, "runs": max(40, runs // 5), "note": NO_SMALL_BATCHES},
        ),
        "mini-sets keep apart": (audit_chunks, {"runs": runs, "note": "one sample in front of all others"}),
        "BatchNorm, public statistics": (
            audit_buffers,
            {"policy": "public", "runs": max(50, runs // 2), "noise_multiplier": 8.0},
        ),
        "BatchNorm, public statistics, IC": (
            audit_buffers,
            {"policy": "individual", "runs": max(50, runs // 2), "noise_multiplier": 8.0},
        ),
        "BatchNorm, private statistics": (
            audit_buffers,
            {"policy": "private", "runs": runs, "noise_multiplier": 0.5},
        ),
        "IC, one run": (
            audit_many_canaries,
            {"canaries": canaries, "steps": 50, "steps_per_epoch": 10, "noise_multiplier": 1.0},
        ),
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


def _named(audit: Audit, *args: Any, **settings: Any) -> Audit:
    def run(**common: Any) -> AuditResult:
        return audit(*args, **settings, **common)

    return run


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
        **interrupted(50_000 if quick else 500_000),
        **({} if quick else several_processes(100_000)),
        "BC, two steps on one batch": second_step,
        **whole_runs(150 if quick else 4000, 2000 if quick else 10_000),
    }


@contextmanager
def _set_up() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the toys are small: threads cost more than they bring
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus's hooks
            yield
    finally:
        torch.set_num_threads(before)


def run_audits(
    audits: dict[str, Audit], *, delta: float = 1e-5, seed: int = 0, progress: bool = False
) -> list[AuditResult]:
    """Run the audits one after the other; they share the verdict's error probability."""
    results: list[AuditResult] = []
    with _set_up():
        for place, (_, audit) in enumerate(_bar(audits, progress)):
            start = time.perf_counter()
            result = audit(delta=delta, audits=len(audits), seed=seed + 1_000_003 * place)
            results.append(replace(result, seconds=time.perf_counter() - start))
    return results


def _bar(audits: dict[str, Audit], progress: bool) -> Iterator[tuple[str, Audit]]:
    if not progress:
        yield from audits.items()
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("the progress bar needs tqdm: pip install 'opacus-bc[experiments]'") from error
    with tqdm(audits.items(), unit="audit", file=sys.stderr) as bar:
        for name, audit in bar:
            bar.set_description(name)
            yield name, audit


def audit(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    delta: float = 1e-5,
    seed: int = 0,
    json: bool = False,
    markdown: bool = False,
    update: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Attack the real optimizer, loader and accountant and compare with what they claim.

    Exit code 1 if some claim is refuted at 99.9 % confidence.

    Args:
        quick: a tenth of the repetitions: under a minute.
        only: run the audits whose name contains one of these words.
        delta: the delta at which epsilons are compared.
        seed: of everything random; another seed is another attack.
        json: print JSON instead of a table.
        markdown: print the table in Markdown.
        update: put the Markdown table into this file, between its marks.
        plot: draw score histograms and trade-off curves into this file (.png, .pdf, .svg).
    """
    check_delta(delta)
    check_count("seed", seed)
    every = all_audits(quick=quick)
    chosen = {
        name: run
        for name, run in every.items()
        if not only or any(word.lower() in name.lower() for word in only)
    }
    if not chosen:
        raise ValueError(f"only={list(only)!r} names none of: {'; '.join(every)}")
    results = run_audits(chosen, delta=delta, seed=seed, progress=True)
    command = "opacus-bc audit" + (" --quick" if quick else "") + (f" --seed {seed}" if seed else "")
    if plot is not None:
        report.plot(results, plot)
    if update is not None:
        report.update(update, report.markdown(results, command))
    if json:
        print(report.as_json(results))
    elif markdown:
        print(report.markdown(results, command))
    else:
        report.print_table(results, None if sys.stdout.isatty() else 170)
    return int(any(result.verdict != "holds" for result in results))
