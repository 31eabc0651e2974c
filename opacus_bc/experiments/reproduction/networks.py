"""The paper's two small networks with the norm before the activation, as its authors' public code has it."""

from __future__ import annotations

from torch import nn

from opacus_bc.experiments import models


def bn_lenet5(norm: models.Norm = "batch", *, in_channels: int = 1, num_classes: int = 10) -> nn.Module:
    """BN-LeNet-5 as convolution, norm, tanh, pooling."""
    return models.bn_lenet5(norm, order="conv-norm-act", in_channels=in_channels, num_classes=num_classes)


def convnet(norm: models.Norm = "batch", *, in_channels: int = 3, num_classes: int = 10) -> nn.Module:
    """The convnet as convolution, norm, ReLU, pooling."""
    return models.convnet(norm, order="conv-norm-act", in_channels=in_channels, num_classes=num_classes)
