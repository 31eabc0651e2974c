"""User-level audits hold, come close to what is claimed, and see what would break it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opacus_bc.audit.modes import USERS
from opacus_bc.audit.units import UserToy, audit_users, participation, single_user_round
from opacus_bc.draws import loader, sources
from opacus_bc.mechanism import blocks

REPETITIONS = 20_000
FEW = 6_000  # enough to see what is wrong by a factor


@pytest.mark.parametrize("method", USERS)
def test_a_user_whose_samples_are_all_adversarial_costs_what_is_claimed(method: str) -> None:
    """One round, or four: the audited mu is a lower bound, and above eight tenths of the claimed one."""
    number = REPETITIONS if USERS[method].batch_norm is None else FEW
    result = audit_users(single_user_round(method), repetitions=number, name=method, audits=20)
    assert result.verdict == "holds"
    assert result.claimed_mu == pytest.approx(1.0)
    assert 0.8 < result.ratio <= 1.0


@pytest.mark.parametrize("method", ["BK of users", "GBC of users"])
def test_sampled_steps_of_users_hold(method: str) -> None:
    toy = UserToy(method=method, steps=8, steps_per_epoch=4)
    result = audit_users(toy, repetitions=FEW, name=method, audits=20)
    assert result.verdict == "holds"
    assert result.ratio > 0.4


def test_users_take_part_at_the_rate_that_is_booked() -> None:
    toy = UserToy(method="BK of users", steps=50, steps_per_epoch=10)
    taken, rate = participation(toy, repetitions=2_000, seed=1)
    assert rate == 1 / 10
    # Binomial(100,000, 0.1): six standard deviations, a false alarm of 2e-9.
    assert abs(taken.mean() - rate) < 6 * np.sqrt(rate * (1 - rate) / taken.size)


def _violated(toy: UserToy) -> bool:
    return audit_users(toy, repetitions=FEW, name="mutant", audits=20).violation


def test_the_audit_sees_two_mini_sets_for_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_two(self: Any) -> Any:
        for (drawn,) in self.source:
            rows = [self.rows(unit) for unit in drawn]
            yield [half for own in rows for half in (own[: len(own) // 2], own[len(own) // 2 :]) if half]

    monkeypatch.setattr(sources.Spelled, "__iter__", in_two)
    assert _violated(UserToy(method="IC of users"))


def test_the_audit_sees_a_chunk_that_is_cut_inside_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def anywhere(rows: list[int], counts: tuple[int, ...], most: int) -> Any:
        owner = np.repeat(np.arange(len(counts)), counts)
        pieces = [slice(start, start + most) for start in range(0, len(rows), most)]
        return [(rows[p], tuple(np.unique(owner[p], return_counts=True)[1].tolist())) for p in pieces]

    toy = UserToy(method="BK of users", rows_at_once=5)
    assert not _violated(toy)
    monkeypatch.setattr(loader, "chunks_of_units", anywhere)
    assert _violated(toy)


def test_a_cap_that_is_not_enforced_costs_nothing_that_an_audit_could_see(monkeypatch: Any) -> None:
    """A user stays one vector of norm C; tests/draws/test_users.py is what fails without the cap."""
    delivered: list[int] = []

    def uncapped(users: Any, cap: int, views: int, generator: Any, user: int) -> list[int]:
        rows: list[int] = np.repeat(users.samples_of(user), views).tolist()
        delivered.append(len(rows))
        return rows

    monkeypatch.setattr(sources, "rows_of_user", uncapped)
    for method in ("BK of users", "GBC of users"):
        toy = UserToy(method=method)
        assert not _violated(toy)
        assert max(delivered) > toy.cap
        delivered.clear()


def test_the_audit_sees_samples_drawn_instead_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six chances instead of one: 0.82 instead of 0.25."""

    def by_sample(self: Any) -> Any:
        index = self.rows.args[0]
        owner = np.repeat(np.arange(index.users), np.diff(index.offsets))
        for _ in range(self.plan.steps_per_epoch):
            drawn = self.generator.random(len(owner)) < self.plan.sample_rate
            yield [self.rows(unit) for unit in np.unique(owner[drawn]).tolist()]

    toy = UserToy(method="BK of users", steps=8, steps_per_epoch=4)
    monkeypatch.setattr(sources.Spelled, "__iter__", by_sample)
    assert _violated(toy)


def test_the_audit_sees_a_mean_that_is_not_clipped_as_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row clipped by itself: a user of four rows moves the sum by 4C."""
    whole = sources.whole_units

    def rows(draw: Any) -> Any:
        part = whole(draw)
        return sources.Part(
            mini_sets=part.mini_sets, placeholder=part.placeholder, shares=part.shares, counts=None
        )

    from opacus_bc.engine import book_keeping

    monkeypatch.setattr(book_keeping, "whole_units", rows)
    assert _violated(UserToy(method="BK of users"))


def test_the_audit_sees_half_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = blocks.sensitivity
    monkeypatch.setattr(blocks, "sensitivity", lambda bound, **how: 0.5 * whole(bound, **how))
    assert _violated(UserToy(method="GBC of users"))
