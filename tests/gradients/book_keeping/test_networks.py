"""A dozen networks of torchvision and timm: norms and clipped sums of one backward against two others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import engine
from support.zoo import NETWORKS, PIXELS, build, zoo_steps
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:.*hold the statistics|batch_norm= changes nothing"),
]
QUICK = 4
BOUND, MARGIN = 1.0, 1e-5  # clip bounds are so much smaller, so that they hold in floats
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# In float32 a batch of one can round to another path through ReLU and max-pooling than a batch of four. Hooks
# see the same batch as book-keeping does, and in float64 the loop agrees too.
ANOTHER_PATH = ("timm dla46x_c",)
CASES = [
    pytest.param(name, dtype, id=f"{kind}, {str(dtype)[6:]}", marks=[pytest.mark.slow] if i >= QUICK else [])
    for i, (kind, name) in enumerate(NETWORKS.items())
    for dtype in TOLERANCE
]
Found = tuple[Tensor, dict[str, Tensor]]


class Noted:
    """Stands for the noise: keeps what would have been noised."""

    secure = False

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def add_(self, tensor: Tensor, std: float) -> None:
        self.sums.append(tensor.clone())

    def normal(self, tensor: Tensor, std: float) -> Tensor:
        self.sums.append(tensor.clone())
        return torch.zeros_like(tensor)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = zoo_steps.data(PIXELS, seed=0).tensors
    return x.to(dtype), y


def trained(model: nn.Module, dtype: torch.dtype, mode: str) -> Found:
    """Every sample's norm and the clipped sum of a step over one batch, in a mode of make_private."""
    module, optimizer, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*batch(dtype)), batch_size=zoo_steps.SAMPLES),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        poisson_sampling=False,
        batch_norm="frozen",
        grad_sample_mode=mode,
    )
    optimizer.noise = Noted()
    names = [name for block in optimizer.blocks() for name in block.names]
    ((x, y),) = loader
    zoo_steps.loss_of(module.train()(x), y).backward()
    norms: list[Tensor]
    if mode == "bk":  # a mean's gradients are 1/rows of the samples'
        held = optimizer._book.read(model.parameters()).values()
        norms = [len(x) * entry.norms().double() for entry in held]
    else:
        rows: list[Any] = [getattr(p, "grad_sample", None) for p in model.parameters()]
        norms = [row.double().flatten(1).norm(dim=1) for row in rows if row is not None]
    optimizer.step()
    return torch.stack(norms).norm(dim=0), dict(zip(names, optimizer.noise.sums, strict=True))


def looped(model: nn.Module, dtype: torch.dtype) -> Found:
    """The same by plain autograd over single samples; nothing of this package is used."""
    plain = copy.deepcopy(model).train()
    for layer in plain.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.training = False
    params = dict(plain.named_parameters())
    total, norms = {name: torch.zeros_like(p) for name, p in params.items()}, []
    for x, y in zip(*batch(dtype), strict=True):
        loss = zoo_steps.loss_of(plain(x[None]), y[None])
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        rows = {
            name: torch.zeros_like(total[name]) if g is None else g
            for name, g in zip(params, grads, strict=True)
        }
        norms.append(torch.stack([row.double().norm() for row in rows.values()]).norm())
        for name, row in rows.items():
            total[name] += min(1.0, BOUND * (1 - MARGIN) / float(norms[-1])) * row
    return torch.stack(norms), total


def apart(found: Found, expected: Found) -> tuple[float, float]:
    """How far norms and clipped sums are apart, relative to their size."""
    (norms, sums), (other_norms, other_sums) = found, expected
    assert set(sums) == set(other_sums)
    difference = torch.stack([(sums[name] - other).double().norm() for name, other in other_sums.items()])
    size = torch.stack([other.double().norm() for other in other_sums.values()])
    return float((norms / other_norms - 1).abs().max()), float(difference.norm() / size.norm())


@pytest.mark.parametrize(("network", "dtype"), CASES)
def test_norms_and_clipped_sums_are_those_of_hooks_and_of_a_loop_over_single_samples(
    network: str, dtype: torch.dtype
) -> None:
    model = zoo_steps.without_randomness(zoo_steps.settle(build(network)(), PIXELS)).to(dtype)
    expected, hooks, ours = (
        looped(model, dtype),
        trained(copy.deepcopy(model), dtype, "hooks"),
        trained(copy.deepcopy(model), dtype, "bk"),
    )
    assert float(ours[0].min()) > BOUND  # every sample is clipped
    assert max(apart(ours, hooks)) < TOLERANCE[dtype]
    if dtype == torch.float64 or network not in ANOTHER_PATH:
        assert max(apart(ours, expected)) < TOLERANCE[dtype]
