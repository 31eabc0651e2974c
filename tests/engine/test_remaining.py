"""``engine.remaining``: so many more steps fit into a budget, and not one more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import blobs, engine, mlp
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc import PrivateStatistics, UnprotectedStatisticsError

pytestmark = [
    pytest.mark.filterwarnings("ignore:delta="),
    pytest.mark.filterwarnings("ignore:batch_norm='private'"),
]
DATA, DELTA = blobs(64), 1e-3
BATCH = {"clipping": "batch"}


class Run:
    def __init__(self, eng: Any = None, **kwargs: Any) -> None:
        self.engine = engine() if eng is None else eng
        model = mlp(norm="batch_norm" in kwargs)
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=16),
            **{"noise_multiplier": 2.0, "max_grad_norm": 1.0, **kwargs},
        )

    def train(self, steps: int) -> None:
        """Take so many steps, in whole passes and a part of one."""
        end = self.optimizer.steps_taken + steps
        while self.optimizer.steps_taken < end:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.module(x), y).backward()
                self.optimizer.step()
                if self.optimizer.steps_taken == end:
                    break

    def brute_force(self, epsilon: float, *releases: float, passes: bool = False) -> int:
        """The oracle: step a copy of the accountant until it exceeds the budget."""
        plan, steps = self.loader.plan, 0
        copy = type(self.engine.accountant)()
        copy.history = list(self.engine.accountant.history)
        kind = {"sampling": plan.event} if copy.mechanism() == "fdp" else {}
        while True:
            begun = copy.history[-1][2] if passes and copy.history else 0
            if passes:
                kind["new_pass"] = begun % plan.steps_per_epoch == 0
            copy.step(
                noise_multiplier=self.optimizer.effective_noise_multiplier,
                sample_rate=plan.sample_rate,
                **kind,
            )
            spent = type(copy)()
            spent.history = list(copy.history)
            for multiplier in releases:
                spent.release(noise_multiplier=multiplier, adjacency=plan.neighbours)
            if spent.get_epsilon(DELTA) > epsilon:
                return steps
            steps += 1


MODES: dict[str, dict[str, Any]] = {
    "flat": {},
    "mini-sets": {**BATCH, "mini_batch_size": 4},
    "partition": {**BATCH, "sampling": "partition", "noise_multiplier": 3.0},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [0, 3])
def test_remaining_is_the_most_steps_that_the_accountant_allows(mode: str, before: int) -> None:
    run = Run(**MODES[mode])
    run.train(before)
    assert run.engine.remaining(1.2, DELTA) == run.brute_force(1.2) > 0


def test_remaining_steps_keep_the_budget_and_one_more_exceeds_it() -> None:
    run = Run()
    run.train(2)
    run.train(run.engine.remaining(1.2, DELTA))
    assert run.engine.remaining(1.2, DELTA) == 0
    assert run.engine.get_epsilon(DELTA) <= 1.2
    run.train(1)
    assert run.engine.get_epsilon(DELTA) > 1.2
    assert run.engine.remaining(1.2, DELTA) == 0


@pytest.mark.parametrize("before", [0, 3, 4])
def test_passes_over_shuffled_data_are_counted_whole(before: int) -> None:
    run = Run(poisson_sampling=False, noise_multiplier=8.0)
    run.train(before)
    found = run.engine.remaining(2.0, DELTA)
    assert found == run.brute_force(2.0, passes=True) > 4
    assert (found + before) % 4 == 0


def test_noise_that_was_lowered_within_a_pass_costs_the_whole_pass() -> None:
    run = Run(poisson_sampling=False, noise_multiplier=8.0)
    run.train(3)
    run.optimizer.noise_multiplier = 6.0
    assert run.engine.remaining(2.0, DELTA) == run.brute_force(2.0, passes=True) > 0
    run.optimizer.noise_multiplier = 0.5
    assert run.engine.remaining(2.0, DELTA) == run.brute_force(2.0, passes=True) == 0


def test_remaining_follows_the_present_noise() -> None:
    run = Run()
    run.train(2)
    run.optimizer.noise_multiplier = 1.5
    assert run.engine.remaining(1.2, DELTA) == run.brute_force(1.2)
    run.optimizer.noise_multiplier = 0.0
    assert run.engine.remaining(1.2, DELTA) == 0


def test_the_reserved_release_of_private_statistics_is_counted() -> None:
    run = Run(**BATCH, batch_norm=PrivateStatistics(noise_multiplier=3.0))
    found = run.engine.remaining(2.0, DELTA)
    assert found == run.brute_force(2.0, 3.0) < run.brute_force(2.0)
    run.train(found)
    run.engine.finalize(run.module)
    assert run.engine.get_epsilon(DELTA) <= 2.0


def test_opacus_accountants_answer_too() -> None:
    run = Run(engine(accountant="rdp"))
    run.train(2)
    budget = run.engine.get_epsilon(DELTA) + 0.5
    assert run.engine.remaining(budget, DELTA) == run.brute_force(budget) > 0


def test_remaining_needs_a_run_a_budget_and_statistics_that_do_not_leak() -> None:
    with pytest.raises(ValueError, match="call make_private first"):
        engine().remaining(1.0, DELTA)
    run = Run()
    for epsilon, delta in ((-1.0, DELTA), (1.0, 0.0), (1.0, 1.5)):
        with pytest.raises(ValueError, match=r"epsilon|delta"):
            run.engine.remaining(epsilon, delta)
    with pytest.warns(UserWarning, match="unprotected"):
        run = Run(**BATCH, batch_norm="unprotected")
    with pytest.raises(UnprotectedStatisticsError):
        run.engine.remaining(1.0, DELTA)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0", "ignore:accountant='gdp'", "ignore:GDP")
@pytest.mark.parametrize("accountant", ["fdp", "gdp"])
def test_a_run_without_noise_has_no_steps_left(accountant: str) -> None:
    run = Run(engine(accountant=accountant), noise_multiplier=0.0)
    run.train(1)
    run.optimizer.noise_multiplier = 2.0
    assert run.engine.remaining(5.0, DELTA) == 0
    assert torch.isinf(torch.tensor(run.engine.get_epsilon(DELTA)))
