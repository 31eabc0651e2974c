"""Layers that Opacus has no rule for, and layouts that its rules misread: against plain autograd."""

from __future__ import annotations

import copy
from typing import Any

import opacus
import pytest
import timm.layers
import torch
import torch.nn.functional as F
from support import engine
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import MovingBufferError
from opacus_bc.gradients.samples import PrivateGradSampleModule

SIZE = 6


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 3, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(2, (SIZE,), generator=generator))


def public() -> DataLoader[Any]:
    x = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 1
    return DataLoader(TensorDataset(x, torch.zeros(12)), batch_size=6)


class Block(nn.Module):
    """A parameter of its own next to layers: Opacus differentiates the whole as one."""

    def __init__(self, drop: float = 0.0, inputs: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.gamma, self.drop, self.inputs = nn.Parameter(torch.rand(3)), nn.Dropout(drop), inputs

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        return x + self.drop(self.gamma.view(-1, 1, 1) * self.norm(self.conv(x)).relu_())


class Net(nn.Module):
    def __init__(self, *middle: nn.Module, channels: int = 3) -> None:
        super().__init__()
        self.middle, self.head = nn.Sequential(*middle), nn.Linear(channels, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(x).mean((2, 3)))


def private(model: nn.Module, eng: Any = None, **kwargs: Any) -> tuple[Any, Any, Any]:
    return (eng or engine()).make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=SIZE),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        **({"grad_sample_mode": "hooks"} | kwargs),
    )


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    rows = [
        torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        for i in range(len(x))
    ]
    return [torch.stack(each) for each in zip(*rows, strict=True)]


def assert_rows(module: Any, model: nn.Module, expected: list[Tensor]) -> None:
    x, y = data().tensors
    F.cross_entropy(module(x), y).backward()
    for (name, p), rows in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_sample, rows, msg=lambda text, name=name: f"{name}: {text}")


def test_a_block_with_its_own_parameter_uses_the_constants_of_this_step_and_not_of_the_first() -> None:
    torch.manual_seed(0)
    model = Net(Block()).double()
    module, optimizer, loader = private(model, batch_norm=public())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    norm = model.middle[0].norm
    plain = Net(Block()).double().eval()
    plain.load_state_dict(dict(model.named_parameters()), strict=False)
    plain.middle[0].norm.running_mean.copy_(norm.constant_mean)
    plain.middle[0].norm.running_var.copy_(norm.constant_var)
    x, y = data().tensors
    optimizer.zero_grad()
    assert_rows(module, model, one_by_one(plain, x, y))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: timm.layers.StdConv2d(3, 4, 3),
        lambda: timm.layers.ScaledStdConv2d(3, 4, 3),
        lambda: timm.layers.Conv2dSame(3, 4, 3, stride=2),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.SqueezeExcite(4, rd_channels=2)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.EcaModule(4)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, groups=4)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.BlurPool2d(4)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.LayerNorm2d(4), nn.Conv2d(4, 4, 2, stride=2)),
    ],
    ids=["StdConv2d", "ScaledStdConv2d", "Conv2dSame", "SqueezeExcite", "ECA", "grouped", "blur", "permuted"],
)
def test_what_timms_networks_are_made_of_has_exact_per_sample_gradients(layer: Any) -> None:
    torch.manual_seed(0)
    model = Net(layer(), nn.ReLU(inplace=True), channels=4).double()
    x, y = data().tensors
    expected = one_by_one(copy.deepcopy(model), x, y)
    assert_rows(private(model)[0], model, expected)


@pytest.mark.parametrize("layout", ["channels last", "samples inside"])
def test_a_convolutions_gradients_do_not_depend_on_its_inputs_layout_in_memory(layout: str) -> None:
    torch.manual_seed(0)
    model = Net(nn.Conv2d(3, 3, 2, stride=2)).double()
    x, y = data().tensors
    strange = x.to(memory_format=torch.channels_last)
    if layout == "samples inside":
        strange = x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    stock = opacus.GradSampleModule(copy.deepcopy(model))
    ours = PrivateGradSampleModule(copy.deepcopy(model))
    expected = one_by_one(model, x, y)[0]
    for wrapper in (stock, ours):
        F.cross_entropy(wrapper(strange), y).backward()
    torch.testing.assert_close(ours._module.middle[0].weight.grad_sample, expected)
    assert not torch.allclose(stock._module.middle[0].weight.grad_sample, expected)  # or the copy can go


@pytest.mark.filterwarnings("ignore:.*hold the statistics")
def test_a_block_that_draws_random_numbers_beside_its_own_parameter_is_refused() -> None:
    module, _, loader = private(Net(Block(drop=0.5)).double(), batch_norm="frozen")
    x, y = next(iter(loader))
    loss = F.cross_entropy(module(x), y)
    with pytest.raises(
        RuntimeError, match=r"a test_unruled\.Block draws random numbers .* use clipping='batch'"
    ):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*hold the statistics")
@pytest.mark.parametrize("how", ["positional", "named"])
def test_a_block_with_its_own_parameter_and_two_inputs_is_refused(how: str) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x, x) if how == "positional" else self.block(x, skip=x)

    module, _, loader = private(Net(Calls()).double(), batch_norm="frozen")
    x, _ = next(iter(loader))
    with pytest.raises(
        RuntimeError, match=r"a test_unruled\.Block has parameters .* more than one tensor as input"
    ):
        module(x)


def test_stochastic_depth_drops_whole_samples_and_the_dropped_ones_have_no_gradient() -> None:
    torch.manual_seed(0)
    model = Net(nn.Conv2d(3, 3, 3, padding=1), timm.layers.DropPath(0.5)).double()
    module, *_ = private(model)
    x, y = data().tensors
    dropped: list[Tensor] = []
    model.middle.register_forward_hook(lambda _m, _x, out: dropped.append(out.flatten(1).abs().sum(1) == 0))
    F.cross_entropy(module(x), y).backward()
    assert 0 < int(dropped[-1].sum()) < SIZE  # or the seed is a bad one
    gone = model.middle[0].weight.grad_sample.flatten(1).abs().sum(1) == 0
    assert torch.equal(gone, dropped[-1])


class Table(nn.Module):
    """A table read through a constant buffer of indices, as Swin's relative positions are."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(3, 3, 1), nn.Parameter(torch.randn(5, 3))
        self.register_buffer("index", torch.tensor([4, 0, 0]))
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        if self.moves and self.training:
            self.index.copy_(self.index.flip(0))
        return self.conv(x) + self.table[self.index].sum(0).view(-1, 1, 1) * x.mean((2, 3), keepdim=True)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_constant_buffers_beside_parameters_are_accepted_and_gradients_are_exact(mode: str) -> None:
    torch.manual_seed(0)
    model = Net(Table()).double()
    x, y = data().tensors
    expected = one_by_one(copy.deepcopy(model), x, y)
    module = private(model, grad_sample_mode=mode)[0]
    assert dict(model.named_buffers()).keys() == {"middle.0.index"}  # put back where it was
    assert_rows(module, model, expected)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "bk"])
def test_a_buffer_beside_parameters_that_a_forward_moves_is_refused_in_that_forward(mode: str) -> None:
    module, _, loader = private(Net(Table(moves=True)).double(), grad_sample_mode=mode)
    with pytest.raises(MovingBufferError, match=r"'index' of (middle\.0|the module) \(test_unruled\.Table\)"):
        module(next(iter(loader))[0])


def test_a_buffer_beside_parameters_that_moves_later_is_not_handed_out() -> None:
    model, eng = Net(Table()).double(), engine()
    module, optimizer, loader = private(model, eng=eng)
    for x, y in loader:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    model.middle[0].index.copy_(torch.tensor([1, 1, 1]))
    with pytest.raises(MovingBufferError, match="index"):
        eng.finalize(module)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_a_frozen_part_that_torchscript_runs_is_trained_behind_as_in_opacus(mode: str) -> None:
    torch.manual_seed(0)
    model = Net(nn.Conv2d(3, 3, 1)).double()
    expected = one_by_one(model, *data().tensors)[2:]
    model.middle[0] = torch.jit.script(model.middle[0].requires_grad_(False))
    module = private(model, grad_sample_mode=mode)[0]
    x, y = data().tensors
    F.cross_entropy(module(x), y).backward()
    for p, rows in zip(model.head.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_sample, rows)
