"""Slips that a newcomer makes: each is said at once, and nothing is handed out that no epsilon describes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.grad_sample import register_grad_sampler
from support import blobs, engine, mlp, weights
from support.batch_norm import images, make_private, network, public, train
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import BatchMemoryManager, PrivateStatistics
from opacus_bc.batch_norm.buffers import MovingBufferError, ParameterWatch
from opacus_bc.batch_norm.layers import PolicyLayer
from opacus_bc.public.data import PublicDataError

DATA = blobs(32)


def set_up(clipping: str, *, inner: Any = optim.SGD, eng: Any = None, **kwargs: Any) -> tuple[Any, ...]:
    """Engine, the user's optimizer, and what was made private of it."""
    eng, model = eng or engine(), mlp()
    mine = inner(model.parameters(), lr=0.1)
    return eng, mine, *make_anew(eng, model, mine, clipping, **kwargs)


def make_anew(eng: Any, model: nn.Module, optimizer: Any, clipping: str, **kwargs: Any) -> tuple[Any, ...]:
    made: tuple[Any, ...] = eng.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(DATA, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=clipping,
        **kwargs,
    )
    return made


def one_pass(module: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


both = pytest.mark.parametrize("clipping", ["batch", "flat"])


@both
@pytest.mark.parametrize("trained", [False, True])
def test_the_optimizer_that_was_passed_in_cannot_move_the_weights(clipping: str, trained: bool) -> None:
    eng, mine, module, private, loader = set_up(clipping)
    if trained:
        one_pass(module, private, loader)
    before = weights(module)
    private.zero_grad()
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) of the optimizer that make_private returned"):
        mine.step()
    assert torch.equal(weights(module), before)
    assert len(eng.accountant) == (4 if trained else 0)


def test_a_release_that_was_never_taken_does_not_license_the_next_draws_raw_gradients() -> None:
    eng, mine, module, private, loader = set_up("flat", poisson_sampling=False)
    steps = 0
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=private) as chunks:
        for x, y in chunks:
            nn.functional.cross_entropy(module(x), y).backward()
            released = private.pre_step()
            if steps and not released:
                break
            steps += released
    before = weights(module)
    nn.functional.cross_entropy(module(x), y).backward()
    assert any(p.grad is not None for p in module.parameters())
    with pytest.raises(RuntimeError, match=r"step\(\) of the optimizer that make_private returned"):
        mine.step()
    assert torch.equal(weights(module), before)
    assert len(eng.accountant) == steps


@both
def test_releases_and_other_models_steps_do_not_cover_for_an_unbooked_one(clipping: str) -> None:
    eng, *_, module, private, loader = set_up(clipping)
    one_pass(module, private, loader)
    _, mine, other, _, data = set_up(clipping, eng=eng)
    eng.accountant.history[0] = (*eng.accountant.history[0][:2], 40, *eng.accountant.history[0][3:])  # slack
    x, y = next(iter(data))
    nn.functional.cross_entropy(other(x), y).backward()
    with pytest.raises(RuntimeError, match="make_private returned"):
        mine.step()


@both
def test_weights_that_moved_without_the_accountant_are_neither_handed_out_nor_saved(
    clipping: str, tmp_path: Path
) -> None:
    eng, _, module, private, loader = set_up(clipping)
    one_pass(module, private, loader)
    eng.accountant.history.clear()
    with pytest.raises(RuntimeError, match="4 steps were taken and 0 are booked"):
        eng.finalize(module)
    with pytest.raises(RuntimeError, match="4 steps were taken and 0 are booked"):
        eng.save_checkpoint(path=tmp_path / "run.pt", module=module, optimizer=private)
    assert not list(tmp_path.iterdir())


@both
def test_an_optimizer_whose_step_calls_its_parents_counts_each_step_once(clipping: str) -> None:
    optim.Adam(mlp().parameters())  # torch then runs step hooks in both classes

    class Mine(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    eng, _, module, private, loader = set_up(clipping, inner=Mine)
    one_pass(module, private, loader)
    assert eng._runs[-1].steps == 4
    eng.finalize(module)


@both
@pytest.mark.parametrize("finalized", [False, True])
def test_make_private_anew_takes_the_optimizer_over_and_counts_on(clipping: str, finalized: bool) -> None:
    eng, mine, module, private, loader = set_up(clipping)
    one_pass(module, private, loader)
    plain = eng.finalize(module) if finalized else getattr(module, "_module", module)
    if clipping == "flat" and not finalized:
        module.remove_hooks()  # Opacus wants that before it wraps a model again
    again = make_anew(eng, plain, mine, clipping)
    one_pass(*again)
    assert [run.steps for run in eng._runs] == [4, 4]
    assert len(eng.accountant) == 8
    again[1].zero_grad()
    x, y = next(iter(again[2]))
    nn.functional.cross_entropy(again[0](x), y).backward()
    with pytest.raises(RuntimeError, match="finalized" if finalized else "called again with this optimizer"):
        private.step()
    assert eng.finalize(again[0]) is plain


def test_another_engine_that_trained_with_the_optimizer_is_not_forgotten_silently() -> None:
    eng, mine, module, private, loader = set_up("batch")
    one_pass(module, private, loader)
    with pytest.warns(UserWarning, match="another PrivacyEngine has made 4 steps with this optimizer"):
        make_anew(engine(), module, mine, "batch")
    assert len(eng.accountant) == 4


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_a_finalized_model_is_not_saved_as_a_checkpoint(clipping: str, tmp_path: Path) -> None:
    eng, module, optimizer, criterion, loader = make_private(
        network(), clipping=clipping, batch_norm=public()
    )
    train(module, optimizer, criterion, loader)
    eng.finalize(module)
    with pytest.raises(RuntimeError, match="save a checkpoint before finalize"):
        eng.save_checkpoint(path=tmp_path / "run.pt", module=module, optimizer=optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [None, 4])
def test_a_scheduler_by_steps_moves_once_a_draw(size: int | None) -> None:
    eng, model = engine(), mlp()
    _, optimizer, loader = eng.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(blobs(96), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="batch",
        mini_batch_size=size,
    )
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer.weights_moved:
            scheduler.step()
    assert len(eng.accountant) == 6
    assert optimizer.param_groups[0]["lr"] == 0.5**6


@pytest.mark.parametrize("clipping", ["batch", "flat"])
@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(images(8, seed=9), batch_size=1), "no batch of the public loader has two samples"),
        (DataLoader(blobs(20), batch_size=4), "the model fails on a batch of the public loader"),
    ],
    ids=["single samples", "another shape"],
)
def test_public_data_that_do_not_fit_are_refused_before_training_and_leave_the_model(
    loader: DataLoader[Any], message: str, clipping: str
) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PublicDataError, match=message):
        make_private(model, clipping=clipping, batch_norm=loader)
    assert not any(isinstance(m, PolicyLayer) for m in model.modules())
    assert not model._forward_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("argument", ["batch_norm", "alc"])
@pytest.mark.parametrize("wrap", [list, torch.stack, lambda rows: TensorDataset(torch.stack(rows))])
def test_data_given_in_place_of_a_loader_are_not_printed(argument: str, wrap: Any) -> None:
    given = wrap([torch.full((4,), 123.456) for _ in range(3)])
    with pytest.raises((ValueError, TypeError), match="DataLoader") as caught:
        make_private(network(), **{"batch_norm": public(), argument: given})
    assert "123" not in str(caught.value)
    assert f"got {type(given).__name__}" in str(caught.value)


def test_batches_much_larger_than_the_data_are_said_and_described_as_they_are() -> None:
    with pytest.warns(UserWarning, match="batch_size=128 is more than twice the data set's 48 samples"):
        eng, *_ = make_private(network(), batch_norm=public(), batch_size=128, mini_batch_size=8)
    assert "16 mini-sets of 3 samples in expectation" in eng.statement(1e-5)
    make_private(network(), batch_norm=public(), batch_size=96, mini_batch_size=8)  # a warning is an error


def test_individual_clipping_needs_a_loader_that_makes_batches() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="batch_size=None"):
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(blobs(32), batch_size=None),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_refresh_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_norm_refresh=10 .* leave it out"):
        make_private(network(), batch_norm=public(), batch_norm_refresh=10)


def test_a_make_private_that_fails_late_leaves_no_hook_on_the_model() -> None:
    model = mlp()
    impossible = {"max_clipbound": 0.1, "min_clipbound": 1.0, "target_unclipped_quantile": 0.5}
    more = {"clipbound_learning_rate": 0.2, "unclipped_num_std": 2.0, "poisson_sampling": False}
    with pytest.raises(ValueError, match="max_clipbound"):
        make_anew(engine(), model, optim.SGD(model.parameters(), lr=0.1), "adaptive", **impossible, **more)
    assert not any(child._forward_hooks or child._backward_hooks for child in model.modules())
    nn.functional.cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).backward()
    for p in model.parameters():
        assert not [name for name in vars(p) if "grad_sample" in name]


@pytest.mark.parametrize("epsilon", ["8", 0, -1.0, float("nan"), None])
def test_a_budget_that_is_no_positive_number_is_refused(epsilon: Any) -> None:
    model = mlp()
    with pytest.raises((ValueError, TypeError), match="target_epsilon"):
        engine().make_private_with_epsilon(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(blobs(32), batch_size=8),
            target_epsilon=epsilon,
            target_delta=1e-3,
            epochs=1,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize(
    ("samples", "sigma", "said"),
    [
        # Five channels: R = 2 sqrt(10) = 6.32, so 50 R / N > 0.1 for N < 3162.
        (3000, 50.0, r"noise of standard deviation 0\.11.*noise_multiplier=47\)"),
        (48, 50.0, r"noise of standard deviation 6\.6.*Use public data"),
        (3200, 50.0, None),
        (3000, 40.0, None),
    ],
)
def test_private_statistics_that_noise_will_drown_are_said_before_training(
    samples: int, sigma: float, said: str | None
) -> None:
    model = network()
    expected = pytest.warns(UserWarning, match=said) if said else nullcontext()  # others would be errors
    with expected:
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(images(samples), batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            batch_norm=PrivateStatistics(noise_multiplier=sigma),
        )


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_trying_the_public_data_out_leaves_every_buffer_as_it_was(clipping: str) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table = self.table + 1  # another tensor, as caches of position tables do
            return x

    model = nn.Sequential(Cached(), *network())
    _, module, *_, loader = make_private(model, clipping=clipping, batch_norm=public())
    assert model[0].table.item() == 0.0
    with pytest.raises(MovingBufferError, match="table"):
        module(next(iter(loader))[0])


class SetItselfUp(nn.Module):
    """Takes its weight from the first batch, as ActNorm does."""

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.weight, self.raw, self.ready = nn.Parameter(torch.ones(4)), raw, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.ready:
            self.ready = True
            if self.raw:
                self.weight.data.copy_(x.amax(0))
            else:
                with torch.no_grad():
                    self.weight.mul_(x.std())
        return x * self.weight


@both
@pytest.mark.parametrize("raw", [True, False])
def test_a_forward_that_writes_private_statistics_into_a_weight_is_refused(clipping: str, raw: bool) -> None:
    if clipping == "flat":
        register_grad_sampler(SetItselfUp)(lambda layer, a, b: {layer.weight: a[0] * b})
    eng, model = engine(), nn.Sequential(SetItselfUp(raw), nn.Linear(4, 2))
    module, _, loader = make_anew(eng, model, optim.SGD(model.parameters(), lr=0.1), clipping)
    with pytest.raises(MovingBufferError, match=r"a training forward moved parameter '0\.weight'"):
        module(next(iter(loader))[0])


def test_the_watch_over_parameters_takes_itself_off() -> None:
    _, _, module, private, loader = set_up("batch")
    one_pass(module, private, loader)
    assert not module._forward_hooks
    assert not any(isinstance(hook.__self__, ParameterWatch) for hook in module._forward_pre_hooks.values())


@pytest.mark.parametrize("mode", ["bk", "hooks"])
def test_torchs_gradient_clipping_in_the_loop_changes_nothing_under_individual_clipping(mode: str) -> None:
    """The release is made of the samples' gradients; what stands in ``.grad`` before is no part of it."""
    moved = []
    for most in (None, 1e-3):
        model = mlp()
        module, optimizer, loader = engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=len(DATA)),  # q = 1: everybody is drawn
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            noise_generator=torch.Generator().manual_seed(0),
        )
        for x, y in loader:
            nn.functional.cross_entropy(module(x), y).backward()
            if most is not None:
                nn.utils.clip_grad_norm_(module.parameters(), most)
            optimizer.step()
        moved.append(weights(model) - weights(mlp()))
    assert moved[0].norm() > 0.01
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-5, atol=1e-8)  # the order of the batch differs


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_torchs_gradient_clipping_in_the_loop_only_shortens_a_mini_set_of_batch_clipping() -> None:
    longest = []
    for most in (None, 0.05):
        model = mlp()
        module, optimizer, loader = engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(DATA, batch_size=len(DATA)),
            noise_multiplier=0.0,
            max_grad_norm=0.1,
            clipping="batch",
        )
        for x, y in loader:
            nn.functional.cross_entropy(module(x), y).backward()
            if most is not None:
                nn.utils.clip_grad_norm_(module.parameters(), most)
            optimizer.step()
        longest.append(float((weights(model) - weights(mlp())).norm()))
    assert longest == pytest.approx([0.1, 0.05], rel=1e-4)


def test_bounds_by_layer_are_one_for_each_parameter() -> None:
    with pytest.raises(ValueError, match="max_grad_norm has 3 bounds for 10 trainable parameters"):
        make_private(network(), clipping="per_layer", max_grad_norm=[1.0] * 3, batch_norm=public())


def test_frozen_layers_keep_their_mode_when_make_private_fails() -> None:
    model = network()
    with pytest.raises(RuntimeError, match="conv2d"):
        make_private(model, batch_norm="frozen", alc=DataLoader(blobs(20), batch_size=4))
    assert all(layer.training for layer in model)


def test_running_statistics_come_back_when_make_private_fails() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="conv2d"):
        make_private(model, batch_norm="batch", alc=DataLoader(blobs(20), batch_size=4))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert all(getattr(layer, "track_running_stats", True) for layer in model)


def test_a_wrapper_for_another_loss_reduction_is_refused() -> None:
    """Per-sample gradients of a summed loss taken for those of a mean would be off by the batch size."""
    _, mine, module, *_ = set_up("flat", loss_reduction="sum")
    with pytest.raises(ValueError, match="wrapped for per-sample gradients already"):
        make_anew(engine(), module, mine, "flat", loss_reduction="mean")
