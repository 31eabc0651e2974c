"""BatchNorm under individual clipping: each sample's gradient is its own, at stock Opacus's noise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.batch_norm import (
    BACKWARD_HOOK_REMARK,
    INDIVIDUAL,
    batches,
    buffers,
    images,
    make_private,
    network,
    public,
    train,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_bc._opacus import GradSampleHooks
from opacus_bc.batch_norm.buffers import MovingBufferError
from opacus_bc.batch_norm.layers import ConstantStatistics, patch
from opacus_bc.batch_norm.public import PublicStatistics

pytestmark = pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK)
PUBLIC = public()
CONSTANTS = PublicStatistics(loader=PUBLIC, differentiate=False)


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Per-sample gradients of a plain model in evaluation mode, one backward for each sample."""
    plain = copy.deepcopy(model).eval()
    grads = []
    for i in range(len(x)):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).backward()
        grads.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    return grads


def with_constants(model: nn.Module, patched: nn.Module) -> nn.Module:
    """A plain copy whose running statistics are the training constants of the patched model."""
    plain = copy.deepcopy(model)
    layers = zip(plain.modules(), patched.modules(), strict=True)
    for target, source in layers:
        if isinstance(source, ConstantStatistics):
            target.running_mean.copy_(source.constant_mean)
            target.running_var.copy_(source.constant_var)
    plain.load_state_dict(dict(patched.named_parameters()), strict=False)
    return plain


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_per_sample_gradients_equal_those_of_evaluation_mode_sample_by_sample(loss_reduction: str) -> None:
    model = network()
    plain = copy.deepcopy(model)
    _, module, *_ = make_private(model, clipping="flat", batch_norm=CONSTANTS, loss_reduction=loss_reduction)
    x, y = images(12, seed=5).tensors
    nn.functional.cross_entropy(module(x), y, reduction=loss_reduction).backward()
    expected = oracle(with_constants(plain, model), x, y)
    for name, p in model.named_parameters():
        rows = torch.stack([row[name] for row in expected])
        assert torch.allclose(p.grad_sample, rows, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (5, 3)),
        (nn.BatchNorm1d(3), (5, 3, 7)),
        (nn.BatchNorm2d(3), (5, 3, 4, 2)),
        (nn.BatchNorm2d(3), (300, 3, 32, 32)),
        (nn.BatchNorm3d(3), (5, 3, 2, 3, 4)),
        (nn.SyncBatchNorm(3), (5, 3, 4, 2)),
        (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (5, 3, 4, 2)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_every_layer_type_has_a_grad_sampler_that_agrees_with_autograd(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    patch(layer, ConstantStatistics)
    layer.constant_mean, layer.constant_var = torch.randn(3), torch.rand(3) + 0.5
    x, g = torch.randn(shape) + 3, torch.randn(shape)
    sampled = GradSampleHooks.GRAD_SAMPLERS[type(layer)](layer, [x], g)
    with torch.no_grad():
        unscaled = GradSampleHooks.GRAD_SAMPLERS[type(layer)](layer, [x], g)
    for i in range(min(3, len(x))):
        row = x[i : i + 1].clone().requires_grad_()
        grads = torch.autograd.grad(layer(row), [row, layer.weight, layer.bias], g[i : i + 1])
        assert torch.allclose(sampled[layer.weight][i], grads[1], rtol=1e-4, atol=1e-4)
        assert torch.allclose(unscaled[layer.weight][i], grads[1], rtol=1e-4, atol=1e-4)
        assert torch.allclose(sampled[layer.bias][i], grads[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
def test_the_lean_backward_is_that_of_torch_up_to_second_derivatives(affine: bool) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, affine=affine).double().eval()
    plain.running_mean.normal_()
    plain.running_var.uniform_(0.5, 2)
    ours = copy.deepcopy(plain)
    patch(ours, ConstantStatistics)
    ours.train()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    inputs = [x, *plain.parameters()], [x, *ours.parameters()]
    first = torch.autograd.grad((plain(x) ** 3).sum(), inputs[0])
    second = torch.autograd.grad((ours(x) ** 3).sum(), inputs[1])
    assert all(torch.allclose(a, b) for a, b in zip(first, second, strict=True))
    assert torch.autograd.gradgradcheck(lambda value: ours(value) ** 2, x)


def test_a_replaced_sample_moves_only_its_own_gradient() -> None:
    x, y = images(12, seed=5).tensors
    other = x.clone()
    other[3] = 1e4
    samples = []
    for batch in (x, other):
        model = network()
        _, module, *_ = make_private(model, clipping="flat", batch_norm=PUBLIC)
        nn.functional.cross_entropy(module(batch), y).backward()
        samples.append({name: p.grad_sample for name, p in model.named_parameters()})
    others = [i for i in range(12) if i != 3]
    for name in samples[0]:
        assert torch.allclose(samples[0][name][others], samples[1][name][others], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(samples[0]["0.weight"][3], samples[1]["0.weight"][3])


def test_with_batch_statistics_the_same_replacement_would_move_every_gradient() -> None:
    x, y = images(12, seed=5).tensors
    other = x.clone()
    other[3] = 1e4
    model = network().train()

    def gradient_of_sample_zero(batch: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch), y, reduction="none")[0]
        return torch.autograd.grad(loss, model[0].weight)[0]

    first, second = gradient_of_sample_zero(x), gradient_of_sample_zero(other)
    assert (first - second).norm() > 0.5 * first.norm()


def released_update(kwargs: dict[str, Any]) -> Tensor:
    """The (noiseless) clipped mean that one step over all samples releases."""
    model = network()
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    with pytest.warns(UserWarning, match="noise_multiplier=0"):
        _, module, *rest = make_private(
            model,
            batch_norm=CONSTANTS,
            noise_multiplier=0.0,
            lr=1.0,
            batch_size=48,
            max_grad_norm=0.3,
            **kwargs,
        )
    train(module, *rest)
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


def test_hooks_and_ghost_clipping_release_the_same_update() -> None:
    hooks, ghost = (released_update(INDIVIDUAL[name]) for name in ("flat", "ghost"))
    assert torch.allclose(hooks, ghost, rtol=1e-3, atol=1e-6)
    assert hooks.norm() > 1e-3


@pytest.mark.parametrize("kwargs", INDIVIDUAL.values(), ids=INDIVIDUAL)
def test_every_individual_mode_trains_and_accounts_as_stock_opacus(kwargs: dict[str, Any]) -> None:
    model = network()
    eng, module, *rest = make_private(model, batch_norm=PUBLIC, accountant="prv", **kwargs)
    train(module, *rest, epochs=2)
    assert eng.accountant.history == [(rest[0].noise_multiplier, 1 / 3, 6)]


@pytest.mark.parametrize("refresh", [1, 3])
def test_constants_are_statistics_of_a_public_batch_every_n_steps(refresh: int) -> None:
    model = network()
    one = DataLoader(images(16, seed=99), batch_size=16)
    _, module, optimizer, criterion, loader = make_private(
        model, clipping="flat", batch_norm=one, batch_norm_refresh=refresh
    )
    history = []
    for x, y in batches(loader, 6):
        plain = network()
        plain.load_state_dict(dict(model.named_parameters()), strict=False)
        for layer in (plain[1], plain[4]):
            layer.momentum = 1.0
        with torch.no_grad():
            plain(one.dataset.tensors[0])
        matches = [
            torch.allclose(layer.constant_mean, expected.running_mean, atol=1e-6)
            and torch.allclose(layer.constant_var, expected.running_var, rtol=1e-5)
            for layer, expected in ((model[1], plain[1]), (model[4], plain[4]))
        ]
        history.append(all(matches))
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
    assert history == [i % refresh == 0 for i in range(6)]


def test_successive_refreshes_take_successive_public_batches() -> None:
    model = network()
    _, module, optimizer, criterion, loader = make_private(model, clipping="flat", batch_norm=PUBLIC, lr=0.0)
    seen = []
    for x, y in batches(loader, 6):
        seen.append(model[1].constant_mean.clone())
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[3])  # three public batches
    assert torch.equal(seen[2], seen[5])


def test_constants_are_no_buffers_but_are_saved_loaded_and_moved_with_the_layer() -> None:
    model = network()
    keys = list(model.state_dict())
    make_private(model, clipping="flat", batch_norm=PUBLIC)
    assert list(model.buffers()) == []
    assert list(model.state_dict()) == keys
    state = model.state_dict()
    state["1.running_mean"] = torch.full((4,), 7.0)
    model.load_state_dict(state)
    assert torch.equal(model[1].running_mean, torch.full((4,), 7.0))
    assert model.double()[1].constant_mean.dtype == torch.float64
    assert isinstance(model[1], nn.BatchNorm2d)


def test_nobody_elses_grad_samplers_change() -> None:
    before = {
        kind: sampler
        for kind, sampler in GradSampleHooks.GRAD_SAMPLERS.items()
        if not issubclass(kind, ConstantStatistics)
    }
    make_private(network(), clipping="flat", batch_norm=PUBLIC)
    after = GradSampleHooks.GRAD_SAMPLERS
    assert {k: v for k, v in after.items() if not issubclass(k, ConstantStatistics)} == before
    assert nn.BatchNorm2d not in after


def test_evaluation_uses_public_averages_and_finalize_keeps_them() -> None:
    model = network()
    eng, module, *rest = make_private(model, clipping="flat", batch_norm=PUBLIC, batch_norm_refresh=5)
    train(module, *rest)
    x = images(8, seed=4).tensors[0]
    module.eval()
    expected, held = module(x), buffers(model)
    finished = eng.finalize(module)
    assert torch.equal(finished.eval()(x), expected)
    assert all(torch.equal(held[name], value) for name, value in buffers(finished).items())


def test_batch_norm_without_affine_parameters_and_without_statistics_is_served_too() -> None:
    for norm in ({"affine": False}, {"track_running_stats": False}):
        model = network(**norm)
        eng, module, *rest = make_private(model, clipping="flat", batch_norm=PUBLIC)
        assert all(isinstance(model[i], ConstantStatistics) for i in (1, 4))
        train(module, *rest)
        finished = eng.finalize(module)
        assert list(finished.state_dict()) == list(network(**norm).state_dict())


@pytest.mark.parametrize("mode", ["flat", "ghost"])
def test_training_in_evaluation_mode_gets_a_clear_error_and_goes_on_after_train(mode: str) -> None:
    _, module, optimizer, criterion, loader = make_private(network(), batch_norm=PUBLIC, **INDIVIDUAL[mode])
    train(module, optimizer, criterion, loader)
    before = [p.detach().clone() for p in module.parameters()]
    module.eval()
    with pytest.raises(RuntimeError, match=r"evaluation mode.*model\.train\(\)"):
        train(module, optimizer, criterion, loader)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    module.train()
    train(module, optimizer, criterion, loader)
    assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_frozen_statistics_give_an_epsilon_and_must_stay_frozen() -> None:
    model = network()
    eng, module, *rest = make_private(model, clipping="flat", batch_norm="frozen")
    train(module, *rest)
    assert 0 < eng.get_epsilon(1e-5) < float("inf")
    model[4].running_mean.add_(1.0)
    with pytest.raises(MovingBufferError, match="'running_mean' of 4"):
        eng.get_epsilon(1e-5)
    model[4].running_mean.sub_(1.0)
    assert type(eng.finalize(module)[4]) is nn.BatchNorm2d
