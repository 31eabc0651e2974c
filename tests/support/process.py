"""Real processes for tests: the ranks of a run, forked from one that has imported everything."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def fork_ranks(count: int, folder: Path, run: Callable[[int], Any], *, timeout: float = 120) -> list[int]:
    """Run ``run(rank)`` in ``count`` processes that form a gloo group; the exit code of each.

    What it returns is saved as ``<rank>.pt``. Importing takes longer than running, so ranks are forked.
    """
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                _rank(rank, count, folder, run, timeout)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _rank(rank: int, count: int, folder: Path, run: Callable[[int], Any], timeout: float) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'store-{os.getppid()}'}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
    )
    torch.set_num_threads(1)
    torch.save(run(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()


# The package under test, and the tests' own support.
IMPORTS = os.pathsep.join(str(folder) for folder in Path(__file__).parents[1:3])


def run_script(script: str, *args: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """A test's support module as a program of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", script, *args],
        env={**os.environ, "PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def rank_results(script: str, scenario: str, folder: Path, ranks: int) -> list[Any]:
    """Run a scenario to its end and return what each rank found."""
    done = run_script(script, scenario, str(folder))
    assert done.returncode == 0, done.stdout
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
