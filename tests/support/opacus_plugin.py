"""pytest plugin: Opacus's own tests meet this package's engine and memory manager instead of Opacus's.

``make opacus-tests`` runs them. A test of :data:`support.opacus_differences.DIFFERENCES` must fail, with the
words that are listed; one of :data:`support.opacus_differences.BY_CHANCE` may fail with its words; every
other test must pass. Property tests try few examples, always the same.

Opacus's tests rely on ``torch.manual_seed``, which does not seed this package's streams. What the operating
system would give these follows from the test's name here, anew for each example of a property test, so that
a test has the same noise in every run. No seed was chosen by what comes out.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import opacus
import opacus.privacy_engine
import opacus.utils.batch_memory_manager
import pytest
from hypothesis import settings

from opacus_bc import BatchMemoryManager, PrivacyEngine
from opacus_bc.engine import individual
from opacus_bc.engine.resume import randomness as resumed
from opacus_bc.mechanism import noise, randomness
from support.opacus_differences import BY_CHANCE, DIFFERENCES, difference

WHOLE = 450  # tests of Opacus 1.6; fewer were asked for by name


def pytest_configure() -> None:
    """Exchange the two classes before any test is imported; an import of this module exchanges nothing."""
    opacus.PrivacyEngine = PrivacyEngine
    opacus.privacy_engine.PrivacyEngine = PrivacyEngine
    opacus.utils.batch_memory_manager.BatchMemoryManager = BatchMemoryManager
    examples = int(os.environ.get("OPACUS_TESTS_EXAMPLES", "4"))
    settings.register_profile("opacus", max_examples=examples, derandomize=True, deadline=None)
    settings.load_profile("opacus")


def name_of(item: pytest.Item) -> str:
    """``Class::test``."""
    return "::".join(item.nodeid.split("::")[1:])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names on the list must exist, where the whole suite was collected."""
    names = [name_of(item) for item in items]
    stale = [found for found in (*DIFFERENCES, BY_CHANCE) if not any(found.covers(name) for name in names)]
    if stale and len(items) > WHOLE:
        raise pytest.UsageError(
            f"none of Opacus's tests: {', '.join(t for found in stale for t in found.tests)}"
        )


class Seeds:
    """Seeds that follow one another as the operating system's would, always the same ones."""

    def __init__(self, name: str) -> None:
        self.start = zlib.crc32(name.encode())
        self.restart()

    def restart(self) -> None:
        """Begin again with the first one."""
        self.stream = np.random.default_rng(self.start)

    def __call__(self) -> int:
        return int(self.stream.integers(2**63))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Give the test seeds of its own, and each of its examples the same ones."""
    seeds = Seeds(name_of(item))
    with ExitStack() as undo:
        for module in (randomness, noise, individual, resumed):
            undo.enter_context(mock.patch.object(module, "entropy", seeds))
        examples = getattr(getattr(item, "obj", None), "hypothesis", None)
        if examples is not None:
            undo.enter_context(mock.patch.object(examples, "inner_test", _seeded(seeds, examples.inner_test)))
        return (yield)


def _seeded(seeds: Seeds, test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def example(*args: Any, **drawn: Any) -> None:
        seeds.restart()
        test(*args, **drawn)

    return example


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure that is on the list is expected; a test on the list that passes is a failure."""
    report = yield
    found = difference(name_of(item))
    if found is None or report.skipped or call.when != "call":
        return report
    if report.passed and found is BY_CHANCE:
        return report
    if report.passed:
        report.outcome = "failed"
        report.longrepr = f"this test is listed as different and passes: {found.why}"
    elif call.excinfo is not None and any(words in _said(call.excinfo.value) for words in found.words):
        report.outcome = "skipped"
        report.wasxfail = found.why
    return report


def _said(error: BaseException) -> str:
    """All messages of an error and of those that it came from."""
    parts = [f"{type(error).__name__}: {error}"]
    parts += [_said(inner) for inner in getattr(error, "exceptions", ())]
    if error.__cause__ is not None:
        parts.append(_said(error.__cause__))
    return "\n".join(parts)
