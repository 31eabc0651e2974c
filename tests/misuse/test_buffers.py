"""Whatever a private forward writes into the model is found before the model is released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import blobs, engine
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_bc.batch_norm.buffers import MovingBufferError

DATA = blobs(32)
every = pytest.mark.parametrize("mode", ["batch", "flat", "bk"])


class Writer(nn.Module):
    """Passes its input on, and writes something down in training forwards once it is ``active``."""

    active = False

    def __init__(self, write: Callable[[Writer, Tensor], None], prepare: Any = None) -> None:
        super().__init__()
        self.write = write
        if prepare is not None:
            prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.active:
            with torch.no_grad():
                self.write(self, x)
        return x


def registered(layer: Writer, x: Tensor) -> None:
    layer.register_buffer("late", x.mean(0))


def assigned(layer: Writer, x: Tensor) -> None:
    layer.empty = x.mean(0)


def counted(layer: Writer, x: Tensor) -> None:
    layer.positive += bool(x[0, 0] > 0)


def new_parameter(layer: Writer, x: Tensor) -> None:
    layer.late = nn.Parameter(x.mean(0), requires_grad=False)


def frozen_moved(layer: Writer, x: Tensor) -> None:
    layer.frozen.data.copy_(x.mean(0))


def swapped(layer: Writer, x: Tensor) -> None:
    """Keeps the sum and the norm of the parameter."""
    layer.frozen.data = layer.frozen.data.roll(1)


WRITERS: dict[str, tuple[Any, Any, str]] = {
    "registered inside a forward": (registered, None, "'late' of 0 .* was not there"),
    "None at make_private": (
        assigned,
        lambda layer: layer.register_buffer("empty", None),
        "'empty' of 0 .* is not what it was",
    ),
    "a count of something private": (
        counted,
        lambda layer: layer.register_buffer("positive", torch.tensor(0)),
        "'positive' of 0 .* is not what it was",
    ),
    "a parameter registered inside a forward": (new_parameter, None, r"parameter '0\.late' was not there"),
    "a frozen parameter": (
        frozen_moved,
        lambda layer: layer.register_parameter("frozen", nn.Parameter(torch.ones(4), requires_grad=False)),
        r"parameter '0\.frozen' was never trained",
    ),
    "a frozen parameter, permuted": (
        swapped,
        lambda layer: layer.register_parameter(
            "frozen", nn.Parameter(torch.arange(5.0), requires_grad=False)
        ),
        r"parameter '0\.frozen' was never trained",
    ),
}


def trained(model: nn.Module, mode: str, epochs: int = 4, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Engine, wrapper and private optimizer after ``epochs`` passes of two steps, the last two active."""
    eng = engine()
    wrapper, optimizer, loader = eng.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="flat" if mode == "bk" else mode,
        grad_sample_mode="bk" if mode == "bk" else "hooks",
        **kwargs,
    )
    train(wrapper, optimizer, loader, max(0, epochs - 2))
    for child in model.modules():
        if hasattr(child, "active"):
            child.active = True
    train(wrapper, optimizer, loader, min(2, epochs))
    return eng, wrapper, optimizer


def train(wrapper: nn.Module, optimizer: Any, loader: Any, epochs: int) -> None:
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapper(x), y).backward()
            optimizer.step()


@every
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_late_forward_writes_is_neither_released_nor_saved(
    name: str, mode: str, tmp_path: Path
) -> None:
    write, prepare, message = WRITERS[name]
    model = nn.Sequential(Writer(write, prepare), nn.Linear(4, 2))
    eng, wrapper, optimizer = trained(model, mode)
    with pytest.raises(MovingBufferError, match=message):
        eng.save_checkpoint(path=tmp_path / "file", module=wrapper, optimizer=optimizer)
    assert not list(tmp_path.iterdir())
    with pytest.raises(MovingBufferError, match=message):
        eng.finalize(wrapper)


@every
def test_a_buffer_registered_by_an_early_forward_is_found_at_once(mode: str) -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("constant", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("late", x.detach().mean(0))
            return x

    with pytest.raises(MovingBufferError, match="a training forward moved buffer 'late'"):
        trained(nn.Sequential(Early(), nn.Linear(4, 2)), mode)


POLICIES: dict[str, dict[str, Any]] = {
    "BC public": {"mode": "batch", "batch_norm": DataLoader(blobs(16, seed=3), batch_size=8)},
    "BC batch": {"mode": "batch", "batch_norm": "batch"},
    "BC frozen": {"mode": "batch", "batch_norm": "frozen"},
    "BC private": {"mode": "batch", "batch_norm": "private"},
    "IC public": {"mode": "flat", "batch_norm": DataLoader(blobs(16, seed=3), batch_size=8)},
    "IC frozen": {"mode": "flat", "batch_norm": "frozen"},
    "bk public": {"mode": "bk", "batch_norm": DataLoader(blobs(16, seed=3), batch_size=8)},
    "bk frozen": {"mode": "bk", "batch_norm": "frozen"},
}


class Hanging(nn.Module):
    """Writes into its BatchNorm layer from outside, once it is ``active``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.out, self.name = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2), name
        self.active = False
        if name == "extra":
            self.norm.register_buffer("extra", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.active:
            held = getattr(self.norm, self.name)
            if held is None:
                setattr(self.norm, self.name, x.detach().sum(0))
            else:
                held += int(x[:, 0].abs().sum() * 100)
        out: Tensor = self.out(self.norm(x))
        return out


@pytest.mark.filterwarnings("ignore:batch_norm='private'", "ignore:batch_norm='frozen'")
@pytest.mark.parametrize("name", ["extra", "running_mean", "num_batches_tracked"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_hangs_on_a_batch_norm_layer_is_released_overwritten_or_refused(policy: str, name: str) -> None:
    model = Hanging(name)
    eng, wrapper, _ = trained(model, **POLICIES[policy])
    overwritten = {"BC public": ["running_mean", "num_batches_tracked"], "BC private": ["running_mean"]}
    overwritten["IC public"] = overwritten["bk public"] = overwritten["BC public"]
    if name in overwritten.get(policy, []):
        eng.finalize(wrapper)
        held = getattr(model.norm, name)
        assert torch.isfinite(held).all()
        assert float(held.abs().max()) < 100  # what the forward wrote is far more
        return
    with pytest.raises(MovingBufferError, match=name):
        eng.finalize(wrapper)


@every
def test_a_buffer_that_hangs_on_a_batch_norm_layer_is_watched_from_the_first_forward(mode: str) -> None:
    with pytest.raises(MovingBufferError, match="a training forward moved buffer 'extra'"):
        trained(Hanging("extra"), mode, epochs=1, batch_norm=DataLoader(blobs(16, seed=3), batch_size=8))


class Counter(nn.Module):
    """Says no more than how many steps were made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return x


@every
def test_a_counter_of_steps_may_move_also_over_a_resume(mode: str, tmp_path: Path) -> None:
    model = nn.Sequential(Counter(), nn.Linear(4, 2))
    eng, wrapper, optimizer = trained(model, mode)
    eng.save_checkpoint(path=tmp_path / "file", module=wrapper, optimizer=optimizer)
    again = nn.Sequential(Counter(), nn.Linear(4, 2))
    other, wrapper, optimizer = trained(again, mode, epochs=0)
    other.load_checkpoint(path=tmp_path / "file", module=wrapper, optimizer=optimizer)
    train(wrapper, optimizer, other._runs[0].loader, 1)
    assert int(other.finalize(wrapper)[0].steps) == 3 + 8 + 2
    assert int(eng.finalize(model)[0].steps) == 3 + 8


def test_a_layer_that_is_thawed_and_trained_is_released() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    eng, wrapper, optimizer = trained(model, "batch", epochs=1)
    model[0].requires_grad_(True)
    train(wrapper, optimizer, eng._runs[0].loader, 1)
    model[0].requires_grad_(False)
    assert not torch.equal(eng.finalize(wrapper)[0].weight, before)
