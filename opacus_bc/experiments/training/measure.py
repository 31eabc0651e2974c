"""What a method costs beside plain SGD: time and peak memory, as trained here.

Time is measured against plain SGD round by round, in turns, so that whatever else the machine does meets
both; memory is that of all tensors that training makes, at its peak.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data
from opacus_bc.experiments.training.session import prepare

ROUNDS = 3
SAMPLES = 512  # at least this many in a round
STEPS = 2  # optimizer states exist from the second one on


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


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Counts the bytes of all tensors that were made while it is open and still live, and their peak.

    Args:
        outside: Tensors that do not count, nor do views of them: a batch may hold rows of the data set.

    Storages are followed by weak reference, so what autograd keeps for the backward pass counts, and the same
    training gives the same number on every machine. What kernels use inside themselves does not count.
    """

    def __init__(self, outside: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._outside = {_reference(tensor.untyped_storage()) for tensor in outside}
        self._sizes: dict[Any, int] = {}  # by weak reference to a storage
        self._bytes = 0  # of everything in _sizes, some of which may be gone
        self.peak = 0

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """From now on these do not count either: data that a training keeps, say."""
        for tensor in tensors:
            reference = _reference(tensor.untyped_storage())
            self._outside.add(reference)
            self._bytes -= self._sizes.pop(reference, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        reference = _reference(storage)
        if reference in self._outside:
            return
        if reference not in self._sizes:
            self._sizes[reference] = storage.nbytes()
            self._bytes += storage.nbytes()
        if self._bytes > self.peak:  # it matters only now who is gone
            self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
            self._bytes = sum(self._sizes.values())
            self.peak = max(self.peak, self._bytes)


def _reference(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's has no types


def peak_bytes(cell: Cell, data: Data) -> int:
    """Peak of model, optimizer, batch, activations and gradients over the first steps, without the data set.

    Args:
        cell: With its noise given: a calibration would be measured too.
        data: Already loaded, so that it does not count.
    """
    parts = (data.private, data.public, data.test)
    memory = TensorMemory(outside=[tensor for part in parts for tensor in part.tensors])
    with memory:
        run = stepper(cell, data)
        for _ in range(STEPS):
            run(cell.batch_size)
    return memory.peak
