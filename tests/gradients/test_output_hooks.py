"""Opacus's hooks on the outputs of layers: models that overwrite them, against plain autograd."""

from __future__ import annotations

import copy
import pickle

import opacus
import pytest
import torch
import torchvision
from opacus.layers import DPGRU, DPLSTM, DPRNN
from support import engine
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivacyEngine, PublicStatistics
from opacus_bc.batch_norm.buffers import ParameterWatch
from opacus_bc.gradients.half_precision import HalfPrecisionWatch

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
        constants = PublicStatistics(loader=PUBLIC, differentiate=False)
        kwargs = {"grad_sample_mode": "hooks", "batch_norm": constants} | kwargs
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
        grad_sample_mode="hooks",
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
    for layer in wrapper._module.modules():
        assert not layer._backward_hooks
        left = [hook.__self__ for hook in layer._forward_hooks.values()]
        assert all(isinstance(watch, (ParameterWatch, HalfPrecisionWatch)) for watch in left)


class TensorHook(nn.Module):
    """A gradient is turned around and stretched on its way into a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.register_hook(lambda gradient: -20 * gradient)
        return self.last(h.tanh())


class ForwardHook(nn.Module):
    """A forward hook of the user's own stretches a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.first.register_forward_hook(lambda _layer, _inputs, output: 20 * output)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class View(nn.Module):
    """InstanceNorm returns a view; it is read, and then written over."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.InstanceNorm1d(2, affine=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.view(-1, 2, 3))
        before = h * 1e-3
        h.mul_(3.0)
        return self.last((h + before).flatten(1))


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("kind", [TensorHook, ForwardHook, View])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_no_sample_moves_the_weights_further_than_its_bound_whatever_happens_behind_a_layer(kind, mode):
    torch.manual_seed(0)
    model = kind()
    bound = 0.05
    wrapper, optimizer, *rest = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(*(t[:1] for t in DATA.tensors)), batch_size=1),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        grad_sample_mode=mode,
        **({"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}),
    )
    before = [p.detach().clone() for p in wrapper.parameters()]
    wrapper.disable_hooks()
    x, y = (t[:1] for t in DATA.tensors)
    true = torch.autograd.grad(F.cross_entropy(wrapper(x), y), list(wrapper.parameters()))
    wrapper.enable_hooks()
    norm = torch.cat([g.flatten() for g in true]).norm()
    assert norm > 2 * bound
    x, y = next(iter(rest[-1]))
    optimizer.zero_grad()
    (rest[0] if mode == "ghost" else F.cross_entropy)(wrapper(x), y).backward()
    optimizer.step()
    for p, old, gradient in zip(wrapper.parameters(), before, true, strict=True):
        torch.testing.assert_close(old - p.detach(), gradient * (bound / norm), rtol=1e-3, atol=1e-6)


class Pair(nn.Linear):
    """A layer of the user's own, with two outputs and a grad sampler."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


@opacus.grad_sample.register_grad_sampler(Pair)
def pair_gradients(layer: Pair, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    return {layer.weight: torch.einsum("ni,nj->nij", backprops, activations[0]), layer.bias: backprops}


class UsesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x)[0]


@pytest.mark.filterwarnings("ignore:noise_multiplier=0", "ignore:Full backward hook is firing")
def test_a_users_own_layer_with_two_outputs_keeps_opacus_hook():
    model = UsesPair()
    wrapper, _, _ = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=SIZE),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    expected = one_by_one(wrapper)
    F.cross_entropy(wrapper(DATA.tensors[0]), DATA.tensors[1]).backward()
    for place, p in enumerate(wrapper.parameters()):
        torch.testing.assert_close(p.grad_sample, torch.stack([sample[place] for sample in expected]))


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_a_second_backward_pass_after_one_forward_pass_is_a_clear_error():
    wrapper, _, loader = private(nn.LayerNorm)
    x, y = next(iter(loader))
    loss = F.cross_entropy(wrapper(x), y)
    torch.autograd.grad(loss, wrapper._module.last.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second backward pass went through a torch\.nn\.Linear"):
        loss.backward()


class Recomputed(nn.Module):
    """One layer inside and outside of a reentrant checkpoint: ghost clipping would keep one norm of two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        inner = checkpoint(lambda z: self.norm(z) * 1e-3, x, use_reentrant=True)
        return self.last(self.norm(inner + x) * 20)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_ghost_norms_are_not_written_twice_for_one_batch():
    model = Recomputed()
    wrapper, optimizer, criterion, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=SIZE),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(),
    )
    x, y = next(iter(loader))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"norms of a torch\.nn\.LayerNorm already"):
        criterion(wrapper(x), y).backward()
    assert not any(hasattr(p, "_norm_sample") for p in model.parameters())


class Sequences(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.last = kind(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x[:, 0].abs().ceil().clamp(1, 3).long()
        rows = x.view(-1, 3, 2)
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.last(padded.sum(1))


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("kind", [DPRNN, DPGRU, DPLSTM])
def test_packed_sequences_in_another_order_than_the_batch_are_refused(kind):
    """Their rows would be clipped together with those of other samples, as one sample's length decides."""
    model, maker = Sequences(kind), engine()
    wrapper, _, _ = maker.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=SIZE),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    x = DATA.tensors[0][:3].clone()
    x[:, 0] = torch.tensor([3.0, 2.0, 1.0])
    assert wrapper(x).shape == (3, 3)
    x[:, 0] = torch.tensor([2.0, 3.0, 1.0])
    with pytest.raises(ValueError, match=f"{kind.__name__} got sequences packed with enforce_sorted=False"):
        wrapper(x)
    maker.finalize(wrapper)
    assert model(x).shape == (3, 3)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_a_layer_whose_hook_did_not_fire_stops_the_step():
    wrapper, optimizer, loader = private(nn.LayerNorm)
    x, y = next(iter(loader))
    handles = wrapper._module.autograd_grad_sample_hooks
    handles[-1].remove()  # that of the last layer
    F.cross_entropy(wrapper(x), y).backward()
    with pytest.raises(ValueError, match="Per sample gradient is not initialized"):
        optimizer.step()
