"""Opacus's own modes through our engine: the same weights and the same epsilon, bit for bit."""

from __future__ import annotations

import math
import warnings

import opacus
import pytest
import torch
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from opacus.schedulers import ExponentialGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support import blobs, cross_entropy, engine, mlp, weights
from torch import nn, optim
from torch.utils.data import DataLoader, WeightedRandomSampler

from opacus_bc import PrivacyEngine, accounting
from opacus_bc.draws.ledger import Delivery, DrawLedger

DATA = blobs(60)
LAYERS = 4
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}
MODES = {
    "flat": {},
    "flat-sum": {"loss_reduction": "sum"},
    "per_layer": {"clipping": "per_layer", "max_grad_norm": [0.5] * LAYERS},
    "adaptive": {"clipping": "adaptive", **ADAPTIVE},
    "adaptive, clamped": {"clipping": "adaptive", **ADAPTIVE, "min_clipbound": 0.45, "max_clipbound": 0.5},
    "ghost": {"grad_sample_mode": "ghost"},
    "functorch": {"grad_sample_mode": "functorch"},
    "ew": {"grad_sample_mode": "ew"},
    "no-wrap": {"wrap_model": False},
    "no-wrap-ghost": {"wrap_model": False, "grad_sample_mode": "ghost"},
    "rand-on-empty": {"rand_on_empty": True},
}


def stock(accountant: str) -> opacus.PrivacyEngine:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        return opacus.PrivacyEngine(accountant=accountant)


def run(maker, *, with_epsilon: bool = False, workers: int = 0, **mode):
    """A short training run; returns weights, epsilon and what make_private returned."""
    torch.manual_seed(0)
    model = mlp()
    budget = (
        {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2}
        if with_epsilon
        else {"noise_multiplier": 0.7}
    )
    arguments = {"max_grad_norm": 0.5, "noise_generator": torch.Generator().manual_seed(1), **budget, **mode}
    make = maker.make_private_with_epsilon if with_epsilon else maker.make_private
    result = make(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(
            DATA, batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(2), num_workers=workers
        ),
        **arguments,
    )
    forward = result[0] if mode.get("wrap_model", True) else model
    optimizer, loader = result[1], result[-1]
    criterion = (
        result[2] if len(result) == 4 else nn.CrossEntropyLoss(reduction=mode.get("loss_reduction", "mean"))
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(forward(x), y).backward()
            optimizer.step()
    return weights(model), maker.get_epsilon(1e-3), result


@pytest.mark.filterwarnings("ignore:Opacus's clipping='adaptive'")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize(("accountant", "workers"), [("prv", 0), ("rdp", 0), ("rdp", 1)])
@pytest.mark.parametrize("mode", MODES)
def test_stock_modes_give_identical_weights_and_epsilon(mode, accountant, workers):
    ours = run(engine(accountant=accountant), workers=workers, **MODES[mode])
    theirs = run(stock(accountant), workers=workers, **MODES[mode])
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert all(isinstance(a, type(b)) for a, b in zip(ours[2], theirs[2], strict=True))


@pytest.mark.parametrize("mode", ["flat", "per_layer", "ghost", "functorch"])
def test_stock_modes_give_identical_weights_where_batches_are_empty(mode):
    """Batches of one sample in expectation: about a third of them is empty."""
    sizes = []

    def count(_module, inputs):
        sizes.append(len(inputs[0]))

    results = []
    for maker in (engine(accountant="rdp"), stock("rdp")):
        model = mlp()
        result = maker.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=1, generator=torch.Generator().manual_seed(3)),
            noise_generator=torch.Generator().manual_seed(1),
            **{"noise_multiplier": 0.7, "max_grad_norm": 0.5, **MODES[mode]},
        )
        model.register_forward_pre_hook(count)
        criterion = result[2] if len(result) == 4 else nn.CrossEntropyLoss()
        with warnings.catch_warnings(action="ignore"):  # means of nothing
            for x, y in result[-1]:
                result[1].zero_grad()
                criterion(result[0](x), y).backward()
                result[1].step()
        results.append(weights(model))
    assert sizes.count(0) >= 20
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
def test_calibration_of_stock_modes_is_identical():
    ours = run(engine(accountant="prv"), with_epsilon=True)
    theirs = run(stock("prv"), with_epsilon=True)
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert ours[2][1].noise_multiplier == theirs[2][1].noise_multiplier


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "adaptive", "batch"])
def test_unknown_keywords_are_a_type_error_before_anything_changes(clipping):
    model = mlp()
    with pytest.raises(TypeError, match="max_grad_nrom"):
        engine(accountant="prv").make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=12),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping=clipping,
            max_grad_nrom=2.0,
        )
    assert not any(m._forward_hooks for m in model.modules())


def test_a_grad_clip_scheduler_on_per_layer_bounds_is_refused():
    _, _, (_, optimizer, _) = run(engine(accountant="prv"), **MODES["per_layer"])
    assert isinstance(optimizer, DPPerLayerOptimizer)
    scheduler = ExponentialGradClip(optimizer, gamma=0.5)
    with pytest.raises(ValueError, match="old bounds while the noise moves"):
        scheduler.step()


def test_stock_per_layer_would_keep_clipping_while_the_noise_moves():
    """Why the scheduler is refused: Opacus's bounds stay, its noise follows."""
    _, _, (_, optimizer, _) = run(stock("prv"), **MODES["per_layer"])
    scheduler = ExponentialGradClip(optimizer, gamma=0.5)
    scheduler.step()
    assert optimizer.max_grad_norms == [0.5] * LAYERS
    assert optimizer.max_grad_norm == pytest.approx(0.5 * math.sqrt(LAYERS) / 2)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_poisson_only_accountants_refuse_a_shuffled_loader(accountant):
    with pytest.raises(ValueError, match="models Poisson sampling only"):
        run(engine(accountant=accountant), poisson_sampling=False)


def test_a_shuffled_loader_is_accounted_with_twice_the_sensitivity_and_no_amplification():
    ours = engine(accountant="fdp")
    _, epsilon, (_, optimizer, _) = run(ours, poisson_sampling=False)
    theirs = run(stock("prv"), poisson_sampling=False)
    assert torch.equal(weights_of(optimizer), theirs[0])
    # Two passes of G_mu with mu = 2C / (sigma C), in closed form.
    mu = math.sqrt(2) * 2 / 0.7
    normal = torch.distributions.Normal(0.0, 1.0)
    delta = normal.cdf(torch.tensor(-epsilon / mu + mu / 2)) - math.exp(epsilon) * normal.cdf(
        torch.tensor(-epsilon / mu - mu / 2, dtype=torch.float64)
    )
    assert float(delta) <= 1e-3 * 1.001
    assert float(delta) >= 1e-3 * 0.9


def weights_of(optimizer: DPOptimizer) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in optimizer.params])


def test_shuffled_passes_are_counted_when_they_start():
    ours = engine(accountant="fdp")
    model = mlp()
    model, optimizer, loader = ours.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=12),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )

    def one_step():
        x, y = next(iter(loader))
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()

    one_step()
    first = ours.get_epsilon(1e-3)
    one_step()  # another pass over (the start of) the data
    assert ours.get_epsilon(1e-3) > 1.2 * first


def test_a_shuffled_step_over_several_batches_is_refused():
    ours = engine(accountant="fdp")
    model = mlp()
    model, optimizer, loader = ours.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=12),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    before = weights(model)
    for i, (x, y) in enumerate(loader):
        cross_entropy(model, x, y).backward()
        if i == 1:
            break
    with pytest.raises(RuntimeError, match="several batches were delivered since the last"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert len(ours.accountant) == 0


def individual(**kwargs):
    ours = engine(accountant="fdp")
    model = mlp()
    parts = ours.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=12, num_workers=kwargs.pop("num_workers", 0)),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        **kwargs,
    )
    return ours, *parts


@pytest.mark.parametrize("poisson", [True, False])
def test_a_second_step_on_one_batch_is_refused_for_individual_clipping_too(poisson):
    ours, model, optimizer, loader = individual(poisson_sampling=poisson)
    x, y = next(iter(loader))
    for i in range(2):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        before = weights(model)
        if i == 0:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="needs a new batch"):
                optimizer.step()
            assert torch.equal(weights(model), before)
    assert len(ours.accountant) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_interleaved_shuffled_passes_are_refused(workers):
    _, model, optimizer, loader = individual(poisson_sampling=False, num_workers=workers)
    older = iter(loader)
    x, y = next(older)
    cross_entropy(model, x, y).backward()
    optimizer.step()
    next(iter(loader))
    with pytest.raises(RuntimeError, match="superseded"):
        next(older)


@pytest.mark.parametrize("poisson", [True, False])
def test_a_batch_abandoned_between_its_chunks_does_not_reach_the_next_release(poisson):
    _, model, optimizer, loader = individual(poisson_sampling=poisson)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as physical:
        for x, y in physical:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
            break
        assert optimizer._draw.sums
        next(iter(physical))
        assert optimizer._draw is None
        assert all(p.summed_grad is None for p in optimizer.params)


def test_a_parameter_frozen_after_backward_does_not_move_by_its_raw_gradient():
    _, model, optimizer, loader = individual()
    x, y = next(iter(loader))
    (1e6 * cross_entropy(model, x, y)).backward()
    bias = list(model.parameters())[-1]
    bias.requires_grad_(False)
    before = bias.clone()
    optimizer.step()
    assert torch.equal(bias, before)


def test_two_runs_on_one_accountant_do_not_share_a_shuffled_pass():
    """Two interleaved runs, sigma falling within the pass: closed form of two passes at the smaller sigma."""
    ours = engine(accountant="fdp")
    runs = []
    for _ in range(2):
        model = mlp()
        runs.append(
            ours.make_private(
                module=model,
                optimizer=optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(DATA, batch_size=30),
                noise_multiplier=20.0,
                max_grad_norm=1.0,
                clipping="batch",
                sampling="shuffle",
            )
        )
    iterators = [iter(run[2]) for run in runs]
    for sigma in (20.0, 2.0):
        for (model, optimizer, _), iterator in zip(runs, iterators, strict=True):
            optimizer.noise_multiplier = sigma
            x, y = next(iterator)
            cross_entropy(model, x, y).backward()
            optimizer.step()
    least = accounting.epsilon(noise_multiplier=2.0, sample_rate=1.0, steps=2, delta=1e-3, sampling="shuffle")
    assert ours.get_epsilon(1e-3) >= least * (1 - 1e-9)


def test_steps_that_nobody_booked_leave_no_epsilon():
    ours, model, optimizer, loader = individual()
    optimizer.attach_step_hook(lambda _: None)  # Opacus's own way to lose its accountant: no longer
    ours.accountant = type(ours.accountant)()
    x, y = next(iter(loader))
    cross_entropy(model, x, y).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="1 steps were taken and 0 are booked"):
        ours.get_epsilon(1e-5)


def test_adaptive_clipping_has_no_certified_epsilon_under_poisson_sampling():
    with pytest.raises(ValueError, match="not an upper bound"):
        individual(clipping="adaptive", **ADAPTIVE)
    individual(clipping="adaptive", poisson_sampling=False, **ADAPTIVE)


@pytest.mark.parametrize("poisson", [False, True])
def test_samplers_that_cannot_be_accounted_are_refused(poisson):
    """Under Poisson sampling Opacus would draw from everything, also from what a sampler leaves out."""
    model = mlp()
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        engine(accountant="fdp").make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=12, sampler=WeightedRandomSampler([1.0] * 60, 60)),
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            poisson_sampling=poisson,
        )


def test_secure_mode_names_the_stock_mode_that_cannot_have_it():
    model = mlp()
    with pytest.raises(ValueError, match=r"secure_mode.*adaptive"):
        PrivacyEngine(accountant="prv", secure_mode=True).make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=12),
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            clipping="adaptive",
            **ADAPTIVE,
        )
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("affine", [True, False])
def test_stock_modes_refuse_batch_norm_that_opacus_would_let_move_its_buffers(affine):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=affine), nn.Linear(8, 2))
    if affine:
        model[1].requires_grad_(False)
    with pytest.raises(opacus.validators.errors.UnsupportedModuleError, match="running statistics"):
        run_model(model)


def run_model(model):
    return engine(accountant="prv").make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=12),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )


def test_draws_of_an_abandoned_pass_serve_no_later_step():
    told = []

    class Optimizer:
        def before_delivery(self):
            told.append("delivery")

        def before_pass(self):
            told.append("pass")

    ledger, optimizer = DrawLedger(), Optimizer()
    ledger.tell(optimizer)

    def draw(pass_index):
        size = {"size": 3, "set_size": 3, "ends_set": True, "ends_draw": True, "placeholder": False}
        ledger.plan(Delivery(serial=ledger.next_serial(), pass_index=pass_index, **size))

    first = ledger.begin_pass()
    draw(first)
    ledger.deliver(first)
    ledger.consume()
    draw(first)
    ledger.deliver(first)
    second = ledger.begin_pass()
    assert told == ["pass", "delivery", "delivery", "pass"]
    with pytest.raises(RuntimeError, match="needs a new batch"):
        ledger.consume()
    draw(second)
    ledger.deliver(second)
    ledger.consume()
    with pytest.raises(RuntimeError, match="needs a new batch"):
        ledger.consume()
