"""Individual clipping looks at what is released: noise, clipped sums, and what survives a step."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialGradClip
from support import blobs, cross_entropy, engine, given, mlp, weights
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC, BatchMemoryManager, IndividualClippingOptimizer
from opacus_bc.mechanism.noise import SecureNoise
from opacus_bc.optimizers.stock import StockOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]
DATA, C = blobs(64), 0.5
PUBLIC = DataLoader(blobs(16, seed=5), batch_size=8)
GIVEN = {"noise_generator": torch.Generator().manual_seed(3)}
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [C / 2] * 4}
GHOST = {"grad_sample_mode": "ghost"}
BK = {"grad_sample_mode": "bk"}
KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "per_layer": PER_LAYER,
    "ghost": GHOST,
    "alc": {"alc": ALC(PUBLIC)},
    "bk": BK,
    "bk, per_layer": {**BK, **PER_LAYER},
    "bk, alc": {**BK, "alc": ALC(PUBLIC)},
    "Opacus's flat": GIVEN,
    "Opacus's per_layer": {**PER_LAYER, **GIVEN},
    "Opacus's ghost": {**GHOST, **GIVEN},
}


def private(model: nn.Module, data: TensorDataset = DATA, *, secure: bool = False, **kwargs: Any) -> Any:
    """Engine, forward, optimizer, criterion and loader of a model made private."""
    maker = engine(secure_mode=secure)
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": C, **kwargs}
    wrapper, optimizer, *criterion, loader = maker.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=arguments.pop("data_loader", DataLoader(data, batch_size=16)),
        **arguments,
    )
    return maker, wrapper, optimizer, criterion[0] if criterion else nn.functional.cross_entropy, loader


def released(model: nn.Module, parts: Any, batches: Any) -> list[Tensor]:
    """The sums that steps release: weights move by them over the expected batch size."""
    _, wrapper, optimizer, criterion, _ = parts
    found = []
    for x, y in batches:
        before = weights(model)
        optimizer.zero_grad()
        criterion(wrapper(x), y).backward()
        optimizer.step()
        if optimizer.weights_moved:
            found.append((before - weights(model)) * optimizer.expected_batch_size)
    return found


SECURE: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat, alc": {"alc": ALC(PUBLIC, refresh="once")},
    "flat, alc by scaling": {"alc": ALC(PUBLIC, apply="scale", refresh="once")},
    "per_layer": PER_LAYER,
    "ghost": GHOST,
    "bk": BK,
    "bk, per_layer": {**BK, **PER_LAYER},
    "bk, alc by scaling": {**BK, "alc": ALC(PUBLIC, apply="scale", refresh="once")},
}


@pytest.mark.parametrize("mode", SECURE)
def test_secure_noise_of_individual_clipping_has_the_stated_scale_and_is_not_torchs(mode: str) -> None:
    """Noise alone, on empty draws: variance within 5 deviations of tau^2, a false alarm in 1.7 million."""
    steps = 100
    model = mlp()
    parts = private(model, secure=True, **SECURE[mode])
    optimizer, loader = parts[2], parts[4]
    assert isinstance(optimizer.noise, SecureNoise)
    scales = {n: b.noise_std / m for b in optimizer.blocks() for n, m in zip(b.names, b.factors, strict=True)}
    expected = torch.cat([torch.full((p.numel(),), scales[n]) for n, p in optimizer.named_parameters()])
    batches = given(loader, *[[]] * steps)
    sums = torch.stack(released(model, parts, batches))
    standard = sums / expected.double()
    assert len(standard) == steps
    assert abs(float(standard.var()) - 1) < 5 * math.sqrt(2 / standard.numel())
    assert abs(float(standard.mean())) < 5 / math.sqrt(standard.numel())


def test_secure_draws_of_individual_clipping_are_poisson_and_follow_no_seed() -> None:
    """Mean batch size within 5 deviations; two runs under one torch seed draw differently."""
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        data_loader = DataLoader(blobs(400), batch_size=40, shuffle=True, generator=generator)
        loader = private(mlp(), secure=True, data_loader=data_loader)[4]
        seen.append([tuple(draw[0]) for _ in range(20) for draw in loader.draws])
    assert seen[0] != seen[1]
    sizes = torch.tensor([len(draw) for draw in seen[0]], dtype=torch.float64)
    assert abs(float(sizes.mean()) - 40) < 5 * math.sqrt(40 * 0.9 / len(sizes))


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("kind", [{}, GHOST, PER_LAYER, BK, {"clipping": "batch"}], ids=str)
def test_secure_draws_come_from_the_cryptographic_generator(kind: dict[str, Any], seeded: bool) -> None:
    randomgen = pytest.importorskip("randomgen")
    generator = torch.Generator().manual_seed(0) if seeded else None
    data_loader = DataLoader(DATA, batch_size=16, shuffle=True, generator=generator)
    loader = private(mlp(), secure=True, data_loader=data_loader, **kind)[4]
    assert isinstance(loader.draws.generator.bit_generator, randomgen.AESCounter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_torch_seed_in_the_loop_does_not_repeat_noise(kind: str) -> None:
    model = mlp()
    parts = private(model, **KINDS[kind])
    sums = []
    for _ in range(2):
        torch.manual_seed(42)
        sums += released(model, parts, given(parts[4], []))
    correlation = float((sums[0] * sums[1]).mean() / (sums[0].norm() * sums[1].norm()) * len(sums[0]))
    assert abs(correlation) < 6 / math.sqrt(len(sums[0]))


def test_a_torch_seed_in_the_loop_does_not_repeat_the_noise_of_adaptive_clipping() -> None:
    """With sigma = 100 the release is noise but for a thousandth."""
    model = mlp()
    arguments = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 1e-9,
        "max_clipbound": 10.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 1e4,
        "noise_multiplier": 100.0,
    }
    parts = private(model, clipping="adaptive", poisson_sampling=False, **arguments)
    sums = []
    for _ in range(2):
        torch.manual_seed(42)
        sums += released(model, parts, given(parts[4], [0]))
    cosine = float((sums[0] * sums[1]).sum() / (sums[0].norm() * sums[1].norm()))
    assert abs(cosine) < 6 / math.sqrt(len(sums[0]))


LONG = torch.rand(1, 3_000_000, generator=torch.Generator().manual_seed(0)) ** 4


class Long(nn.Module):
    """A layer of many entries: torch's own float32 norm of its gradient comes out too small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LONG.shape[1], 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize(
    "kwargs", [{}, {"clipping": "per_layer", "max_grad_norm": [C]}, BK], ids=["flat", "per_layer", "bk"]
)
def test_a_long_gradient_stays_in_its_ball_float_rounding_included(kwargs: dict[str, Any]) -> None:
    data = TensorDataset(LONG.repeat(2, 1), torch.zeros(2, 1))
    model = Long()
    arguments = {"noise_multiplier": 0.0, "data_loader": DataLoader(data, batch_size=2), **kwargs}
    parts = private(model, data, **arguments)
    _, wrapper, optimizer, _, loader = parts
    for x, _ in given(loader, [0]):
        wrapper(x).sum().backward()
        optimizer.step()
    moved = model.layer.weight.detach().double() * optimizer.expected_batch_size
    assert C * (1 - 2e-5) <= float(moved.norm()) <= C


def test_opacus_own_arithmetic_lets_a_long_gradient_out_of_its_ball() -> None:
    """Why the bound is certified where Opacus's arithmetic was not asked for."""
    theirs = LONG * (C / (LONG.norm(2, dim=-1) + 1e-6)).clamp(max=1.0)
    assert float(theirs.double().norm()) > C * (1 + 1e-4)


@pytest.mark.parametrize("kwargs", [{}, GIVEN], ids=["ours", "Opacus's"])
def test_noise_is_of_the_bound_that_clipped_when_a_scheduler_moves_it_inside_a_draw(kwargs: Any) -> None:
    """Opacus clips later chunks at the new bound and noises all of them with it."""
    model = mlp()
    parts = private(model, noise_multiplier=1.0, **kwargs)
    _, wrapper, optimizer, _, loader = parts
    scheduler = ExponentialGradClip(optimizer, gamma=0.1)
    scales: list[float] = []
    add = optimizer.add_noise

    def looking() -> None:
        sums = [p.summed_grad.clone() for p in optimizer.params]
        add()
        pairs = zip(optimizer.params, sums, strict=True)
        scales.append(float(torch.cat([(p.grad - s).flatten() for p, s in pairs]).std()))

    optimizer.add_noise = looking
    batches = given(loader, list(range(16)), list(range(16)))
    with BatchMemoryManager(data_loader=batches, max_physical_batch_size=4, optimizer=optimizer) as chunks:
        for number, (x, y) in enumerate(chunks):
            optimizer.zero_grad()
            cross_entropy(wrapper, x, y).backward()
            optimizer.step()
            if number == 1:
                scheduler.step()
    entries = sum(p.numel() for p in optimizer.params)
    for scale, bound in zip(scales, (C, C / 10), strict=True):
        assert abs(scale / bound - 1) < 5 * math.sqrt(0.5 / entries)


def test_adaptive_clipping_keeps_its_bound_and_noise_until_the_draw_is_released() -> None:
    """A bound moved after the first chunk: the noise is still that of the bound that clipped it."""
    model = mlp()
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.001,
        "unclipped_num_std": 2.0,
    }
    _, wrapper, optimizer, _, loader = private(
        model, clipping="adaptive", poisson_sampling=False, **GIVEN, **adaptive
    )
    sigma, scales = optimizer.noise_multiplier, []
    add = optimizer.add_noise

    def looking() -> None:
        sums = [p.summed_grad.clone() for p in optimizer.params]
        add()
        pairs = zip(optimizer.params, sums, strict=True)
        scales.append(float(torch.cat([(p.grad - s).flatten() for p, s in pairs]).std()))

    optimizer.add_noise = looking
    batches = given(loader, list(range(16)))
    with BatchMemoryManager(data_loader=batches, max_physical_batch_size=4, optimizer=optimizer) as chunks:
        for x, y in chunks:
            optimizer.zero_grad()
            cross_entropy(wrapper, x, y).backward()
            optimizer.step()
            if not scales:
                optimizer.max_grad_norm = C / 10
    entries = sum(p.numel() for p in optimizer.params)
    assert len(scales) == 1
    assert abs(scales[0] / (sigma * C) - 1) < 5 * math.sqrt(0.5 / entries)


@pytest.mark.parametrize("kind", ["ghost", "Opacus's ghost", "Opacus's per_layer"])
def test_a_bound_that_opacus_keeps_elsewhere_cannot_be_scheduled(kind: str) -> None:
    optimizer = private(mlp(), **KINDS[kind])[2]
    with pytest.raises(ValueError, match="old bounds while the noise moves"):
        ExponentialGradClip(optimizer, gamma=0.5).step()


def test_per_layer_bounds_and_noise_move_together_in_our_own_arithmetic() -> None:
    optimizer = private(mlp(), **PER_LAYER)[2]
    before = optimizer.blocks()
    optimizer.max_grad_norm *= 0.5
    for old, new in zip(before, optimizer.blocks(), strict=True):
        assert new.clip_bound == pytest.approx(old.clip_bound / 2)
        assert new.noise_std == pytest.approx(old.noise_std / 2)
    assert optimizer.effective_noise_multiplier == pytest.approx(1.0)
    assert optimizer.clip_bounds == {name: pytest.approx(C / 4) for name in optimizer.clip_bounds}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_made_up_for_an_empty_draw_does_not_count(kind: str) -> None:
    model = mlp()
    parts = private(model, noise_multiplier=0.0, rand_on_empty=True, **KINDS[kind])
    first, empty = released(model, parts, given(parts[4], [0, 1], []))
    assert float(first.norm()) > 0
    assert float(empty.norm()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_batch_survives_its_step_in_a_pickle(kind: str) -> None:
    """A sample whose first feature is a known number leaves no tensor with that number behind."""
    x, y = (t.clone() for t in DATA.tensors)
    model = mlp()
    parts = private(model, TensorDataset(x, y), **KINDS[kind])
    released(model, parts, given(parts[4], [3]))
    for p in model.parameters():
        assert not [name for name, value in vars(p).items() if isinstance(value, (Tensor, list))]
    file = io.BytesIO()
    torch.save(parts[1], file)
    assert x[3].numpy().tobytes() not in file.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_a_forward_without_backward_has_recorded_are_never_pickled(kind: str) -> None:
    x = DATA.tensors[0]
    model = mlp()
    private(model, **KINDS[kind])[1](x)
    file = io.BytesIO()
    torch.save(model, file)
    assert x[3].numpy().tobytes() not in file.getvalue()


def test_a_sample_that_is_not_finite_counts_as_zero_in_both_arithmetics() -> None:
    x, y = (t.clone() for t in DATA.tensors)
    x[0] = math.inf
    for kwargs in ({}, GIVEN, BK):
        model = mlp()
        parts = private(model, TensorDataset(x, y), noise_multiplier=0.0, **kwargs)
        with_it, without = released(model, parts, given(parts[4], [0, 1, 2], []))
        assert torch.isfinite(with_it).all()
        assert float(with_it.norm()) > 0
        assert float(without.norm()) == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith(("flat", "per_layer", "bk"))])
def test_a_sample_that_overflows_in_one_layer_counts_in_no_layer(kind: str) -> None:
    """Oracle: the release of the same draw without that sample."""
    x, y = (t.clone() for t in DATA.tensors)
    x[0, 0] = 3e38

    def model_of_large_gradients() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model[0].weight[:, 0] = 0.0  # what passes forward is finite
            model[2].weight *= 100
        return model

    plain = model_of_large_gradients()
    y[0] = 1 - plain(x[:1]).argmax()
    cross_entropy(plain, x[:1], y[:1]).backward()
    assert [bool(p.grad.isfinite().all()) for p in plain.parameters()] == [False, True, True, True]
    sums = []
    for draw in ([0, 1, 2], [1, 2]):
        model = model_of_large_gradients()
        parts = private(model, TensorDataset(x, y), noise_multiplier=0.0, **KINDS[kind])
        sums += released(model, parts, given(parts[4], draw))
    assert float(sums[1].norm()) > 0
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forgotten", [False, True])
def test_counts_of_adaptive_clipping_serve_one_draw(forgotten: bool) -> None:
    """Oracle: the bound follows from the counts of each draw alone, whether or not zero_grad() is called."""
    model = mlp()
    arguments = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 1e6,
        "min_clipbound": 1e-6,
        "unclipped_num_std": 1e-6,
        "noise_multiplier": 1e-6,
    }
    _, wrapper, optimizer, _, loader = private(
        model, clipping="adaptive", poisson_sampling=False, max_grad_norm=1e3, **arguments
    )
    bounds = [1e3]
    for x, y in given(loader, list(range(8)), list(range(16))):
        if not forgotten:
            optimizer.zero_grad()
        # Nobody is clipped in the first draw, everybody in the second.
        (cross_entropy(wrapper, x, y) * (1.0 if len(bounds) == 1 else 1e12)).backward()
        optimizer.step()
        bounds.append(float(optimizer.max_grad_norm))
    assert bounds[1] / bounds[0] == pytest.approx(math.exp(-0.2 * (1.0 - 0.5)), rel=1e-3)
    assert bounds[2] / bounds[1] == pytest.approx(math.exp(-0.2 * (0.0 - 0.5)), rel=1e-3)


@pytest.mark.parametrize("kind", ["flat", "per_layer", "alc", "Opacus's flat", "Opacus's per_layer"])
def test_our_arithmetic_clips_unless_noise_is_to_be_repeated(kind: str) -> None:
    optimizer = private(mlp(), **KINDS[kind])[2]
    assert isinstance(optimizer, StockOptimizer if "Opacus" in kind else IndividualClippingOptimizer)


@pytest.mark.parametrize("kwargs", [{}, PER_LAYER], ids=["flat", "per_layer"])
@pytest.mark.parametrize("other", [{}, BK], ids=["hooks", "bk"])
def test_all_arithmetics_release_the_same_sums(kwargs: dict[str, Any], other: dict[str, Any]) -> None:
    sums = []
    for generator in (other, GIVEN):
        model = mlp()
        parts = private(model, noise_multiplier=0.0, **kwargs, **generator)
        sums.append(released(model, parts, given(parts[4], list(range(16))))[0])
    torch.testing.assert_close(*sums, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{}, GIVEN], ids=["ours", "Opacus's"])
def test_a_parameter_frozen_within_a_draw_and_thawed_later_brings_nothing_of_it_along(kwargs: Any) -> None:
    model = mlp()
    parts = private(model, noise_multiplier=0.0, **kwargs)
    _, wrapper, optimizer, _, loader = parts
    batches = given(loader, list(range(16)))
    with BatchMemoryManager(data_loader=batches, max_physical_batch_size=8, optimizer=optimizer) as chunks:
        arriving = iter(chunks)
        x, y = next(arriving)
        cross_entropy(wrapper, x, y).backward()
        optimizer.step()
        model[0].weight.requires_grad_(False)
        next(arriving)
    next(iter(given(loader, [])))  # the draw is given up
    model[0].weight.requires_grad_(True)
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())


def test_a_failing_make_private_leaves_model_and_optimizer_as_they_were() -> None:
    """A warning that is an error is the last thing that can fail; everything is set up by then."""
    model, maker = mlp(norm=True), engine()
    plain = optim.SGD(model.parameters(), lr=0.1)
    maker.dataset = object()  # another data set was accounted before
    types = [type(child) for child in model.modules()]
    with pytest.raises(UserWarning, match="another data set"):
        maker.make_private(
            module=model,
            optimizer=plain,
            data_loader=DataLoader(DATA, batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=C,
            batch_norm=PUBLIC,
        )
    assert [type(child) for child in model.modules()] == types
    for child in model.modules():
        assert not child._forward_hooks
        assert not child._forward_pre_hooks
        assert not child._backward_hooks
    assert not hasattr(model, "autograd_grad_sample_hooks")
    assert not plain._optimizer_step_pre_hooks
    assert not maker._runs
    plain.step()  # the torch optimizer is free
