"""Learning rates may move when the weights do; a schedule that follows a loop's deliveries is warned of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp
from torch import nn, optim
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from opacus_bc import BatchMemoryManager

FAST = "learning rate changed between two deliveries of one draw"


def train(*, careful: bool, chunked: bool = False, in_tensor: bool = False, **kwargs: Any) -> float:
    """Two epochs with a schedule by steps; returns the last rate."""
    model = mlp()
    module, optimizer, loader = engine().make_private(
        module=model,
        optimizer=optim.Adam(model.parameters(), lr=torch.tensor(0.1) if in_tensor else 0.1),
        data_loader=DataLoader(blobs(64), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **kwargs,
    )
    schedule = ExponentialLR(optimizer, gamma=0.5)

    def epoch(batches: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            if not careful or optimizer.weights_moved:
                schedule.step()

    for _ in range(2):
        if chunked:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
            ) as batches:
                epoch(batches)
        else:
            epoch(loader)
    return float(optimizer.param_groups[0]["lr"])


MODES: dict[str, dict[str, Any]] = {
    "mini-sets": {"clipping": "batch", "mini_batch_size": 4},
    "chunks": {"chunked": True},
    "a rate in a tensor": {"clipping": "batch", "mini_batch_size": 4, "in_tensor": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_that_follows_deliveries_is_warned_of_once(mode: str) -> None:
    with pytest.warns(UserWarning, match=FAST) as found:
        assert train(careful=False, **MODES[mode]) < 0.1 * 0.5**8
    assert len(found) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_that_follows_the_weights_is_not(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(careful=True, **MODES[mode]) == pytest.approx(0.1 * 0.5**8)


def test_where_every_delivery_moves_the_weights_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(careful=False, clipping="batch") == pytest.approx(0.1 * 0.5**8)
