"""Random architectures, settings and data: the invariants that hold for all of them.

Hypothesis draws a *case*: blocks of layers (convolutions, linear layers, BatchNorm, attention, shared and
frozen parameters), how they are clipped, drawn and normalised, the precision and the parameter groups. Every
test is boxed in time: examples after ``FUZZ_SECONDS`` (default 5) seconds of computing pass at once.
``FUZZ_SEED`` changes the examples, ``FUZZ_EXAMPLES`` their number; seed and box are printed, and hypothesis
prints how to repeat a failure.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support import GivenDraws, engine
from support.alc import KnownNoise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC, PrivateDataLoader, accounting
from opacus_bc.mechanism.blocks import Block

SECONDS = float(os.environ.get("FUZZ_SECONDS", "5"))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "20240"))
CHANNELS, SIZE, CLASSES = 2, 4, 3


def fuzz(test: Any) -> Any:
    """Hypothesis with a printed seed and without a deadline for single examples."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    configured = settings(
        max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=checks, database=None
    )
    return seed(SEED)(configured(test))


class Box:
    """Time for one test, counted from its first example."""

    def __init__(self) -> None:
        self.end: float | None = None

    def closed(self) -> bool:
        if self.end is None:
            print(f"FUZZ_SEED={SEED} FUZZ_SECONDS={SECONDS:g}")
            self.end = time.process_time() + SECONDS  # a loaded machine tests as much as an idle one
        return time.process_time() > self.end


# --- random models ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A block of self-attention over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        mixed = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return x + mixed.transpose(1, 2).reshape(x.shape)


class Tokens(nn.Module):
    """Self-attention by linear layers over the pixels, each with a scale of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x.flatten(2).transpose(1, 2))).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v) * self.scale
        return x + mixed.transpose(1, 2).reshape(x.shape)


class Residual(nn.Module):
    """Two uses of one convolution: shared parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(torch.tanh(self.conv(x)))


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "conv": lambda width: nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh()),
    "batch norm": lambda width: nn.BatchNorm2d(width),
    "batch norm without affine": lambda width: nn.BatchNorm2d(width, affine=False),
    "group norm": lambda width: nn.GroupNorm(1, width),
    "attention": Attention,
    "tokens": Tokens,
    "shared": Residual,
    "unused": lambda width: nn.Sequential(nn.Identity(), Unused(width)),
}


class Unused(nn.Module):
    """A parameter that the loss never sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Case:
    """One random setting."""

    blocks: tuple[str, ...]
    head: str
    frozen: int
    groups: int
    dtype: torch.dtype
    k: int
    s: int
    sampling: str
    policy: str
    alc: str | None
    layers: Any
    noise: str
    sigma: float
    bound: float
    seed: int

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        width = CHANNELS
        body = [BLOCKS[name](width) for name in self.blocks]
        pool: list[nn.Module] = [nn.Flatten(), nn.Linear(width * SIZE * SIZE, CLASSES)]
        if self.head == "pooled":
            pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
        model = nn.Sequential(*body, *pool).to(self.dtype)
        parameters = list(model.parameters())
        for p in parameters[: min(self.frozen, len(parameters) - 1)]:
            p.requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        parts = [parameters[i :: self.groups] for i in range(self.groups)]
        return torch.optim.SGD([{"params": part, "lr": lr} for part in parts if part], lr=lr)

    def data(self, n: int, shift: int = 0) -> TensorDataset:
        generator = torch.Generator().manual_seed(self.seed + shift)
        x = torch.randn(n, CHANNELS, SIZE, SIZE, generator=generator).to(self.dtype)
        return TensorDataset(x, torch.arange(n) % CLASSES)

    def private(
        self, data: TensorDataset, lr: float = 1.0, *, individual: str | None = None
    ) -> tuple[Any, nn.Module, Any, Any]:
        """Clips mini-sets, or samples in the mode ``individual``."""
        model, maker = self.model(), engine()
        public = DataLoader(self.data(8, shift=1), batch_size=4)
        extra: dict[str, Any] = {}
        if self.alc is not None:
            noise = self.noise if self.alc == "clip" else "proportional"
            extra["alc"] = ALC(public, apply=self.alc, layers=self.layers, noise=noise, max_batches=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the public data has")
            warnings.filterwarnings("ignore", message="batch_norm='private': with")  # tiny data, much noise
            warnings.filterwarnings("ignore", message=".*hold the statistics|batch_norm= changes nothing")
            _, optimizer, loader = maker.make_private(
                module=model,
                optimizer=self.optimizer(model, lr),
                data_loader=DataLoader(data, batch_size=self.k * self.s),
                noise_multiplier=self.sigma,
                max_grad_norm=self.bound,
                clipping="flat" if individual else "batch",
                mini_batch_size=None if individual else self.s,
                sampling="shuffle" if individual and self.sampling != "poisson" else self.sampling,
                batch_norm=public if self.policy == "public" else self.policy,
                grad_sample_mode=individual,
                **extra,
            )
        return maker, model, optimizer, loader


cases = st.builds(
    Case,
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=0, max_size=4).map(tuple),
    head=st.sampled_from(["flat", "pooled"]),
    frozen=st.integers(0, 4),
    groups=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    k=st.sampled_from([1, 2, 5]),
    s=st.sampled_from([2, 3, 6]),
    sampling=st.sampled_from(["poisson", "partition", "shuffle"]),
    policy=st.sampled_from(["public", "batch", "frozen", "private"]),
    alc=st.sampled_from([None, "clip", "scale"]),
    layers=st.sampled_from(["module", "parameter", 2]),
    noise=st.sampled_from(["proportional", "isotropic", "optimal"]),
    sigma=st.floats(0.1, 10.0),
    bound=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10**6),
)


def one_draw(case: Case, data: TensorDataset, draw: list[list[int]], noise: float) -> tuple[Any, ...]:
    """The release of one draw by block and by name, with ``noise`` times its std instead of noise."""
    maker, model, optimizer, loader = case.private(data)
    optimizer.noise = KnownNoise(noise)
    given_draws = PrivateDataLoader(loader, draws=GivenDraws(loader.plan, [draw]), ledger=loader.ledger)
    optimizer.original_optimizer.step = lambda *_: None  # keep the release in .grad
    blocks: list[Block] = optimizer.blocks()
    for x, y in given_draws:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    by_name = {name: p.grad.double() * case.k for name, p in model.named_parameters() if p.grad is not None}
    return maker, model, optimizer, blocks, by_name


def bins(case: Case, n: int) -> list[list[int]]:
    where = torch.randint(0, case.k, (n,), generator=torch.Generator().manual_seed(case.seed))
    return [torch.nonzero(where == j).flatten().tolist() for j in range(case.k)]


def vectors(blocks: list[Block], release: dict[str, Tensor]) -> list[Tensor]:
    """Every block's vector in the coordinates in which noise is added."""
    return [
        torch.cat([(m * release[name]).flatten() for name, m in zip(b.names, b.factors, strict=True)])
        for b in blocks
    ]


delta_box, noise_box, sigma_box, sample_box, stock_box, buffer_box, epsilon_box = (Box() for _ in range(7))


@fuzz
@given(case=cases, size=st.sampled_from([1e-3, -1.0, 1e4, -1e4, 1e30]))
def test_no_sample_moves_a_block_by_more_than_its_sensitivity(case: Case, size: float) -> None:
    if delta_box.closed():
        return
    n = 4 * case.k * case.s
    data = case.data(n)
    x, y = data.tensors
    other, label = x.clone(), y.clone()
    other[0] = (size * other[0].double()).clamp(-1e38, 1e38).to(case.dtype)  # the neighbour's sample
    label[0] = (y[0] + 1) % CLASSES
    draw, pair = bins(case, n - 1), (TensorDataset(x, y), TensorDataset(other, label))
    results = [one_draw(case, data, draw, 0.0) for data in pair]
    blocks = results[0][3]
    first, second = (vectors(blocks, result[4]) for result in results)
    alone = vectors(blocks, one_draw(case, pair[1], [list(range(case.s)), *([[]] * (case.k - 1))], 0.0)[4])
    # .grad has the parameters' precision: that is post-processing, but a comparison has to allow for it.
    rounding = 2 * case.k * torch.finfo(case.dtype).eps
    for block, one, two, single in zip(blocks, first, second, alone, strict=True):
        assert float((one - two).norm()) <= block.sensitivity * (1 + 1e-6) + block.clip_bound * rounding
        # A random neighbour seldom turns a mini-set around; a vector inside its ball covers all of them.
        assert float(single.norm()) <= block.clip_bound * (1 + 1e-6 + rounding)


@fuzz
@given(case=cases)
def test_noise_of_the_stated_size_is_on_every_trainable_entry(case: Case) -> None:
    if noise_box.closed():
        return
    n = 4 * case.k * case.s
    draw = bins(case, n)
    _, model, _, blocks, quiet = one_draw(case, case.data(n), draw, 0.0)
    loud = one_draw(case, case.data(n), draw, 1.0)[4]
    stds = {name: b.noise_std / m for b in blocks for name, m in zip(b.names, b.factors, strict=True)}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(loud) == set(stds) == trainable
    eps = 4 * torch.finfo(case.dtype).eps
    for name in trainable:
        added = loud[name] - quiet[name]
        tolerance = eps * (loud[name].abs() + quiet[name].abs() + stds[name])
        assert ((added - stds[name]).abs() <= tolerance).all()


@fuzz
@given(case=cases)
def test_sigma_eff_is_one_over_the_root_of_the_sum_of_squares_and_is_what_is_booked(case: Case) -> None:
    if sigma_box.closed():
        return
    n = 4 * case.k * case.s
    maker, _, optimizer, blocks, _ = one_draw(case, case.data(n), bins(case, n), 1.0)
    expected = 1 / math.sqrt(sum((b.sensitivity / b.noise_std) ** 2 for b in blocks))
    assert optimizer.effective_noise_multiplier == pytest.approx(expected, rel=1e-9)
    sigma, rate, steps, sampling = maker.accountant.history[0]
    assert (sigma, rate, steps, sampling) == (pytest.approx(expected, rel=1e-9), 0.25, 1, case.sampling)
    for block in blocks:
        assert block.sensitivity == pytest.approx(2 * block.clip_bound)


INDIVIDUAL = ("conv", "batch norm", "group norm", "shared")
ONE_BACKWARD = ("bk", "bk-ghost", "bk-rows")


@fuzz
@given(
    case=cases,
    blocks=st.lists(st.sampled_from(INDIVIDUAL), max_size=3).map(tuple),
    size=st.sampled_from([1e-3, 1.0, -1e4, 1e30]),
    mode=st.sampled_from(["hooks", *ONE_BACKWARD]),
    tokens=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_individual_clipping_in_blocks_keeps_its_sensitivity_and_noise(
    case: Case, blocks: tuple[str, ...], size: float, mode: str, tokens: bool
) -> None:
    if sample_box.closed():
        return
    dtype = torch.float32 if case.dtype == torch.bfloat16 else case.dtype
    blocks += ("tokens",) if tokens and mode in ONE_BACKWARD else ()
    case = replace(case, blocks=blocks, dtype=dtype, policy="public", alc=case.alc or "clip")
    x, y = case.data(6).tensors
    x[5] = (size * x[5].double()).clamp(-1e38, 1e38).to(dtype)
    releases: dict[tuple[int, float], dict[str, Tensor]] = {}
    for members, noise in ((6, 0.0), (5, 0.0), (6, 1.0)):
        maker, model, optimizer, loader = case.private(case.data(24), individual=mode)
        optimizer.noise = KnownNoise(noise)
        optimizer.original_optimizer.step = lambda *_: None
        given = GivenDraws(loader.plan, [[list(range(members))]])
        next(iter(PrivateDataLoader(loader, draws=given, ledger=loader.ledger, part=loader.part)))
        expected: list[Block] = optimizer.blocks()
        optimizer.zero_grad()
        nn.functional.cross_entropy(maker._runs[0].wrapper(x[:members]), y[:members]).backward()
        optimizer.step()
        size_ = optimizer.expected_batch_size
        releases[members, noise] = {
            name: p.grad.double() * size_ for name, p in model.named_parameters() if p.requires_grad
        }
    eps = 100 * torch.finfo(dtype).eps
    one, two, loud = (vectors(expected, releases[key]) for key in ((6, 0.0), (5, 0.0), (6, 1.0)))
    for block, with_, without, noisy in zip(expected, one, two, loud, strict=True):
        assert block.sensitivity == pytest.approx(block.clip_bound * (1 if case.sampling == "poisson" else 2))
        assert float((with_ - without).norm()) <= block.clip_bound * (1 + eps)
        torch.testing.assert_close(
            noisy - with_, torch.full_like(with_, block.noise_std), rtol=eps, atol=eps * block.clip_bound
        )
    mu = math.sqrt(sum((b.sensitivity / b.noise_std) ** 2 for b in expected))
    assert maker.accountant.history[0][0] == pytest.approx(1 / mu, rel=1e-9)


@pytest.mark.filterwarnings("ignore:batch_norm= changes nothing")
@fuzz
@given(
    case=cases,
    blocks=st.lists(st.sampled_from(("conv", "batch norm", "group norm")), max_size=3).map(tuple),
    size=st.sampled_from([1e-3, 1.0, -1e4, 1e30]),
    clipping=st.sampled_from(["flat", "per_layer"]),
    mode=st.sampled_from(["hooks", "ghost", *ONE_BACKWARD]),
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_no_sample_moves_a_sum_with_public_batch_norm_by_more_than_the_bound(
    case: Case, blocks: tuple[str, ...], size: float, clipping: str, mode: str
) -> None:
    if stock_box.closed():
        return
    clipping = "flat" if mode == "ghost" else clipping
    dtype = torch.float32 if case.dtype == torch.bfloat16 else case.dtype
    case = replace(case, blocks=blocks, dtype=dtype, frozen=0)
    x, y = case.data(6).tensors
    x[5] = (size * x[5].double()).clamp(-1e15, 1e15).to(dtype)
    sums = []
    for members in (6, 5):
        model, maker = case.model(), engine()
        count = len([p for p in model.parameters() if p.requires_grad])
        bounds = [case.bound / math.sqrt(count)] * count
        wrapper, optimizer, *criterion, loader = maker.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(case.data(24), batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=bounds if clipping == "per_layer" else case.bound,
            clipping=clipping,
            grad_sample_mode=mode,
            batch_norm=DataLoader(case.data(8, shift=1), batch_size=4),
        )
        optimizer.noise_multiplier = 0.0  # what is left is the clipped sum
        optimizer.original_optimizer.step = lambda *_: None
        given = GivenDraws(loader.plan, [[list(range(members))]])
        next(iter(PrivateDataLoader(loader, draws=given, ledger=loader.ledger, part=loader.part)))
        loss = criterion[0] if criterion else nn.functional.cross_entropy
        optimizer.zero_grad()
        loss(wrapper(x[:members]), y[:members]).backward()
        optimizer.step()
        grads = [p.grad.double().flatten() * 6 for p in model.parameters() if p.requires_grad]
        sums.append(torch.cat(grads))
    assert float((sums[0] - sums[1]).norm()) <= case.bound * (1 + 1000 * torch.finfo(dtype).eps)


RUNNING = ("running_mean", "running_var", "num_batches_tracked")


@fuzz
@given(case=cases)
def test_buffers_depend_on_no_private_sample_and_the_state_dict_keeps_its_form(case: Case) -> None:
    if buffer_box.closed():
        return
    plain = {
        name: (value.shape, value.dtype)
        for name, value in case.model().state_dict().items()
        if case.policy != "batch" or not name.endswith(RUNNING)  # that policy keeps no running statistics
    }
    n = 4 * case.k * case.s
    released = []
    for shift in (0, 7):  # entirely different private data
        maker, model, optimizer, loader = case.private(case.data(n, shift), lr=0.0)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if case.policy == "private" and any("running_mean" in key for key in plain):
            maker.recalibrate_batch_norm(noise_multiplier=1.0)
        final = maker.finalize(model)
        state = final.state_dict()
        assert {name: (value.shape, value.dtype) for name, value in state.items()} == plain
        own = dict(final.named_parameters())
        released.append({name: value for name, value in state.items() if name not in own})
    if case.policy != "private":  # at a learning rate of 0 public statistics, too, are of the same weights
        assert all(torch.equal(released[0][name], released[1][name]) for name in released[0])


@fuzz
@given(
    sigma=st.floats(0.3, 20),
    q=st.floats(1e-3, 1.0),
    steps=st.integers(1, 5000),
    layers=st.integers(1, 60),
    delta=st.sampled_from([1e-3, 1e-5, 1e-9]),
    sampling=st.sampled_from(["poisson", "partition", "shuffle"]),
    factor=st.floats(1.05, 3.0),
)
def test_epsilon_grows_with_steps_rate_and_layers_and_falls_with_noise(
    sigma: float, q: float, steps: int, layers: int, delta: float, sampling: Any, factor: float
) -> None:
    if epsilon_box.closed():
        return

    def epsilon(**change: Any) -> float:
        run = {"noise_multiplier": sigma, "sample_rate": q, "steps": steps, "layers": layers}
        return accounting.epsilon(delta=delta, sampling=sampling, **(run | change))

    base = epsilon()
    slack = 1e-3 * base + 1e-9  # upper bounds carry up to this much numerical allowance
    more = [epsilon(steps=math.ceil(steps * factor)), epsilon(sample_rate=min(1.0, q * factor))]
    assert all(value >= base - slack for value in more)
    layered, noised = epsilon(layers=math.ceil(layers * factor)), epsilon(noise_multiplier=sigma * factor)
    assert layered >= base - slack
    assert noised <= base + slack
    if base > 0.01 and math.isfinite(base):  # and each of them counts
        assert noised < base < layered
        if sampling != "shuffle":  # there, only whole passes do
            assert more[0] > base
            assert more[1] > base or q > 0.95
