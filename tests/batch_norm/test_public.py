"""Public statistics for batch clipping: lazy, repeatable, and never in anybody's way."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.batch_norm import buffers, images, make_private, network, public, same, train
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.batch_norm.layers import MiniSetStatistics, PolicyLayer, patch
from opacus_bc.batch_norm.public import PublicBatches, PublicStatistics
from opacus_bc.public.data import PublicDataError

PUBLIC = public()


def oracle(model: nn.Module, loader: DataLoader[Any] = PUBLIC) -> dict[str, Tensor]:
    """Torch's own re-estimation on a plain model with the same weights."""
    plain = network()
    plain.load_state_dict(dict(model.named_parameters()), strict=False)
    update_bn(loader, plain)
    return buffers(plain)


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=1e-5, atol=1e-6) for name in right)


def trained(**kwargs: Any) -> tuple[Any, nn.Module]:
    model = network()
    eng, module, *rest = make_private(model, batch_norm=PUBLIC, **kwargs)
    train(module, *rest)
    return eng, model


def read_in_evaluation(model: nn.Module) -> None:
    model.eval()(images(4).tensors[0])


READS = {
    "evaluation": read_in_evaluation,
    "evaluation of a part": lambda model: model.eval()[:2](images(4).tensors[0]),
    "evaluation under no_grad": torch.no_grad()(read_in_evaluation),
    "evaluation under inference_mode": torch.inference_mode()(read_in_evaluation),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a part": lambda model: model[1].state_dict(),
    "torch.save of the model": lambda model: torch.save(model, io.BytesIO()),
}


def held(model: nn.Module) -> dict[str, Tensor]:
    """The buffers as they are, without asking for them through a state dict."""
    return {name: value.clone() for name, value in model.named_buffers()}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_stale_statistics_are_re_estimated_when_they_are_read(read: Any) -> None:
    _, model = trained()
    initial = held(network())
    assert same(held(model), initial)
    read(model)
    assert close(held(model), oracle(model))


def test_statistics_are_estimated_once_for_the_same_weights() -> None:
    _, model = trained()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    x = images(4).tensors[0]
    model.eval()
    model(x)
    assert len(calls) == 1 + 3  # three public batches
    model(x)
    model.state_dict()
    assert len(calls) == 2 + 3
    with torch.no_grad():
        model[0].weight.add_(0.1)
    model(x)
    assert len(calls) == 3 + 6


def test_finalize_re_estimates_even_where_nothing_looks_stale() -> None:
    eng, model = trained()
    model.eval()(images(4).tensors[0])
    model[0].weight.data.mul_(2)  # writes through .data leave no version behind
    assert close(buffers(eng.finalize(model)), oracle(model))


def test_training_forwards_use_the_mini_sets_own_statistics_and_gradients_flow_through_them() -> None:
    model = network()
    plain = copy.deepcopy(model)
    make_private(model, batch_norm=PUBLIC)
    x, y = images(10).tensors
    for net in (model, plain):
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_estimation_is_repeatable_and_leaves_mode_gradients_and_random_streams_alone() -> None:
    shuffled = public(shuffle=True)
    results = []
    for offset in range(2):
        model = nn.Sequential(network(), nn.Dropout(0.5))
        _, module, *_ = make_private(model, batch_norm=shuffled)
        model[1].eval()
        torch.manual_seed(offset)
        nn.functional.cross_entropy(module(images().tensors[0]), images().tensors[1]).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        modes, state = [m.training for m in model.modules()], torch.get_rng_state()
        results.append(buffers(model))
        assert [m.training for m in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert same(*results)


def test_the_number_of_public_batches_is_capped_and_they_are_read_once() -> None:
    reads = []

    class Counting(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    loader = DataLoader(Counting(*images(64).tensors), batch_size=4)
    batches = PublicBatches(PublicStatistics(loader=loader, max_batches=3))
    assert len(batches.all()) == len(batches.all()) == 3
    assert len(reads) == 12
    with pytest.raises(ValueError, match="max_batches must be a whole number >= 1, got 0"):
        PublicStatistics(loader=loader, max_batches=0)


def test_public_batches_of_one_sample_are_refused_with_the_reason() -> None:
    with pytest.raises(PublicDataError, match="no batch of the public loader has two samples"):
        make_private(network(), batch_norm=public(batch_size=1))


def test_user_hooks_are_part_of_the_model_and_may_ask_for_its_state() -> None:
    eng, model = trained()
    model[0].register_forward_hook(lambda _module, _inputs, output: output * 3)
    model[2].register_forward_pre_hook(lambda *_: model.state_dict() and None)
    plain = network()
    plain.load_state_dict(dict(model.named_parameters()), strict=False)
    plain[0].register_forward_hook(lambda _module, _inputs, output: output * 3)
    update_bn(PUBLIC, plain)
    assert close(buffers(model), buffers(plain))
    assert len(eng.finalize(model)[0]._forward_hooks) == 1


def test_a_deep_copy_and_an_averaged_model_estimate_at_their_own_weights() -> None:
    _, model = trained()
    averaged = AveragedModel(model)
    with torch.no_grad():
        model[0].weight.mul_(3)
    averaged.update_parameters(model)
    assert close(buffers(averaged.module), oracle(averaged.module))
    assert close(buffers(model), oracle(model))
    part = copy.deepcopy(model[1])
    assert part.keeper is None
    assert torch.equal(part.running_mean, model[1].running_mean)


def test_a_model_loaded_from_a_file_evaluates_with_the_saved_statistics() -> None:
    _, model = trained()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = images(4).tensors[0]
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    before = held(loaded)
    loaded.train()(x)
    assert same(before, held(loaded))


def test_load_state_dict_makes_statistics_stale() -> None:
    _, model = trained()
    state = network(seed=8).state_dict()
    model.load_state_dict(state)
    assert close(buffers(model), oracle(model))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (6, 3)),
        (nn.BatchNorm1d(3), (6, 3, 5)),
        (nn.BatchNorm2d(3), (6, 3, 4, 4)),
        (nn.BatchNorm3d(3), (6, 3, 2, 2, 2)),
        (nn.SyncBatchNorm(3), (6, 3, 4, 4)),
        (nn.InstanceNorm1d(3, track_running_stats=True), (6, 3, 5)),
        (nn.InstanceNorm2d(3, track_running_stats=True, affine=True), (6, 3, 4, 4)),
        (nn.InstanceNorm3d(3, track_running_stats=True), (6, 3, 2, 2, 2)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_every_layer_type_trains_without_writing_and_evaluates_with_public_statistics(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    plain, x = copy.deepcopy(layer), torch.randn(shape) * 2 + 1
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    model(x)
    layer.reset_running_stats()
    data = TensorDataset(torch.randn(32, *shape[1:]), torch.zeros(32, dtype=torch.long))
    eng, module, *rest = make_private(model, data, batch_norm=DataLoader(TensorDataset(x), batch_size=6))
    train(module, *rest)
    assert torch.equal(layer.running_mean, torch.zeros(3))
    plain.load_state_dict(dict(layer.named_parameters()), strict=False)
    plain.momentum = 1.0
    assert torch.allclose(layer.train()(x), plain(x), atol=1e-6)
    assert torch.allclose(layer.eval()(x), plain.eval()(x), atol=1e-5)
    assert type(eng.finalize(module)[0]) is type(plain)
    assert layer.track_running_stats


class Doubling(nn.BatchNorm2d):
    """A user's own BatchNorm, which scales its input first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def test_a_users_own_batch_norm_keeps_its_forward() -> None:
    x = images(6, seed=7).tensors[0]
    layer, plain = Doubling(3), Doubling(3)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(108, 2))
    eng, module, *_ = make_private(model, batch_norm=DataLoader(TensorDataset(x), batch_size=6))
    plain.momentum = 1.0
    assert torch.equal(layer(x), plain(x))
    assert torch.allclose(layer.eval()(x), plain.eval()(x), atol=1e-5)
    assert isinstance(layer, Doubling)
    assert type(eng.finalize(module)[0]) is Doubling


def test_sync_batch_norm_is_estimated_without_a_word_to_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.SyncBatchNorm(3)
    patch(layer, MiniSetStatistics)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    layer.collecting = []
    layer(torch.randn(4, 3, 2, 2))
    assert len(layer.collecting) == 1


def test_a_patched_model_compiles_in_one_graph_for_training() -> None:
    _, model = trained()
    x = images(6).tensors[0]
    expected = model.train()(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, atol=1e-6)
    torch.compiler.reset()


def test_a_compiled_model_re_estimates_stale_statistics_in_evaluation() -> None:
    _, model = trained()
    x = images(6).tensors[0]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = model.eval()(x)
        assert torch.allclose(compiled(x), expected, atol=1e-6)
        model[0].weight.add_(0.5)
        compiled(x)
    assert close(held(model), oracle(model))
    torch.compiler.reset()


def test_patched_layers_are_still_batch_norm() -> None:
    _, model = trained()
    assert all(isinstance(model[i], nn.BatchNorm2d) and isinstance(model[i], PolicyLayer) for i in (1, 4))
