"""Running statistics released from the private data: sensitivity, noise, composition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import engine
from support.batch_norm import buffers, images, make_private, network, same, train
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.accounting import epsilon as certified_epsilon
from opacus_bc.accounting import noise_multiplier as calibrated
from opacus_bc.accounting.events import RELEASES
from opacus_bc.batch_norm.buffers import MovingBufferError
from opacus_bc.batch_norm.choices import BatchNormPolicyError
from opacus_bc.batch_norm.layers import MiniSetStatistics, PolicyLayer, patch
from opacus_bc.batch_norm.private import (
    VARIANCE_FLOOR,
    PrivateKeeper,
    PrivateStatistics,
    clipped_sum,
    default_bound,
    execution_order,
    layer_sum,
    moments,
    release_multiplier,
)
from opacus_bc.engine.release import in_order
from opacus_bc.mechanism.noise import TorchNoise


class Recorder:
    """A noise source that adds nothing and writes down the standard deviations it was asked for."""

    secure = False

    def __init__(self) -> None:
        self.stds: list[float] = []

    def normal(self, like: Tensor, std: float) -> Tensor:
        self.stds.append(std)
        return torch.zeros_like(like)


def with_noise(optimizer: Any, noise: Any) -> Any:
    optimizer.noise = noise
    return noise


# The release's sensitivity.

finite = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(finite, min_size=4, max_size=4), min_size=1, max_size=6),
    other=st.lists(finite, min_size=4, max_size=4),
    bound=st.floats(1e-3, 1e3),
)
def test_one_sample_moves_the_clipped_sum_by_at_most_the_bound_or_twice_if_replaced(
    rows: list[list[float]], other: list[float], bound: float
) -> None:
    data = torch.tensor(rows, dtype=torch.float64)
    replaced = torch.cat([data[1:], torch.tensor([other], dtype=torch.float64)])
    whole = clipped_sum(data, bound)
    slack = 1e-9 * bound * (len(rows) + 1)
    assert (whole - clipped_sum(data[1:], bound)).norm() <= bound + slack
    assert (whole - clipped_sum(replaced, bound)).norm() <= 2 * bound + slack


def test_the_worst_neighbours_attain_the_claimed_sensitivity_and_none_exceeds_it() -> None:
    """A search over canaries on the real model: the first layer's release moves by at most R, and by R."""
    bound, worst = 1.5, 0.0
    x, _ = images(12).tensors
    for scale in (0.0, 1.0, -10.0, 1e3, -1e6):
        model = network()
        make_private(model, batch_norm="private")
        layer = model[1]
        assert isinstance(layer, PolicyLayer)
        layer.keeper = None
        model.eval()
        canary = torch.full((1, 3, 6, 6), scale)
        with torch.no_grad():
            without = layer_sum(model, layer, [x], bound)
            moved = layer_sum(model, layer, [torch.cat([x, canary])], bound)
        worst = max(worst, float((moved - without).norm()))
        assert worst <= bound * (1 + 1e-9)
    assert worst > 0.99 * bound


def test_samples_that_are_not_finite_count_as_zero() -> None:
    rows = torch.tensor([[1.0, 0.0], [math.nan, 1.0], [math.inf, 0.0], [-math.inf, math.nan]])
    assert torch.equal(clipped_sum(rows.double(), 5.0), torch.tensor([1.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(("sampling", "factor"), [("poisson", 1.0), ("partition", 2.0), ("shuffle", 2.0)])
def test_noise_is_sigma_times_the_sensitivity_of_the_runs_adjacency(sampling: str, factor: float) -> None:
    model = network()
    kwargs = {"poisson_sampling": False} if sampling == "shuffle" else {"sampling": sampling}
    eng, _, optimizer, *_ = make_private(model, batch_norm="private", **kwargs)
    noise = with_noise(optimizer, Recorder())
    eng.recalibrate_batch_norm(noise_multiplier=20.0, bound=3.0)
    assert noise.stds == pytest.approx([20.0 * factor * 3.0 / 48] * 2)


def test_the_default_bound_is_a_function_of_the_layers_width_alone() -> None:
    model = network()
    eng, _, optimizer, *_ = make_private(model, batch_norm="private")
    noise = with_noise(optimizer, Recorder())
    eng.recalibrate_batch_norm(noise_multiplier=1.0)
    assert noise.stds == pytest.approx([default_bound(4) / 48, default_bound(5) / 48])


# What is released.


def test_without_noise_and_clipping_each_layer_gets_the_datas_statistics_given_the_earlier_ones() -> None:
    model = network()
    eng, module, optimizer, criterion, loader = make_private(model, batch_norm="private")
    train(module, optimizer, criterion, loader)
    with_noise(optimizer, Recorder())
    eng.recalibrate_batch_norm(bound=1e9)
    x = images().tensors[0]
    with torch.no_grad():
        for index in (1, 4):
            inputs = model.eval()[:index](x)
            expected = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), correction=0)
            assert torch.allclose(model[index].running_mean, expected[0], atol=1e-5)
            assert torch.allclose(model[index].running_var, expected[1], rtol=1e-3, atol=1e-4)


def test_variances_are_floored_however_large_the_noise() -> None:
    model = network()
    eng, *_ = make_private(model, batch_norm="private")
    eng.recalibrate_batch_norm(noise_multiplier=1e4)
    assert all(float(model[i].running_var.min()) >= VARIANCE_FLOOR for i in (1, 4))
    assert torch.isfinite(model.eval()(images(4).tensors[0])).all()


def test_layers_are_released_in_the_order_of_execution() -> None:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early, self.unused = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early(x))

    model = Swapped()
    for layer in (model.late, model.early, model.unused):
        patch(layer, MiniSetStatistics)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    order = execution_order(model, [model.late, model.early, model.unused], torch.randn(3, 4))
    assert order == [model.early, model.late]
    assert torch.equal(seen[0], torch.zeros(3, 4))  # the private batch lends its shape only


def test_moments_are_those_of_each_sample() -> None:
    x = torch.randn(5, 3, 4, 2)
    expected = torch.stack([torch.cat([r.mean((1, 2)), (r**2).mean((1, 2))]) for r in x.double()])
    assert torch.allclose(moments(x), expected)
    assert moments(torch.randn(5, 3)).shape == (5, 6)


def test_a_layer_whose_rows_are_no_samples_is_refused() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x.reshape(-1, 6))).reshape(len(x), -1, 2).mean(1)

    eng, *_ = make_private(Folded(), batch_norm="private")
    with pytest.raises(ValueError, match="one row for each sample"):
        eng.recalibrate_batch_norm()


# Composition, order of events, refusals.


def test_the_accountant_is_told_sigma_over_root_layers_before_the_release() -> None:
    model = network()
    eng, module, *rest = make_private(model, batch_norm="private")
    train(module, *rest)
    steps = eng.get_epsilon(1e-5)
    eng.recalibrate_batch_norm(noise_multiplier=10.0)
    assert eng.accountant.history[-1][0] == pytest.approx(10.0 / math.sqrt(2))
    assert eng.get_epsilon(1e-5) > steps
    assert len(eng.accountant) == 3

    def refuse(**_kwargs: Any) -> None:
        raise RuntimeError("budget exhausted")

    before = buffers(model)
    eng.accountant.release = refuse
    with pytest.raises(RuntimeError, match="budget"):
        eng.recalibrate_batch_norm()
    assert same(before, buffers(model))


def test_poisson_accountants_count_the_release_as_a_step_on_all_data() -> None:
    model = network()
    eng, module, *rest = make_private(model, batch_norm="private", accountant="rdp")
    train(module, *rest)
    eng.recalibrate_batch_norm(noise_multiplier=30.0)
    assert eng.accountant.history[-1] == (pytest.approx(30 / math.sqrt(2)), 1.0, 1)


def test_evaluation_before_the_first_release_raises_and_says_what_to_do() -> None:
    model = network()
    eng, module, *rest = make_private(model, batch_norm="private")
    train(module, *rest)
    with pytest.raises(RuntimeError, match="recalibrate_batch_norm"):
        model.eval()(images(4).tensors[0])
    model.train()
    eng.recalibrate_batch_norm()
    model.eval()(images(4).tensors[0])


def test_finalize_releases_only_if_the_weights_have_moved_since() -> None:
    model = network()
    eng, module, *rest = make_private(model, batch_norm="private")
    train(module, *rest)
    eng.recalibrate_batch_norm()
    train(module, *rest)
    eng.finalize(model)
    assert sum(entry[3] in RELEASES for entry in eng.accountant.history) == 2
    eng.finalize(model)

    model = network()
    eng, module, *rest = make_private(model, batch_norm="private")
    train(module, *rest)
    eng.recalibrate_batch_norm()
    held = buffers(model)
    assert same(held, buffers(eng.finalize(model)))
    assert sum(entry[3] in RELEASES for entry in eng.accountant.history) == 1


def test_finalize_refuses_statistics_that_were_not_released() -> None:
    model = network()
    eng, *_ = make_private(model, batch_norm="private")
    eng.recalibrate_batch_norm()
    model[4].running_var.mul_(1.01)
    with pytest.raises(MovingBufferError, match="not the released ones"):
        eng.finalize(model)


@pytest.mark.filterwarnings("ignore:batch_norm='private'. with 48 samples")
def test_calibration_reserves_the_final_release() -> None:
    model, data = network(), DataLoader(images(), batch_size=16)
    eng = engine()
    _, optimizer, loader = eng.make_private_with_epsilon(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        clipping="batch",
        batch_norm=PrivateStatistics(noise_multiplier=8.0),
    )
    bare = calibrated(target_epsilon=2.0, target_delta=1e-5, sample_rate=1 / 3, steps=6)
    assert optimizer.noise_multiplier > bare
    train(model, optimizer, nn.CrossEntropyLoss(), loader, epochs=2)
    assert eng.get_epsilon(1e-5) < 1.99
    eng.finalize(model)
    assert 1.9 < eng.get_epsilon(1e-5) <= 2.0


def test_the_designs_example_costs_mu_0_035() -> None:
    mu = 1 / release_multiplier(50.0, 3)
    assert mu == pytest.approx(0.0346, abs=1e-4)
    cost = certified_epsilon(noise_multiplier=1 / mu, sample_rate=1.0, steps=1, delta=1e-5)
    assert cost < 0.15


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"bound": 0.0}, "bound"),
        ({"bound": math.inf}, "bound"),
    ],
)
def test_impossible_noise_and_bounds_are_refused(kwargs: dict[str, float], message: str) -> None:
    eng, *_ = make_private(network(), batch_norm="private")
    with pytest.raises(ValueError, match=message):
        eng.recalibrate_batch_norm(**kwargs)
    with pytest.raises(ValueError, match=message):
        PrivateStatistics(**kwargs)


def test_recalibration_needs_the_policy() -> None:
    eng, *_ = make_private(network(), batch_norm="batch")
    with pytest.raises(ValueError, match="batch_norm='private'"):
        eng.recalibrate_batch_norm()


def test_layers_that_mix_samples_in_evaluation_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), *network())
    with pytest.raises(BatchNormPolicyError, match="depend on other samples"):
        make_private(model, batch_norm="private")


def test_the_release_draws_from_the_engines_noise_source_and_every_release_differs() -> None:
    model = network()
    eng, _, optimizer, *_ = make_private(model, batch_norm="private")
    assert isinstance(optimizer.noise, TorchNoise)
    eng.recalibrate_batch_norm()
    first = buffers(model)
    eng.recalibrate_batch_norm()
    assert not torch.equal(first["1.running_mean"], buffers(model)["1.running_mean"])


def test_the_normaliser_is_the_public_size_of_the_data_set() -> None:
    eng, *_ = make_private(network(), TensorDataset(*images(40).tensors), batch_norm="private")
    keeper = eng._runs[0].policy.keeper
    assert isinstance(keeper, PrivateKeeper)
    assert keeper.normaliser == 40


def mixup(samples: list[Any]) -> list[Tensor]:
    """A collate function that mixes every sample into its neighbour."""
    x = torch.stack([sample[0] for sample in samples])
    return [0.5 * x + 0.5 * x.roll(1, 0), torch.tensor([int(sample[1]) for sample in samples])]


def test_one_user_moves_the_released_statistics_by_one_vector_of_at_most_the_bound() -> None:
    """N-bar counts users, and the vector that is clipped is the mean over at most the cap of their samples.

    The sum of all users' clipped vectors is compared with a loop over users; a user of forty samples, all of
    them huge, adds one vector of norm R.
    """
    generator = torch.Generator().manual_seed(4)
    sizes, cap = [1, 3, 2, 40], 3
    ids = np.repeat(np.arange(4), sizes)
    x = torch.randn(sum(sizes), 4, generator=generator)
    x[6:] = 1e3
    data = TensorDataset(x, torch.zeros(len(x), dtype=torch.long))
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    ours = engine()
    with pytest.warns(UserWarning, match="with 4 users the released statistics"):
        model, optimizer, _ = ours.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            batch_norm="private",
            unit=ids,
            mini_batch_size=cap,
        )
    recorder = with_noise(optimizer, Recorder())
    bound = 5.0
    ours.recalibrate_batch_norm(noise_multiplier=2.0, bound=bound)
    assert recorder.stds == [2.0 * bound / 4]
    assert ours.accountant.history == [(2.0, 1.0, 0, "release over users")]
    assert ours.accountant.adjacency == "add/remove one user"
    total = torch.zeros(8, dtype=torch.float64)
    for start, size in zip(np.cumsum([0, *sizes[:-1]]), sizes, strict=True):
        mean = moments(x[start : start + min(size, cap)]).mean(0)  # which of the forty does not matter
        total += mean * min(1.0, bound / float(mean.norm()))
    first, second = (total / 4).chunk(2)
    torch.testing.assert_close(model[0].running_mean.double(), first, rtol=1e-5, atol=1e-6)
    variance = (second - first.square()).clamp_min(VARIANCE_FLOOR)
    torch.testing.assert_close(model[0].running_var.double(), variance, rtol=1e-4, atol=1e-6)


def test_a_collate_function_cannot_mix_samples_into_each_other() -> None:
    data = images(12)
    (alone, _), (together, _) = (
        next(iter(in_order(DataLoader(data, batch_size=size, collate_fn=mixup)))) for size in (1, 12)
    )
    assert torch.equal(alone[0], together[0])
    assert torch.equal(together, data.tensors[0])
