"""Draws are what the accountant assumes, and loaders that are not are refused."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from scipy import stats
from support import blobs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from opacus_bc.draws.ledger import Delivery, DrawLedger, NoFreshBatchError
from opacus_bc.draws.loader import PrivateDataLoader
from opacus_bc.draws.plan import SamplingPlan, check_loader, make_plan, resolve_sampling
from opacus_bc.draws.sources import FixedPartition, PoissonBins, ShuffledPass, make_draws
from opacus_bc.mechanism.randomness import sampling_generator

ALARM = 1e-6  # false-alarm rate of every statistical test here; the seeds are fixed


def plan(n: int, steps: int, k: int = 1, s: int = 4, kind="poisson") -> SamplingPlan:
    return SamplingPlan(kind=kind, dataset_size=n, steps_per_epoch=steps, mini_sets=k, mini_set_size=s)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


@pytest.mark.parametrize("k", [1, 2])
def test_every_sample_joins_a_uniform_bin_with_probability_q_independently_of_all_others(k):
    """Chi-square of all (k + 1)^4 outcomes against the product distribution: independence and all."""
    n, steps, repetitions = 4, 3, 40_000
    draws = PoissonBins(plan(n, steps, k), generator(1))
    q = 1 / steps
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(repetitions):
        where = [0] * n
        for j, members in enumerate(draws.draw()):
            for i in members:
                assert where[i] == 0, "a sample fell into two bins"
                where[i] = j + 1
        seen[tuple(where)] += 1
    outcomes = list(itertools.product(range(k + 1), repeat=n))
    expected = [repetitions * math.prod(q / k if w else 1 - q for w in o) for o in outcomes]
    assert stats.chisquare([seen[o] for o in outcomes], expected).pvalue > ALARM


def test_batches_have_the_same_distribution_as_opacus_poisson_sampler():
    n, steps, repetitions = 5, 2, 20_000
    ours = PoissonBins(plan(n, steps), generator(2))
    theirs = UniformWithReplacementSampler(
        num_samples=n,
        sample_rate=1 / steps,
        generator=torch.Generator().manual_seed(3),
        steps=repetitions,
    )
    a = Counter(tuple(sorted(ours.draw()[0])) for _ in range(repetitions))
    b = Counter(tuple(batch) for batch in theirs)
    keys = sorted(set(a) | set(b))
    table = [[a[key] for key in keys], [b[key] for key in keys]]
    assert stats.chi2_contingency(table).pvalue > ALARM


def test_a_draw_comes_in_uniform_order():
    """A function of a mini-set may depend on the order; chi-square over the six orders of three samples."""
    draws = PoissonBins(plan(30, 10), generator(2))
    orders = Counter(
        tuple(np.argsort(draw)) for draw in (draws.draw()[0] for _ in range(40_000)) if len(draw) == 3
    )
    assert len(orders) == 6
    assert stats.chisquare(list(orders.values())).pvalue > ALARM


def test_a_full_rate_takes_every_sample():
    (members,) = PoissonBins(plan(10, 1), generator()).draw()
    assert sorted(members) == list(range(10))


def test_a_partition_puts_every_sample_into_one_mini_set_and_draws_k_without_replacement():
    n, steps, k = 103, 5, 4
    draws = FixedPartition(plan(n, steps, k, kind="partition"), generator(4))
    assert sorted(i for part in draws.mini_sets for i in part) == list(range(n))
    assert len(draws.mini_sets) == k * steps
    assert max(map(len, draws.mini_sets)) - min(map(len, draws.mini_sets)) <= 1
    known = {tuple(part) for part in draws.mini_sets}
    counts: Counter[tuple[int, ...]] = Counter()
    passes = 400
    for _ in range(passes):
        for draw in draws:
            chosen = [tuple(part) for part in draw]
            assert len(set(chosen)) == k
            assert set(chosen) <= known
            counts.update(chosen)
    rate = 1 / steps
    for part in known:
        assert stats.binomtest(counts[part], passes * steps, rate).pvalue > ALARM


def test_a_shuffled_pass_holds_every_sample_once_in_consecutive_mini_sets():
    loader = DataLoader(blobs(50), batch_size=12, shuffle=True)
    draws = make_draws(make_plan(loader, sampling="shuffle", mini_batch_size=4), loader, generator())
    assert isinstance(draws, ShuffledPass)
    for _ in range(2):
        passed = list(draws)
        assert [len(draw) for draw in passed] == [3, 3, 3, 3, 1]
        assert sorted(i for draw in passed for part in draw for i in part) == list(range(50))


def test_a_sequential_loader_keeps_its_order():
    loader = DataLoader(blobs(6), batch_size=4)
    draws = make_draws(make_plan(loader, sampling="shuffle", mini_batch_size=2), loader, generator())
    assert list(draws) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_the_plan_counts_the_steps_of_the_users_loader():
    loader = DataLoader(blobs(103), batch_size=20)
    found = make_plan(loader, sampling="poisson", mini_batch_size=5)
    assert (found.steps_per_epoch, found.mini_sets, found.mini_set_size) == (6, 4, 5)
    assert found.sample_rate == 1 / 6
    assert found.adjacency == "add/remove one"
    assert make_plan(loader, sampling="partition", mini_batch_size=5).adjacency == "replace one"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class NoLength(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index


DATA = blobs(40)
REFUSED = {
    "IterableDataset": lambda: DataLoader(Stream(), batch_size=4),
    "has no __len__": lambda: DataLoader(NoLength(), batch_size=4, sampler=SequentialSampler(range(9))),
    "WeightedRandomSampler": lambda: DataLoader(
        DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40)
    ),
    "replacement=True": lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True)),
    "num_samples=7": lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, num_samples=7)),
    "SubsetRandomSampler": lambda: DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler(range(9))),
    "batch_sampler": lambda: DataLoader(DATA, batch_size=None),
    "make its batches from batch_size": lambda: DataLoader(
        DATA, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(DATA), 4, False)
    ),
    "at least 2": lambda: DataLoader(TensorDataset(torch.zeros(1, 2)), batch_size=1),
    "is empty": lambda: DataLoader(DATA, batch_size=64, drop_last=True),
    "must be a torch DataLoader": lambda: [1, 2, 3],
}


@pytest.mark.parametrize("message", REFUSED)
def test_loaders_that_no_accountant_describes_are_refused(message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = REFUSED[message]()
    with pytest.raises(ValueError, match=message):
        check_loader(loader)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "does not divide the loader's batch_size=20"),
        (1, "use clipping='flat'"),
        (0, "whole number >= 2"),
        (2.0, "whole number >= 2"),
        (True, "whole number >= 2"),
        (40, "does not divide"),
    ],
)
def test_mini_batch_sizes_that_do_not_fit_are_refused(size, message):
    with pytest.raises(ValueError, match=message):
        make_plan(DataLoader(DATA, batch_size=20), sampling="poisson", mini_batch_size=size)


def test_a_partition_with_single_samples_is_refused():
    with pytest.raises(ValueError, match="larger mini_batch_size"):
        FixedPartition(plan(10, 3, 2, kind="partition"), generator())


def test_sampling_and_poisson_sampling_must_not_contradict_each_other():
    assert resolve_sampling(None, poisson_sampling=True) == "poisson"
    assert resolve_sampling(None, poisson_sampling=False) == "shuffle"
    assert resolve_sampling("partition", poisson_sampling=True) == "partition"
    with pytest.raises(ValueError, match="contradicts"):
        resolve_sampling("poisson", poisson_sampling=False)
    with pytest.raises(ValueError, match="'poisson', 'partition', 'shuffle'"):
        resolve_sampling("uniform", poisson_sampling=True)


# --- delivery ---------------------------------------------------------------------------------------------


def collate_dicts(samples):
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([int(y) for _, y in samples])}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_loader_settings_are_kept(workers):
    seeds = torch.Generator().manual_seed(5)
    user = DataLoader(
        DATA,
        batch_size=8,
        num_workers=workers,
        collate_fn=collate_dicts,
        generator=seeds,
        persistent_workers=workers > 0,
        prefetch_factor=3 if workers else None,
        timeout=30 if workers else 0,
    )
    draws = make_draws(make_plan(user, sampling="poisson", mini_batch_size=4), user, generator(6))
    private = PrivateDataLoader(user, draws=draws)
    for name in ("dataset", "num_workers", "generator", "prefetch_factor", "persistent_workers", "timeout"):
        assert getattr(private, name) is getattr(user, name) or getattr(private, name) == getattr(user, name)
    for _ in range(2):
        batches = list(private)
        assert all(set(batch) == {"x", "y"} and len(batch["x"]) == len(batch["y"]) >= 2 for batch in batches)
    assert len(private) == 10
    assert private.steps_per_epoch == 5


def test_torch_seeds_do_not_repeat_draws_and_the_loaders_generator_does():
    def draws(seed: int, own: int | None):
        torch.manual_seed(seed)
        given = None if own is None else torch.Generator().manual_seed(own)
        return PoissonBins(plan(100, 5), sampling_generator(secure=False, generator=given)).draw()

    assert draws(0, None) != draws(0, None)
    assert draws(0, 7) == draws(1, 7) != draws(0, 8)


def test_secure_sampling_does_not_follow_torch_seeds():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(PoissonBins(plan(1000, 5), sampling_generator(secure=True)).draw())
    assert results[0] != results[1]


def test_chunks_that_do_not_make_up_their_mini_set_are_not_delivered() -> None:
    ledger = DrawLedger()
    pass_index = ledger.begin_pass()
    ledger.plan(
        Delivery(
            serial=ledger.next_serial(),
            pass_index=pass_index,
            size=10,
            set_size=10,
            ends_set=True,
            ends_draw=True,
            placeholder=False,
        )
    )
    ledger.announce_chunk(ends_set=False)
    ledger.deliver_chunk(5)
    ledger.consume()
    ledger.announce_chunk(ends_set=True)
    with pytest.raises(RuntimeError, match="chunks of 9 samples were delivered for a mini-set of 10"):
        ledger.deliver_chunk(4)
    with pytest.raises(NoFreshBatchError):
        ledger.outstanding()
