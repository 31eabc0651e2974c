"""What forwards move without reading data must not count the deliveries of a draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import GivenDraws, Recorder, engine
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_style
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PrivateDataLoader

WIDTH, USERS = 6, 20


class Warming(nn.Module):
    """Multiplies by a factor that grows with a counter of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.linear(x) * (1 + 0.01 * self.calls)


def linear() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():  # singular values so close that the power iteration is still under way
        layer.weight.copy_(torch.diag(torch.linspace(1.02, 0.92, WIDTH)) * 3)
    torch.manual_seed(3)
    return layer


KINDS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "old spectral norm": lambda: old_style(linear()),
    "counter": Warming,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def network(kind: str) -> nn.Module:
    model = nn.Sequential(KINDS[kind](), nn.Linear(WIDTH, 1, bias=False))
    with torch.no_grad():
        model[1].weight.fill_(1.0)
        if kind == "counter":
            model[0].linear.weight.fill_(0.5)
    return model


class Run:
    """Users of two equal samples each; user u's target lies between the outputs of forwards u and u + 1."""

    def __init__(self, kind: str, *, lr: float = 1.0) -> None:
        torch.manual_seed(0)
        trial = network(kind)
        outputs = torch.tensor([float(trial(torch.ones(1, WIDTH)).detach()) for _ in range(USERS + 1)])
        targets = (outputs[:-1] + outputs[1:]) / 2
        torch.manual_seed(0)
        self.model, self.engine = network(kind), engine()
        data = TensorDataset(torch.ones(2 * USERS, WIDTH), targets.repeat_interleave(2)[:, None])
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optim.SGD(self.model.parameters(), lr=lr),
            data_loader=DataLoader(data, batch_size=5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            unit=[i // 2 for i in range(2 * USERS)],
            mini_batch_size=2,
            loss_reduction="sum",
        )
        self.optimizer.noise = Recorder()

    def train(self, *draws: list[int]) -> Tensor:
        """What the last of these draws of users releases, but for the noise."""
        source = GivenDraws(self.loader.plan, [[[2 * u, 2 * u + 1] for u in users] for users in draws])
        loader = PrivateDataLoader(
            self.loader, draws=source, ledger=self.loader.ledger, part=self.loader.part
        )
        for x, y in loader:
            self.optimizer.zero_grad()
            (1e8 * (self.model(x) - y).square().sum()).backward()
            self.optimizer.step()
        return self.optimizer.noise.steps(len(self.engine.accountant))[-1]

    def buffers(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.named_buffers()}


@every_kind
def test_adding_a_user_in_front_moves_no_other_users_vector(kind: str) -> None:
    """Each of them has its target where one forward more turns its gradient around: 2 C for every user."""
    others = list(range(USERS - 1))
    without, with_one = Run(kind).train(others), Run(kind).train([USERS - 1, *others])
    assert float((with_one - without).norm()) <= 1.0


@every_kind
def test_what_ships_does_not_tell_how_many_mini_sets_there_were(kind: str) -> None:
    runs = Run(kind, lr=0.0), Run(kind, lr=0.0)
    runs[0].train([0], [1])
    runs[1].train([0, 1, 2, 3], [4, 5, 6])
    few, many = (run.buffers() for run in runs)
    for name, value in few.items():
        assert torch.equal(value, many[name]), name
    for run in runs:
        run.engine.finalize(run.model)
        for name, value in run.buffers().items():
            assert torch.equal(value, few[name]), name


@every_kind
def test_a_step_counts_as_one_forward(kind: str) -> None:
    run, plain = Run(kind, lr=0.0), network(kind)
    plain.load_state_dict(run.model.state_dict())
    run.train(*[[0, 1, 2]] * 3)
    for _ in range(3):
        plain(torch.ones(1, WIDTH))
    for name, value in plain.named_buffers():
        assert torch.allclose(run.buffers()[name], value, atol=1e-6), name


@every_kind
def test_a_resume_goes_on_from_the_saved_values(kind: str, tmp_path: Path) -> None:
    run, again = Run(kind), Run(kind)
    run.train([0, 1], [2])
    run.engine.save_checkpoint(path=tmp_path / "file", module=run.model, optimizer=run.optimizer)
    again.engine.load_checkpoint(path=tmp_path / "file", module=again.model, optimizer=again.optimizer)
    kept = run.buffers()
    assert all(torch.equal(value, kept[name]) for name, value in again.buffers().items())
    again.loader.ledger.resume_after = 0
    draws: Any = ([3, 4], [5])
    run.train(*draws)
    again.train(*draws)
    for name, value in run.buffers().items():
        assert torch.allclose(value, again.buffers()[name]), name


def test_a_forward_without_a_step_leaves_nothing_behind() -> None:
    run = Run("spectral norm")
    run.train([0, 1])
    before = run.buffers()
    run.model(torch.ones(2, WIDTH))
    run.engine.finalize(run.model)
    assert all(torch.equal(value, before[name]) for name, value in run.buffers().items())
