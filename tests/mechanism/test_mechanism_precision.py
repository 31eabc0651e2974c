"""Clipping is in float32 whatever precision the loop has chosen: autocast and TF32 do not reach it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine
from opacus_bc.mechanism.precision import in_full_precision
from opacus_bc.mechanism.precision import settings as deciding


def settings() -> list[object]:
    return [getattr(holder, name) for holder, name, _ in deciding()]


@pytest.mark.parametrize("place", range(len(list(deciding()))))
def test_products_of_float32_are_exact_within_and_settings_as_they_were_afterwards(place: int) -> None:
    before = settings()
    seen: list[object] = []

    def product() -> torch.dtype:
        seen.extend(settings())
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with ExitStack() as stack:
        holder, name, exact = list(deciding())[place]
        stack.callback(setattr, holder, name, before[place])
        setattr(holder, name, "bf16" if isinstance(exact[0], str) else True)
        chosen = settings()
        with torch.autocast("cpu", torch.bfloat16):
            assert in_full_precision(product) == torch.float32
            assert torch.is_autocast_enabled("cpu")
        assert all(value in exact for value, (*_, exact) in zip(seen, deciding(), strict=True))
        assert settings() == chosen != before
    assert settings() == before


def test_a_loop_that_asks_for_medium_precision_gets_exact_products_within() -> None:
    left, right = torch.rand(2, 256, 256, generator=torch.Generator().manual_seed(0))
    exact, before = left @ right, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(in_full_precision(torch.matmul, left, right), exact)
    finally:
        torch.set_float32_matmul_precision(before)


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
