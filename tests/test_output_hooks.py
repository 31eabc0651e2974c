"""Opacus's hooks on the outputs of layers: models that overwrite them, against plain autograd."""

from __future__ import annotations

import copy
import pickle

import opacus
import pytest
import torch
import torchvision
from support import engine
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine

SIZE = 12
DATA = TensorDataset(torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1)), torch.arange(SIZE) % 3)
PUBLIC = DataLoader(
    TensorDataset(torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(2)), torch.arange(SIZE) % 3),
    batch_size=SIZE,
)


class Overwriting(nn.Module):
    """A residual block that writes over the outputs of linear and norm layers, and uses one layer twice."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = norm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x), inplace=True)
        out = self.norm(self.twice(h))
        out += h
        branch = self.twice(out)
        branch.mul_(0.5).tanh_()
        return self.last(branch + out)


def private(norm: type[nn.Module], **kwargs):
    torch.manual_seed(0)
    model = Overwriting(norm)
    if norm is nn.BatchNorm1d:
        kwargs["batch_norm"] = PUBLIC
    return engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=SIZE),
        noise_multiplier=0.0,
        max_grad_norm=0.05,
        poisson_sampling=False,
        **kwargs,
    )


def one_by_one(wrapper: nn.Module) -> list[list[Tensor]]:
    """Every sample's gradient by plain autograd, with Opacus's hooks silent."""
    wrapper.disable_hooks()
    found = []
    for x, y in zip(*DATA.tensors, strict=True):
        loss = F.cross_entropy(wrapper(x[None]), y[None])
        found.append(list(torch.autograd.grad(loss, list(wrapper.parameters()))))
    wrapper.enable_hooks()
    return found


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_per_sample_gradients_of_a_model_that_overwrites_outputs_are_those_of_autograd(norm):
    wrapper, optimizer, _ = private(norm)
    expected = one_by_one(wrapper)
    optimizer.zero_grad()
    F.cross_entropy(wrapper(DATA.tensors[0]), DATA.tensors[1]).backward()
    for place, (name, p) in enumerate(wrapper.named_parameters()):
        want = torch.stack([sample[place] for sample in expected])
        assert p.grad_sample.abs().max() > 0
        torch.testing.assert_close(p.grad_sample, want, msg=name)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_ghost_clipping_of_a_model_that_overwrites_outputs_clips_what_autograd_gives():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3)
    )
    wrapper, optimizer, criterion, _ = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=SIZE),
        noise_multiplier=0.0,
        max_grad_norm=0.05,
        poisson_sampling=False,
        batch_norm=PUBLIC,
        grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(),
    )
    samples = one_by_one(wrapper)
    norms = [torch.stack([g.norm() for g in sample]).norm() for sample in samples]
    factors = [min(1.0, 0.05 / float(norm)) for norm in norms]
    assert max(factors) < 1.0
    optimizer.zero_grad()
    criterion(wrapper(DATA.tensors[0]), DATA.tensors[1]).backward()
    for place, p in enumerate(wrapper.parameters()):
        want = sum(f * sample[place] for f, sample in zip(factors, samples, strict=True))
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-6)  # Opacus divides by norm + 1e-6


def test_torchvisions_resnet_keeps_its_batch_norm_and_its_in_place_operations():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=3)
    assert model.relu.inplace

    def images(seed: int) -> DataLoader:
        x = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        return DataLoader(TensorDataset(x, torch.arange(6) % 3), batch_size=3)

    wrapper, optimizer, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=images(0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        batch_norm=images(1),
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(wrapper(x), y).backward()
        assert all(len(p.grad_sample) == len(x) for p in wrapper.parameters())
        optimizer.step()


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_per_sample_gradients_are_stock_opacus_own_to_the_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    found = []
    for maker in (opacus.PrivacyEngine, PrivacyEngine):
        one = copy.deepcopy(model)
        wrapper, _, _ = maker().make_private(
            module=one,
            optimizer=optim.SGD(one.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=SIZE),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        F.cross_entropy(wrapper(DATA.tensors[0]), DATA.tensors[1]).backward()
        found.append([p.grad_sample for p in wrapper.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_hooked_models_can_be_copied_and_pickled_and_nothing_stays_after_removal():
    wrapper, _, _ = private(nn.LayerNorm)
    for twin in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert torch.equal(twin.eval()(DATA.tensors[0]), wrapper(DATA.tensors[0]))
    wrapper.remove_hooks()
    layers = list(wrapper._module.modules())
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in layers)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_a_layer_whose_hook_did_not_fire_stops_the_step():
    wrapper, optimizer, loader = private(nn.LayerNorm)
    x, y = next(iter(loader))
    handles = wrapper._module.autograd_grad_sample_hooks
    handles[-1].remove()  # that of the last layer
    F.cross_entropy(wrapper(x), y).backward()
    with pytest.raises(ValueError, match="Per sample gradient is not initialized"):
        optimizer.step()
