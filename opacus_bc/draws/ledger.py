"""Which batches were planned, delivered and consumed: what makes one draw serve one step and no more."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from opacus_bc.mechanism.types import State

CHUNKS_OVER_RANKS = (
    "ranks would make different numbers of backwards: BatchMemoryManager does not go with several ranks; use "
    "more of them or a smaller batch"
)


class NoFreshBatchError(RuntimeError, ValueError):
    """A step for which nothing was drawn: it would use a draw twice. Raised before anything changes."""

    def __init__(self) -> None:
        super().__init__(
            "optimizer.step() needs a new batch of the loader that make_private returned: none was delivered "
            "since the last step. Iterate over that loader, not over the one that you passed in, and step "
            "once for each batch (a second step on one draw would cost privacy that is not accounted)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One batch as handed to the user's loop: a mini-set, a batch of units, or a chunk of either."""

    serial: int  # of the draw it belongs to; never used twice
    pass_index: int  # each iter(loader) starts a pass
    size: int  # rows of this batch: its samples, each as often as it has views
    set_size: int  # rows of its mini-set or batch
    ends_set: bool  # whether it completes the mini-set or batch
    ends_draw: bool
    placeholder: bool  # nothing was drawn that could be delivered; this batch's gradient is discarded
    share: float = 1.0  # of the mini-set, where several processes work on one together
    counts: tuple[int, ...] | None = None  # rows of each unit, one after the other; None: every row is one

    @property
    def units(self) -> int:
        """How many units of individual clipping are in this batch."""
        return self.size if self.counts is None else len(self.counts)


def cut_at_units(counts: tuple[int, ...], start: int, size: int) -> tuple[int, ...]:
    """The counts of the units in ``size`` rows from ``start`` on.

    Raises:
        RuntimeError: A unit has rows on both sides of a cut: it would be clipped twice and move 2C.
    """
    ends = [0, *accumulate(counts)]
    if start not in ends or start + size not in ends:
        raise RuntimeError(
            "a chunk of this batch would cut a user's or a sample's rows in two, which are clipped as one "
            "vector: use opacus_bc.BatchMemoryManager (same arguments) instead of Opacus's"
        )
    return counts[ends.index(start) : ends.index(start + size)]


class Listener(Protocol):
    """Who must drop what it holds before another batch arrives: the optimizer."""

    def before_delivery(self) -> None:
        """A batch is about to reach the user's loop: gradients of earlier ones must not survive."""
        ...

    def before_pass(self) -> None:
        """A pass begins: a draw that an earlier one left unfinished must not survive."""
        ...


def _nobody() -> None:
    """A listener that is not there."""


def _always() -> bool:
    """Nobody limits the draws."""
    return True


class DrawLedger:
    """Which batches were planned, delivered and consumed, in this order.

    **Formal guarantee**: :meth:`consume` returns every delivery at most once, in order, and only while it is
    the sole one outstanding; so the gradients of two deliveries never share a clip, and no draw serves two
    steps. That holds in every mode, with and without loader workers.

    **Edge cases**: a new pass forgets whatever is outstanding; an older iterator then raises. The listener is
    told before a batch reaches the user's loop, so that gradients left over from anything earlier can be
    dropped. After a resume within a pass the next one makes up the rest of it: ``resume_after`` draws are not
    drawn again.
    """

    def __init__(self) -> None:
        self._listener: Callable[[], Listener | None] = _nobody
        self._may_begin: Callable[[], bool] = _always
        self._iterators: list[weakref.ref[Iterator[list[int]]]] = []
        self.pass_index = 0
        self.draws_used = 0  # by steps of the current pass
        self.resume_after = 0  # draws of the next pass that steps of another process have used
        self.loader_workers = 0
        self._last_serial = 0
        self._planned: deque[Delivery] = deque()
        self._outstanding: list[Delivery] = []
        self._within_draw = False
        self._chunk_ends_set: bool | None = None
        self._chunked_so_far = 0
        self._broken = False  # an announced chunk was never delivered

    def __getstate__(self) -> State:
        """Workers get a copy with the collate function; what only the main process uses stays here."""
        return {**self.__dict__, "_listener": _nobody, "_iterators": [], "_may_begin": _always}

    def tell(self, listener: Listener) -> None:
        """Tell ``listener`` before every delivery and at the start of every pass, as long as it lives."""
        self._listener = weakref.ref(listener)

    def ask_before_draws(self, may_begin: Callable[[], bool]) -> None:
        """Ask whether another draw may be delivered; passes end where the answer is no."""
        self._may_begin = may_begin

    def ends_here(self) -> bool:
        """Whether the next delivery would begin a draw that must not begin."""
        return not self._within_draw and not self._outstanding and not self._may_begin()

    def track(self, iterator: Iterator[list[int]]) -> None:
        """Remember an iterator over the draws for as long as it lives."""
        self._iterators = [ref for ref in self._iterators if ref() is not None]
        self._iterators.append(weakref.ref(iterator))

    def begin_pass(self) -> int:
        """Forget what an earlier pass left behind and return the new pass's number."""
        self.pass_index += 1
        self.draws_used, self.resume_after = self.resume_after, 0
        if (listener := self._listener()) is not None:
            listener.before_pass()
        self._planned.clear()
        self._outstanding.clear()
        self._within_draw = False
        self._chunk_ends_set = None
        self._chunked_so_far = 0
        self._broken = False
        return self.pass_index

    def next_serial(self) -> int:
        """The next draw's number."""
        self._last_serial += 1
        return self._last_serial

    def plan(self, delivery: Delivery) -> None:
        """Note that this batch's indices have been handed to the DataLoader."""
        self.check_current(delivery.pass_index)
        self._planned.append(delivery)

    def check_current(self, pass_index: int) -> None:
        """Refuse an iterator of an older pass."""
        if pass_index != self.pass_index:
            raise RuntimeError(
                "this iterator was superseded by a newer iter(loader): a draw must not be delivered twice"
            )

    def deliver(self, pass_index: int) -> None:
        """The oldest planned batch of this pass is about to reach the user's loop."""
        self.check_current(pass_index)
        self._deliver(self._planned.popleft())

    def announce_chunk(self, *, ends_set: bool) -> None:
        """Opacus's BatchMemoryManager is about to fetch a chunk of the oldest planned mini-set."""
        if self.loader_workers:
            raise RuntimeError(
                f"Opacus's BatchMemoryManager with num_workers={self.loader_workers} announces batches "
                "before they are delivered: use opacus_bc.BatchMemoryManager (same arguments) or no workers"
            )
        alive = [i for ref in self._iterators if (i := ref()) is not None and getattr(i, "gi_frame", None)]
        if len(alive) > 1:
            raise RuntimeError(
                "two iterators over one BatchMemoryManager loader are alive, and Opacus does not say whose "
                "chunk this is: delete the older one, or use opacus_bc.BatchMemoryManager (same arguments)"
            )
        self._broken |= self._chunk_ends_set is not None
        self._chunk_ends_set = ends_set

    def deliver_chunk(self, size: int) -> None:
        """If a chunk was announced, it is being delivered now with ``size`` samples."""
        if self._chunk_ends_set is None:
            return
        ends_set, self._chunk_ends_set = self._chunk_ends_set, None
        whole = self._planned[0]
        counts = whole.counts and cut_at_units(whole.counts, self._chunked_so_far, size)
        self._chunked_so_far += size
        if ends_set:
            self._planned.popleft()
            if self._chunked_so_far != whole.set_size:
                raise RuntimeError(
                    f"chunks of {self._chunked_so_far} samples were delivered for a mini-set of "
                    f"{whole.set_size}: start again with iter(loader)"
                )
            self._chunked_so_far = 0
        ends_draw = whole.ends_draw and ends_set
        self._deliver(replace(whole, size=size, counts=counts, ends_set=ends_set, ends_draw=ends_draw))

    def _deliver(self, delivery: Delivery) -> None:
        if (listener := self._listener()) is not None:
            listener.before_delivery()
        if len(self._outstanding) < 2:  # two are an error already; more need not be kept
            self._outstanding.append(delivery)

    def outstanding(self) -> Delivery:
        """The one delivery that a step may use; raises if there is none, or more than one."""
        if self._broken:
            raise RuntimeError(
                "a batch of this pass was announced and never delivered (did the data set raise?), so which "
                "draw a chunk belongs to cannot be told: start again with iter(loader)"
            )
        if not self._outstanding:
            raise NoFreshBatchError
        if len(self._outstanding) > 1:
            raise RuntimeError(
                "several batches were delivered since the last optimizer.step(): call backward() and step() "
                "once for each batch, or start again with iter(loader) (gradients of two draws must not be "
                "mixed). To accumulate over small batches, give your DataLoader the large batch_size and "
                "iterate over opacus_bc.BatchMemoryManager's loader, which cuts it up"
            )
        return self._outstanding[0]

    def sole(self) -> Delivery | None:
        """The one delivery that a step may use, or None if a step would raise."""
        return self._outstanding[0] if len(self._outstanding) == 1 and not self._broken else None

    def consume(self) -> Delivery:
        """Take the outstanding delivery; it can never be used again."""
        delivery = self.outstanding()
        self._outstanding.clear()
        self.draws_used += delivery.ends_draw
        self._within_draw = not delivery.ends_draw
        return delivery

    @property
    def between_draws(self) -> bool:
        """Whether everything that was drawn so far has been used."""
        return not (self._outstanding or self._planned or self._within_draw)
