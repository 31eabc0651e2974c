"""pytest plugin: Opacus's own tests meet this package's engine and memory manager instead of Opacus's.

``make opacus-tests`` runs them. A test of :data:`support.opacus_differences.DIFFERENCES` must fail, with the
words that are listed; every other test must pass. Property tests try few examples,
always the same.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import opacus
import opacus.privacy_engine
import opacus.utils.batch_memory_manager
import pytest
from hypothesis import settings

from opacus_bc import BatchMemoryManager, PrivacyEngine
from support.opacus_differences import DIFFERENCES, Difference

opacus.PrivacyEngine = PrivacyEngine
opacus.privacy_engine.PrivacyEngine = PrivacyEngine
opacus.utils.batch_memory_manager.BatchMemoryManager = BatchMemoryManager

settings.register_profile(
    "opacus", max_examples=int(os.environ.get("OPACUS_TESTS_EXAMPLES", "4")), derandomize=True, deadline=None
)
settings.load_profile("opacus")

EXPECTED: dict[str, Difference] = {name: found for found in DIFFERENCES for name in found.tests}


def name_of(item: pytest.Item) -> str:
    """``Class::test``."""
    return "::".join(item.nodeid.split("::")[1:])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names on the list must exist, wherever a whole module was collected."""
    unknown = set(EXPECTED) - {name_of(item) for item in items}
    if unknown and len(items) > 300:
        raise pytest.UsageError(f"not among Opacus's tests: {', '.join(sorted(unknown))}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure that is on the list is expected; a test on the list that passes is a failure."""
    report = yield
    found = EXPECTED.get(name_of(item))
    if found is None or report.skipped or call.when != "call":
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
