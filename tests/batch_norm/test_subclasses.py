"""BatchNorm types with a forward of their own: served where that is seen to be right, else refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm.layers
import torch
import torchvision
from support import engine
from support.batch_norm import BACKWARD_HOOK_REMARK, GHOST, batches, images, make_private, public, same, train
from test_individual import oracle, with_constants
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_bc import PrivacyEngine, PublicStatistics
from opacus_bc.batch_norm.layers import ConstantStatistics, FrozenStatistics, patch
from opacus_bc.batch_norm.subclass_check import why_not_constant

pytestmark = pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK)
PUBLIC = public()


class Scaled(nn.BatchNorm2d):
    """Normalises something else than its input, in single precision, and goes on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 3).float()).tanh() * 2


class Renamed(nn.BatchNorm2d):
    """Nothing of its own."""


class MixesRows(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.01 * x.mean(0, keepdim=True))


class ByHand(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight / torch.sqrt(self.running_var + self.eps)
        return (x - self.running_mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + self.bias.view(
            1, -1, 1, 1
        )


class Twice(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Gated(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


class Conditional(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, 1 + self.weight, self.bias)


def act(channels: int, act_layer: Any = nn.SiLU, **kwargs: Any) -> nn.Module:
    return timm.layers.BatchNormAct2d(channels, act_layer=act_layer, **kwargs)


LAYERS: dict[str, Any] = {
    "BatchNormAct2d": act,
    "BatchNormAct2d, ReLU in place": lambda c: act(c, nn.ReLU, inplace=True),
    "BatchNormAct2d, PReLU": lambda c: act(c, nn.PReLU),
    "SyncBatchNormAct": lambda c: timm.layers.convert_sync_batchnorm(act(c)),
    "scaled": Scaled,
    "renamed": Renamed,
}


def network(layer: Any, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), layer(4), nn.Conv2d(4, 5, 3), layer(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(5, 2),
    )  # fmt: skip
    for i in (1, 3):
        nn.init.uniform_(model[i].weight, 0.5, 1.5)
        nn.init.uniform_(model[i].bias, -0.5, 0.5)
        model[i].running_mean.normal_()
        model[i].running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize(
    "batch_norm", [PublicStatistics(loader=PUBLIC, differentiate=False), "frozen"], ids=["public", "frozen"]
)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_per_sample_gradients_go_through_what_the_layer_does_after_it_has_normalised(
    layer: Any, batch_norm: Any
) -> None:
    model = network(layer)
    plain = copy.deepcopy(model)
    _, module, *_ = make_private(model, clipping="flat", batch_norm=batch_norm)
    x, y = images(6, seed=5).tensors
    nn.functional.cross_entropy(module(x), y).backward()
    expected = oracle(with_constants(plain, model), x, y)
    for name, p in model.named_parameters():
        rows = torch.stack([row[name] for row in expected])
        assert torch.allclose(p.grad_sample, rows, rtol=1e-4, atol=1e-6), name


POLICIES: dict[str, dict[str, Any]] = {
    "BC public": {"batch_norm": PUBLIC},
    "GBC public": {"batch_norm": PUBLIC, "mini_batch_size": 8},
    "BC private": {"batch_norm": "private"},
    "BC batch": {"batch_norm": "batch"},
    "BC frozen": {"batch_norm": "frozen"},
    "IC public": {"batch_norm": PUBLIC, "clipping": "flat"},
    "IC frozen": {"batch_norm": "frozen", "clipping": "flat"},
    "ghost public": {"batch_norm": PUBLIC, **GHOST},
}


@pytest.mark.parametrize("kwargs", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("layer", [act, Scaled], ids=["BatchNormAct2d", "scaled"])
def test_under_every_policy_a_subclass_trains_and_its_release_loads_into_a_plain_model(
    layer: Any, kwargs: dict[str, Any]
) -> None:
    model = network(layer)
    kinds = [type(child) for child in model.modules()]
    eng, module, *rest = make_private(model, **kwargs)
    train(module, *rest)
    plain = eng.finalize(module)
    assert [type(child) for child in plain.modules()] == kinds
    fresh = network(layer, seed=1)
    if kwargs["batch_norm"] == "batch":
        return  # the release holds no statistics
    fresh.load_state_dict(plain.state_dict(), strict=True)
    x = images(4, seed=7).tensors[0]
    assert torch.equal(plain.eval()(x), fresh.eval()(x))


@pytest.mark.parametrize("kwargs", [{}, {"clipping": "flat"}], ids=["BC", "IC"])
def test_frozen_statistics_keep_dropout_and_activation_of_the_layer_in_training(
    kwargs: dict[str, Any],
) -> None:
    model = network(lambda c: act(c, drop_layer=nn.Dropout))
    _, module, *_ = make_private(model, batch_norm="frozen", **kwargs)
    module.train()
    assert model[1].drop.training
    x = images(4).tensors[0]
    assert not torch.equal(model[1](model[0](x)), model[1](model[0](x)))
    module.eval()
    assert torch.equal(model[1](model[0](x)), model[1](model[0](x)))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (MixesRows, "row by row it does not give what it gives for a batch"),
        (ByHand, r"does not call F\.batch_norm \(or its parent's forward\)"),
        (Conditional, r"does not call F\.batch_norm \(or its parent's forward\)"),
        (Twice, "per-sample gradients are not those of its weight and bias"),
        (Gated, "its parameter 'gate' has unknown per-sample gradients"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_subclass_whose_samples_have_no_known_gradient_is_refused_with_the_reason(
    layer: Any, reason: str
) -> None:
    model = network(layer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=rf"1 \(test_subclasses\.{layer.__name__}\) has a forward of its own: .*{reason}"
    ):
        make_private(model, clipping="flat", batch_norm="frozen")
    assert same(model.state_dict(), before)
    assert type(model[1]) is layer


def test_the_try_out_leaves_the_layer_and_the_random_stream_alone() -> None:
    layer = network(act)[1].train()
    before, state = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    assert why_not_constant(layer) is None
    assert same(layer.state_dict(), before)
    assert layer.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_training_forward_of_a_subclass_writes_no_statistics() -> None:
    for layer in (act, Scaled):
        model = network(layer)
        before = [model[1].running_mean.clone(), model[1].num_batches_tracked.clone()]
        _, module, *_ = make_private(model, clipping="flat", batch_norm=PUBLIC)
        module.train()(images(8).tensors[0])
        assert torch.equal(model[1].running_mean, before[0])
        assert torch.equal(model[1].num_batches_tracked, before[1])


def test_copies_and_pickles_of_a_patched_subclass_carry_no_graph() -> None:
    layer = network(act)[1]
    patch(layer, ConstantStatistics)
    x = images(4, seed=3).tensors[0][:, :1].expand(-1, 4, -1, -1)
    layer.train()(x)
    assert layer.tap is not None
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.tap is None
        assert torch.equal(twin(x), layer(x))


def test_gradients_follow_statistics_only_where_the_layer_normalises_its_input() -> None:
    def upstream(layer: Any) -> Any:
        model = network(layer)
        statistics = PublicStatistics(loader=PUBLIC, differentiate=True)
        make_private(model, clipping="flat", batch_norm=statistics)
        return model[1].upstream

    assert len(upstream(act)) == 1
    with pytest.warns(UserWarning, match="normalises something else than its input"):
        assert upstream(Scaled) == ()


def frozen_layers() -> dict[str, nn.Module]:
    timms = timm.layers.freeze_batch_norm_2d(network(act))
    return {
        "torchvision": network(lambda c: torchvision.ops.misc.FrozenBatchNorm2d(c)),
        "timm": timms,
    }


@pytest.mark.parametrize("policy", [None, "frozen"])
@pytest.mark.parametrize("kind", ["torchvision", "timm"])
@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_frozen_batch_norm_types_need_no_policy_and_stay_as_they_are(
    kind: str, clipping: str, policy: str | None
) -> None:
    model = frozen_layers()[kind]
    before = {name: value.clone() for name, value in model.named_buffers()}
    eng, module, *rest = make_private(model, clipping=clipping, batch_norm=policy)
    train(module, *rest)
    assert eng.get_epsilon(1e-5) < float("inf")
    after = dict(eng.finalize(module).named_buffers())
    assert same(before, after)


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_lazy_batch_norm_is_refused_without_a_shape_and_served_with_one(clipping: str) -> None:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), *head)
    loader = DataLoader(images(), batch_size=16)
    trained = optim.SGD(head[2].parameters(), lr=0.1)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "clipping": clipping, "batch_norm": PUBLIC}
    with pytest.raises(
        ValueError, match=r"1 \(torch\.nn\.LazyBatchNorm2d\) has no shape yet: run one forward"
    ):
        PrivacyEngine().make_private(module=model, optimizer=trained, data_loader=loader, **given)
    model(images(4, seed=3).tensors[0])
    eng, module, optimizer, criterion, private = make_private(model, eng=engine(), **given)
    for x, y in batches(private, 1):
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
    assert type(eng.finalize(module)[1]) is nn.BatchNorm2d


def test_a_frozen_layer_swaps_only_its_own_mode() -> None:
    layer = act(3, drop_layer=nn.Dropout)
    patch(layer, FrozenStatistics)
    layer.train()
    assert not layer.training
    assert layer.drop.training
