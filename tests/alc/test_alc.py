"""ALC in training: no trace on the model, refresh, schedulers, individual clipping, calibration, report."""

from __future__ import annotations

import math
import random
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip
from support import blobs, engine, given, mlp, private_parts
from support.alc import KnownNoise, data, three_layers
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from opacus_bc import ALC, BatchMemoryManager, IndividualClippingOptimizer, local_update
from opacus_bc.alc.adaptive import default_count
from opacus_bc.optimizers.stock import StockOptimizer
from opacus_bc.public.data import PublicDataError
from opacus_bc.public.norms import loss_gradient, mean_group_norms, parameter_norms

PRIVATE, PUBLIC = blobs(200), blobs(60, seed=9)


def loader(dataset=PUBLIC, batch_size: int = 10) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size)


def private(
    model: nn.Module, *, alc: Any = None, private_data=PRIVATE, batch_size: int = 20, **kwargs: Any
) -> tuple[Any, ...]:
    """(engine, module, optimizer, loader) after make_private."""
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "clipping": "batch"} | kwargs
    lr = settings.pop("lr", 0.1)
    made = engine(accountant=settings.pop("accountant", "prv"))
    return made, *made.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr),
        data_loader=DataLoader(private_data, batch_size=batch_size),
        alc=alc if alc is not None else loader(),
        **settings,
    )


def train(model, optimizer, batches, steps: int) -> None:
    """Optimizer steps over as many passes as it takes; for GBC a step is several batches."""
    done = 0
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before = optimizer.adaptive.steps
            optimizer.step()
            done += optimizer.adaptive.steps - before
            if done == steps:
                return


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rule": "median"}, "rule must be one of 'ratio', 'norm', got 'median'"),
        ({"layers": "conv*"}, "a single pattern goes into a list"),
        ({"layers": 0}, "at least 1"),
        ({"layers": True}, "got True"),
        ({"layers": []}, "name patterns, got"),
        ({"layers": ["a*", "a*"]}, "names a pattern twice"),
        ({"layers": {"a": 3}}, "3 is no name pattern"),
        ({"apply": "both"}, "apply must be one of"),
        ({"noise": "little"}, "noise must be one of"),
        ({"noise": {}}, "a weight p_h > 0"),
        ({"noise": {"a": -1.0}}, r"noise\['a'\] must be a finite number > 0"),
        ({"apply": "scale", "noise": "optimal"}, "apply='scale' makes one"),
        ({"refresh": "never"}, "refresh must be 'epoch', 'once' or a number of steps"),
        ({"refresh": 0}, "got 0"),
        ({"max_batches": 0}, "max_batches must be a whole number >= 1"),
        ({"gradient": 3}, "gradient must be a function"),
        ({"freeze": 10}, "freeze must be a FreezeConverged"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_wrong_configurations_say_what_would_be_right(wrong, message):
    with pytest.raises(ValueError, match=message):
        ALC(loader(), **wrong)


def test_configuration_is_frozen_and_keyword_only():
    config = ALC(loader(), layers=4)
    with pytest.raises(AttributeError):
        config.layers = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ALC(loader(), "ratio")  # type: ignore[misc]
    with pytest.raises(ValueError, match="torch DataLoader, got list"):
        ALC([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="public DataLoader or an ALC, got list"):
        private(mlp(), alc=[1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, "clipping='batch' or 'flat'"),
        ({"clipping": "flat", "grad_sample_mode": "ghost"}, "ghost clipping never forms them"),
        ({"alc": ALC(loader(), layers=["0.*"])}, "'2.weight' is in no group"),
        ({"alc": ALC(loader(), noise={"0": 1.0})}, "noise has weights for 0; the groups are 0, 2"),
    ],
    ids=["per_layer", "ghost", "patterns", "weights"],
)
def test_what_alc_cannot_do_is_refused_before_anything_changes(kwargs, message):
    model = mlp()
    with pytest.raises(ValueError, match=message):
        private(model, **kwargs)
    assert not model._forward_hooks
    assert not hasattr(model[0], "autograd_grad_sample_hooks")


@pytest.mark.filterwarnings("ignore:batch_norm= changes nothing")
@pytest.mark.parametrize("batch_norm", [None, "batch"])  # None passes the public loader on to BatchNorm
def test_public_data_that_overlap_the_private_data_are_refused_and_disjoint_halves_accepted(batch_norm):
    whole = blobs(200)
    first, second = Subset(whole, range(150)), Subset(whole, range(150, 200))
    private(mlp(), private_data=first, alc=loader(second), batch_norm=batch_norm)
    for public in (whole, Subset(whole, [149, 150]), ConcatDataset([PUBLIC, Subset(whole, [3])])):
        with pytest.raises(PublicDataError, match="belong to the private data"):
            private(mlp(), private_data=first, alc=loader(public), batch_norm=batch_norm)


# ---------------------------------------------------------------- estimation


def bn_dropout_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)
    )


class Augmented(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Public data whose transform draws from every global random stream."""

    def __len__(self) -> int:
        return len(PUBLIC)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = PUBLIC[i]
        return x + torch.randn(()) + np.random.rand() + random.random(), y  # noqa: NPY002


def traces(model: nn.Module, generator: torch.Generator) -> list[Any]:
    """Everything that an estimation might disturb."""
    state: Any = [(k, v.clone()) for k, v in model.state_dict(keep_vars=False).items()]
    state += [(n, id(p), p.requires_grad, p._version) for n, p in model.named_parameters()]
    state += [
        (n, None if p.grad is None else (id(p.grad), p.grad.clone())) for n, p in model.named_parameters()
    ]
    state += [(n, id(b), b._version) for n, b in model.named_buffers()]
    state += [
        (
            n,
            m.training,
            list(m._forward_hooks),
            list(m._forward_pre_hooks),
            list(m._backward_hooks),
            list(vars(m)),
        )
        for n, m in model.named_modules()
    ]
    legacy = np.random.get_state()  # noqa: NPY002
    return [
        *state,
        torch.get_rng_state(),
        legacy[1].copy(),
        legacy[2:],
        random.getstate(),
        generator.get_state(),
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_estimation_leaves_weights_buffers_gradients_hooks_modes_and_random_states_alone(mode, fails):
    model = bn_dropout_model()
    seen: list[int] = []
    model[4].register_forward_hook(lambda *_: seen.append(1))
    model[5].weight.requires_grad_(False)
    nn.functional.cross_entropy(model(PUBLIC[:10][0]), PUBLIC[:10][1]).backward()
    model.train(mode != "eval")
    if mode == "mixed":
        model[1].eval()
    generator = torch.Generator().manual_seed(3)
    public = DataLoader(Augmented(), batch_size=5, shuffle=True, generator=generator)
    usual = loss_gradient(nn.functional.cross_entropy)

    def gradient(net: nn.Module, batch: Any) -> None:
        usual(net, batch)
        if fails:
            raise ArithmeticError

    before = traces(model, generator)
    args: dict[str, Any] = {"loader": public, "gradient": gradient, "mini_set_size": 7, "count": 3, "seed": 1}
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    if fails:
        with pytest.raises(ArithmeticError):
            parameter_norms(model, names, **args)
    else:
        first = parameter_norms(model, names, **args)
        assert first == parameter_norms(model, names, **args)
        assert len(first) == 3
        assert all(norms[n] > 0 for norms in first for n in names if not n.endswith("0.bias"))
    assert same(before, traces(model, generator))
    assert seen


def test_estimation_reads_weights_and_public_data_and_nothing_else():
    def norms(disturb: bool) -> Any:
        model = bn_dropout_model()
        if disturb:
            torch.manual_seed(99)
            for p in model.parameters():
                p.grad = torch.full_like(p, math.nan)
            model[1].running_mean.fill_(1e6)
        names = [n for n, _ in model.named_parameters()]
        usual = loss_gradient(nn.functional.cross_entropy)
        return parameter_norms(
            model, names, loader=loader(), gradient=usual, mini_set_size=10, count=2, seed=0
        )

    assert norms(False) == norms(True)


def test_mini_sets_have_the_size_that_is_clipped_whatever_the_public_loader_batches():
    sizes: list[int] = []

    def gradient(module: nn.Module, batch: Any) -> None:
        sizes.append(len(batch[0]))
        nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()

    config = ALC(loader(batch_size=7), gradient=gradient, max_batches=3)
    private(mlp(), alc=config)
    private(mlp(), alc=config, mini_batch_size=5)
    private(mlp(), alc=config, clipping="flat")
    assert sizes == [20] * 3 + [5] * 3 + [1] * 3


def test_norm_is_the_mean_over_mini_sets_and_not_the_norm_of_the_mean():
    public, plain = data(8, seed=4), three_layers()
    config = ALC(loader(public), max_batches=8, layers="parameter")
    rule = private(three_layers(), alc=config, clipping="flat", private_data=data(40))[2].adaptive
    norms = []
    for x, y in DataLoader(public, batch_size=1):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        norms.append(plain[0].weight.grad.norm().item())
    assert rule.norms["0.weight"] == pytest.approx(sum(norms) / 8)


@pytest.mark.filterwarnings("ignore:.*hold the statistics")
def test_public_gradients_that_are_not_finite_are_left_out_and_all_of_them_are_an_error():
    x, y = PUBLIC.tensors
    bad = x.clone()
    bad[:30] = math.nan
    model = mlp(norm=True)
    rule = private(model, alc=ALC(loader(TensorDataset(bad, y)), max_batches=60), clipping="flat",
                   batch_norm="frozen")[2].adaptive  # fmt: skip
    assert all(0 < value < math.inf for value in rule.norms.values())
    again = mlp(norm=True)
    with pytest.raises(PublicDataError, match="all zero or not finite"):
        private(again, alc=loader(TensorDataset(torch.full_like(x, math.nan), y)))
    assert type(again[1]) is nn.BatchNorm1d  # the policy was taken back
    assert again[1].track_running_stats


def test_a_refresh_without_a_public_gradient_warns_and_keeps_the_bounds():
    calls = []

    def gradient(module: nn.Module, batch: Any) -> None:
        calls.append(1)
        (
            nn.functional.cross_entropy(module(batch[0]), batch[1]) * (math.nan if len(calls) > 1 else 1)
        ).backward()

    _, model, optimizer, batches = private(
        mlp(), alc=ALC(loader(), max_batches=1, refresh=2, gradient=gradient)
    )
    bounds = optimizer.clip_bounds
    train(model, optimizer, batches, 2)
    with pytest.warns(UserWarning, match="step 2: the public gradients are all zero or not finite"):
        train(model, optimizer, batches, 1)
    assert optimizer.clip_bounds == bounds


def test_a_public_set_smaller_than_a_mini_set_warns():
    with pytest.warns(UserWarning, match="fewer than a mini-set of 20"):
        private(mlp(), alc=loader(blobs(8, seed=3)))


@pytest.mark.parametrize(
    ("unit", "gradients", "expected"),
    [
        ("mini-set", 844, 32),
        ("mini-set", 53, 2),
        ("mini-set", 10, 1),
        ("sample", 54_000, 128),
        ("sample", 1500, 7),
    ],
)
def test_default_count_is_at_most_a_small_share_of_what_training_computes(unit, gradients, expected):
    assert default_count(unit, gradients) == expected


# ---------------------------------------------------------------- refresh and schedules


@pytest.mark.parametrize(
    ("refresh", "expected"), [("epoch", [0, 10, 20]), (4, [0, 4, 8, 12, 16, 20]), ("once", [0])]
)
@pytest.mark.parametrize(
    "kwargs", [{}, {"mini_batch_size": 10}, {"clipping": "flat"}], ids=["bc", "gbc", "ic"]
)
def test_norms_are_estimated_when_refresh_says_so(refresh, expected, kwargs):
    _, model, optimizer, batches = private(mlp(), alc=ALC(loader(), refresh=refresh), **kwargs)
    train(model, optimizer, batches, 21)
    assert [step for step, _ in optimizer.adaptive.history] == expected


@pytest.mark.parametrize("layers", ["module", "parameter", 2])
@pytest.mark.parametrize("noise", ["proportional", "isotropic", "optimal"])
@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_a_refresh_moves_the_bounds_and_not_sigma_eff(layers, noise, clipping):
    model = three_layers().float()
    made, model, optimizer, batches = private(
        model, alc=ALC(loader(), layers=layers, noise=noise, refresh=1), clipping=clipping, lr=0.5
    )
    before, bounds = optimizer.effective_noise_multiplier, optimizer.clip_bounds
    train(model, optimizer, batches, 12)
    assert optimizer.clip_bounds != bounds
    assert made.accountant.history == [(before, 0.1, 12)]
    count = 1 if noise == "isotropic" else {"module": 3, "parameter": 6, 2: 2}[layers]
    assert before == pytest.approx(1 / math.sqrt(count), rel=1e-11)


@pytest.mark.parametrize("apply", ["clip", "scale"])
@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_a_grad_clip_scheduler_moves_clipping_and_noise_together(apply, clipping):
    config = ALC(loader(), apply=apply, refresh="once")
    optimizer = private(mlp(), alc=config, clipping=clipping, max_grad_norm=1e-3)[2]
    scheduler = ExponentialGradClip(optimizer, gamma=0.9)
    first, bounds, sigma = optimizer.blocks(), optimizer.clip_bounds, optimizer.effective_noise_multiplier
    scheduler.step()
    for old, new in zip(first, optimizer.blocks(), strict=True):
        assert new.clip_bound == pytest.approx(0.9 * old.clip_bound)
        assert new.noise_std == pytest.approx(0.9 * old.noise_std)
    assert optimizer.clip_bounds == pytest.approx({n: 0.9 * b for n, b in bounds.items()})
    assert optimizer.effective_noise_multiplier == sigma
    # What is released moves too: everything is clipped at this bound, and KnownNoise is the std itself.
    releases = []
    for factor in (1.0, 0.9):
        copy = mlp()
        _, wrapped, again, batches = private(
            copy,
            alc=ALC(loader(), apply=apply, refresh="once"),
            clipping=clipping,
            max_grad_norm=1e-3,
            lr=1.0,
            poisson_sampling=False,
            accountant="fdp",
        )
        again.noise = KnownNoise(1.0)
        again.max_grad_norm *= factor
        start = [p.detach().clone() for p in copy.parameters()]
        train(wrapped, again, batches, 1)
        releases.append([a - p.detach() for a, p in zip(start, copy.parameters(), strict=True)])
    for one, other in zip(*releases, strict=True):
        torch.testing.assert_close(other, 0.9 * one, rtol=1e-3, atol=2e-7)


def test_bounds_do_not_move_within_a_draw():
    _, model, optimizer, batches = private(mlp(), alc=ALC(loader(), refresh=1), mini_batch_size=5)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer._draw is not None:
            break
    blocks = optimizer.blocks()
    optimizer.max_grad_norm = 7.0
    optimizer.adaptive.begin_draw()
    assert optimizer.blocks() == blocks


def test_a_long_history_is_thinned_and_keeps_its_ends():
    adaptive = private(mlp(), alc=ALC(loader(), refresh=1, max_batches=1))[2].adaptive
    adaptive.history = [(step, dict(adaptive.norms)) for step in range(1000)]
    adaptive.steps = 1000
    adaptive.begin_draw()
    steps = [step for step, _ in adaptive.history]
    assert steps == [*range(0, 1000, 2), 1000]


# ---------------------------------------------------------------- individual clipping


def individual_weights(mode: str, **kwargs: Any) -> list[Tensor]:
    model = mlp()
    _, wrapped, optimizer, batches = private(
        model,
        clipping="flat",
        grad_sample_mode=mode,
        alc=ALC(loader(), refresh=2, max_batches=20),
        noise_generator=torch.Generator().manual_seed(1),
        poisson_sampling=False,
        accountant="fdp",
        **kwargs,
    )
    assert isinstance(optimizer, IndividualClippingOptimizer)
    train(wrapped, optimizer, batches, 5)
    return [p.detach() for p in model.parameters()]


def test_hooks_expanded_weights_and_functorch_take_the_same_steps():
    expected = individual_weights("hooks")
    for mode in ("ew", "functorch"):
        for a, b in zip(expected, individual_weights(mode), strict=True):
            torch.testing.assert_close(a, b)


def test_refresh_does_not_disturb_opacus_per_sample_gradients():
    """The refresh happens while private per-sample gradients are waiting to be clipped."""
    _, wrapped, optimizer, batches = private(mlp(), clipping="flat", alc=ALC(loader(), refresh=1))
    x, y = next(iter(batches))
    nn.functional.cross_entropy(wrapped(x), y).backward()
    before = [(id(p.grad_sample), p.grad_sample.clone(), p._forward_counter) for p in optimizer.params]
    optimizer.adaptive._estimated_at = -1
    optimizer.adaptive.begin_draw()
    assert len(optimizer.adaptive.history) == 2
    assert same(before, [(id(p.grad_sample), p.grad_sample, p._forward_counter) for p in optimizer.params])
    assert wrapped.hooks_enabled
    assert not any(getattr(m, "activations", []) for m in wrapped.modules())


def test_physical_chunks_give_the_step_of_the_whole_batch():
    results = []
    for chunk in (None, 7):
        model = mlp()
        _, wrapped, optimizer, batches = private(
            model, clipping="flat", alc=ALC(loader(), refresh=1), poisson_sampling=False, accountant="fdp",
            noise_generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        if chunk is None:
            train(wrapped, optimizer, batches, 10)
        else:
            with BatchMemoryManager(
                data_loader=batches, max_physical_batch_size=chunk, optimizer=optimizer
            ) as chunks:
                train(wrapped, optimizer, chunks, 10)
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_scheduler_between_two_chunks_of_a_batch_waits_for_the_next_draw():
    _, wrapped, optimizer, batches = private(mlp(), clipping="flat", sampling="shuffle", accountant="fdp")
    with BatchMemoryManager(data_loader=batches, max_physical_batch_size=9, optimizer=optimizer) as chunks:
        for x, y in chunks:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            last = optimizer.weights_moved
            if not last and optimizer.max_grad_norm != 5.0:
                blocks, optimizer.max_grad_norm = optimizer.blocks(), 5.0
            assert (optimizer._released_blocks if last else optimizer.blocks()) == blocks
            if last:
                break
    assert optimizer.blocks() != blocks


def test_a_sample_whose_gradient_is_not_finite_counts_as_zero():
    x, y = (t.clone() for t in PRIVATE[:20])
    x[3], x[8] = math.nan, math.inf
    releases = []
    for keep in (list(range(20)), [i for i in range(20) if i not in (3, 8)]):
        model = mlp()
        _, wrapped, optimizer, batches = private(model, clipping="flat", lr=20.0)
        next(iter(given(batches, keep)))
        optimizer.noise = KnownNoise(0.0)
        start = [p.detach().clone() for p in model.parameters()]
        nn.functional.cross_entropy(wrapped(x[keep]), y[keep]).backward()
        optimizer.step()
        releases.append([a - p.detach() for a, p in zip(start, model.parameters(), strict=True)])
    for a, b in zip(*releases, strict=True):
        assert b.abs().sum() > 0
        torch.testing.assert_close(a, b)


def test_an_empty_batch_releases_noise_and_is_accounted():
    model = mlp()
    made, wrapped, optimizer, batches = private(model, clipping="flat")
    next(iter(given(batches, [])))
    start = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.functional.cross_entropy(wrapped(torch.zeros(0, 4)), torch.zeros(0, dtype=torch.long)).backward()
        optimizer.step()
    assert len(made.accountant.history) == 1
    for a, p in zip(start, model.parameters(), strict=True):
        assert torch.isfinite(p).all()
        assert not torch.equal(a, p)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(1)])
def test_flat_clipping_without_alc_is_opacus_own_arithmetic_where_noise_is_to_be_repeated(generator):
    model = mlp()
    _, optimizer, _ = engine(accountant="prv").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(PRIVATE, batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=generator,
    )
    assert isinstance(optimizer, DPOptimizer)
    assert isinstance(optimizer, StockOptimizer) == (generator is not None)


def test_one_group_with_ratio_is_opacus_flat_clipping():
    """IC + ALC with a single group has C_1 = C: clipped sums as stock Opacus makes them."""
    sums = []
    for alc in (None, ALC(loader(), layers=1)):
        model = mlp()
        made = engine(accountant="prv").make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=20.0),
            data_loader=DataLoader(PRIVATE, batch_size=20), noise_multiplier=1.0, max_grad_norm=0.3, alc=alc,
        )  # fmt: skip
        x, y = PRIVATE[:20]
        nn.functional.cross_entropy(made[0](x), y).backward()
        made[1].clip_and_accumulate()
        sums.append([p.summed_grad for p in model.parameters()])
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- BatchNorm, local updates, calibration


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_the_public_loader_serves_batch_norm_too_and_buffers_do_not_leak(clipping):
    model = mlp(norm=True)
    _, wrapped, optimizer, batches = private(model, clipping=clipping, alc=ALC(loader(), refresh=2))
    before = {n: b.clone() for n, b in model.named_buffers()}
    train(wrapped, optimizer, batches, 5)
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())
    wrapped.eval()(PUBLIC[:5][0])


def test_local_updates_are_measured_with_the_users_own_gradient_function():
    def step(module: nn.Module, batch: Any) -> None:
        x, y = batch
        make = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
        local_update(module, make, [lambda: nn.functional.cross_entropy(module(x), y)] * 2)

    model = mlp()
    _, _, optimizer, batches = private(model, alc=ALC(loader(), gradient=step, max_batches=2))
    plain = private(mlp(), alc=ALC(loader(), max_batches=2))[2].adaptive.norms
    # Two steps at 0.5 move about as far as one gradient.
    for layer, norm in optimizer.adaptive.norms.items():
        assert 0.5 * plain[layer] < norm < 1.5 * plain[layer]
        assert norm != plain[layer]
    for batch in batches:
        optimizer.zero_grad()
        step(model, batch)
        optimizer.step()


def test_batches_that_are_no_pairs_need_a_gradient_function():
    only_x = loader(TensorDataset(PUBLIC.tensors[0]))
    with pytest.raises(PublicDataError, match="gradient=f"):
        private(mlp(), alc=only_x)


@pytest.mark.parametrize(
    "alc",
    [{"layers": "parameter"}, {"layers": 2}, {"apply": "scale"}, {"noise": "isotropic"}, {"noise": "optimal"},
     {"noise": {"0": 1.0, "2": 3.0}}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "kwargs", [{}, {"clipping": "flat"}, {"poisson_sampling": False}], ids=["bc", "ic", "shuffle"]
)
def test_calibration_through_the_blocks_spends_the_budget_and_no_more(alc, kwargs):
    model = mlp()
    made = engine(accountant="fdp")
    wrapped, optimizer, batches = made.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(PRIVATE, batch_size=20), target_epsilon=3.0, target_delta=1e-4, epochs=1,
        max_grad_norm=0.5, alc=ALC(loader(), refresh=3, **alc), **({"clipping": "batch"} | kwargs),
    )  # fmt: skip
    train(wrapped, optimizer, batches, 10)
    assert 2.9 < made.get_epsilon(1e-4) <= 3.0


# ---------------------------------------------------------------- report


def test_the_report_says_what_is_used_now():
    made, model, optimizer, batches = private(mlp(), alc=ALC(loader(), refresh=5), mini_batch_size=10)
    train(model, optimizer, batches, 11)
    report = made.layer_report()
    assert [row.layer for row in report.rows] == ["0", "2"]
    assert [row.entries for row in report.rows] == [40, 18]
    assert {row.layer: row.clip_bound for row in report.rows} == optimizer.clip_bounds
    assert optimizer.layers == {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    for row, block in zip(report.rows, optimizer.blocks(), strict=True):
        assert row.noise_std == block.noise_std == pytest.approx(2 * row.clip_bound)
        signal = 2 * min(row.norm, row.clip_bound)
        assert row.noise_to_signal == pytest.approx(row.noise_std * math.sqrt(row.entries) / signal)
    assert [step for step, _ in report.history] == [0, 5, 10]
    assert str(report).splitlines()[0].split() == [
        "layer",
        "group",
        "entries",
        "e_h",
        "C_h",
        "noise",
        "std",
        "noise/signal",
    ]
    assert len(report.table().splitlines()) == 3


def test_the_report_is_drawn_into_a_file_and_names_the_extra_that_it_needs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    made, model, optimizer, batches = private(mlp(), alc=ALC(loader(), refresh=1, layers=1))
    train(model, optimizer, batches, 3)
    made.layer_report().plot(tmp_path / "norms.png")
    assert (tmp_path / "norms.png").stat().st_size > 5000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"opacus-bc\[experiments\]"):
        made.layer_report().plot(tmp_path / "other.png")


def test_without_alc_there_is_one_layer_and_no_report():
    model = mlp()
    optimizer, _ = private_parts(model, PRIVATE, [[list(range(8))]], clip_bound=0.3)
    assert optimizer.clip_bounds == {"all": 0.3}
    assert list(optimizer.layers) == ["all"]
    with pytest.raises(ValueError, match="pass alc="):
        engine().layer_report()


def test_scale_reports_the_bound_that_each_layer_amounts_to():
    made, _, optimizer, _ = private(mlp(), alc=ALC(loader(), apply="scale"))
    norms = optimizer.adaptive.norms
    assert optimizer.clip_bounds == pytest.approx(
        {n: 0.5 * e / max(norms.values()) for n, e in norms.items()}
    )
    assert len(optimizer.blocks()) == 1
    assert made.layer_report().rows[0].noise_std == pytest.approx(2 * optimizer.clip_bounds["0"])


def test_group_norm_is_that_of_the_whole_group():
    assert mean_group_norms([{"a": 3.0, "b": 4.0}], {"g": ("a", "b")}) == {"g": 5.0}
