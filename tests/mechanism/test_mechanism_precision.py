"""Clipping is in float32 whatever precision the loop has chosen: autocast and TF32 do not reach it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.mechanism.precision import _settings, full_precision


def settings() -> list[object]:
    return [getattr(holder, name) for holder, name, _ in _settings()]


def test_products_of_float32_are_exact_within_and_settings_as_they_were_afterwards() -> None:
    before = settings()
    with ExitStack() as stack:
        for (holder, name, _), value in zip(_settings(), before, strict=True):
            stack.callback(setattr, holder, name, value)
        holder, name, exact = next(_settings())
        setattr(holder, name, "tf32" if isinstance(exact, str) else True)
        chosen = settings()
        with torch.autocast("cpu", torch.bfloat16), full_precision():
            assert settings() == [exact for *_, exact in _settings()]
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert settings() == chosen != before
    assert settings() == before


def released(samples: int, mode: str, features: int) -> Tensor:
    """The clipped sum of equal samples, backward and step within autocast."""
    model = nn.Linear(features, 1, bias=False)
    before = model.weight.detach().clone()
    data = TensorDataset(torch.ones(samples, features))
    arguments: dict[str, Any] = {"poisson_sampling": False, "loss_reduction": "sum", "grad_sample_mode": mode}
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=samples),
        noise_multiplier=1e-9,
        max_grad_norm=1.0,
        **arguments,
    )
    for (x,) in loader:
        with torch.autocast("cpu", torch.bfloat16):
            (5 * private(x)).sum().backward()
            optimizer.step()
    return before - model.weight.detach()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("mode", ["bk", "bk-rows", "hooks"])
def test_one_sample_moves_the_sum_by_at_most_its_bound_if_the_step_is_within_autocast(mode: str) -> None:
    """In bfloat16 a sum of 600 moves by 4 or not at all."""
    moved = [float((released(n + 1, mode, 8) - released(n, mode, 8)).norm()) for n in (601, 602)]
    assert max(moved) <= 1.0001
