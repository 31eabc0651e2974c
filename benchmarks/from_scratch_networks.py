"""The networks of `from_scratch.py`: the paper's convnet, and a residual one that two cores can train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor, nn

from opacus_bc.experiments.training.models import Norm, convnet


def normalisation(norm: Norm, channels: int) -> nn.Module:
    """BatchNorm, or what Opacus's ``ModuleValidator.fix`` puts in its place."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(math.gcd(32, channels), channels)


def convolution(fan_in: int, fan_out: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    """Without a bias, which normalisation would take away."""
    return nn.Conv2d(fan_in, fan_out, size, stride=stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """Two 3×3 convolutions beside a 1×1 one or nothing, every sum normalised."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = convolution(fan_in, fan_out, stride)
        self.norm1 = normalisation(norm, fan_out)
        self.conv2 = convolution(fan_out, fan_out)
        self.norm2 = normalisation(norm, fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                convolution(fan_in, fan_out, stride, size=1), normalisation(norm, fan_out)
            )
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.norm1(self.conv1(x)))
        summed: Tensor = self.act(self.norm2(self.conv2(inner)) + self.shortcut(x))
        return summed


def resnet8(norm: Norm) -> nn.Module:
    """A stem of stride 2, and three residual blocks of 32, 64 and 128 channels.

    >>> sum(p.numel() for p in resnet8("batch").parameters())
    309290
    """
    return nn.Sequential(
        convolution(3, 32, stride=2),
        normalisation(norm, 32),
        nn.ReLU(),
        Block(32, 32, 1, norm),
        Block(32, 64, 2, norm),
        Block(64, 128, 2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


NETWORKS: Mapping[str, Callable[[Norm], nn.Module]] = MappingProxyType(
    {
        "convnet": convnet,
        "convnet-norm-first": partial(convnet, order="conv-norm-act"),  # as in residual networks
        "resnet8": resnet8,
    }
)
