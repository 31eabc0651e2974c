"""The command ``opacus-bc audit``: a list of audits, run one after the other."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from opacus_bc.accounting.events import check_count, check_delta
from opacus_bc.audit import report
from opacus_bc.audit.claims import AuditResult
from opacus_bc.audit.table import Audit, all_audits


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
        quick: a tenth of the repetitions: about four minutes of one core.
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
