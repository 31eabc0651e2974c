"""Draws of users are what the accountant assumes: every user with probability q, as one list of samples."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import Units
from opacus_bc.draws.loader import chunks_of_units
from opacus_bc.draws.plan import SamplingPlan, users_plan
from opacus_bc.draws.sources import draws_of_users, whole_units
from opacus_bc.parallel.ddp import part_of_units

ALARM = 1e-6  # false-alarm rate of every statistical test here; the seeds are fixed
SIZES = [1, 8, 3, 4]  # samples of each user
IDS = np.repeat(np.arange(4), SIZES)
INDEX = Units(IDS).index(len(IDS))


def plan(kind: str = "poisson", batch_size: int = 2, cap: int = 3, **options) -> SamplingPlan:
    loader = DataLoader(TensorDataset(torch.zeros(len(IDS))), batch_size=batch_size)
    return users_plan(loader, INDEX, sampling=kind, cap=cap, **{"individual": False, **options})


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def drawn(source, repetitions: int):
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(source)), repetitions)


def users_of(draw) -> list[int]:
    """The users of a draw; every list must be one user's."""
    owners = [set(IDS[mini_set].tolist()) for mini_set in draw]
    assert all(len(owner) == 1 for owner in owners), "a list with samples of several users"
    found = [owner.pop() for owner in owners]
    assert len(found) == len(set(found)), "a user in two lists of one draw"
    return found


def test_every_user_is_drawn_with_probability_q_whatever_their_number_of_samples():
    """Chi-square of all 16 outcomes against the product distribution: sampling by sample fails it."""
    repetitions, q = 20_000, 1 / 2
    source = draws_of_users(plan(), INDEX, generator(1))
    assert source.plan.sample_rate == q
    seen = Counter(tuple(sorted(users_of(draw))) for draw in drawn(source, repetitions))
    outcomes = [o for n in range(5) for o in itertools.combinations(range(4), n)]
    expected = [repetitions * math.prod(q if u in o else 1 - q for u in range(4)) for o in outcomes]
    assert stats.chisquare([seen[o] for o in outcomes], expected).pvalue > ALARM


@pytest.mark.parametrize("kind", ["poisson", "partition", "shuffle"])
def test_no_user_has_more_samples_in_a_draw_than_the_cap_and_none_twice(kind):
    for draw in drawn(draws_of_users(plan(kind), INDEX, generator(2)), 200):
        users_of(draw)
        for mini_set in draw:
            assert len(mini_set) == len(set(mini_set)) == min(3, SIZES[IDS[mini_set[0]]])


def test_the_samples_of_a_large_user_are_chosen_anew_and_uniformly():
    """Chi-square over the four subsets of three of four samples, and no two draws share their choice."""
    source = draws_of_users(plan(), INDEX, generator(3))
    own = [tuple(sorted(s)) for draw in drawn(source, 8_000) for s in draw if IDS[s[0]] == 3]
    seen = Counter(own)
    assert len(seen) == 4
    assert stats.chisquare(list(seen.values())).pvalue > ALARM
    following = Counter(itertools.pairwise(own))
    assert stats.chisquare(list(following.values())).pvalue > ALARM
    assert len(following) == 16


def test_a_fixed_number_of_users_is_a_uniform_subset_of_them():
    """Chi-square over the six pairs of four users; each is in with probability k/U, at most the rate."""
    source = draws_of_users(plan("partition"), INDEX, generator(4))
    seen = Counter(tuple(sorted(users_of(draw))) for draw in drawn(source, 12_000))
    assert set(seen) == set(itertools.combinations(range(4), 2))
    assert stats.chisquare(list(seen.values())).pvalue > ALARM


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_no_user_is_drawn_more_often_than_the_rate_says(batch_size):
    p = plan("partition", batch_size)
    assert p.steps_per_epoch == math.ceil(4 / batch_size)
    assert p.vectors / 4 <= p.sample_rate


def test_a_pass_has_every_user_exactly_once():
    source = draws_of_users(plan("shuffle", 3), INDEX, generator(5))
    orders = set()
    for _ in range(20):
        users = [user for draw in source for user in users_of(draw)]
        assert sorted(users) == [0, 1, 2, 3]
        orders.add(tuple(users))
    assert len(orders) > 5


def test_a_draw_of_units_comes_in_one_batch_that_says_whose_rows_are_whose():
    source = draws_of_users(plan(individual=True, views=2), INDEX, generator(6))
    for draw in drawn(source, 50):
        part = whole_units(draw)
        (rows,) = part.mini_sets
        assert sum(part.counts) == len(rows)
        assert part.placeholder == (not rows)
        start = 0
        for count, unit in zip(part.counts, draw, strict=True):
            assert rows[start : start + count] == unit
            assert set(Counter(unit).values()) == {2}  # every sample has both views
            start += count


def test_every_unit_is_in_one_chunk_and_on_one_rank():
    draw = [[1, 1], [2, 2, 2], [3], [4, 4, 4, 4], [5, 5]]
    part = whole_units(draw)
    for most in range(4, 14):
        chunks = chunks_of_units(part.mini_sets[0], part.counts, most)
        assert [row for rows, _ in chunks for row in rows] == part.mini_sets[0]
        assert [count for _, counts in chunks for count in counts] == list(part.counts)
        assert all(sum(counts) == len(rows) <= most for rows, counts in chunks)
    for ranks in (1, 2, 3):
        parts = [part_of_units(draw, rank=rank, size=ranks) for rank in range(ranks)]
        assert sorted(row for p in parts for row in p.mini_sets[0]) == sorted(part.mini_sets[0])
        assert sorted(count for p in parts for count in p.counts) == sorted(part.counts)
        assert not any(set(a.mini_sets[0]) & set(b.mini_sets[0]) for a, b in itertools.combinations(parts, 2))


@pytest.mark.slow
def test_a_step_of_a_million_users_costs_what_it_draws():
    """Ten million samples: a draw of 256 users in milliseconds, where a look at everybody takes a second."""
    size, users = 10_000_000, 1_000_000
    owner = np.random.default_rng(0).integers(0, users, size)
    owner[:users] = np.arange(users)
    index = Units(owner).index(size)
    loader = DataLoader(TensorDataset(torch.zeros(1).expand(size)), batch_size=256)
    source = draws_of_users(
        users_plan(loader, index, sampling="poisson", cap=8, individual=False), index, generator(7)
    )
    draws = iter(source)
    next(draws)
    start = time.process_time()
    rows = sum(len(mini_set) for draw in itertools.islice(draws, 20) for mini_set in draw)
    assert rows > 20 * 256 * 4
    assert (time.process_time() - start) / 20 < 0.05
