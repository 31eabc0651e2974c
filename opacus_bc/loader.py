"""From draws to delivered batches: one draw, one step.

The loader delivers a draw's mini-sets one after the other and writes down each delivery in a
:class:`~opacus_bc.ledger.DrawLedger`, which the optimizer reads: a step consumes exactly one complete draw.
Nothing here knows about gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from opacus_bc._opacus import StockBatchMemoryManager
from opacus_bc.ledger import CHUNKS_OVER_RANKS, Delivery, DrawLedger
from opacus_bc.sampling import Draw, DrawSource, Part, SamplingPlan, whole_draw


class DrawSampler(Sampler[list[int]]):
    """Batch sampler that hands a draw's mini-sets (or chunks of them) to a DataLoader, one by one."""

    def __init__(
        self,
        draws: DrawSource,
        ledger: DrawLedger,
        max_size: int | None = None,
        part: Callable[[Draw], Part] = whole_draw,
    ) -> None:
        self.draws = draws
        self.ledger = ledger
        self.max_size = max_size
        self.part = part

    def __len__(self) -> int:
        plan = self.draws.plan
        chunks = 1 if self.max_size is None else math.ceil(plan.mini_set_size / self.max_size)
        return plan.steps_per_epoch * plan.mini_sets * chunks

    def __iter__(self) -> Iterator[list[int]]:
        pass_index = self.ledger.begin_pass()
        left = self.draws.plan.steps_per_epoch - self.ledger.draws_used
        iterator = self._mini_sets(pass_index, left)
        self.ledger.track(iterator)
        return iterator

    def _mini_sets(self, pass_index: int, steps: int) -> Iterator[list[int]]:
        for draw in islice(self.draws, steps):
            serial = self.ledger.next_serial()
            part = self.part(draw)
            for j, mini_set in enumerate(part.mini_sets):
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
                            ends_draw=ends_set and j == len(part.mini_sets) - 1,
                            placeholder=part.placeholder,
                            share=part.shares[j],
                        )
                    )
                    yield chunk

    def _chunks(self, mini_set: list[int]) -> list[list[int]]:
        if self.max_size is None or len(mini_set) <= self.max_size:
            return [mini_set]
        parts = np.array_split(np.asarray(mini_set), math.ceil(len(mini_set) / self.max_size))
        return [part.tolist() for part in parts]


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
        part: Callable[[Draw], Part] = whole_draw,
    ) -> None:
        self.draws = draws
        self.part = part
        self.ledger = ledger or DrawLedger()
        self.ledger.loader_workers = data_loader.num_workers
        collate = data_loader.collate_fn
        if isinstance(collate, _AnnouncedCollate):
            collate = collate.collate
        super().__init__(
            dataset=data_loader.dataset,
            batch_sampler=DrawSampler(draws, self.ledger, max_physical_batch_size, part),
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
        continued = self.ledger.resume_after > 0
        generator = self.generator or torch.default_generator
        before = generator.get_state() if continued else None
        iterator = super().__iter__()
        if before is not None:  # torch draws a seed for each pass: this one has its own already
            generator.set_state(before)
        return self._delivered(iterator, self.ledger.pass_index)

    def _delivered(self, iterator: Iterator[Any], pass_index: int) -> Iterator[Any]:
        for batch in iterator:
            self.ledger.deliver(pass_index)
            yield batch

    def with_max_physical_batch_size(self, size: int) -> PrivateDataLoader:
        """The same draws, delivered in chunks of at most ``size`` samples.

        Raises:
            ValueError: ``size`` is no whole number, or several ranks share the draws.
        """
        if self.part is not whole_draw:
            raise ValueError(CHUNKS_OVER_RANKS)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"max_physical_batch_size must be a whole number >= 1, got {size!r}")
        return PrivateDataLoader(
            self, draws=self.draws, ledger=self.ledger, max_physical_batch_size=size, part=self.part
        )


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
