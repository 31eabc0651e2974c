"""Running statistics never carry private data out, and nothing is decided silently."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from support import engine
from support.batch_norm import (
    ADAPTIVE,
    BACKWARD_HOOK_REMARK,
    GHOST,
    PER_LAYER,
    buffers,
    images,
    make_private,
    network,
    public,
    same,
    train,
)
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Subset, TensorDataset

from opacus_bc._opacus import UnsupportedModuleError
from opacus_bc.batch_norm.buffers import MovingBufferError
from opacus_bc.batch_norm.choices import BatchNormPolicyError, UnprotectedStatisticsError, check_policy
from opacus_bc.batch_norm.layers import PolicyLayer

pytestmark = pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK)

PUBLIC = public()
PROTECTED: dict[str, dict[str, Any]] = {
    "BC public": {"batch_norm": PUBLIC},
    "GBC public": {"batch_norm": PUBLIC, "mini_batch_size": 8},
    "BC private": {"batch_norm": "private"},
    "GBC private": {"batch_norm": "private", "mini_batch_size": 8},
    "BC batch": {"batch_norm": "batch"},
    "BC frozen": {"batch_norm": "frozen"},
    "IC public": {"batch_norm": PUBLIC, "clipping": "flat"},
    "IC per_layer public": {"batch_norm": PUBLIC, **PER_LAYER},
    "IC adaptive public": {"batch_norm": PUBLIC, **ADAPTIVE},
    "IC ghost public": {"batch_norm": PUBLIC, **GHOST},
    "IC frozen": {"batch_norm": "frozen", "clipping": "flat"},
    "IC ghost frozen": {"batch_norm": "frozen", **GHOST},
}


def with_canary() -> TensorDataset:
    """The same data with one sample replaced by an outlier of a million standard deviations."""
    x, y = (t.clone() for t in images().tensors)
    x[7] = 1e6
    return TensorDataset(x, y)


def buffers_after_training(dataset: TensorDataset, **kwargs: Any) -> dict[str, Tensor]:
    """What the buffers hold after two epochs that leave the weights where they are."""
    model = network()
    _, module, *rest = make_private(model, dataset, lr=0.0, **kwargs)
    train(module, *rest, epochs=2)
    raw = {f"{name} before it is read": value.clone() for name, value in model.named_buffers()}
    return raw | buffers(model)


@pytest.mark.parametrize("kwargs", PROTECTED.values(), ids=PROTECTED)
def test_neighbouring_data_sets_leave_bit_identical_buffers(kwargs: dict[str, Any]) -> None:
    assert same(buffers_after_training(images(), **kwargs), buffers_after_training(with_canary(), **kwargs))


def test_the_same_comparison_finds_the_leak_of_unprotected_statistics() -> None:
    plain = buffers_after_training(images(), batch_norm="unprotected")
    canary = buffers_after_training(with_canary(), batch_norm="unprotected")
    assert (canary["1.running_mean"] - plain["1.running_mean"]).abs().max() > 1e2


@pytest.mark.parametrize("kwargs", PROTECTED.values(), ids=PROTECTED)
def test_finalize_gives_plain_types_and_what_a_plain_model_can_load(kwargs: dict[str, Any]) -> None:
    model, plain = network(), network(seed=1)
    eng, module, *rest = make_private(model, **kwargs)
    train(module, *rest)
    finished = eng.finalize(module)
    assert finished is model
    assert [type(m) for m in finished.modules()] == [type(m) for m in plain.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    if kwargs["batch_norm"] == "batch":
        plain = network(track_running_stats=False)
    assert list(finished.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(finished.state_dict())
    x = images(8, seed=3).tensors[0]
    assert torch.equal(finished.eval()(x), plain.eval()(x))
    assert pickle.loads(pickle.dumps(finished))[1].weight.equal(model[1].weight)


@pytest.mark.parametrize("kwargs", [{"clipping": "flat"}, GHOST, {"clipping": "batch"}], ids=str)
def test_a_finished_module_carries_no_private_gradients_or_activations(kwargs: dict[str, Any]) -> None:
    model = network()
    eng, module, optimizer, criterion, loader = make_private(model, batch_norm=PUBLIC, **kwargs)
    train(module, optimizer, criterion, loader)
    module(images().tensors[0])  # a forward whose activations nobody has consumed
    eng.finalize(module)
    assert all(p.grad is None and not p.__dict__ for p in model.parameters())
    assert not any(hasattr(m, "activations") for m in model.modules())


def test_training_on_after_finalize_raises_before_the_weights_move() -> None:
    for kwargs in ({"clipping": "batch"}, {"clipping": "flat"}):
        model = network()
        eng, module, optimizer, _criterion, loader = make_private(model, batch_norm=PUBLIC, **kwargs)
        eng.finalize(module)
        x, y = next(iter(loader))
        before = model[0].weight.clone()
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match="finalized"):
            optimizer.step()
        assert torch.equal(before, model[0].weight)


def test_finalize_refuses_a_module_of_somebody_else_and_may_be_called_twice() -> None:
    eng, module, *_ = make_private(network(), batch_norm=PUBLIC)
    with pytest.raises(ValueError, match="not made this Sequential private"):
        eng.finalize(network())
    first = buffers(eng.finalize(module))
    assert same(first, buffers(eng.finalize(module)))


# What is refused, and how it is said.


@pytest.mark.parametrize("clipping", ["batch", "flat", "per_layer", "adaptive"])
def test_without_a_policy_the_error_lists_the_choices(clipping: str) -> None:
    kwargs = {"per_layer": PER_LAYER, "adaptive": ADAPTIVE}.get(clipping, {"clipping": clipping})
    with pytest.raises(BatchNormPolicyError, match=r"public DataLoader.*'frozen'") as caught:
        make_private(network(), **kwargs)
    assert isinstance(caught.value, UnsupportedModuleError)
    assert isinstance(caught.value, ValueError)
    assert "in 1 (torch.nn.BatchNorm2d) and 1 more a private forward" in str(caught.value)


@pytest.mark.parametrize("norm", [{"affine": False}, {"affine": False, "track_running_stats": False}])
def test_individual_clipping_refuses_batch_norm_that_stock_opacus_accepts(norm: dict[str, bool]) -> None:
    with pytest.raises(BatchNormPolicyError):
        make_private(network(**norm), clipping="flat")
    frozen = network()
    for layer in (frozen[1], frozen[4]):
        layer.requires_grad_(False)
    with pytest.raises(BatchNormPolicyError):
        make_private(frozen, clipping="flat")


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm2d(3),
        nn.BatchNorm3d(3),
        nn.SyncBatchNorm(3),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.InstanceNorm2d(3, track_running_stats=True),
        nn.InstanceNorm3d(3, track_running_stats=True),
        nn.LazyBatchNorm2d(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_layer_with_running_statistics_needs_a_policy(layer: nn.Module) -> None:
    with pytest.raises(BatchNormPolicyError):
        check_policy(nn.Sequential(nn.Linear(2, 2), layer), None)


@pytest.mark.parametrize(
    "layer", [nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)]
)
def test_layers_without_running_statistics_need_none(layer: nn.Module) -> None:
    assert check_policy(nn.Sequential(layer), None) == {}


def test_a_lazy_layer_is_refused_with_the_fix_and_accepted_once_it_has_a_shape() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(BatchNormPolicyError, match="run one forward on dummy"):
        check_policy(model, PUBLIC)
    model(torch.zeros(2, 3, 6, 6))
    assert list(check_policy(model, PUBLIC)) == ["1"]


@pytest.mark.parametrize("policy", ["private", "batch", "unprotected"])
def test_policies_that_use_the_private_batch_are_refused_with_individual_clipping(policy: str) -> None:
    with pytest.raises(BatchNormPolicyError, match="gradient of its own"):
        make_private(network(), clipping="flat", batch_norm=policy)


@pytest.mark.parametrize("policy", ["publik", 3, True, [PUBLIC]])
def test_an_unknown_policy_is_named(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"batch_norm must be .* wrap it, DataLoader\(public"):
        make_private(network(), batch_norm=public().dataset)
    with pytest.raises(ValueError, match="batch_norm must be a public DataLoader or one of"):
        make_private(network(), batch_norm=policy)


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_public_data_that_is_private_is_refused_before_anything_changes(clipping: str) -> None:
    dataset, model = images(), network()
    shared = DataLoader(Subset(dataset, range(8)), batch_size=4)
    with pytest.raises(ValueError, match=r"8 of (the )?8 public samples"):
        make_private(model, dataset, clipping=clipping, batch_norm=shared)
    assert not any(isinstance(m, PolicyLayer) for m in model.modules())


@pytest.mark.parametrize("mode", ["functorch", "ew"])
def test_grad_sample_modes_that_cannot_serve_batch_norm_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=r"'bk' .the default., 'hooks' or 'ghost'"):
        make_private(network(), clipping="flat", batch_norm=PUBLIC, grad_sample_mode=mode)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10"])
def test_a_refresh_that_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="batch_norm_refresh must be a whole number >= 1"):
        make_private(network(), clipping="flat", batch_norm=PUBLIC, batch_norm_refresh=value)


def test_a_failing_make_private_leaves_the_model_as_it_was() -> None:
    model = network().eval()  # stock Opacus wants training mode
    with pytest.raises(UnsupportedModuleError):
        make_private(model, clipping="flat", batch_norm=PUBLIC)
    assert type(model[1]) is nn.BatchNorm2d
    assert list(dict(model[1].named_buffers())) == ["running_mean", "running_var", "num_batches_tracked"]
    assert not model._forward_hooks


def test_a_second_policy_on_one_model_is_refused_until_it_is_finalized() -> None:
    model = network()
    eng, *_ = make_private(model, batch_norm=PUBLIC)
    with pytest.raises(BatchNormPolicyError, match="already obeys a policy"):
        make_private(model, batch_norm=PUBLIC)
    eng.finalize(model)
    make_private(model, batch_norm=PUBLIC)


# Unprotected.


def test_unprotected_statistics_warn_and_no_guarantee_is_given_unless_asked_for() -> None:
    eng, model = engine(), network()
    loader = DataLoader(images(), batch_size=16)
    with pytest.warns(UserWarning, match="Differential privacy does not hold"):
        eng.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            batch_norm="unprotected",
        )
    for call in (lambda: eng.get_epsilon(1e-5), eng.get_tradeoff, lambda: eng.statement(1e-5)):
        with pytest.raises(UnprotectedStatisticsError, match="allow_unprotected=True"):
            call()
    assert eng.get_epsilon(1e-5, allow_unprotected=True) == 0
    assert "LEAK" in eng.statement(1e-5, allow_unprotected=True)


# Frozen.


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_frozen_statistics_normalise_private_batches_in_training_mode(clipping: str) -> None:
    model = network()
    model[1].running_mean.fill_(0.3)
    model[4].running_var.fill_(2.0)
    expected = copy.deepcopy(model).eval()
    _, module, *_ = make_private(model, batch_norm="frozen", clipping=clipping)
    x = images().tensors[0]
    assert torch.allclose(module.train()(x), expected(x), atol=1e-6)


def test_finalize_refuses_frozen_statistics_that_somebody_wrote() -> None:
    eng, module, *_ = make_private(network(), batch_norm="frozen")
    module[1].running_mean.add_(1)
    with pytest.raises(MovingBufferError, match="buffer 'running_mean' of 1"):
        eng.finalize(module)


# Buffers of the user's own modules.


class Tracker(nn.Module):
    """Keeps a running mean of what it sees, as user-defined normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.mean((0, 2, 3)).detach(), alpha=0.1)
            self.calls.add_(1)
        return x


class Counter(Tracker):
    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


def head() -> list[nn.Module]:
    return [nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)]


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_a_buffer_of_a_user_module_that_a_private_forward_moves_is_caught_and_named(clipping: str) -> None:
    model = nn.Sequential(nn.Sequential(Tracker()), *head())
    _, module, *rest = make_private(model, clipping=clipping)
    with pytest.raises(MovingBufferError, match=r"buffer 'seen' of (0\.0|the module) \(\S*Tracker\)"):
        train(module, *rest)


def test_a_part_of_the_model_that_is_called_on_its_own_is_watched_too() -> None:
    model = nn.Sequential(nn.Sequential(Tracker()), *head())
    _, module, *_ = make_private(model)
    with pytest.raises(MovingBufferError, match="'seen'"):
        module[0](images().tensors[0])


def test_counters_and_spectral_norm_may_move() -> None:
    parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8))
    old_style = nn.utils.spectral_norm(nn.Linear(8, 2))
    model = nn.Sequential(Counter(), nn.Conv2d(3, 4, 3), nn.Flatten(), parametrized, old_style)
    eng, module, *rest = make_private(model)
    train(module, *rest, epochs=2)
    eng.finalize(module)


def test_the_watch_ends_after_the_first_forwards_and_finalize_still_finds_late_movers() -> None:
    model = nn.Sequential(Tracker().eval(), *head())
    eng, module, *rest = make_private(model)
    module[0].eval()
    train(module, *rest, epochs=2)
    assert not model._forward_hooks
    module[0].train()
    module(images().tensors[0])
    with pytest.raises(MovingBufferError, match="'seen' of 0"):
        eng.finalize(module)


# Copies and files.


READABLE = {name: kwargs for name, kwargs in PROTECTED.items() if kwargs["batch_norm"] != "private"}


@pytest.mark.parametrize("kwargs", READABLE.values(), ids=READABLE)
def test_a_patched_model_can_be_copied_saved_and_moved(kwargs: dict[str, Any]) -> None:
    model = network()
    _, module, *rest = make_private(model, **kwargs)
    train(module, *rest)
    x = images(8, seed=3).tensors[0]
    model.eval()
    expected = model(x)
    file = io.BytesIO()
    if kwargs.get("clipping", "batch") == "batch":
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), expected)
        assert torch.equal(copy.deepcopy(model)(x), expected)
    fresh = network(seed=5, track_running_stats=kwargs["batch_norm"] != "batch")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(x), expected)
    assert all(p.dtype == torch.float64 for p in model.double().parameters())
    assert model(x.double()).dtype == torch.float64


def test_a_buffer_that_moves_late_leaves_no_epsilon_and_no_statement() -> None:
    class Late(nn.Module):
        """Keeps still for ten forwards, then writes down what it sees."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 10:
                self.seen += x.detach().mean((0, 2, 3))
            return x

    model = nn.Sequential(Late(), network())
    eng, module, *rest = make_private(model, batch_norm="batch")
    train(module, *rest, epochs=2)
    assert eng.get_epsilon(1e-5) > 0
    train(module, *rest, epochs=3)
    for claim in (lambda: eng.get_epsilon(1e-5), lambda: eng.statement(1e-5), eng.get_tradeoff):
        with pytest.raises(MovingBufferError, match="seen"):
            claim()
