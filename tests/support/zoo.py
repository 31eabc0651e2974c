"""Networks of torchvision and timm that several tests train, one for each kind, and how to build them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import zoo_models
import zoo_steps

sys.path.pop(0)

__all__ = ["NETWORKS", "PIXELS", "SLOW", "build", "zoo_models", "zoo_steps"]

PIXELS = 32
NETWORKS = {
    "residual, BatchNormAct2d inside": "timm test_byobnet",
    "residual, in-place ReLU": "timm test_resnet",
    "depthwise, squeeze-and-excite, BatchNormAct2d": "timm test_efficientnet",
    "weight-standardised convolutions": "timm test_nfnet",
    "hard activations, squeeze-and-excite": "timm lcnet_035",
    "universal inverted bottlenecks": "timm mobilenetv4_conv_small_035",
    "element-wise products": "timm starnet_s050",
    "aggregated trees, grouped": "timm dla46x_c",
    "partial convolutions": "timm fasternet_t0",
    "parameters in the block": "timm inception_next_atto",
    "channel shuffle": "torchvision shufflenet_v2_x0_5",
    "inverted bottlenecks, dropout": "torchvision mnasnet0_5",
}
SLOW = {
    "reparameterised": "timm repghostnet_050",
    "channel attention": "timm ecaresnet26t",
    "split attention": "timm resnest14d",
    "pre-activation, blur": "timm resnetblur18",
    "pre-activation": "timm resnetv2_18",
    "dense": "timm densenet121",
    "stochastic depth, squeeze-and-excite": "torchvision efficientnet_b0",
    "residual": "torchvision resnet18",
}


def build(network: str) -> Any:
    """A function that makes the network."""
    return partial(zoo_models.build, network, zoo_steps.CLASSES)
