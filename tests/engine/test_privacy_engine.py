"""The engine: what it returns, what it tells the accountant, what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import opacus
import pytest
import torch
from support import blobs, cross_entropy, engine, mlp, weights
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc import BatchClippingOptimizer, PrivacyEngine, PrivateDataLoader, accounting

DATA = blobs(96)


def make(model: nn.Module | None = None, *, maker: PrivacyEngine | None = None, **kwargs):
    model = mlp() if model is None else model
    arguments = {
        "module": model,
        "optimizer": optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(DATA, batch_size=16, shuffle=True),
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        "clipping": "batch",
        **kwargs,
    }
    return (maker or engine()).make_private(**arguments)


def train(model, optimizer, loader, epochs=1):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()


def test_batch_mode_returns_the_same_module_and_opacus_subclasses():
    model = mlp()
    module, optimizer, loader = make(model)
    assert module is model
    assert isinstance(optimizer, BatchClippingOptimizer)
    assert isinstance(optimizer, opacus.optimizers.DPOptimizer)
    assert isinstance(loader, PrivateDataLoader)
    assert isinstance(engine(), opacus.PrivacyEngine)


@pytest.mark.parametrize("accountant", ["fdp", "prv", "rdp"])
@pytest.mark.parametrize("size", [None, 4])
def test_every_accountant_is_fed_the_effective_multiplier_the_rate_and_every_step(accountant, size):
    maker = engine(accountant=accountant)
    model, optimizer, loader = make(maker=maker, mini_batch_size=size, noise_multiplier=1.5)
    train(model, optimizer, loader, epochs=2)
    sigma, rate, steps = maker.accountant.history[0][:3]
    assert (sigma, rate, steps) == (pytest.approx(1.5), 1 / 6, 12)
    assert len(maker.accountant.history) == 1
    direct = accounting.epsilon(noise_multiplier=1.5, sample_rate=1 / 6, steps=12, delta=1e-5)
    assert maker.get_epsilon(1e-5) == pytest.approx(direct, rel=0.25 if accountant == "rdp" else 5e-3)


@pytest.mark.parametrize("sampling", ["poisson", "partition", "shuffle"])
@pytest.mark.parametrize("size", [None, 4])
def test_every_sampling_trains_and_is_accounted_as_what_it_is(sampling, size):
    maker = engine()
    model, optimizer, loader = make(
        maker=maker, mini_batch_size=size, sampling=sampling, noise_multiplier=2.0
    )
    train(model, optimizer, loader, epochs=2)
    expected = accounting.epsilon(
        noise_multiplier=2.0, sample_rate=1 / 6, steps=12, delta=1e-5, sampling=sampling
    )
    assert maker.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-6)
    wanted = "add/remove one" if sampling == "poisson" else "replace one"
    assert maker.accountant.adjacency == wanted


def test_poisson_sampling_false_means_shuffle():
    _, _, loader = make(poisson_sampling=False)
    assert loader.plan.kind == "shuffle"


@pytest.mark.parametrize("sampling", ["poisson", "partition", "shuffle"])
@pytest.mark.parametrize("size", [None, 8])
def test_calibrated_training_spends_the_budget_and_not_more(sampling, size):
    maker = engine()
    model = mlp()
    model, optimizer, loader = maker.make_private_with_epsilon(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=16),
        target_epsilon=4.0,
        target_delta=1e-4,
        epochs=3,
        max_grad_norm=1.0,
        clipping="batch",
        sampling=sampling,
        mini_batch_size=size,
    )
    train(model, optimizer, loader, epochs=3)
    assert 0.999 * 4.0 <= maker.get_epsilon(1e-4) <= 4.0


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_calibration_with_opacus_accountants_stays_below_the_target(accountant):
    maker = engine(accountant=accountant)
    model = mlp()
    model, optimizer, loader = maker.make_private_with_epsilon(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=16),
        target_epsilon=4.0,
        target_delta=1e-4,
        epochs=3,
        max_grad_norm=1.0,
        clipping="batch",
    )
    train(model, optimizer, loader, epochs=3)
    assert 3.9 <= maker.get_epsilon(1e-4) <= 4.0


def test_the_same_seeds_give_the_same_run_and_other_noise_gives_another():
    def run(seed):
        torch.manual_seed(0)
        data = DataLoader(DATA, batch_size=16, generator=torch.Generator().manual_seed(0))
        model, optimizer, loader = make(data_loader=data, noise_generator=torch.Generator().manual_seed(seed))
        train(model, optimizer, loader)
        return weights(model)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_secure_mode_trains_and_cannot_be_repeated():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        maker = PrivacyEngine(secure_mode=True)  # no warning: warnings are errors here
        model, optimizer, loader = make(maker=maker, mini_batch_size=4)
        assert optimizer.secure_mode
        assert optimizer.noise.secure
        train(model, optimizer, loader)
        results.append(weights(model))
    assert not torch.equal(*results)
    with pytest.raises(ValueError, match="noise_generator cannot be given"):
        make(maker=PrivacyEngine(secure_mode=True), noise_generator=torch.Generator())


def test_no_noise_is_allowed_loud_and_worth_nothing():
    for accountant in ("fdp", "prv"):
        maker = engine(accountant=accountant)
        with pytest.warns(UserWarning, match="epsilon is infinite"):
            model, optimizer, loader = make(maker=maker, noise_multiplier=0.0)
        train(model, optimizer, loader)
        assert maker.get_epsilon(1e-5) == math.inf


def test_nothing_spent_before_the_first_step():
    maker = engine()
    make(maker=maker)
    assert maker.get_epsilon(1e-5) == 0.0


REFUSED = {
    "max_grad_norm must be": {"max_grad_norm": -1.0},
    r"max_grad_norm must be a finite number > 0, got \[": {"max_grad_norm": [1.0, 1.0]},
    "noise_multiplier must be": {"noise_multiplier": math.nan},
    "loss_reduction must be": {"loss_reduction": "none"},
    "clipping must be 'batch', 'flat'": {"clipping": "bach"},
    "clipping='batch' makes none": {"grad_sample_mode": "ghost"},
    "does not divide": {"mini_batch_size": 5},
    "contradicts poisson_sampling=False": {"sampling": "poisson", "poisson_sampling": False},
    "sampling must be one of": {"sampling": "bernoulli"},
    "goes with clipping='batch'": {"clipping": "flat", "mini_batch_size": 4},
    "sampling='partition' goes with": {"clipping": "flat", "sampling": "partition"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_refused_before_anything_changes(message):
    model = mlp()
    before = weights(model)
    maker = engine()
    with pytest.raises(ValueError, match=message):
        make(model, maker=maker, **REFUSED[message])
    assert torch.equal(weights(model), before)
    assert maker.dataset is None
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())


@pytest.mark.parametrize("method", ["make_private", "make_private_with_epsilon"])
def test_private_data_come_in_a_dataloader(method):
    model = mlp()
    with pytest.raises(TypeError, match=r"data_loader must be a .*DataLoader, got list"):
        getattr(engine(), method)(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=[1, 2],
            max_grad_norm=1.0,
            **(
                {"noise_multiplier": 1.0}
                if method == "make_private"
                else {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1}
            ),
        )


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match="not module's"):
        make(optimizer=optim.SGD(mlp().parameters(), lr=0.1))


def test_a_private_loader_cannot_serve_a_second_optimizer():
    maker = engine()
    _, _, loader = make(maker=maker)
    with pytest.raises(ValueError, match="private already"):
        make(maker=maker, data_loader=loader)


def test_another_adjacency_on_the_same_accountant_is_refused_and_nothing_moves():
    maker = engine()
    model, optimizer, loader = make(maker=maker)
    train(model, optimizer, loader)
    other, optimizer, loader = make(maker=maker, sampling="partition")
    before = weights(other)
    with pytest.raises(ValueError, match=r"replace one.*add/remove one"):
        train(other, optimizer, loader)
    assert torch.equal(weights(other), before)


def test_a_second_data_set_on_one_engine_warns():
    maker = engine()
    make(maker=maker)
    with pytest.warns(UserWarning, match="another data set object"):
        make(maker=maker, data_loader=DataLoader(blobs(40), batch_size=8))


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
def test_an_approximate_accountant_says_so():
    with pytest.warns(UserWarning, match="not an upper bound"):
        PrivacyEngine(accountant="gdp")


def test_models_with_running_statistics_need_a_policy():
    model = mlp(norm=True)
    with pytest.raises(opacus.validators.errors.UnsupportedModuleError, match=r"'batch'.*'frozen'"):
        make(model)
    with pytest.raises(ValueError, match="batch_norm"):
        make(model, batch_norm="ignore")


@pytest.mark.parametrize("policy", ["batch", "frozen"])
def test_batch_norm_trains_without_touching_a_buffer(policy):
    model = mlp(norm=True)
    model[1].running_mean.fill_(0.3)
    module, optimizer, loader = make(model, batch_norm=policy, noise_multiplier=0.1)
    before = {name: b.clone() for name, b in module.named_buffers() if "num_batches" not in name}
    module.train()
    train(module, optimizer, loader, epochs=2)
    after = dict(module.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    module.eval()
    assert torch.isfinite(module(DATA[:10][0])).all()


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_training_beyond_the_calibrated_steps_is_said_once_and_booked(clipping):
    maker, model = engine(), mlp()
    model, optimizer, loader = maker.make_private_with_epsilon(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=48),
        target_epsilon=4.0,
        target_delta=1e-4,
        epochs=2,
        max_grad_norm=1.0,
        clipping=clipping,
    )
    train(model, optimizer, loader, epochs=2)  # warnings are errors here
    assert maker.get_epsilon(1e-4) <= 4.0
    with pytest.warns(UserWarning, match="step 5 is beyond the 4 that") as said:
        train(model, optimizer, loader)
    (warning,) = [w for w in said if "beyond" in str(w.message)]
    assert Path(warning.filename).parent == Path(__file__).parent  # the user's line, not torch's
    assert maker.get_epsilon(1e-4) > 4.0


def test_a_delta_of_one_over_n_is_warned_of_and_a_smaller_one_is_not():
    maker = engine()
    model, optimizer, loader = make(maker=maker)
    train(model, optimizer, loader)
    with pytest.warns(UserWarning, match="no less than 1/96"):
        maker.get_epsilon(1 / 96)
    assert maker.get_epsilon(0.99 / 96) > 0
    fresh = mlp()
    with pytest.warns(UserWarning, match="target_delta=0.02 is no less than 1/96"):
        engine().make_private_with_epsilon(
            module=fresh,
            optimizer=optim.SGD(fresh.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=48),
            target_epsilon=4.0,
            target_delta=0.02,
            epochs=2,
            max_grad_norm=1.0,
            clipping="batch",
        )


def test_synchronised_statistics_of_processes_that_are_accounted_one_by_one_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="SyncBatchNorm would mix the draws"):
        make(model, batch_norm="batch")
    assert type(model[1]) is nn.SyncBatchNorm
