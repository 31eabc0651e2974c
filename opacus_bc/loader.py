"""From draws to delivered batches: one draw, one step.

The loader delivers a draw's mini-sets one after the other and writes down each delivery in a
:class:`DrawLedger`, which the optimizer reads: a step consumes exactly one complete draw. Nothing here knows
about gradients.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler, get_worker_info

from opacus_bc._opacus import StockBatchMemoryManager
from opacus_bc.sampling import SMALLEST_MINI_SET, Draw, DrawSource, SamplingPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One batch as handed to the user's loop: a mini-set, or a physical chunk of one.

    Attributes:
        serial: Number of the draw it belongs to; never used twice.
        pass_index: Number of the pass (each ``iter(loader)`` starts one).
        size: Samples in this batch.
        set_size: Samples in its mini-set.
        ends_set: Whether it completes the mini-set.
        ends_draw: Whether it completes the draw.
        placeholder: The draw had no deliverable mini-set; the gradient of this batch is discarded.
    """

    serial: int
    pass_index: int
    size: int
    set_size: int
    ends_set: bool
    ends_draw: bool
    placeholder: bool


def _nobody() -> None:
    """A listener that is not there."""


class DrawLedger:
    """Which batches were planned, delivered and consumed, in this order.

    **Formal guarantee**: :meth:`consume` returns every delivery at most once, in order, and only while it is
    the sole one outstanding; so the gradients of two deliveries never share a clip, and no draw serves two
    steps.

    **Edge cases**: a new pass forgets whatever is outstanding; an older iterator then raises. Whoever
    subscribed with :meth:`on_delivery` is told before a batch reaches the user's loop, so that gradients left
    over from anything earlier can be dropped.
    """

    def __init__(self) -> None:
        self._listener: Callable[[], Callable[[], None] | None] = _nobody
        self._iterators: list[weakref.ref[Any]] = []
        self.pass_index = 0
        self.loader_workers = 0
        self._last_serial = 0
        self._planned: deque[Delivery] = deque()
        self._outstanding: list[Delivery] = []
        self._chunk_ends_set: bool | None = None
        self._chunked_so_far = 0

    def __getstate__(self) -> dict[str, Any]:
        """Workers get a copy with the collate function; what only the main process uses stays here."""
        return {**self.__dict__, "_listener": _nobody, "_iterators": []}

    def on_delivery(self, method: Callable[[], None]) -> None:
        """Call the bound ``method`` before every delivery and at the start of every pass."""
        self._listener = weakref.WeakMethod(method)

    def _announce(self) -> None:
        if (method := self._listener()) is not None:
            method()

    def track(self, iterator: Iterator[Any]) -> None:
        """Remember an iterator over the draws for as long as it lives."""
        self._iterators = [ref for ref in self._iterators if ref() is not None]
        self._iterators.append(weakref.ref(iterator))

    def begin_pass(self) -> int:
        """Forget what an earlier pass left behind and return the new pass's number."""
        self.pass_index += 1
        self._announce()
        self._planned.clear()
        self._outstanding.clear()
        self._chunk_ends_set = None
        self._chunked_so_far = 0
        return self.pass_index

    def next_serial(self) -> int:
        """The next draw's number."""
        self._last_serial += 1
        return self._last_serial

    def plan(self, delivery: Delivery) -> None:
        """Note that this batch's indices have been handed to the DataLoader."""
        self._check_current(delivery.pass_index)
        self._planned.append(delivery)

    def _check_current(self, pass_index: int) -> None:
        if pass_index != self.pass_index:
            raise RuntimeError(
                "this iterator was superseded by a newer iter(loader): a draw must not be delivered twice"
            )

    def deliver(self, pass_index: int) -> None:
        """The oldest planned batch of this pass is about to reach the user's loop."""
        self._check_current(pass_index)
        self._deliver(self._planned.popleft())

    def announce_chunk(self, *, ends_set: bool) -> None:
        """Opacus's BatchMemoryManager is about to fetch a chunk of the oldest planned mini-set.

        Raises:
            RuntimeError: The loader has workers; then chunks are announced long before they are delivered,
                and which gradient belongs to which chunk could not be told.
        """
        if self.loader_workers:
            raise RuntimeError(
                f"Opacus's BatchMemoryManager with num_workers={self.loader_workers} announces batches "
                "before they are delivered: use opacus_bc.BatchMemoryManager (same arguments) or no workers"
            )
        alive = [i for ref in self._iterators if (i := ref()) is not None and i.gi_frame is not None]
        if len(alive) > 1:
            raise RuntimeError(
                "two iterators over one BatchMemoryManager loader are alive, and Opacus does not say whose "
                "chunk this is: delete the older one, or use opacus_bc.BatchMemoryManager (same arguments)"
            )
        self._chunk_ends_set = ends_set

    def deliver_chunk(self, size: int) -> None:
        """If a chunk was announced, it is being delivered now with ``size`` samples."""
        if self._chunk_ends_set is None:
            return
        ends_set, self._chunk_ends_set = self._chunk_ends_set, None
        whole = self._planned[0]
        self._chunked_so_far += size
        if ends_set:
            self._planned.popleft()
            if self._chunked_so_far != whole.set_size:
                raise RuntimeError(
                    f"chunks of {self._chunked_so_far} samples were delivered for a mini-set of "
                    f"{whole.set_size}: start again with iter(loader)"
                )
            self._chunked_so_far = 0
        self._deliver(replace(whole, size=size, ends_set=ends_set, ends_draw=whole.ends_draw and ends_set))

    def _deliver(self, delivery: Delivery) -> None:
        self._announce()
        if len(self._outstanding) < 2:  # two are an error already; more need not be kept
            self._outstanding.append(delivery)

    def outstanding(self) -> Delivery:
        """The one delivery that a step may use.

        Raises:
            RuntimeError: There is none, or more than one.
        """
        if not self._outstanding:
            raise RuntimeError(
                "optimizer.step() needs a new batch of the private loader: none was delivered since the last "
                "step (a second step on one draw would cost privacy that is not accounted)"
            )
        if len(self._outstanding) > 1:
            raise RuntimeError(
                "several batches were delivered since the last optimizer.step(): call backward() and step() "
                "once for each batch, or start again with iter(loader) (gradients of two draws must not be "
                "mixed)"
            )
        return self._outstanding[0]

    def consume(self) -> Delivery:
        """Take the outstanding delivery; it can never be used again."""
        delivery = self.outstanding()
        self._outstanding.clear()
        return delivery


class DrawSampler(Sampler[list[int]]):
    """Batch sampler that hands a draw's mini-sets (or chunks of them) to a DataLoader, one by one."""

    def __init__(self, draws: DrawSource, ledger: DrawLedger, max_size: int | None = None) -> None:
        self.draws = draws
        self.ledger = ledger
        self.max_size = max_size

    def __len__(self) -> int:
        plan = self.draws.plan
        chunks = 1 if self.max_size is None else math.ceil(plan.mini_set_size / self.max_size)
        return plan.steps_per_epoch * plan.mini_sets * chunks

    def __iter__(self) -> Iterator[list[int]]:
        iterator = self._mini_sets(self.ledger.begin_pass())
        self.ledger.track(iterator)
        return iterator

    def _mini_sets(self, pass_index: int) -> Iterator[list[int]]:
        for draw in self.draws:
            serial = self.ledger.next_serial()
            mini_sets, placeholder = deliverable(draw)
            for j, mini_set in enumerate(mini_sets):
                chunks = self._chunks(mini_set)
                for c, chunk in enumerate(chunks):
                    ends_set = c == len(chunks) - 1
                    self.ledger.plan(
                        Delivery(
                            serial=serial,
                            pass_index=pass_index,
                            size=len(chunk),
                            set_size=len(mini_set),
                            ends_set=ends_set,
                            ends_draw=ends_set and j == len(mini_sets) - 1,
                            placeholder=placeholder,
                        )
                    )
                    yield chunk

    def _chunks(self, mini_set: list[int]) -> list[list[int]]:
        if self.max_size is None or len(mini_set) <= self.max_size:
            return [mini_set]
        parts = np.array_split(np.asarray(mini_set), math.ceil(len(mini_set) / self.max_size))
        return [part.tolist() for part in parts]


def deliverable(draw: Draw) -> tuple[Draw, bool]:
    """The mini-sets large enough to be delivered, or a placeholder if there is none.

    A mini-set that is too small contributes zero, which is a function of that mini-set alone, so the
    sensitivity stays what it was. The placeholder only keeps the user's loop going: its gradient is
    discarded, and the step is noised, taken and accounted.
    """
    kept = [mini_set for mini_set in draw if len(mini_set) >= SMALLEST_MINI_SET]
    return (kept, False) if kept else ([list(range(SMALLEST_MINI_SET))], True)


class _AnnouncedCollate:
    """The user's collate function; in the main process it also reports the size of an announced chunk."""

    def __init__(self, collate: Callable[[list[Any]], Any], ledger: DrawLedger) -> None:
        self.collate = collate
        self.ledger = ledger

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if get_worker_info() is None:
            self.ledger.deliver_chunk(len(samples))
        return batch


class PrivateDataLoader(DataLoader[Any]):
    """The user's DataLoader with private draws: same data set, workers and collate function.

    ``len(loader)`` counts deliveries (the most there can be: mini-sets with fewer than two samples are left
    out), ``loader.steps_per_epoch`` counts optimizer steps.
    """

    def __init__(
        self,
        data_loader: DataLoader[Any],
        *,
        draws: DrawSource,
        ledger: DrawLedger | None = None,
        max_physical_batch_size: int | None = None,
    ) -> None:
        self.draws = draws
        self.ledger = ledger or DrawLedger()
        self.ledger.loader_workers = data_loader.num_workers
        collate = data_loader.collate_fn
        if isinstance(collate, _AnnouncedCollate):
            collate = collate.collate
        super().__init__(
            dataset=data_loader.dataset,
            batch_sampler=DrawSampler(draws, self.ledger, max_physical_batch_size),
            num_workers=data_loader.num_workers,
            collate_fn=_AnnouncedCollate(collate, self.ledger),
            pin_memory=data_loader.pin_memory,
            timeout=data_loader.timeout,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            generator=data_loader.generator,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
        )

    @property
    def plan(self) -> SamplingPlan:
        """The public description of the draws."""
        return self.draws.plan

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass."""
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names its private iterator
        iterator = super().__iter__()
        return self._delivered(iterator, self.ledger.pass_index)

    def _delivered(self, iterator: Iterator[Any], pass_index: int) -> Iterator[Any]:
        for batch in iterator:
            self.ledger.deliver(pass_index)
            yield batch

    def with_max_physical_batch_size(self, size: int) -> PrivateDataLoader:
        """The same draws, delivered in chunks of at most ``size`` samples."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"max_physical_batch_size must be a whole number >= 1, got {size!r}")
        return PrivateDataLoader(self, draws=self.draws, ledger=self.ledger, max_physical_batch_size=size)


class BatchMemoryManager(StockBatchMemoryManager):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's BatchMemoryManager, which for a private batch-clipping loader also works with workers.

    Chunks of one mini-set are accumulated *unclipped*, weighted by their size, and clipped once, so the
    clipped gradient of a model without batch statistics does not depend on the physical batch size.
    """

    def __enter__(self) -> DataLoader[Any]:
        if isinstance(self.data_loader, PrivateDataLoader):
            return self.data_loader.with_max_physical_batch_size(self.max_physical_batch_size)
        loader: DataLoader[Any] = super().__enter__()
        return loader
