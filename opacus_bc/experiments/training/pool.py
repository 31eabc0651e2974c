"""Work in several processes that can be interrupted at any moment: whatever counts is in files by then."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], None]
Work = Callable[[Item, Progress], Result]

_POLL_SECONDS = 0.2
_queue: Any = None  # in a worker: the way back to the parent


def run_all(
    work: Work[Item, Result],
    items: Sequence[Item],
    *,
    jobs: int,
    on_progress: Callable[[int, int], None] = lambda index, amount: None,
) -> Iterator[tuple[int, Result | Exception]]:
    """Yield (index, result or exception) as items are finished, in any order.

    Args:
        work: Called with an item and a function that reports how far it is; a function of a module, because
            it travels to other processes.
        items: What to work on.
        jobs: Processes, each with one torch thread; 1 works in this process.
        on_progress: Told the index of an item and what its work reported.

    Raises:
        ChildProcessError: A worker died (the kernel kills the largest process when memory runs out).
    """
    if jobs == 1 or len(items) <= 1:
        yield from _here(work, items, on_progress)
        return
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    pool = ProcessPoolExecutor(
        min(jobs, len(items)), mp_context=context, initializer=_start_worker, initargs=(queue,)
    )
    clean = False
    try:
        futures: dict[Future[Result], int] = {
            pool.submit(_in_worker, work, index, item): index for index, item in enumerate(items)
        }
        waiting = set(futures)
        while waiting:
            finished, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            while not queue.empty():
                on_progress(*queue.get())
            for future in finished:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise ChildProcessError(
                        "a worker process died, perhaps for want of memory: what is finished is kept, so "
                        "give the same command again, with fewer --jobs"
                    ) from error
                yield futures[future], error if isinstance(error, Exception) else future.result()
        clean = True
    finally:
        if not clean:
            for child in multiprocessing.active_children():
                child.terminate()
        pool.shutdown(wait=clean, cancel_futures=True)


def _here(
    work: Work[Item, Result], items: Sequence[Item], on_progress: Callable[[int, int], None]
) -> Iterator[tuple[int, Result | Exception]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait for the first
    try:
        for index, item in enumerate(items):

            def report(amount: int, index: int = index) -> None:
                on_progress(index, amount)

            result: Result | Exception
            try:
                with warnings.catch_warnings():
                    _quiet()
                    result = work(item, report)
            except Exception as error:
                result = error
            yield index, result
    finally:
        torch.set_num_threads(threads)


def _quiet() -> None:
    warnings.filterwarnings("ignore", message="Full backward hook is firing")


def _start_worker(queue: Any) -> None:
    global _queue
    _queue = queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(1)
    _quiet()
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A parent that was killed cannot end its workers: they must not go on behind the next command's back."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _in_worker(work: Work[Item, Result], index: int, item: Item) -> Result:
    return work(item, lambda amount: _queue.put((index, amount)))
