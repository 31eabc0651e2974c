"""Layers that are thawed in the middle of training are looked at as the others were in the beginning."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine


class Sorting(nn.Module):
    """A layer that sees the rows sorted, as for packed sequences, beside one that sees them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.sorted = nn.Linear(4, 1), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(1, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.norm(self.plain(x)) + self.sorted(x[order])[order.argsort()]


@pytest.mark.filterwarnings("ignore:batch_norm='frozen'")
def test_a_layer_thawed_later_that_sees_other_rows_is_refused() -> None:
    torch.manual_seed(0)
    model = Sorting()
    model.sorted.requires_grad_(False)
    before = model.sorted.weight.clone()
    module, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        batch_norm="frozen",
        sampling="shuffle",
    )

    def epoch() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()

    for _ in range(5):  # more than are looked at in the beginning
        epoch()
    model.sorted.requires_grad_(True)
    with pytest.raises(RuntimeError, match="sample"):
        epoch()
    assert torch.equal(model.sorted.weight, before)
