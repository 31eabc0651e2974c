"""Averaged weights and learning rates by steps: both follow the moves of the weights, in every mode."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import blobs, cross_entropy, mlp, reseed
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_bc import AveragedWeights, PrivacyEngine, WarmupCosine

MODES: dict[str, dict[str, Any]] = {
    "hooks": {"clipping": "flat", "grad_sample_mode": "hooks"},
    "bk": {"clipping": "flat", "grad_sample_mode": "bk"},
    "gbc": {"clipping": "batch", "mini_batch_size": 4},
}


def private(mode: str, seed: int = 0, **more: Any) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    model, engine = mlp(norm=True, seed=seed), PrivacyEngine()
    public = DataLoader(blobs(60, seed=9), batch_size=30)
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(blobs(96), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        batch_norm=public,
        **MODES[mode],
        **more,
    )
    reseed(optimizer, loader, 5)
    return engine, module, optimizer, loader


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model, x, y).backward()
    optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
def test_the_average_is_that_of_the_weights_after_every_move(mode: str) -> None:
    _, model, optimizer, loader = private(mode)
    averaged, expected, moves = AveragedWeights(optimizer, decay=0.7), weights(model), 0
    for x, y in loader:
        step(model, optimizer, x, y)
        if optimizer.weights_moved:
            moves += 1
            d = min(0.7, (1 + moves) / (10 + moves))
            expected = [d * e + (1 - d) * w for e, w in zip(expected, weights(model), strict=True)]
    assert moves == loader.steps_per_epoch == optimizer.steps_taken == averaged.moves
    before = weights(model)
    with averaged.applied():
        torch.testing.assert_close(weights(model), expected)
        assert not torch.equal(weights(model)[0], before[0])
    assert all(map(torch.equal, weights(model), before))


def test_public_statistics_follow_the_averaged_weights_and_finalize_releases_them() -> None:
    engine, model, optimizer, loader = private("bk")
    averaged = AveragedWeights(optimizer, decay=0.9)
    for x, y in loader:
        step(model, optimizer, x, y)
    probe = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    model.eval()
    last = model(probe).detach()
    with averaged.applied():
        inside = model(probe).detach()
    assert not torch.allclose(inside, last)
    torch.testing.assert_close(model(probe).detach(), last)
    epsilon = engine.get_epsilon(1e-5)
    averaged.write()
    released = engine.finalize(model).eval()
    torch.testing.assert_close(released(probe).detach(), inside)
    assert engine.get_epsilon(1e-5) == epsilon


def test_a_step_on_averaged_weights_raises_before_anything_moves() -> None:
    _, model, optimizer, loader = private("bk")
    averaged, batches = AveragedWeights(optimizer), iter(loader)
    step(model, optimizer, *next(batches))
    x, y = next(batches)
    with averaged.applied():
        before = weights(model)
        with pytest.raises(RuntimeError, match="averaged weights"):
            step(model, optimizer, x, y)
        assert all(map(torch.equal, weights(model), before))
        with pytest.raises(RuntimeError, match="applied already"), averaged.applied():
            pass


def test_a_resumed_average_goes_on_and_another_models_is_refused(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private("bk")
    averaged = AveragedWeights(optimizer)
    for x, y in loader:
        step(model, optimizer, x, y)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(
        path=path, module=model, optimizer=optimizer, checkpoint_dict={"averaged": averaged.state_dict()}
    )
    engine, model, optimizer, loader = private("bk", seed=1)
    resumed = AveragedWeights(optimizer)
    resumed.load_state_dict(engine.load_checkpoint(path=path, module=model, optimizer=optimizer)["averaged"])
    with averaged.applied(), resumed.applied():
        assert resumed.moves == averaged.moves
        torch.testing.assert_close(resumed.state_dict()["averages"], averaged.state_dict()["averages"])
    resumed.remove()
    step(model, optimizer, *next(iter(loader)))
    assert resumed.moves == averaged.moves
    with pytest.raises(ValueError, match="shapes"):
        resumed.load_state_dict({"moves": 1, "averages": [torch.zeros(3)]})


@pytest.mark.parametrize("decay", [0.0, 1.0, math.nan, -1])
def test_a_decay_outside_of_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay must be"):
        AveragedWeights(private("bk")[2], decay=decay)


@pytest.mark.parametrize("mode", MODES)
def test_the_learning_rate_goes_by_moves_of_the_weights(mode: str) -> None:
    _, model, optimizer, loader = private(mode)
    total = 2 * loader.steps_per_epoch
    schedule = WarmupCosine(optimizer, total_steps=total, warmup_steps=3, final=0.1)
    rates = []
    for _ in range(2):
        for x, y in loader:
            rate = optimizer.param_groups[0]["lr"]
            step(model, optimizer, x, y)
            schedule.step()
            if optimizer.weights_moved:
                rates.append(rate)
    cosine = [0.55 + 0.45 * math.cos(math.pi * t / (total - 3)) for t in range(total - 3)]
    assert rates == pytest.approx([0.5 * f for f in (1 / 3, 2 / 3, 1.0, *cosine)])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_learning_rate_goes_on_after_a_resume(tmp_path: Path) -> None:
    engine, model, optimizer, loader = private("gbc")
    schedule = WarmupCosine(optimizer, total_steps=20)
    for x, y in loader:
        step(model, optimizer, x, y)
        schedule.step()
    path, rate = tmp_path / "run.pt", optimizer.param_groups[0]["lr"]
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, lr_scheduler=schedule)
    engine, model, optimizer, loader = private("gbc", seed=1)
    schedule = WarmupCosine(optimizer, total_steps=20)
    engine.load_checkpoint(path=path, module=model, optimizer=optimizer, lr_scheduler=schedule)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    schedule.step()  # nothing has moved since
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_with_a_plain_optimizer_every_call_counts() -> None:
    optimizer = optim.SGD(mlp().parameters(), lr=1.0)
    schedule = WarmupCosine(optimizer, total_steps=4, warmup_steps=2)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    "arguments",
    [{"total_steps": 0}, {"total_steps": 5, "warmup_steps": 5}, {"total_steps": 5, "final": 1.5}],
)
def test_schedules_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        WarmupCosine(optim.SGD(mlp().parameters(), lr=1.0), **arguments)
