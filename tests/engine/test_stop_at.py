"""``engine.stop_at``: loops end before the budget is exceeded, and no step goes beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp, weights
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc import BatchMemoryManager, PrivateStatistics
from opacus_bc.engine.limit import BudgetSpentError

pytestmark = [
    pytest.mark.filterwarnings("ignore:delta="),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
DATA, DELTA = blobs(64), 1e-3
MODES: dict[str, dict[str, Any]] = {
    "batch": {"clipping": "batch"},
    "mini-sets": {"clipping": "batch", "mini_batch_size": 4},
    "flat": {},
    "flat, Opacus's": {"noise_generator": torch.Generator().manual_seed(1)},
    "shuffled": {"poisson_sampling": False},
}


class Run:
    def __init__(self, mode: str = "flat", eng: Any = None, workers: int = 0, **kwargs: Any) -> None:
        self.engine = engine() if eng is None else eng
        self.model = mlp(norm="batch_norm" in kwargs)
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optim.SGD(self.model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=16, num_workers=workers),
            **{"noise_multiplier": 2.0, "max_grad_norm": 1.0, **MODES[mode], **kwargs},
        )

    def train(self, epochs: int, batches: Any = None) -> None:
        for _ in range(epochs):
            before = self.optimizer.steps_taken
            for x, y in self.loader if batches is None else batches:
                self.step(x, y)
            if self.optimizer.steps_taken == before:
                return

    def step(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(x), y).backward()
        self.optimizer.step()


def one_step_more(run: Run) -> float:
    """The oracle: epsilon after one more pass or step, by an accountant of its own."""
    other = type(run.engine.accountant)()
    other.history = list(run.engine.accountant.history)
    plan = run.loader.plan
    sigma = run.optimizer.effective_noise_multiplier
    other.step(noise_multiplier=sigma, sample_rate=plan.sample_rate, sampling=plan.kind, new_pass=True)
    return float(other.get_epsilon(DELTA))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_loops_end_at_the_last_step_that_the_budget_covers(mode: str, workers: int) -> None:
    run = Run(mode, workers=workers)
    target = 8.0 if mode == "shuffled" else 1.2
    run.engine.stop_at(target, DELTA)
    run.train(30)
    assert 0 < run.engine.get_epsilon(DELTA) <= target
    assert one_step_more(run) > target
    assert not list(run.loader)


def test_chunks_of_the_last_draw_are_all_delivered() -> None:
    run = Run()
    run.engine.stop_at(2.0, DELTA)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as chunks:
        run.train(30, chunks)
    assert run.engine.get_epsilon(DELTA) <= 2.0 < one_step_more(run)
    assert run.optimizer._draw is None


def test_a_step_beyond_the_budget_is_refused_before_anything_moves() -> None:
    """A scheduler lowers the noise between the delivery and the step."""
    run = Run()
    run.engine.stop_at(2.0, DELTA)
    run.train(1)
    before, booked = weights(run.model), list(run.engine.accountant.history)
    x, y = next(iter(run.loader))
    run.optimizer.noise_multiplier = 0.1
    with pytest.raises(BudgetSpentError, match=r"more than epsilon=2 at delta=0\.001"):
        run.step(x, y)
    assert torch.equal(weights(run.model), before)
    assert run.engine.accountant.history == booked


@pytest.mark.filterwarnings("ignore:batch_norm='private'")
def test_the_final_release_of_private_statistics_is_reserved() -> None:
    run = Run("batch", batch_norm=PrivateStatistics(noise_multiplier=3.0))
    run.engine.stop_at(2.0, DELTA)
    run.train(30)
    before = run.engine.get_epsilon(DELTA)
    run.engine.finalize(run.module)
    assert before < run.engine.get_epsilon(DELTA) <= 2.0


@pytest.mark.filterwarnings("ignore:batch_norm='private'")
@pytest.mark.parametrize("trained", [False, True])
def test_a_release_on_the_way_that_does_not_fit_is_refused_and_one_that_fits_ends_training_earlier(
    trained: bool,
) -> None:
    run = Run("batch", batch_norm=PrivateStatistics(noise_multiplier=3.0))
    run.engine.stop_at(2.0, DELTA)
    run.train(30 if trained else 1)
    before, booked = dict(run.model.named_buffers()), list(run.engine.accountant.history)
    with pytest.raises(BudgetSpentError, match="running statistics would spend more than epsilon=2"):
        run.engine.recalibrate_batch_norm(noise_multiplier=0.5)
    assert run.engine.accountant.history == booked
    assert all(torch.equal(value, before[name]) for name, value in run.model.named_buffers())
    run.engine.recalibrate_batch_norm()  # the last one, or one more
    run.train(30)
    run.engine.finalize(run.module)
    assert run.engine.get_epsilon(DELTA) <= 2.0
    assert len(run.engine.accountant.history) == (2 if trained else 3)


@pytest.mark.filterwarnings("ignore:batch_norm='private'")
def test_a_budget_below_what_is_reserved_is_refused_before_anything_changes() -> None:
    """The last release alone would have cost epsilon = 7.6 under a budget of 2."""
    run = Run("batch", batch_norm=PrivateStatistics(noise_multiplier=0.5))
    with pytest.raises(ValueError, match="does not cover the final release"):
        run.engine.stop_at(2.0, DELTA)
    assert run.engine._limit is None
    run.engine.stop_at(20.0, DELTA)

    eng, model = engine(), mlp(norm=True)
    eng.stop_at(2.0, DELTA)
    with pytest.raises(ValueError, match="does not cover the final release"):
        eng.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=16),
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            clipping="batch",
            batch_norm=PrivateStatistics(noise_multiplier=0.5),
        )
    assert type(model[1]) is nn.BatchNorm1d
    assert not eng._runs


def test_a_resumed_run_ends_where_the_whole_run_would_have(tmp_path: Path) -> None:
    run = Run()
    run.engine.stop_at(2.0, DELTA)
    run.train(1)
    run.engine.save_checkpoint(path=tmp_path / "file", module=run.module, optimizer=run.optimizer)
    again = Run()
    again.engine.load_checkpoint(path=tmp_path / "file", module=again.module, optimizer=again.optimizer)
    again.engine.stop_at(2.0, DELTA)
    again.train(30)
    run.train(30)
    assert len(again.engine.accountant) == len(run.engine.accountant)


def test_folds_on_one_engine_share_the_budget() -> None:
    eng = engine()
    eng.stop_at(2.0, DELTA)
    for _ in range(3):
        Run(eng=eng).train(3)
    assert eng.get_epsilon(DELTA) <= 2.0
    last = Run(eng=eng)
    last.train(30)
    assert eng.get_epsilon(DELTA) <= 2.0 < one_step_more(last)


def test_a_budget_that_is_spent_already_and_bad_numbers_are_refused() -> None:
    run = Run()
    run.train(2)
    with pytest.raises(ValueError, match="is spent already"):
        run.engine.stop_at(0.01, DELTA)
    for epsilon, delta in ((-1.0, DELTA), (1.0, 0.0), (1.0, 1.5)):
        with pytest.raises(ValueError, match=r"epsilon|delta"):
            run.engine.stop_at(epsilon, delta)
    run.train(1)  # no budget is in force


@pytest.mark.parametrize("accountant", [pytest.param("prv", marks=pytest.mark.slow), "rdp"])
def test_opacus_accountants_stop_too(accountant: str) -> None:
    run = Run(eng=engine(accountant=accountant))
    run.engine.stop_at(3.0, DELTA)
    run.train(20)
    assert run.engine.get_epsilon(DELTA) <= 3.0
    assert not list(run.loader)
