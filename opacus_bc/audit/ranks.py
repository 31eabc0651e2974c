"""The worst case in several processes: DistributedDataParallel over gloo, real ranks on this machine.

The adversary sees the weights of every rank. Where ranks add the same noise to the same sum, as they should,
the second one's weights say nothing new; noise of their own could be averaged away, and the same noise on
different sums subtracted.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from opacus_bc._opacus import DifferentiallyPrivateDistributedDataParallel
from opacus_bc.audit.claims import AuditResult, Claim, Row
from opacus_bc.audit.toys import Toy, make_toy
from opacus_bc.audit.worst_case import Observed, judge_observed, participation, releases
from opacus_bc.draws.plan import SMALLEST_MINI_SET

# What a process does: its rank, the number of ranks, a folder to meet in and leave results, the toy,
# repetitions and seed.
Worker = Callable[[int, int, str, Toy, int, int], None]


def join(rank: int, ranks: int, folder: str) -> None:
    """Meet the other ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )


def observe_rank(
    rank: int, ranks: int, folder: str, toy: Toy, repetitions: int, seed: int, name: str = "seen"
) -> None:
    """One rank's part of the worst case, written into ``folder``; the ranks have met already."""
    each = SMALLEST_MINI_SET * ranks  # every rank has a part of every mini-set
    stock = toy.mode.stock  # Opacus's optimizer has a wrapper of its own, and divides by the ranks twice
    # Ranks differ in their own seeds, as they do in practice, and have to agree.
    present, absent = (
        make_toy(
            toy,
            canaries=canaries,
            width=repetitions,
            seed=ranks * (2 * seed + which) + rank,
            wrap=DifferentiallyPrivateDistributedDataParallel if stock else DistributedDataParallel,
            parts=ranks if stock else 1,
        )
        for which, canaries in enumerate((repetitions, 1))
    )
    seen = Observed(
        taken=participation(present, repetitions, toy.steps),
        with_canary=releases(present, with_canary=True, draws=toy.steps, each=each),
        without=releases(absent, with_canary=False, draws=toy.steps, each=each),
        claim=Claim.booked(present.engine, scale=repetitions**0.5),
        noise_stds=present.noise_stds(),
    )
    _file(folder, name, rank).write_bytes(pickle.dumps(seen))


def _file(folder: str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}.{rank}.pickle"


def _meet_and_observe(rank: int, ranks: int, folder: str, toy: Toy, repetitions: int, seed: int) -> None:
    join(rank, ranks, folder)
    observe_rank(rank, ranks, folder, toy, repetitions, seed)
    dist.destroy_process_group()


def all_ranks(folder: str, ranks: int, name: str = "seen") -> Observed:
    """What the adversary sees: every rank's releases side by side.

    Raises:
        ValueError: Ranks disagree about who takes part or about what is booked.
    """
    parts: list[Observed] = []
    for rank in range(ranks):
        parts.append(pickle.loads(_file(folder, name, rank).read_bytes()))  # our own child's
    claims = {part.claim for part in parts}
    if len(claims) != 1 or any(not np.array_equal(part.taken, parts[0].taken) for part in parts):
        raise ValueError(f"ranks have drawn or booked differently: {claims}")
    return Observed(
        taken=parts[0].taken,
        with_canary=np.concatenate([part.with_canary for part in parts], axis=2),
        without=np.concatenate([part.without for part in parts], axis=2),
        claim=parts[0].claim,
        noise_stds=np.concatenate([part.noise_stds for part in parts]),
    )


def audit_ranks(
    toy: Toy,
    *,
    repetitions: int,
    ranks: int = 2,
    seed: int = 0,
    worker: Worker = _meet_and_observe,
    **row: Unpack[Row],
) -> AuditResult:
    """The worst case of batch or individual clipping, made by several processes together.

    **Formal guarantee**: see :func:`opacus_bc.audit.claims.judge`.

    Args:
        toy: What is audited.
        repetitions: With the canary, and as many without.
        ranks: Processes.
        seed: Of everything random.
        worker: What each process does.
        row: See :func:`opacus_bc.audit.claims.judge`.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (ranks, folder, toy, repetitions, seed), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]  # torch types it loosely
        seen = all_ranks(folder, ranks)
    return judge_observed(seen, **row)
