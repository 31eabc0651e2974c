"""The networks whose cost is measured, each with BatchNorm or with what Opacus accepts, and data for them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from opacus_bc.experiments.training import models

Norm = Literal["batch", "group"]
DEPTHWISE = "tf_efficientnet_lite0"  # at 96 pixels, with random weights
NETWORKS = ("bn_lenet5", "convnet", "resnet18", "transformer", DEPTHWISE)
WIDTHS = ("mlp 64", "mlp 256", "mlp 1024", "mlp 2048")  # 12 thousand to 9 million parameters
TOKENS, FEATURES, HEADS = 16, 64, 4


class Tokens(nn.Module):
    """BatchNorm over the features of (batch, tokens, features)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """A pre-norm attention block with its feed-forward part."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            Tokens(FEATURES) if norm == "batch" else nn.LayerNorm(FEATURES) for _ in range(2)
        )
        self.inwards = nn.Linear(FEATURES, 3 * FEATURES)
        self.outwards = nn.Linear(FEATURES, FEATURES)
        self.wide = nn.Linear(FEATURES, 4 * FEATURES)
        self.narrow = nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        shape = (len(x), TOKENS, HEADS, FEATURES // HEADS)
        parts = (part.reshape(shape).transpose(1, 2) for part in self.inwards(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        x = x + self.outwards(mixed)
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    """Four attention blocks over vectors, and a classifier of their mean."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.Sequential(*[Attention(norm) for _ in range(4)])
        self.head = nn.Linear(FEATURES, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)).mean(1))


def _mlp(width: int, norm: Norm) -> nn.Module:
    def layer(inputs: int) -> list[nn.Module]:
        normalise = nn.BatchNorm1d(width) if norm == "batch" else nn.GroupNorm(8, width)
        return [nn.Linear(inputs, width), normalise, nn.ReLU()]

    return nn.Sequential(*layer(FEATURES), *layer(width), *layer(width), nn.Linear(width, 10))


def build(name: str, *, norm: Norm) -> nn.Module:
    """The network; ``"group"`` is LayerNorm for the transformer."""
    if name == "transformer":
        return Transformer(norm)
    if name.startswith("mlp"):
        return _mlp(int(name.split()[1]), norm)
    if name == DEPTHWISE:
        import timm

        return models.replace_batch_norm(timm.create_model(name, pretrained=False, num_classes=10), norm)
    return models.build(name, norm=norm, in_channels=1 if name == "bn_lenet5" else 3, num_classes=10)


def examples(name: str, count: int) -> TensorDataset:
    """Random inputs of the right shape with random labels."""
    shapes = {"transformer": (TOKENS, FEATURES), "bn_lenet5": (1, 32, 32), DEPTHWISE: (3, 96, 96)}
    shape = shapes.get(name, (FEATURES,) if name.startswith("mlp") else (3, 32, 32))
    return TensorDataset(torch.randn(count, *shape), torch.randint(0, 10, (count,)))
