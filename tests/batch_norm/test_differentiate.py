"""Individual clipping, gradients through the public statistics: each sample's gradient is still its own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.batch_norm import BACKWARD_HOOK_REMARK, batches, images, make_private, network, public
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC
from opacus_bc.batch_norm.layers import ConstantStatistics
from opacus_bc.batch_norm.public import PublicStatistics

NOTHING_TO_FOLLOW = "differentiate=True changes nothing"
pytestmark = [
    pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK),
    pytest.mark.filterwarnings(f"ignore:{NOTHING_TO_FOLLOW}"),
]
ROWS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def grouped() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 4),
        nn.BatchNorm1d(4, affine=False),
        nn.Linear(4, 2),
    )


def activation_between() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Tanh(),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


NETWORKS = {"network": network, "grouped": grouped, "activation between": activation_between}


def configuration(**kwargs: Any) -> PublicStatistics:
    return PublicStatistics(loader=public(), differentiate=True, **kwargs)


def oracle_gradient(model: nn.Sequential, x: Tensor, y: Tensor, known: Tensor) -> dict[str, Tensor]:
    """One sample's gradient by plain autograd; statistics depend on the last layer with rows before them."""
    plain = copy.deepcopy(model)
    for layer in plain:
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            shape = [-1 if d == 1 else 1 for d in range(known.dim())]
            seen = known if layer.affine else known.detach()
            var, mean = torch.var_mean(seen, [d for d in range(known.dim()) if d != 1])
            biased = torch.var(known.detach(), [d for d in range(known.dim()) if d != 1], correction=0)
            gain = 1.0 if layer.weight is None else layer.weight.view(shape)
            shift = 0.0 if layer.bias is None else layer.bias.view(shape)
            x = (x - mean.view(shape)) * torch.rsqrt(var + layer.eps).view(shape) * gain + shift
            known = (known - mean.view(shape)) * torch.rsqrt(biased + layer.eps).view(shape) * gain + shift
        else:
            x, known = layer(x), layer(known.detach() if isinstance(layer, ROWS) else known)
    nn.functional.cross_entropy(x, y).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("refreshed", [0, 3])
def test_gradients_through_public_statistics_equal_plain_autograd_sample_by_sample(
    name: str, refreshed: int
) -> None:
    torch.manual_seed(3)
    model = NETWORKS[name]()
    plain = copy.deepcopy(model)
    _, module, optimizer, criterion, loader = make_private(model, clipping="flat", batch_norm=configuration())
    for x, y in batches(loader, refreshed):
        criterion(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    known = [x for x, _ in public()][refreshed % 3]  # each step takes the next public batch
    plain.load_state_dict(dict(model.named_parameters()), strict=False)
    x, y = images(7, seed=5).tensors
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    for i in range(len(x)):
        expected = oracle_gradient(plain, x[i : i + 1], y[i : i + 1], known)
        for key, p in model.named_parameters():
            assert torch.allclose(p.grad_sample[i], expected[key], rtol=1e-3, atol=2e-6), key


def test_a_bias_that_batch_norm_would_undo_has_no_gradient() -> None:
    model = network()
    _, module, *_ = make_private(model, clipping="flat", batch_norm=configuration())
    x, y = images(7, seed=5).tensors
    nn.functional.cross_entropy(module(x), y).backward()
    assert model[0].bias.grad_sample.abs().max() < 1e-6 < model[1].bias.grad_sample.abs().max()


def test_a_replaced_sample_moves_only_its_own_gradient_through_public_statistics() -> None:
    rows = []
    for replaced in (False, True):
        model = network()
        _, module, *_ = make_private(model, clipping="flat", batch_norm=configuration())
        x, y = images(7, seed=5).tensors
        if replaced:
            x = torch.cat([x[:3], 1e4 * x[3:4], x[4:]])
        nn.functional.cross_entropy(module(x), y).backward()
        rows.append(torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1))
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(rows[0][others], rows[1][others])
    assert not torch.allclose(rows[0][3], rows[1][3])


def test_frozen_weights_get_no_gradient_through_statistics() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    _, module, optimizer, criterion, loader = make_private(model, clipping="flat", batch_norm=configuration())
    before = model[0].weight.clone()
    for x, y in batches(loader, 2):
        criterion(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[0].weight, before)


class Reused(nn.Module):
    """One BatchNorm after two layers: which of them does it follow?"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.tanh(self.norm(self.first(x)))))


class StoppedFeatures(nn.Module):
    """BatchNorm on features without gradient; the layer before it is trained through another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.first(x)
        return self.one(self.norm(features)) + self.two(self.first(x))


class OtherOrderInTraining(nn.Module):
    """BatchNorm after the layer in evaluation, before it in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.norm(x)) if self.training else self.norm(self.first(x)))


class SeveralOtherOrder(nn.Module):
    """Two BatchNorms behind an activation and a layer that is used twice; in training they come before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.last(self.first(torch.tanh(self.first(self.norm(x) + self.other(x)))))
        y = torch.tanh(self.first(x))
        return self.last(self.norm(y + self.first(x)) + self.other(y))


class EarlierUseInTraining(nn.Module):
    """In training BatchNorm stands between two uses of the layer: only one of them is still to come."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(torch.relu(self.first(x))))
        return self.last(self.first(y) if self.training else y)


@pytest.mark.parametrize(
    "kind", [StoppedFeatures, OtherOrderInTraining, SeveralOtherOrder, EarlierUseInTraining]
)
@pytest.mark.parametrize("alc", [False, True])
def test_no_gradient_through_statistics_waits_for_the_next_batch(kind: type[nn.Module], alc: bool) -> None:
    """A sample of the first batch moves the first clipped sum and not the second."""
    sums: list[list[Tensor]] = []
    for value in (1.0, -30.0):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(5)
        x, y = torch.randn(40, 4, generator=generator), torch.randint(0, 2, (40,), generator=generator)
        known = TensorDataset(torch.randn(60, 4, generator=generator), torch.arange(60) % 2)
        x[3] = value
        config = PublicStatistics(loader=DataLoader(known, batch_size=60), differentiate=True)
        extra = {"alc": ALC(DataLoader(known, batch_size=20))} if alc else {}
        _, module, optimizer, criterion, loader = make_private(
            kind(), TensorDataset(x, y), clipping="flat", batch_norm=config, batch_size=20, lr=0.0,
            poisson_sampling=False, **extra,
        )  # fmt: skip
        seen = []
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(module(inputs), labels).backward()
            optimizer.clip_and_accumulate()
            seen.append(torch.cat([p.summed_grad.flatten() for p in optimizer.params]))
            assert not any(hasattr(p, "_current_grad_sample") for p in optimizer.params)
            for p in optimizer.params:
                p.summed_grad = None
        sums.append(seen)
    assert not torch.allclose(sums[0][0], sums[1][0])
    assert torch.equal(sums[0][1], sums[1][1])


def test_a_linear_layer_over_sequences_is_not_followed() -> None:
    """Its features are not the channels that BatchNorm normalises."""
    generator = torch.Generator().manual_seed(0)
    data = [TensorDataset(torch.randn(32, 3, 5, generator=generator), torch.arange(32) % 2) for _ in range(2)]
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(9, 2))
    config = PublicStatistics(loader=DataLoader(data[1], batch_size=16), differentiate=True)
    make_private(model, data[0], clipping="flat", batch_norm=config)
    assert model[1].upstream == ()


def test_a_batch_norm_used_twice_keeps_constant_statistics() -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.zeros(32).long())
    other = TensorDataset(torch.randn(32, 4, generator=generator), torch.zeros(32).long())
    config = PublicStatistics(loader=DataLoader(other, batch_size=16), differentiate=True)
    model = Reused()
    make_private(model, data, clipping="flat", batch_norm=config)
    assert isinstance(model.norm, ConstantStatistics)
    assert model.norm.upstream == ()


def test_copies_pickles_and_finalized_models_carry_no_gradient_of_statistics() -> None:
    model = network()
    eng, module, optimizer, criterion, loader = make_private(
        model, clipping="flat", batch_norm=configuration()
    )
    assert [entry.layer for entry in model[1].upstream] == [model[0]]
    assert copy.deepcopy(model)[1].upstream == ()
    assert pickle.loads(pickle.dumps(model))[1].upstream == ()
    for x, y in batches(loader, 2):
        criterion(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = eng.finalize(module)
    assert type(plain[1]) is nn.BatchNorm2d
    assert "upstream" not in vars(plain[1])
    assert not plain[0]._forward_hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clipping": "batch"}, "goes with individual clipping"),
        (
            {"clipping": "flat", "grad_sample_mode": "ghost"},
            "needs grad_sample_mode='bk' or 'hooks', got 'ghost'",
        ),
    ],
)
def test_differentiate_is_refused_where_it_cannot_be_had(arguments: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=message):
        make_private(model, batch_norm=configuration(), **arguments)
    assert type(model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize(
    "arguments", [{"clipping": "batch"}, {"clipping": "flat", "grad_sample_mode": "ghost"}]
)
def test_by_default_statistics_stay_constants_where_they_cannot_be_followed(
    arguments: dict[str, Any],
) -> None:
    eng, module, optimizer, criterion, loader = make_private(
        network(), batch_norm=PublicStatistics(loader=public()), **arguments
    )
    for x, y in batches(loader, 1):
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
    assert "follows these statistics" not in eng.statement(1e-5)


def test_differentiate_is_a_truth_value_or_none() -> None:
    with pytest.raises(ValueError, match="differentiate must be True, False or None, got 'yes'"):
        PublicStatistics(loader=public(), differentiate="yes")  # type: ignore[arg-type]


class Refused(nn.Module):
    """No statistics of these can be followed, each for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.mixed, self.fixed = (
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4, affine=False),
        )
        self.twice, self.behind, self.good = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.one, self.two, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fixed(self.one(self.mixed(self.one(self.data(x)).softmax(1))))
        x = self.behind(self.act(self.two(self.twice(self.twice(x)))))
        return self.good(torch.relu(self.two(x)))


def test_who_asks_for_gradients_that_cannot_flow_is_told_at_which_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    data, other = (TensorDataset(torch.randn(32, 4, generator=generator), torch.arange(32) % 2) for _ in "ab")
    config = PublicStatistics(loader=DataLoader(other, batch_size=16), differentiate=True)
    with pytest.warns(UserWarning, match=NOTHING_TO_FOLLOW) as told:
        make_private(Refused(), data, clipping="flat", batch_norm=config)
    (message,) = [str(w.message) for w in told if NOTHING_TO_FOLLOW in str(w.message)]
    unfed = "no linear or convolution layer feeds it channel by channel"
    reasons = {"data": unfed, "mixed": unfed, "behind": unfed, "twice": "it is used more than once"}
    for name, reason in {**reasons, "fixed": "it has nothing to train"}.items():
        assert f"{name}: {reason}" in message
    assert "good" not in message


@pytest.mark.parametrize("name", ["network", "activation between"])
def test_nobody_is_told_where_all_statistics_are_followed(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    make_private(NETWORKS[name](), clipping="flat", batch_norm=configuration())
    assert not any(NOTHING_TO_FOLLOW in str(warning.message) for warning in recwarn)


def test_a_checkpoint_keeps_the_derivatives_of_the_statistics() -> None:
    models = [activation_between(), activation_between()]
    keepers = []
    for model in models:
        make_private(model, clipping="flat", batch_norm=configuration())
        keepers.append(model[2].keeper)
    assert not torch.equal(models[0][2].upstream[0].weight_var, models[1][2].upstream[0].weight_var)
    keepers[1].load_state_dict(keepers[0].state_dict())
    (saved,), (loaded,) = (model[2].upstream for model in models)
    assert loaded.layer is models[1][0]
    assert saved.tensors().keys() == loaded.tensors().keys() >= {"bias_mean", "bias_var"}
    assert all(torch.equal(value, saved.tensors()[name]) for name, value in loaded.tensors().items())
