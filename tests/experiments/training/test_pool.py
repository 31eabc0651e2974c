"""Work in processes: everything comes back, failures stay single, a dead worker is told, nobody is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from opacus_bc.experiments.training.pool import Progress, run_all


def double(item: int, report: Progress) -> int:
    report(1)
    if item < 0:
        raise ValueError(f"{item} is negative")
    return 2 * item


def threads(_: int, report: Progress) -> int:
    return torch.get_num_threads()


def die(item: int, report: Progress) -> int:
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    return item


def sleep(item: int, report: Progress) -> int:
    report(1)
    time.sleep(600)
    return item


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_failures_and_progress_arrive(jobs: int) -> None:
    seen: list[tuple[int, int]] = []
    items = [3, -1, 5]
    found = dict(
        run_all(double, items, jobs=jobs, on_progress=lambda index, amount: seen.append((index, amount)))
    )
    assert found[0] == 6
    assert found[2] == 10
    assert isinstance(found[1], ValueError)
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1)]


def test_work_has_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert dict(run_all(threads, [0], jobs=1)) == {0: 1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_worker_that_dies_is_told_in_one_line() -> None:
    with pytest.raises(ChildProcessError, match="fewer --jobs") as caught:
        list(run_all(die, [0, 1, 2], jobs=2))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process_behind() -> None:
    def interrupt(index: int, amount: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(run_all(sleep, [0, 1], jobs=2, on_progress=interrupt))
    for child in multiprocessing.active_children():
        child.join(10)
    assert not multiprocessing.active_children()
    assert time.monotonic() - start < 300, "it must not wait for the work to end"
