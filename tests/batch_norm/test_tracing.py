"""Gradients through public statistics: every construct between a layer and BatchNorm, against autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.batch_norm import BACKWARD_HOOK_REMARK, batches, make_private
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.batch_norm.gradients import into_statistics
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.batch_norm.tracing import _marks, fed_channels

pytestmark = [
    pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK),
    pytest.mark.filterwarnings("ignore:differentiate=True changes nothing"),
    pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel"),
]
ROWS = (nn.Linear, nn.Conv1d, nn.Conv2d)
SEED = 3  # of the public forward


class Graph(nn.Module):
    """Layers by name, and a function that says how they are wired."""

    def __init__(self, wiring: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.wiring = wiring

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self, x)


class Noise(nn.Module):
    """Dropout in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.4, training=True)


def behind(channels: int, *layers: nn.Module) -> nn.Sequential:
    """``layers``, then a convolution and its BatchNorm, whose statistics depend on the former too."""
    head = [nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers, nn.Conv2d(channels, 3, 2), nn.BatchNorm2d(3), *head)


def conv(rows: int, inputs: int = 3, size: int = 3, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, rows, size, **kwargs)


def pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def shuffled(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def gated(net: Any, x: Tensor) -> Tensor:
    """A squeeze-and-excitation block between convolution and BatchNorm."""
    y = net.one(x)
    gate = torch.sigmoid(net.up(torch.relu(net.down(y.mean((2, 3))))))
    return net.end(pooled(net.norm(y * gate[:, :, None, None])))


def norm1d(**layers: nn.Module) -> Graph:
    return Graph(lambda net, x: net.end(torch.tanh(net.norm(net.act(net.one(x.flatten(1)))))), **layers)


def frozen_bias(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    norm.bias.requires_grad_(False)
    return norm


CONSTRUCTS: dict[str, Callable[[], nn.Module]] = {
    "conv, norm": lambda: behind(4, conv(4), nn.BatchNorm2d(4)),
    "conv, relu, norm": lambda: behind(4, conv(4), nn.ReLU(), nn.BatchNorm2d(4)),
    "conv, relu in place, norm": lambda: behind(4, conv(4), nn.ReLU(inplace=True), nn.BatchNorm2d(4)),
    "conv, pool, norm": lambda: behind(4, conv(4, size=2), nn.MaxPool2d(2), nn.BatchNorm2d(4)),
    "conv, relu, pool, dropout, norm": lambda: behind(
        4, conv(4, size=2), nn.ReLU(), nn.AvgPool2d(2, 1), Noise(), nn.BatchNorm2d(4)
    ),
    "linear, norm": lambda: norm1d(
        one=nn.Linear(75, 4), act=nn.Identity(), norm=nn.BatchNorm1d(4), end=nn.Linear(4, 3)
    ),
    "linear, tanh, norm": lambda: norm1d(
        one=nn.Linear(75, 4), act=nn.Tanh(), norm=nn.BatchNorm1d(4), end=nn.Linear(4, 3)
    ),
    "linear over positions": lambda: Graph(
        lambda net, x: net.end(net.norm(torch.tanh(net.one(x.flatten(2))).mT).mean(2)),
        one=nn.Linear(25, 4), norm=nn.BatchNorm1d(4), end=nn.Linear(4, 3),
    ),
    "conv1d": lambda: Graph(
        lambda net, x: net.end(net.norm(torch.tanh(net.one(x.flatten(2)))).mean(2)),
        one=nn.Conv1d(3, 4, 5, stride=2, dilation=2), norm=nn.BatchNorm1d(4), end=nn.Linear(4, 3),
    ),
    "grouped": lambda: behind(6, conv(6, groups=3, bias=False), nn.GELU(), nn.BatchNorm2d(6)),
    "depthwise": lambda: behind(6, conv(6, groups=3, stride=2), nn.Tanh(), nn.BatchNorm2d(6)),
    "padding": lambda: behind(4, conv(4, size=2, padding="same"), nn.Tanh(), nn.BatchNorm2d(4)),
    "two norms behind one conv": lambda: Graph(
        lambda net, x: net.end(
            pooled(net.first(torch.relu(y := net.one(x)))) + pooled(net.second(torch.tanh(y)))
        ),
        one=conv(4), first=nn.BatchNorm2d(4), second=nn.BatchNorm2d(4), end=nn.Linear(4, 3),
    ),
    "one conv used twice": lambda: Graph(
        lambda net, x: net.end(pooled(net.norm(net.one(torch.tanh(net.one(x))) + net.one(x)[..., 1:, 1:]))),
        one=conv(3, size=2), norm=nn.BatchNorm2d(3), end=nn.Linear(3, 3),
    ),
    "residual sum": lambda: Graph(
        lambda net, x: net.end(
            pooled(net.norm(torch.relu(net.two(F.pad(torch.tanh(y := net.one(x)), [1] * 4)) + y)))
        ),
        one=conv(4), two=conv(4, 4), norm=nn.BatchNorm2d(4), end=nn.Linear(4, 3),
    ),
    "residual sum with the data": lambda: Graph(
        lambda net, x: net.end(pooled(net.norm(net.one(x) + x))),
        one=conv(3, padding=1), norm=nn.BatchNorm2d(3), end=nn.Linear(3, 3),
    ),
    "concatenation": lambda: Graph(
        lambda net, x: net.end(
            pooled(net.norm(torch.cat([torch.tanh(net.two(x)), x[..., 2:, 2:], net.one(x)], 1)))
        ),
        one=conv(4), two=conv(2), norm=nn.BatchNorm2d(9), end=nn.Linear(9, 3),
    ),
    "channels in another order": lambda: Graph(
        lambda net, x: net.end(pooled(net.norm(shuffled(net.one(x))))),
        one=conv(6), norm=nn.BatchNorm2d(6), end=nn.Linear(6, 3),
    ),
    "two rows in one channel": lambda: Graph(
        lambda net, x: net.end(pooled(net.norm(F.glu(net.one(x), 1)))),
        one=conv(8), norm=nn.BatchNorm2d(4), end=nn.Linear(4, 3),
    ),
    "gate": lambda: Graph(
        gated, one=conv(4), down=nn.Linear(4, 2), up=nn.Linear(2, 4), norm=nn.BatchNorm2d(4),
        end=nn.Linear(4, 3),
    ),
    "no affine bias": lambda: behind(4, conv(4), nn.Tanh(), frozen_bias(nn.BatchNorm2d(4))),
}  # fmt: skip

# What mixes channels on the way from a layer to BatchNorm, and the layers that are left out therefore.
MIXED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "softmax over channels": (
        lambda: behind(4, conv(4), nn.Softmax(1), nn.BatchNorm2d(4)), ("0",)
    ),
    "a sum with the next channel": (
        lambda: Graph(
            lambda net, x: net.end(pooled(net.norm(torch.relu((y := net.one(x)) + y.roll(1, 1))))),
            one=conv(4), norm=nn.BatchNorm2d(4), end=nn.Linear(4, 3),
        ), ("one",)
    ),
    "every channel twice": (
        lambda: Graph(
            lambda net, x: net.end(pooled(net.norm(net.one(x).repeat_interleave(2, 1)))),
            one=conv(4), norm=nn.BatchNorm2d(8), end=nn.Linear(8, 3),
        ), ("one",)
    ),
    "positive and negative part": (
        lambda: Graph(
            lambda net, x: net.end(pooled(net.norm(torch.relu(torch.cat([y := net.one(x), -y], 1))))),
            one=conv(4), norm=nn.BatchNorm2d(8), end=nn.Linear(8, 3),
        ), ("one",)
    ),
    "positions as channels": (
        lambda: Graph(
            lambda net, x: net.end(net.norm(net.one(x).flatten(1))),
            one=conv(2, size=4), norm=nn.BatchNorm1d(8), end=nn.Linear(8, 3),
        ), ("one",)
    ),
    "one of two layers": (
        lambda: Graph(
            lambda net, x: net.end(pooled(net.norm(net.one(x) + net.two(x).softmax(1)))),
            one=conv(4), two=conv(4), norm=nn.BatchNorm2d(4), end=nn.Linear(4, 3),
        ), ("two",)
    ),
    "features that are not channels": (
        lambda: Graph(
            lambda net, x: net.end(net.norm(net.one(x.flatten(2))).mean(2)),
            one=nn.Linear(25, 3), norm=nn.BatchNorm1d(3), end=nn.Linear(3, 3),
        ), ("one",)
    ),
}  # fmt: skip


class OracleNorm(nn.Module):
    """Row 0 is normalised with the statistics of the other rows, the public ones."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        known = x[1:]
        mean, var = known.mean(dims), known.var(dims)  # PyTorch's running variance is the unbiased one
        constants = known.detach().mean(dims), known.detach().var(dims, correction=0)
        parts = [
            (part - m.view(shape)) / (v.view(shape) + self.eps).sqrt()
            for part, (m, v) in ((x[:1], (mean, var)), (known.detach(), constants))
        ]
        return torch.cat(parts) * self.weight.view(shape) + self.bias.view(shape)


class OracleNoise(nn.Module):
    """The masks that the public forward and the private one draw."""

    def __init__(self, sample: int, samples: int) -> None:
        super().__init__()
        self.sample, self.samples = sample, samples

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(11)
        own = F.dropout(torch.ones(self.samples, *x.shape[1:], dtype=x.dtype), 0.4)[self.sample]
        torch.manual_seed(SEED)
        return x * torch.cat([own[None], F.dropout(torch.ones_like(x[1:]), 0.4)])


def oracle(
    model: nn.Module, x: Tensor, y: Tensor, known: Tensor, left_out: tuple[str, ...] = ()
) -> Iterator[dict[str, Tensor]]:
    """Each sample's gradient by plain autograd; public activations have no past where a layer begins."""

    def detached(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        return torch.cat([args[0][:1], args[0][1:].detach()])

    def forgotten(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return torch.cat([output[:1], output[1:].detach()])

    for i in range(len(x)):
        plain = copy.deepcopy(model)
        for name, layer in list(plain.named_modules()):
            parent = plain.get_submodule(name.rpartition(".")[0])
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
                setattr(parent, name.rpartition(".")[2], OracleNorm(layer))
            elif isinstance(layer, Noise):
                setattr(parent, name.rpartition(".")[2], OracleNoise(i, len(x)))
            elif isinstance(layer, ROWS):
                layer.register_forward_pre_hook(detached)
            if name in left_out:
                layer.register_forward_hook(forgotten)
        F.cross_entropy(plain(torch.cat([x[i : i + 1], known]))[:1], y[i : i + 1]).backward()
        yield {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}


def data(n: int, seed: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 5, 5, generator=generator, dtype=torch.float64) * 2 + 0.3
    return TensorDataset(x.to(dtype), torch.randint(0, 3, (n,), generator=generator))


def public() -> DataLoader[Any]:
    return DataLoader(data(60, 99), batch_size=20)


def prepared(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = make().to(dtype)
    for layer in model.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return model


def private(model: nn.Module, dtype: torch.dtype = torch.float64, **kwargs: Any) -> tuple[Any, ...]:
    config = PublicStatistics(loader=public(), differentiate=True, seed=SEED)
    return make_private(model, data(40, 1, dtype), clipping="flat", batch_norm=config, **kwargs)


def check_gradients(
    model: nn.Module, plain: nn.Module, module: Any, known: Tensor, left_out: tuple[str, ...] = ()
) -> None:
    """``plain`` is a copy of ``model`` from before it was made private."""
    dtype = next(model.parameters()).dtype
    plain.load_state_dict(dict(model.named_parameters()), strict=False)
    x, y = data(4, 5, dtype).tensors
    torch.manual_seed(11)
    F.cross_entropy(module(x), y).backward()
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for i, expected in enumerate(oracle(plain, x, y, known.to(dtype), left_out)):
        for name, gradient in expected.items():
            found: Any = model.get_parameter(name)
            assert torch.allclose(found.grad_sample[i], gradient, rtol=tolerance, atol=tolerance), name


def first_public() -> Tensor:
    known: Tensor = next(iter(public()))[0]
    return known


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_gradients_through_statistics_are_autograds_for_every_construct(name: str) -> None:
    model = prepared(CONSTRUCTS[name])
    plain = copy.deepcopy(model)
    _, module, *_ = private(model)
    check_gradients(model, plain, module, first_public())


@pytest.mark.parametrize("name", ["conv, relu, norm", "concatenation"])
def test_they_are_in_single_precision_too(name: str) -> None:
    model = prepared(CONSTRUCTS[name], torch.float32)
    plain = copy.deepcopy(model)
    _, module, *_ = private(model, torch.float32)
    check_gradients(model, plain, module, first_public())


@pytest.mark.parametrize("name", MIXED)
def test_a_layer_that_moves_several_channels_at_once_is_left_out(name: str) -> None:
    make, left_out = MIXED[name]
    model = prepared(make)
    plain = copy.deepcopy(model)
    _, module, *_ = private(model)
    check_gradients(model, plain, module, first_public(), left_out)


@pytest.mark.parametrize("every", [1, 2])
def test_derivatives_are_those_of_the_statistics_in_use(every: int) -> None:
    """Neither older nor newer: at the weights and of the public batch of the last refresh."""
    model = prepared(CONSTRUCTS["conv, relu, norm"])
    _, module, optimizer, criterion, loader = private(model, batch_norm_refresh=every)
    at = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    for number, (x, y) in enumerate(batches(loader, 3), start=1):
        criterion(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % every == 0:
            at = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    known = [x for x, _ in public()][(3 // every) % 3]
    config = PublicStatistics(loader=DataLoader(TensorDataset(known), batch_size=20), differentiate=True)
    again = prepared(CONSTRUCTS["conv, relu, norm"])
    again.load_state_dict(at, strict=False)
    make_private(again, data(40, 1), clipping="flat", batch_norm=config)
    layers: Any = [net[2] for net in (model, again)]
    (used,), (expected,) = (layer.upstream for layer in layers)
    assert torch.equal(layers[0].constant_mean, layers[1].constant_mean)
    for name, value in expected.tensors().items():
        assert torch.allclose(used.tensors()[name], value, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("name", ["conv, relu, norm", "two norms behind one conv", "concatenation"])
def test_the_term_through_the_statistics_is_inside_the_clip(name: str) -> None:
    """What a step sums up are the oracle's gradients, each clipped as a whole."""
    model = prepared(CONSTRUCTS[name])
    plain = copy.deepcopy(model)
    _, module, optimizer, *_ = private(model, max_grad_norm=0.3)
    x, y = data(4, 5).tensors
    F.cross_entropy(module(x), y).backward()
    optimizer.clip_and_accumulate()
    expected = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    for gradient in oracle(plain, x, y, first_public()):
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        assert norm > 0.3
        for key, g in gradient.items():
            expected[key] += g * 0.3 / norm
    for key, p in model.named_parameters():
        assert torch.allclose(p.summed_grad, expected[key], rtol=1e-5, atol=1e-7), key


@pytest.mark.parametrize("name", ["conv, relu, norm", "residual sum", "concatenation"])
def test_a_replaced_sample_moves_no_other_gradient(name: str) -> None:
    rows = []
    for replaced in (False, True):
        model = prepared(CONSTRUCTS[name])
        _, module, *_ = private(model)
        x, y = data(5, 5).tensors
        if replaced:
            x = torch.cat([x[:3], 1e4 * x[3:4], x[4:]])
        F.cross_entropy(module(x), y).backward()
        rows.append(torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1))
    others = [0, 1, 2, 4]
    assert torch.equal(rows[0][others], rows[1][others])
    assert not torch.allclose(rows[0][3], rows[1][3])


def overwritten(net: Any, x: Tensor) -> Tensor:
    copied = x + 0
    y = net.one(copied)
    copied.mul_(2)
    return net.end(pooled(net.norm(torch.tanh(y))))


def test_a_layer_whose_public_input_is_overwritten_is_not_followed() -> None:
    """Its derivatives would be those of other values."""
    model = Graph(overwritten, one=conv(4), norm=nn.BatchNorm2d(4), end=nn.Linear(4, 3)).double()
    private(model)
    assert model.norm.upstream == ()


def test_a_model_moved_to_another_precision_takes_the_derivatives_along() -> None:
    model = prepared(CONSTRUCTS["concatenation"])
    _, module, *_ = private(model)
    module.to(torch.float32)
    assert [entry.layer for entry in model.norm.upstream] == [model.two, model.one]
    for entry in model.norm.upstream:
        assert {t.dtype for t in entry.tensors().values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_into_the_statistics_are_autograds(affine: bool) -> None:
    torch.manual_seed(2)
    layer: Any = nn.BatchNorm2d(4, affine=affine).double()
    if affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    x, backprops = torch.randn(2, 3, 4, 2, 2, dtype=torch.float64)
    layer.constant_mean, layer.constant_var = (torch.rand(4, dtype=torch.float64) + 0.5 for _ in "mv")
    found = into_statistics(layer, x, backprops)
    for i in range(3):
        mean, var = (c.clone().requires_grad_() for c in (layer.constant_mean, layer.constant_var))
        gain = layer.weight[:, None, None] if affine else 1.0
        y = gain * (x[i] - mean[:, None, None]) / (var[:, None, None] + layer.eps).sqrt()
        expected = torch.autograd.grad(y, (mean, var), backprops[i])
        for value, row in zip(expected, found, strict=True):
            assert torch.allclose(row[i], value, rtol=1e-12, atol=1e-14)


def test_rows_whose_gradients_have_lost_their_digits_count_as_still() -> None:
    marks = _marks(3)
    plain = torch.tensor([[1.0, 2.0], [3e-320, 1e-320], [0.5, 0.1]], dtype=torch.float64)
    found = fed_channels(plain, plain * marks[[2, 0, 0], None], marks)
    assert found is not None
    assert found.tolist() == [2, 1, 0]
    assert (
        fed_channels(plain, (plain * marks[[2, 0, 0], None]).index_fill(0, torch.tensor(1), 1e-3), marks)
        is None
    )


def test_a_channel_that_is_dead_in_the_first_public_samples_is_followed() -> None:
    model = prepared(CONSTRUCTS["concatenation"])
    plain = copy.deepcopy(model)
    known = first_public()
    known[:18] = 0.0  # behind the ReLU nothing is left of these
    for net in (model, plain):
        net.two.bias.data.fill_(-1e-3)
        net.wiring = rectified
    config = PublicStatistics(loader=DataLoader(TensorDataset(known), batch_size=20), differentiate=True)
    _, module, *_ = make_private(model, data(40, 1), clipping="flat", batch_norm=config)
    assert len(model.norm.upstream) == 2
    check_gradients(model, plain, module, known)


def rectified(net: Any, x: Tensor) -> Tensor:
    return net.end(pooled(net.norm(torch.cat([x[..., 2:, 2:], net.one(x), torch.relu(net.two(x))], 1))))


@given(st.data())
def test_marks_tell_the_channel_of_every_row(draw: st.DataObject) -> None:
    channels = draw.draw(st.integers(1, 100))
    fed = draw.draw(st.lists(st.integers(0, channels - 1), min_size=1, max_size=20))
    dead = draw.draw(st.sets(st.integers(0, len(fed) - 1)))
    generator = torch.Generator().manual_seed(draw.draw(st.integers(0, 1000)))
    marks = _marks(channels).float()
    plain = torch.randn(len(fed), 7, generator=generator) * 10 ** draw.draw(st.integers(-12, 6))
    plain[list(dead)] = 0.0
    found = fed_channels(plain, plain * marks[fed, None], marks)
    assert found is not None
    assert all(int(found[k]) == c for k, c in enumerate(fed) if k not in dead)
    if channels > 1:
        other = plain.clone()
        row = draw.draw(st.integers(0, len(fed) - 1))
        size = float(plain[row].abs().max())
        other[row, 3] += size  # this entry moves a second channel
        second = marks[(fed[row] + 1) % channels]
        weighted = plain * marks[fed, None]
        weighted[row, 3] += size * second
        assert row in dead or fed_channels(other, weighted, marks) is None
