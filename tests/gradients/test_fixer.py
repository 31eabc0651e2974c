"""``opacus_bc.fix``: other layers that compute the same, BatchNorm in place, the given model untouched."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.validators import ModuleValidator, register_module_fixer
from support import engine
from support.batch_norm import BACKWARD_HOOK_REMARK
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import fix
from opacus_bc._opacus import UnsupportedModuleError

pytestmark = pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK)
WIDTH, LENGTH = 4, 3
RECURRENT = {nn.LSTM: DPLSTM, nn.GRU: DPGRU, nn.RNN: DPRNN}


class Network(nn.Module):
    """Sequences through BatchNorm and one more layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer, self.out = nn.BatchNorm1d(LENGTH), layer, nn.LazyLinear(2)
        self(torch.randn(5, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        attends = isinstance(self.layer, (nn.MultiheadAttention, DPMultiheadAttention))
        given = self.layer(x, x, x) if attends else self.layer(x)
        return self.out((given if isinstance(given, Tensor) else given[0])[:, -1])


def recurrent(kind: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: kind(WIDTH, 5, batch_first=True, **kwargs)


def attention(**kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, **kwargs)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": recurrent(nn.LSTM),
    "LSTM of two layers and directions": recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.5),
    "LSTM without bias": recurrent(nn.LSTM, bias=False),
    "GRU": recurrent(nn.GRU, num_layers=2),
    "GRU in both directions": recurrent(nn.GRU, bidirectional=True),
    "RNN": recurrent(nn.RNN),
    "RNN with relu": recurrent(nn.RNN, nonlinearity="relu", num_layers=2, bidirectional=True),
    "attention": attention(dropout=0.3),
    "attention without bias": attention(bias=False),
    "attention with more keys": attention(add_bias_kv=True, add_zero_attn=True),
    "attention over other widths": attention(kdim=WIDTH, vdim=WIDTH),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    ),
}


def made(name: str, **to: Any) -> Network:
    torch.manual_seed(0)
    return Network(LAYERS[name]()).to(**to)


def left(model: nn.Module) -> set[type]:
    """Types of torch's that per-sample modes cannot train."""
    return {type(part) for part in model.modules()} & {*RECURRENT, nn.MultiheadAttention}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_a_fixed_model_has_other_layers_and_the_same_outputs_in_evaluation(
    name: str, dtype: torch.dtype
) -> None:
    model = made(name, dtype=dtype).eval()
    fixed = fix(model)
    assert left(model)
    assert not left(fixed)
    assert type(fixed.norm) is nn.BatchNorm1d
    x = torch.randn(6, LENGTH, WIDTH, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12  # weights are not rounded on the way
    assert torch.allclose(fixed(x), model(x), rtol=0, atol=tolerance)
    assert {p.dtype for p in fixed.parameters()} == {dtype}


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "attention"])
def test_fixing_leaves_the_given_model_as_it_was_and_shares_nothing_with_it(name: str) -> None:
    model = made(name)
    before = copy.deepcopy(model.state_dict())
    parts, training = list(model.modules()), [part.training for part in model.modules()]
    fixed = fix(model)
    with torch.no_grad():
        for p in fixed.parameters():
            p.add_(1.0)
    fixed.norm.running_mean.add_(1.0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(parts, model.modules(), strict=True))
    assert training == [part.training for part in model.modules()]


@pytest.mark.parametrize("name", ["LSTM", "attention", "attention with more keys"])
def test_modes_and_frozen_parameters_are_carried_over(name: str) -> None:
    model = made(name)
    model.layer.eval()
    frozen = next(part for part, _ in model.layer.named_parameters())  # weight_ih_l0, in_proj_weight
    getattr(model.layer, frozen).requires_grad_(False)
    fixed = fix(model)
    assert not any(part.training for part in fixed.layer.modules())
    off = {part for part, p in fixed.layer.named_parameters() if not p.requires_grad}
    whole = {"qlinear.weight", "klinear.weight", "vlinear.weight"}
    assert off == ({frozen} if name == "LSTM" else whole)


def test_layers_that_are_not_trained_stay() -> None:
    model = made("LSTM")
    model.layer.requires_grad_(False)
    assert type(fix(model).layer) is nn.LSTM
    attending = made("attention")
    attending.layer.requires_grad_(False).out_proj.requires_grad_(True)
    assert not left(fix(attending))  # hooks on out_proj would never fire in torch's


def test_a_model_that_is_itself_such_a_layer_is_replaced() -> None:
    assert type(fix(nn.GRU(WIDTH, 2))) is DPGRU


def test_a_layer_with_two_places_in_the_model_is_replaced_by_one() -> None:
    layer = nn.RNN(WIDTH, WIDTH)
    fixed = fix(nn.ModuleList([layer, nn.Sequential(layer), nn.Linear(2, 2)]))
    assert type(fixed[0]) is DPRNN
    assert fixed[0] is fixed[1][0]  # type: ignore[index]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)]
)
def test_normalisation_layers_are_left_alone_with_their_statistics(norm: nn.Module) -> None:
    norm.running_mean += 1.0
    fixed = fix(norm)
    assert type(fixed) is type(norm)
    assert fixed.track_running_stats
    assert torch.equal(fixed.running_mean, norm.running_mean)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.LSTM(2, 3), nn.Linear(2, 12)
        self.other.weight = self.layer.weight_ih_l0


def hooked() -> nn.Module:
    layer = nn.GRU(2, 3)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(layer)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "projections": (lambda: nn.Sequential(nn.LSTM(2, 3, proj_size=2)), r"0 \(torch\.nn\.LSTM\).*proj_size=2"),
    "hooks": (hooked, r"0 \(torch\.nn\.GRU\): it has hooks"),
    "a shared parameter": (Tied, r"layer \(torch\.nn\.LSTM\): it shares a parameter"),
    "a wrapper": (lambda: GradSampleModule(nn.Linear(2, 3)), "fix the plain module, then wrap it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_replacement_would_lose_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        fix(make())


@pytest.mark.parametrize("given", [{"num_groups": 2}, {"replace_bn_with_in": True}])
def test_keywords_that_would_replace_batch_norm_point_to_opacus(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"leaves BatchNorm alone: use opacus\.validators\.Module"):
        fix(made("LSTM"), **given)


def test_keywords_reach_fixers_that_were_registered_with_opacus_and_nobody_else() -> None:
    class Mine(nn.Linear):
        """A layer that its user knows how to replace."""

    @register_module_fixer(Mine)
    def replace(layer: nn.Module, *, width: int = 1) -> nn.Module:
        return nn.Linear(width, width)

    try:
        assert fix(nn.Sequential(Mine(3, 3), nn.ReLU()), width=5)[0].in_features == 5  # type: ignore[index]
        with pytest.raises(TypeError, match=r"width=, and no fixer of these layers takes"):
            fix(made("LSTM"), width=5)
    finally:
        del ModuleValidator.FIXERS[Mine]


# --- private training -----------------------------------------------------------------------------------


def sequences(n: int = 16, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, LENGTH, WIDTH, generator=generator)
    return TensorDataset(x, (x[:, 0, 0] > 0).long())


def private(model: nn.Module, **kwargs: Any) -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="batch_norm='frozen': .* hold the statistics")
        return engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(sequences(), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **kwargs,
        )


@pytest.mark.parametrize("mode", [None, "bk", "hooks", "ghost", "ew", "functorch"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "attention", "encoder"])
def test_per_sample_modes_refuse_such_layers_at_once_and_name_fix(name: str, mode: str | None) -> None:
    if (name, mode) == ("RNN", "ew"):
        return  # torch's own ExpandedWeights know this one
    with pytest.raises(UnsupportedModuleError, match=r"layer.*\(torch\.nn\.\w+\): .*opacus_bc\.fix\(model\)"):
        private(made(name), grad_sample_mode=mode, batch_norm="frozen")


@pytest.mark.parametrize("name", ["LSTM", "attention"])
def test_such_layers_may_stay_with_batch_clipping_and_where_they_are_not_trained(name: str) -> None:
    private(made(name), clipping="batch", batch_norm="batch")
    model = made(name)
    model.layer.requires_grad_(False)
    private(model, batch_norm="frozen")


@pytest.mark.parametrize("mode", ["bk", "hooks"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "attention", "encoder"])
def test_a_fixed_model_trains_with_its_batch_norm(name: str, mode: str) -> None:
    public = DataLoader(sequences(20, seed=5), batch_size=10)
    model = fix(made(name))
    module, optimizer, loader = private(model, grad_sample_mode=mode, batch_norm=public)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert all(not torch.equal(p, before[key]) for key, p in model.named_parameters())
