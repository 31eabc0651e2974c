"""Slips that a newcomer makes: each is said at once, and nothing is handed out that no epsilon describes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_norm_support import images, make_private, network, public, train
from support import blobs, engine, mlp
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivateStatistics
from opacus_bc.norm_types import PolicyLayer
from opacus_bc.public_data import PublicDataError


def keep_stepping_the_optimizer_that_was_passed_in(clipping: str) -> tuple[Any, nn.Module, Any]:
    eng, model = engine(), mlp()
    mine = optim.SGD(model.parameters(), lr=0.1)
    module, private, loader = eng.make_private(
        module=model,
        optimizer=mine,
        data_loader=DataLoader(blobs(32), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=clipping,
    )
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()
    mine.step()
    return eng, module, private


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_weights_that_moved_without_the_accountant_are_neither_handed_out_nor_saved(
    clipping: str, tmp_path: Path
) -> None:
    eng, module, private = keep_stepping_the_optimizer_that_was_passed_in(clipping)
    with pytest.raises(RuntimeError, match="passed to make_private was stepped instead"):
        eng.finalize(module)
    with pytest.raises(RuntimeError, match="1 steps were taken and 0 are booked"):
        eng.save_checkpoint(path=tmp_path / "run.pt", module=module, optimizer=private)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_a_finalized_model_is_not_saved_as_a_checkpoint(clipping: str, tmp_path: Path) -> None:
    eng, module, optimizer, criterion, loader = make_private(
        network(), clipping=clipping, batch_norm=public()
    )
    train(module, optimizer, criterion, loader)
    eng.finalize(module)
    with pytest.raises(RuntimeError, match="save a checkpoint before finalize"):
        eng.save_checkpoint(path=tmp_path / "run.pt", module=module, optimizer=optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [None, 4])
def test_a_scheduler_by_steps_moves_once_a_draw(size: int | None) -> None:
    eng, model = engine(), mlp()
    _, optimizer, loader = eng.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(blobs(96), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="batch",
        mini_batch_size=size,
    )
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not optimizer._is_last_step_skipped:
            scheduler.step()
    assert len(eng.accountant) == 6
    assert optimizer.param_groups[0]["lr"] == 0.5**6


@pytest.mark.parametrize("clipping", ["batch", "flat"])
@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(images(8, seed=9), batch_size=1), "no batch of the public loader has two samples"),
        (DataLoader(blobs(20), batch_size=4), "the model fails on a batch of the public loader"),
    ],
    ids=["single samples", "another shape"],
)
def test_public_data_that_do_not_fit_are_refused_before_training_and_leave_the_model(
    loader: DataLoader[Any], message: str, clipping: str
) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PublicDataError, match=message):
        make_private(model, clipping=clipping, batch_norm=loader)
    assert not any(isinstance(m, PolicyLayer) for m in model.modules())
    assert not model._forward_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("argument", ["batch_norm", "alc"])
@pytest.mark.parametrize("wrap", [list, torch.stack, lambda rows: TensorDataset(torch.stack(rows))])
def test_data_given_in_place_of_a_loader_are_not_printed(argument: str, wrap: Any) -> None:
    given = wrap([torch.full((4,), 123.456) for _ in range(3)])
    with pytest.raises((ValueError, TypeError), match="DataLoader") as caught:
        make_private(network(), **{"batch_norm": public(), argument: given})
    assert "123" not in str(caught.value)
    assert f"got {type(given).__name__}" in str(caught.value)


def test_batches_much_larger_than_the_data_are_said_and_described_as_they_are() -> None:
    with pytest.warns(UserWarning, match="batch_size=128 is more than twice the data set's 48 samples"):
        eng, *_ = make_private(network(), batch_norm=public(), batch_size=128, mini_batch_size=8)
    assert "16 mini-sets of 3 samples in expectation" in eng.statement(1e-5)
    make_private(network(), batch_norm=public(), batch_size=96, mini_batch_size=8)  # a warning is an error


def test_individual_clipping_needs_a_loader_that_makes_batches() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="batch_size=None"):
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(blobs(32), batch_size=None),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_refresh_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_norm_refresh=10 .* leave it out"):
        make_private(network(), batch_norm=public(), batch_norm_refresh=10)


@pytest.mark.parametrize("epsilon", ["8", 0, -1.0, float("nan"), None])
def test_a_budget_that_is_no_positive_number_is_refused(epsilon: Any) -> None:
    model = mlp()
    with pytest.raises((ValueError, TypeError), match="target_epsilon"):
        engine().make_private_with_epsilon(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(blobs(32), batch_size=8),
            target_epsilon=epsilon,
            target_delta=1e-3,
            epochs=1,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize(
    ("samples", "sigma", "said"),
    [
        # Five channels: R = 2 sqrt(10) = 6.32, so 50 R / N > 0.1 for N < 3162.
        (3000, 50.0, r"noise of standard deviation 0\.11.*noise_multiplier=47\)"),
        (48, 50.0, r"noise of standard deviation 6\.6.*Use public data"),
        (3200, 50.0, None),
        (3000, 40.0, None),
    ],
)
def test_private_statistics_that_noise_will_drown_are_said_before_training(
    samples: int, sigma: float, said: str | None
) -> None:
    model = network()
    expected = pytest.warns(UserWarning, match=said) if said else nullcontext()  # others would be errors
    with expected:
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(images(samples), batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            batch_norm=PrivateStatistics(noise_multiplier=sigma),
        )
