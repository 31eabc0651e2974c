"""Two real processes: audited like one, and the bugs that only several processes can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import opacus_bc.parallel.ddp as distributed
from opacus_bc.audit.command import all_audits
from opacus_bc.audit.ranks import all_ranks, join, observe_rank
from opacus_bc.audit.toys import Toy
from opacus_bc.audit.worst_case import Observed, judge_observed
from opacus_bc.draws import sources
from opacus_bc.engine import book_keeping, individual
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.optimizers.stock import DistributedFlatOptimizer

RANKS = 2
AUDITS = len(all_audits(quick=False))
STOCK = "IC, Opacus's arithmetic"
TOYS = {
    "BC": Toy(method="BC"),
    "GBC": Toy(method="GBC", mini_sets=4),
    **{method: Toy(method=method) for method in ("BK", "BK of views", STOCK)},
}
Bug = Callable[[pytest.MonkeyPatch, int], None]


def as_it_is(patch: pytest.MonkeyPatch, rank: int) -> None:
    """No bug."""


def noise_of_its_own_on_every_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Whoever sees both models averages the noise away."""
    reseed = TorchNoise.reseed
    patch.setattr(TorchNoise, "reseed", lambda self, seed: reseed(self, seed + rank))


def same_noise_on_different_parts(patch: pytest.MonkeyPatch, rank: int) -> None:
    """BC: every rank clips its own part of the batch; whoever sees both models subtracts the noise."""

    def own_part(state: Any, bucket: Any) -> Any:
        state.weight()
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    own_part.__annotations__ = distributed._reduce_weighted.__annotations__
    patch.setattr(distributed, "_reduce_weighted", own_part)
    patch.setattr(distributed.WeightedReduction, "finish_", lambda self, clipped: None)


def sums_are_not_added_up(patch: pytest.MonkeyPatch, rank: int) -> None:
    """GBC, BK: the same noise on every rank's own mini-sets or samples."""
    patch.setattr(distributed.SummedReduction, "finish_", lambda self, clipped: None)


def every_rank_takes_the_whole_draw(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Individual clipping: the sums of the ranks hold each sample as often as there are ranks."""
    for module in (book_keeping, individual):
        patch.setattr(module, "part_of_batch", lambda draw, **_: sources.whole_batch(draw))
    patch.setattr(book_keeping, "part_of_units", lambda draw, **_: sources.whole_units(draw))


def views_are_dealt_to_the_ranks(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Every rank clips the mean of its own views of a sample: one sample is one vector on each rank."""

    def own_views(draw: Any, *, rank: int, size: int) -> Any:
        return sources.whole_units([unit[rank::size] for unit in draw])

    patch.setattr(book_keeping, "part_of_units", own_views)


def noise_on_no_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Opacus adds noise on the first rank alone, and here that is nobody."""
    add_noise = DistributedFlatOptimizer.add_noise

    def elsewhere(self: Any) -> None:
        self.rank = 1
        add_noise(self)

    patch.setattr(DistributedFlatOptimizer, "add_noise", elsewhere)


TABLE: dict[tuple[str, str], tuple[Bug, str]] = {
    ("BC", "as it is"): (as_it_is, "holds"),
    ("GBC", "as it is"): (as_it_is, "holds"),
    ("BC", "noise of its own on every rank"): (noise_of_its_own_on_every_rank, "VIOLATION"),
    ("GBC", "noise of its own on every rank"): (noise_of_its_own_on_every_rank, "VIOLATION"),
    ("BC", "the same noise on different parts"): (same_noise_on_different_parts, "VIOLATION"),
    ("GBC", "sums are not added up"): (sums_are_not_added_up, "VIOLATION"),
    ("BK", "as it is"): (as_it_is, "holds"),
    ("BK of views", "as it is"): (as_it_is, "holds"),
    (STOCK, "as it is"): (as_it_is, "holds"),
    ("BK", "noise of its own on every rank"): (noise_of_its_own_on_every_rank, "VIOLATION"),
    ("BK", "sums are not added up"): (sums_are_not_added_up, "VIOLATION"),
    ("BK", "every rank takes the whole draw"): (every_rank_takes_the_whole_draw, "VIOLATION"),
    ("BK of views", "every rank takes the whole draw"): (every_rank_takes_the_whole_draw, "VIOLATION"),
    ("BK of views", "views are dealt to the ranks"): (views_are_dealt_to_the_ranks, "VIOLATION"),
    (STOCK, "every rank takes the whole draw"): (every_rank_takes_the_whole_draw, "VIOLATION"),
    (STOCK, "noise on no rank"): (noise_on_no_rank, "VIOLATION"),
}


def file_name(case: tuple[str, str]) -> str:
    return " - ".join(case)


def every_case(rank: int, ranks: int, folder: str) -> None:
    """One start of the processes for all cases: importing takes longer than running."""
    join(rank, ranks, folder)
    for case, (bug, _) in TABLE.items():
        with pytest.MonkeyPatch.context() as patch:
            bug(patch, rank)
            observe_rank(rank, ranks, folder, TOYS[case[0]], 20_000, 3, name=file_name(case))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Observed]:
    """What an adversary sees of both ranks in every case."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    mp.spawn(every_case, (RANKS, folder), nprocs=RANKS)
    return {case: all_ranks(folder, RANKS, file_name(case)) for case in TABLE}


@pytest.mark.parametrize("case", TABLE, ids=file_name)
def test_two_processes_are_audited_and_their_bugs_are_caught(case: tuple[str, str], seen: Any) -> None:
    result = judge_observed(seen[case], name=case[0], audits=AUDITS)
    assert result.verdict == TABLE[case][1]
    if result.verdict == "holds":
        assert 0.85 <= result.ratio <= 1.0
