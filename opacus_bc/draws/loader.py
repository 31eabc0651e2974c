"""From draws to delivered batches, in every mode: one draw, one step.

The loader delivers a draw's mini-sets one after the other, or its samples in one batch, and notes each
delivery in a ledger, which the optimizer reads: a step consumes exactly one complete draw. Nothing here knows
about gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate, get_worker_info

from opacus_bc._opacus import DPDataLoader, StockBatchMemoryManager
from opacus_bc.draws.ledger import CHUNKS_OVER_RANKS, Delivery, DrawLedger
from opacus_bc.draws.order import check_order, check_reads_in_order
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.draws.sources import (
    Draw,
    DrawSource,
    Part,
    every_mini_set,
    whole_batch,
    whole_draw,
    whole_units,
)
from opacus_bc.mechanism.numbers import check_count
from opacus_bc.mechanism.types import Loader

Counts = tuple[int, ...] | None
_END = object()


class DrawSampler(BatchSampler):
    """Batch sampler that hands a draw's mini-sets (or chunks of them) to a DataLoader, one by one.

    Opacus's BatchMemoryManager computes its length from the ``batch_size`` of torch's type.
    """

    def __init__(
        self, draws: DrawSource, ledger: DrawLedger, max_size: int | None, part: Callable[[Draw], Part]
    ) -> None:
        self.draws = draws
        self.batch_size = draws.plan.mini_set_size
        self.ledger = ledger
        self.max_size = max_size
        self.part = part

    def __len__(self) -> int:
        plan = self.draws.plan
        rows = plan.mini_set_size * (plan.rows_of_unit if plan.individual else 1)
        chunks = 1 if self.max_size is None else math.ceil(rows / self.max_size)
        return plan.steps_per_epoch * plan.mini_sets * chunks

    def __iter__(self) -> Iterator[list[int]]:
        pass_index = self.ledger.begin_pass()
        left = self.draws.plan.steps_per_epoch - self.ledger.draws_used
        iterator = self._mini_sets(pass_index, left)
        self.ledger.track(iterator)
        return iterator

    def _mini_sets(self, pass_index: int, steps: int) -> Iterator[list[int]]:
        # A whole pass is read to its end, as torch reads it: a shuffle draws once more when it is exhausted.
        whole = steps == self.draws.plan.steps_per_epoch
        for draw in self.draws if whole else islice(self.draws, steps):
            serial = self.ledger.next_serial()
            part = self.part(draw)
            for j, mini_set in enumerate(part.mini_sets):
                chunks = self._chunks(mini_set, part.counts)
                for c, (chunk, counts) in enumerate(chunks):
                    ends_set = c == len(chunks) - 1
                    self.ledger.plan(
                        Delivery(
                            serial=serial,
                            pass_index=pass_index,
                            size=len(chunk),
                            set_size=len(mini_set),
                            ends_set=ends_set,
                            ends_draw=ends_set and j == len(part.mini_sets) - 1,
                            placeholder=part.placeholder,
                            share=part.shares[j],
                            counts=counts,
                        )
                    )
                    yield chunk

    def _chunks(self, mini_set: list[int], counts: Counts) -> list[tuple[list[int], Counts]]:
        if self.max_size is None or len(mini_set) <= self.max_size:
            return [(mini_set, counts)]
        if counts is not None:
            return chunks_of_units(mini_set, counts, self.max_size)
        parts = np.array_split(np.asarray(mini_set), math.ceil(len(mini_set) / self.max_size))
        return [(part.tolist(), None) for part in parts]


def chunks_of_units(
    rows: list[int], counts: tuple[int, ...], most: int
) -> list[tuple[list[int], tuple[int, ...] | None]]:
    """Chunks of at most ``most`` rows that hold whole units.

    **Formal guarantee**: every unit is in exactly one chunk, so it is clipped once.

    >>> chunks_of_units([7, 7, 8, 8, 9, 9], (2, 2, 2), 5)
    [([7, 7, 8, 8], (2, 2)), ([9, 9], (2,))]
    """
    chunks: list[tuple[list[int], tuple[int, ...] | None]] = []
    start = first = held = 0
    for unit, count in enumerate(counts):
        if held + count > most and held:
            chunks.append((rows[start : start + held], counts[first:unit]))
            start, first, held = start + held, unit, 0
        held += count
    return [*chunks, (rows[start:], counts[first:])]


class _AnnouncedCollate:
    """The user's collate function; in the main process it also reports the size of an announced chunk."""

    def __init__(
        self, collate: Callable[[list[object]], object], ledger: DrawLedger, *, in_order: bool = False
    ) -> None:
        self.collate = collate
        self.ledger = ledger
        self.in_order = in_order and collate is not default_collate

    def __call__(self, samples: list[object]) -> object:
        batch = self.collate(samples)
        if self.in_order:
            check_order(batch, samples, self.collate)
        if get_worker_info() is None:
            self.ledger.deliver_chunk(len(samples))
        return batch


# What the user's loader and the private one have in common.
_OF_WORKERS = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
_KEPT = ("dataset", "num_workers", "pin_memory", "timeout", "generator", *_OF_WORKERS)


class PrivateDataLoader(DPDataLoader):  # type: ignore[misc]  # Opacus is untyped
    """The user's DataLoader with private draws: same data set, workers and collate function.

    One class serves every mode: what a draw is comes from ``draws``, how it is delivered from ``part``.
    ``len(loader)`` counts deliveries (the most there can be: mini-sets with fewer than two samples are left
    out), ``loader.steps_per_epoch`` counts optimizer steps.

    Args:
        data_loader: The user's loader, or what Opacus made of it.
        draws: Where the steps' samples come from.
        ledger: The record of deliveries; a new one if None.
        max_physical_batch_size: The most samples that are delivered at once.
        part: What this process does of a draw.
    """

    def __init__(
        self,
        data_loader: Loader,
        *,
        draws: DrawSource,
        ledger: DrawLedger | None = None,
        max_physical_batch_size: int | None = None,
        part: Callable[[Draw], Part] = whole_draw,
    ) -> None:
        # Opacus's constructor would make a Poisson sampler of its own; its type is all that is wanted.
        self.sample_rate = draws.plan.sample_rate
        self.distributed = False
        self.draws = draws
        self.part = part
        self.ledger = ledger or DrawLedger()
        self.ledger.loader_workers = data_loader.num_workers
        collate = data_loader.collate_fn
        if isinstance(collate, _AnnouncedCollate):
            collate = collate.collate
        several_rows = draws.plan.individual and draws.plan.rows_of_unit > 1
        if several_rows:
            check_reads_in_order(data_loader.dataset)
        DataLoader.__init__(
            self,
            batch_sampler=DrawSampler(draws, self.ledger, max_physical_batch_size, part),
            collate_fn=_AnnouncedCollate(collate, self.ledger, in_order=several_rows),
            **{name: getattr(data_loader, name) for name in _KEPT},
        )

    @property
    def plan(self) -> SamplingPlan:
        """The public description of the draws."""
        return self.draws.plan

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass."""
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        continued = self.ledger.resume_after > 0
        generator = self.generator or torch.default_generator
        before = generator.get_state() if continued else None
        iterator = super().__iter__()
        if before is not None:  # torch draws a seed for each pass: this one has its own already
            generator.set_state(before)
        return self._delivered(iterator, self.ledger.pass_index)

    def _delivered(self, iterator: Iterator[object], pass_index: int) -> Iterator[object]:
        while True:
            self.ledger.check_current(pass_index)  # before a batch is taken that belongs to a newer pass
            if self.ledger.ends_here():
                return
            batch = next(iterator, _END)
            if batch is _END:
                return
            self.ledger.deliver(pass_index)
            yield batch

    def with_max_physical_batch_size(self, size: int) -> PrivateDataLoader:
        """The same draws, delivered in chunks of at most ``size`` samples; not where ranks share them.

        Chunks of units that are clipped one by one hold whole units, so ``size`` must be that of a unit.
        """
        if self.part not in (whole_draw, every_mini_set, whole_batch, whole_units):
            raise ValueError(CHUNKS_OVER_RANKS)
        check_count("max_physical_batch_size", size)
        plan = self.plan
        if plan.individual and size < plan.rows_of_unit:
            raise ValueError(
                f"max_physical_batch_size={size} is less than the {plan.rows_of_unit} rows of one "
                f"{plan.protected} (mini_batch_size times views), which are clipped as one vector: take at "
                f"least {plan.rows_of_unit}"
            )
        return PrivateDataLoader(
            self, draws=self.draws, ledger=self.ledger, max_physical_batch_size=size, part=self.part
        )


class BatchMemoryManager(StockBatchMemoryManager):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's BatchMemoryManager, which also works with loader workers.

    Single samples are clipped as they arrive. Chunks of one mini-set are accumulated *unclipped*, weighted by
    their size, and clipped once, so the clipped gradient of a model without batch statistics does not depend
    on the physical batch size.
    """

    def __enter__(self) -> Loader:
        if isinstance(self.data_loader, PrivateDataLoader):
            return self.data_loader.with_max_physical_batch_size(self.max_physical_batch_size)
        loader: Loader = super().__enter__()
        return loader
