"""Lightning drives the private optimizer and loader as a plain loop does, optimizing by itself or not."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp, weights
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from opacus_bc import WarmupCosine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns of its own deprecations
    lightning = pytest.importorskip("lightning", reason="the extra [lightning] is not installed")
    from opacus_bc.integrations.lightning import LogPrivacy, StepsByMoves

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and devices

EPOCHS = 2


class Private:
    """A model made private, with every stream seeded."""

    def __init__(self, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.engine = engine()
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(blobs(), batch_size=20, generator=torch.Generator().manual_seed(1)),
            noise_generator=torch.Generator().manual_seed(2),
            **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, "clipping": "batch", **kwargs},
        )


class Task(lightning.LightningModule):
    """A user's module: it holds the private model and hands out the private optimizer."""

    def __init__(self, private: Private, *, automatic: bool) -> None:
        super().__init__()
        self.model = private.model
        self.private_optimizer = private.optimizer
        self.automatic_optimization = automatic
        self.evaluated = 0

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        self.evaluated += 1
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        return self.private_optimizer


def fit(private: Private, task: Any = None, **kwargs: Any) -> Any:
    task = task or Task(private, automatic=kwargs.pop("automatic", True))
    trainer = lightning.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **kwargs,
        }
    )
    trainer.fit(task, train_dataloaders=private.loader)
    return task


def plain_loop(private: Private) -> int:
    deliveries = 0
    for _ in range(EPOCHS):
        for x, y in private.loader:
            private.optimizer.zero_grad()
            nn.functional.cross_entropy(private.model(x), y).backward()
            private.optimizer.step()
            deliveries += 1
    return deliveries


MODES: dict[str, dict[str, Any]] = {
    "bc": {},
    "gbc": {"mini_batch_size": 5},
    "gbc with mini-sets left out": {"mini_batch_size": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_takes_the_steps_of_a_plain_loop(mode: str, automatic: bool) -> None:
    by_hand, by_lightning = Private(**MODES[mode]), Private(**MODES[mode])
    torch.manual_seed(3)
    deliveries = plain_loop(by_hand)
    torch.manual_seed(3)
    task = fit(by_lightning, automatic=automatic)
    assert torch.equal(weights(by_hand.model), weights(by_lightning.model))
    assert len(by_lightning.engine.accountant) == EPOCHS * 10
    assert by_lightning.engine.get_epsilon(1e-5) == by_hand.engine.get_epsilon(1e-5)
    assert task.evaluated == deliveries  # closures run once


def test_accumulation_over_batches_is_refused() -> None:
    private = Private()
    before = weights(private.model)
    with pytest.raises(RuntimeError, match="several batches were delivered"):
        fit(private, accumulate_grad_batches=2)
    assert torch.equal(before, weights(private.model))
    assert len(private.engine.accountant) == 0


def test_the_gradient_scaler_of_mixed_precision_is_refused() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    private = Private()
    before = weights(private.model)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="GradScaler"):
        fit(private, plugins=[plugin])
    assert torch.equal(weights(private.model), before)
    assert len(private.engine.accountant) == 0


def test_a_run_that_is_broken_off_books_the_steps_it_took() -> None:
    private = Private()
    fit(private, max_epochs=1, limit_train_batches=4)
    assert len(private.engine.accountant) == 4


def test_individual_clipping_runs_under_lightning_too() -> None:
    torch.manual_seed(0)
    private = Private.__new__(Private)
    private.engine = engine()
    inner = mlp()
    private.model, private.optimizer, private.loader = private.engine.make_private(
        module=inner,
        optimizer=optim.SGD(inner.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )
    fit(private)
    assert len(private.engine.accountant) == EPOCHS * 10


class Scheduled(Task):
    """A user's module with a schedule by steps."""

    def __init__(self, private: Private, *, interval: str = "step", scheduler: Any = None) -> None:
        super().__init__(private, automatic=True)
        self.scheduler = scheduler or ExponentialLR(private.optimizer, gamma=0.9)
        self.interval = interval

    def configure_optimizers(self) -> Any:
        schedule = {"scheduler": self.scheduler, "interval": self.interval}
        return {"optimizer": self.private_optimizer, "lr_scheduler": schedule}


class ByMoves(Scheduled, StepsByMoves):
    """The same module, as the documentation recommends it."""


def rate(private: Private) -> float:
    return float(private.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("mode", MODES)
def test_schedules_by_steps_follow_the_moves_of_the_weights_under_lightning(mode: str) -> None:
    private = Private(**MODES[mode])
    fit(private, ByMoves(private))
    assert private.optimizer.steps_taken == EPOCHS * 10
    assert rate(private) == pytest.approx(0.1 * 0.9 ** (EPOCHS * 10))


def test_a_schedule_by_steps_that_follows_deliveries_is_warned_of() -> None:
    private = Private(mini_batch_size=5)
    with pytest.warns(UserWarning, match=r"while the weights did not move.*StepsByMoves") as found:
        fit(private, Scheduled(private))
    assert len([w for w in found if "weights did not move" in str(w.message)]) == 1
    assert rate(private) < 0.1 * 0.9 ** (3 * EPOCHS * 10)  # that is what the warning is about


def test_schedules_by_epochs_step_once_an_epoch_also_where_one_is_cut_short() -> None:
    private = Private(mini_batch_size=5)
    fit(private, ByMoves(private, interval="epoch"), limit_train_batches=6)  # a draw and a half
    assert not private.optimizer.weights_moved
    assert rate(private) == pytest.approx(0.1 * 0.9**EPOCHS)


def test_our_own_schedule_is_right_without_the_class_and_with_it() -> None:
    for kind in (Scheduled, ByMoves):
        private = Private(mini_batch_size=5)
        schedule = WarmupCosine(private.optimizer, total_steps=40, warmup_steps=4)
        fit(private, kind(private, scheduler=schedule))
        assert rate(private) == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * (20 - 4) / 36)))


def test_the_callback_logs_what_may_be_logged_and_nothing_else() -> None:
    private = Private(mini_batch_size=5)
    logged: list[dict[str, float]] = []

    class Recorder(lightning.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append(dict(metrics))

    fit(private, logger=Recorder(), callbacks=[LogPrivacy(private.engine, 1e-5)])
    expected = {f"privacy/{name}": value for name, value in private.engine.loggable(1e-5).items()}
    assert len(logged) == EPOCHS
    assert {name for each in logged for name in each} == {*expected, "epoch"}
    assert {name: logged[-1][name] for name in expected} == pytest.approx(expected)
    assert [each["privacy/steps"] for each in logged] == [10, 20]
    assert logged[0]["privacy/epsilon"] < logged[1]["privacy/epsilon"]
