"""Models whose every entry, or channel, is a repetition of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Wide(nn.Module):
    """A model of R repetitions side by side, whose movement can be read off."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.start: list[Tensor] = []

    def reset(self) -> None:
        """Put all weights back to where the first call found them."""
        with torch.no_grad():
            self.start = self.start or [p.detach().clone() for p in self.parameters()]
            for p, value in zip(self.parameters(), self.start, strict=True):
                p.copy_(value)

    def moved(self) -> Tensor:
        """What the steps since :meth:`reset` have subtracted: shape ``(width, features)``."""
        moves = [value - p.detach() for p, value in zip(self.parameters(), self.start, strict=True)]
        return torch.cat([move.reshape(self.width, -1) for move in moves], dim=1)


class InnerProduct(Wide):
    """The sum over layers and entries of w times x; its gradient is x itself, whatever w is."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(nn.Linear(1, width, bias=False) for _ in range(layers))
        for p in self.parameters():
            nn.init.zeros_(p)
        self.reset()

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row of ``x``, which has one column for each layer."""
        columns = [layer(x[:, h : h + 1]).sum(1) for h, layer in enumerate(self.layers)]
        return torch.stack(columns).sum(0)


NORMALISED_LAYERS = 3  # parameters of the next one, which "per_layer" clips one by one


class Normalised(Wide):
    """A linear layer of two inputs and BatchNorm behind it, R channels alike; in float64.

    Its gradient depends on the statistics: on those of public data each sample's is its own.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(2, width, bias=False)
        nn.init.ones_(self.linear.weight)
        self.norm = nn.BatchNorm1d(width)
        self.double()
        self.reset()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of a row's channels, times the row's third column."""
        out: Tensor = x[:, 2] * self.norm(self.linear(x[:, :2])).sum(1)
        return out


class Mean(nn.Module):
    """The mean of outputs times targets, or one loss for each row where ghost clipping asks for it."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: Tensor, sign: Tensor) -> Tensor:
        """The loss."""
        losses = output * sign
        return losses if self.reduction == "none" else losses.mean()
