"""What a method costs beside plain SGD: time and peak memory, as trained here.

Time is measured against plain SGD round by round, in turns, so that whatever else the machine does meets
both; memory is the peak of a process of its own, over what it held before.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from opacus_bc.experiments.cells import Cell
from opacus_bc.experiments.data import Data
from opacus_bc.experiments.session import prepare

ROUNDS = 3
SAMPLES = 512  # at least this many in a round
STEPS = 3  # before the peak of memory is read
# Tensors are mapped one by one, so that freed ones leave the process at once and the peak is theirs;
# libraries must not start threads, which would not survive a fork.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "4096", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def stepper(cell: Cell, data: Data) -> Callable[[int], float]:
    """A function that trains on about so many samples and returns seconds per sample."""
    training = prepare(cell, data)
    passes = itertools.chain.from_iterable(training.batches() for _ in itertools.count())

    def run(samples: int) -> float:
        done = 0
        start = time.perf_counter()
        while done < samples:
            x, y = next(passes)
            training.step(x, y)
            done += len(x)
        return (time.perf_counter() - start) / done

    return run


def time_ratio(cell: Cell, baseline: Cell, data: Data, *, rounds: int = ROUNDS) -> dict[str, float]:
    """Time per epoch over plain SGD's: the median of the rounds' ratios, the least and the largest."""
    if cell == baseline:
        return {"time": 1.0, "time_low": 1.0, "time_high": 1.0}
    size = max(cell.batch_size, baseline.batch_size)
    samples = size * -(-min(SAMPLES, len(data.private)) // size)
    both = stepper(cell, data), stepper(baseline, data)
    for warm_up in both:
        warm_up(min(samples, 256))
    ratios = []
    for _ in range(rounds):
        seconds, plain = (run(samples) for run in both)
        ratios.append(seconds / plain)
    return {"time": statistics.median(ratios), "time_low": min(ratios), "time_high": max(ratios)}


def peaks(cells: Sequence[Cell], load: Callable[[], Data]) -> list[float | None]:
    """Peak memory of each cell's training in MiB; None where the system does not tell (it must be Linux).

    Args:
        cells: With their noise given: a calibration would be measured too.
        load: Brings the data; a function of a module, or a partial of one.
    """
    if not Path("/proc/self/clear_refs").exists():
        return [None] * len(cells)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with _environment(_ENVIRONMENT):
        process = context.Process(target=_measure_in_forks, args=(theirs, list(cells), load))
        process.start()
    theirs.close()
    found: list[float | None] = []
    try:
        while len(found) < len(cells):
            found.append(mine.recv())
    except EOFError:  # it died: say nothing rather than something wrong
        found += [None] * (len(cells) - len(found))
    finally:
        process.kill()
        process.join()
    return found


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _measure_in_forks(answers: Any, cells: list[Cell], load: Callable[[], Data]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = load()
    context = multiprocessing.get_context("fork")
    for cell in cells:
        process = context.Process(target=_measure_here, args=(answers, cell, data))
        process.start()
        process.join()
        if process.exitcode:
            answers.send(None)


def _measure_here(answers: Any, cell: Cell, data: Data) -> None:
    _steps(cell, data, STEPS)  # fills the libraries' caches, which grow with every new shape of a batch
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    _steps(cell, data, STEPS)
    answers.send((_status("VmHWM") - before) / 1024)


def _steps(cell: Cell, data: Data, count: int) -> None:
    run = stepper(cell, data)
    for _ in range(count):
        run(cell.batch_size)


def _status(name: str) -> int:
    """A line of /proc/self/status in KiB."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])
