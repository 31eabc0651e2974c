"""A dozen networks of torchvision and timm, one for each kind; ``benchmarks/zoo.py`` has all of them."""

from __future__ import annotations

import pytest
import timm
import torch
from support.zoo import NETWORKS, PIXELS, SLOW, build, zoo_models, zoo_steps
from torch import nn

ALL = [
    *(pytest.param(name, id=kind) for kind, name in NETWORKS.items()),
    *(pytest.param(name, id=kind, marks=pytest.mark.slow) for kind, name in SLOW.items()),
]
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def distance(make: zoo_steps.Build, pixels: int, mode: str) -> float:
    """In float64: in float32 an activation at its kink may fall on the other side in a batch of one."""
    torch.set_default_dtype(torch.float64)
    try:
        return zoo_steps.oracle_distance(lambda: make().double(), pixels, mode)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("network", ALL)
def test_the_release_of_frozen_individual_clipping_is_that_of_a_loop_over_single_samples(
    network: str,
) -> None:
    assert distance(build(network), PIXELS, "hooks") < 2e-5  # the bound is 1e-5 smaller than it says


def blurred() -> nn.Module:
    """Anti-aliased pooling: a convolution with a filter that is a buffer."""
    torch.manual_seed(0)
    pool = [nn.BatchNorm2d(4), nn.ReLU(), timm.layers.BlurPool2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *pool, nn.Linear(4, zoo_steps.CLASSES))


@pytest.mark.parametrize("mode", ["hooks", "bk"])
@pytest.mark.parametrize("policy", ["frozen", "public"])
def test_blur_pooling_trains_under_every_policy(policy: str, mode: str) -> None:
    given = zoo_steps.public(16) if policy == "public" else "frozen"
    zoo_steps.released(blurred, 16, clipping="flat", batch_norm=given, grad_sample_mode=mode)
    assert distance(blurred, 16, mode) < 2e-5


@pytest.mark.parametrize("network", ALL)
def test_individual_clipping_with_public_statistics_releases_a_plain_network(network: str) -> None:
    zoo_steps.released(build(network), PIXELS, clipping="flat", batch_norm=zoo_steps.public(PIXELS))


@pytest.mark.parametrize("size", [None, 2], ids=["BC", "GBC"])
@pytest.mark.parametrize("network", ["timm test_byobnet", "timm test_efficientnet", "torchvision mnasnet0_5"])
def test_batch_clipping_releases_a_plain_network(network: str, size: int | None) -> None:
    public = zoo_steps.public(PIXELS)
    zoo_steps.released(build(network), PIXELS, clipping="batch", mini_batch_size=size, batch_norm=public)


def test_an_oracle_with_another_clip_bound_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = zoo_steps.oracle_update
    monkeypatch.setattr(zoo_steps, "oracle_update", lambda *a: [1.01 * u for u in expected(*a)])
    assert zoo_steps.oracle_distance(build("timm test_resnet"), PIXELS) > 5e-3


def test_the_zoo_has_every_network_once_and_more_than_a_hundred_families() -> None:
    names = zoo_models.names()
    assert len(names) == len(set(names))
    assert len(zoo_models.TIMM.split()) >= 100
