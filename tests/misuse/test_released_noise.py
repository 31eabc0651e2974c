"""The noise that is released, and not what is reported of it: scales within a draw, rates, resumes."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialGradClip
from support import engine, weights
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC, BatchMemoryManager

WIDE = 2000  # entries without a gradient of their own: what is released there is noise
C = 0.5
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Wide(nn.Module):
    """A layer whose inputs are zero, so that its gradient is, next to one that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.learns, self.idle = nn.Linear(3, 2), nn.Linear(WIDE, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.learns(x) + self.idle(x.new_zeros(len(x), WIDE))


def data(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 3, generator=generator), torch.arange(n) % 2)


def noise_of(model: Wide, before: Tensor, divisor: float) -> float:
    """The standard deviation of what a step released where the gradient is zero (learning rate 1)."""
    return float((before - model.idle.weight.detach()).std()) * divisor


BK = {"grad_sample_mode": "bk"}
HOOKS = {"grad_sample_mode": "hooks"}
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [C] * 2}
# The deviation of WIDE normals is within 5 standard errors of sigma but for 6 cases in ten million.
CLOSE = 5 * math.sqrt(0.5 / WIDE)
MODES: dict[str, dict[str, Any]] = {
    "batch": {"clipping": "batch"},
    "mini-sets": {"clipping": "batch", "mini_batch_size": 8},
    "flat": HOOKS,
    "per_layer": {**HOOKS, "clipping": "per_layer", "max_grad_norm": [C] * 3},
    "functorch": {"grad_sample_mode": "functorch"},
    "bk": BK,
    "bk, per_layer": {**BK, "clipping": "per_layer", "max_grad_norm": [C] * 3},
    "bk, alc": {**BK, "alc": ALC(DataLoader(data(16, 3), batch_size=8), layers=["*"])},
    "Opacus's flat": {"noise_generator": torch.Generator().manual_seed(4)},
    "alc": {**HOOKS, "alc": ALC(DataLoader(data(16, 3), batch_size=8), layers=["*"])},
    "batch, alc": {"clipping": "batch", "alc": ALC(DataLoader(data(32, 3), batch_size=16), layers=["*"])},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_draw_is_noised_by_the_bound_that_clipped_it_when_a_scheduler_moves_it_within(mode: str) -> None:
    """The scheduler's new bound is a tenth: noise of it would be ten times too small."""
    model = Wide()
    eng = engine()
    wrapper, optimizer, loader = eng.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data(32, 0), batch_size=16, generator=torch.Generator().manual_seed(1)),
        **{"noise_multiplier": 1.0, "max_grad_norm": C, **MODES[mode]},
    )
    scheduler = ExponentialGradClip(optimizer, gamma=0.1)
    divisor = float(optimizer.expected_batch_size)
    scales: list[float] = []
    deliveries = 0
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as chunks:
        for x, y in chunks:
            before = model.idle.weight.detach().clone()
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapper(x), y).backward()
            optimizer.step()
            deliveries += 1
            if deliveries == 1:
                assert not optimizer.weights_moved
                scheduler.step()
            if optimizer.weights_moved:
                scales.append(noise_of(model, before, divisor))
    assert len(scales) == 2
    bound = math.sqrt(3) * C if "per_layer" in mode else C
    sensitivity = 2 * bound if MODES[mode].get("clipping") == "batch" else bound
    assert abs(scales[0] / sensitivity - 1) < CLOSE
    assert abs(scales[1] / (0.1 * sensitivity) - 1) < CLOSE


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [
        HOOKS,
        BK,
        {"grad_sample_mode": "ghost"},
        PER_LAYER,
        {"alc": ALC(DataLoader(data(16, 3), batch_size=8))},
        {"clipping": "batch"},
        {"clipping": "batch", "mini_batch_size": 4},
    ],
    ids=["hooks", "bk", "ghost", "per_layer", "alc", "bc", "gbc"],
)
@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(2)])
def test_the_booked_rate_is_one_over_the_length_and_the_draws_have_it(
    kwargs: dict[str, Any], drop_last: bool, generator: Any
) -> None:
    """Batches of 8: with 47 samples a pass has 5 steps if the rest is dropped, and q is 1/5, not 8/47."""
    model, eng, size = nn.Linear(3, 2), engine(), 47 if drop_last else 41
    plain = DataLoader(data(size, 0), batch_size=8, drop_last=drop_last, generator=generator)
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": C, **kwargs}
    module, optimizer, *criterion, loader = eng.make_private(
        module=model, optimizer=optim.SGD(model.parameters(), lr=0.1), data_loader=plain, **arguments
    )
    loss = criterion[0] if criterion else nn.functional.cross_entropy
    for x, y in loader:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()
    length = 5 if drop_last else 6
    assert [entry[1:3] for entry in eng.accountant.history] == [(1 / length, length)]
    draws = [len(set(chain.from_iterable(draw))) for _ in range(60) for draw in loader.draws]
    assert len(draws) == 60 * length
    drawn, trials = sum(draws), 60 * length * size
    error = math.sqrt(trials * (1 / length) * (1 - 1 / length))
    assert abs(drawn - trials / length) < 5 * error
    assert abs(trials * 8 / size - trials / length) > 6 * error


@pytest.mark.parametrize("kwargs", [HOOKS, {"grad_sample_mode": "ghost"}, BK, {"clipping": "batch"}], ids=str)
def test_a_resumed_run_adds_other_noise_than_the_steps_that_were_made_from_the_same_seed(
    kwargs: dict[str, Any], tmp_path: Path
) -> None:
    """The script is started again with its seeds: noise that came back would make the steps equal.

    Both steps find torch's default generator in the same state.
    """

    def started() -> tuple[Any, ...]:
        torch.manual_seed(7)
        model = Wide()
        eng = engine()
        wrapper, optimizer, *criterion, loader = eng.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data(32, 0), batch_size=16),
            noise_multiplier=100.0,
            max_grad_norm=C,
            **kwargs,
        )
        return eng, model, wrapper, optimizer, (criterion or [nn.functional.cross_entropy])[0], loader

    def step(model: Any, wrapper: Any, optimizer: Any, criterion: Any, loader: Any) -> Tensor:
        before = weights(model)
        x, y = next(iter(loader))
        optimizer.zero_grad()
        criterion(wrapper(x), y).backward()
        torch.manual_seed(7)
        optimizer.step()
        return weights(model) - before

    eng, *first = started()
    made = step(*first)
    eng.save_checkpoint(path=tmp_path / "file", module=first[1], optimizer=first[2])
    other, *second = started()
    other.load_checkpoint(path=tmp_path / "file", module=second[1], optimizer=second[2])
    again = step(*second)
    cosine = float((made * again).sum() / (made.norm() * again.norm()))
    assert abs(cosine) < 6 / math.sqrt(len(made))  # of independent normals: 2 in a thousand million
    assert len(other.accountant) == 2
