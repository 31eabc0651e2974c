"""Lightning drives the private optimizer and loader as a plain loop does, optimizing by itself or not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp, weights
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns of its own deprecations
    lightning = pytest.importorskip("lightning", reason="the extra [lightning] is not installed")

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


def fit(private: Private, **kwargs: Any) -> Task:
    task = Task(private, automatic=kwargs.pop("automatic", True))
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
