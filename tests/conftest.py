"""What pytest must know before any test is collected, and what every test gets."""

from __future__ import annotations

import itertools
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors; this one is torch's advice to users of one release of Python."""
    config.addinivalue_line("filterwarnings", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Weights and data that a test draws are its own, whatever ran before it on this worker."""
    seed = random.Random(item.nodeid).getrandbits(32)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the stream that other libraries draw from
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _repeatable_entropy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's entropy comes from the test's name, so that a statistical test has a fixed seed.

    Every call gives other bytes, and a forked process others than its parent.
    """
    calls, home = itertools.count(), os.getpid()

    def urandom(size: int) -> bytes:
        apart = "" if os.getpid() == home else os.getpid()
        return random.Random(f"{request.node.nodeid} {next(calls)} {apart}").randbytes(size)

    monkeypatch.setattr("opacus_bc.mechanism.randomness.os", SimpleNamespace(urandom=urandom))
