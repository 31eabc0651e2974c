"""What Opacus refuses with a ValueError is refused with one here too, so that handlers keep working."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import opacus
import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from support import blobs, engine, mlp, weights
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opacus_bc.draws.ledger import NoFreshBatchError

DATA = blobs(24)
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}
Maker = Any


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples without places."""

    def __iter__(self) -> Any:
        return iter(DATA)

    def __len__(self) -> int:
        return len(DATA)


def private(maker: Maker, *, with_epsilon: bool = False, **change: Any) -> Any:
    """What make_private returns for a small classifier, or what it raises."""
    model = change.pop("module", None) or mlp()
    budget = (
        {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1}
        if with_epsilon
        else {"noise_multiplier": 1.0}
    )
    arguments = {
        "module": model,
        "optimizer": optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(DATA, batch_size=8),
        "max_grad_norm": 1.0,
        **budget,
        **change,
    }
    return (maker.make_private_with_epsilon if with_epsilon else maker.make_private)(**arguments)


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()


def two_backwards(maker: Maker) -> None:
    model, optimizer, loader = private(maker)
    x, y = next(batch for batch in loader if len(batch[0]))
    backward(model, x, y)
    backward(model, x, y)
    optimizer.step()


class Unused(nn.Module):
    """A classifier with a layer that no forward reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def steps(maker: Maker, number: int = 1, **change: Any) -> None:
    """So many steps on one batch, with one backward before the first."""
    model, optimizer, loader = private(maker, **change)
    backward(model, *next(batch for batch in loader if len(batch[0])))
    for _ in range(number):
        optimizer.step()


def private_twice(maker: Maker) -> None:
    model = mlp()
    private(maker, module=model)
    private(maker, module=model)


def _wrapped(**how: Any) -> Callable[[Maker], Any]:
    return lambda maker: private(maker, module=GradSampleModule(mlp(), **how))


def _eval(maker: Maker) -> Any:
    return private(maker, module=mlp().eval())


def _state(state: Any) -> Callable[[Maker], Any]:
    return lambda maker: maker.accountant.load_state_dict(state)


CASES: dict[str, Callable[[Maker], Any]] = {
    "a clipping that nobody knows": lambda maker: private(maker, clipping="global"),
    "a grad_sample_mode that nobody knows": lambda maker: private(maker, grad_sample_mode="magic"),
    "a loss_reduction that nobody knows": lambda maker: private(maker, loss_reduction="max"),
    "ghost clipping layer by layer": lambda maker: private(
        maker, clipping="per_layer", grad_sample_mode="ghost", max_grad_norm=[1.0] * 4
    ),
    "ghost clipping with adaptive bounds": lambda maker: private(maker, grad_sample_mode="ghost", **ADAPTIVE),
    "adaptive bounds that cross": lambda maker: private(
        maker, **{**ADAPTIVE, "min_clipbound": 2.0, "max_clipbound": 1.0}
    ),
    "no noise left for the sum of adaptive clipping": lambda maker: private(
        maker, **{**ADAPTIVE, "unclipped_num_std": 0.5}
    ),
    "an optimizer of other parameters": lambda maker: private(
        maker, optimizer=optim.SGD(mlp().parameters(), lr=0.1)
    ),
    "a stream of data": lambda maker: private(maker, data_loader=DataLoader(Stream(), batch_size=8)),
    "a wrapped module with another batch_first": _wrapped(batch_first=False),
    "a wrapped module with another loss_reduction": _wrapped(loss_reduction="sum"),
    "a wrapped module for another grad_sample_mode": lambda maker: private(
        maker, module=GradSampleModule(mlp()), grad_sample_mode="ew"
    ),
    "a module with BatchNorm": lambda maker: private(maker, module=mlp(norm=True)),
    "a module in evaluation mode": _eval,
    "a budget that no noise keeps": lambda maker: private(maker, with_epsilon=True, target_epsilon=1e-9),
    "a module that is private already": private_twice,
    "two backwards before a step": two_backwards,
    "two steps on one batch": lambda maker: steps(maker, 2),
    "a layer that no backward reached": lambda maker: steps(maker, module=Unused()),
    "a step without a backward": lambda maker: private(maker)[1].step(),
    "an empty state of the accountant": _state({}),
    "no state of the accountant": _state(None),
    "a state without a history": _state({"mechanism": "rdp"}),
    "a state without a mechanism": _state({"history": []}),
    "a state of another accountant": _state({"history": [], "mechanism": "prv"}),
}


def stock() -> opacus.PrivacyEngine:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        return opacus.PrivacyEngine(accountant="rdp")


class Seeded:
    """Our engine with a noise generator, and so in Opacus's arithmetic."""

    def __init__(self, **kwargs: Any) -> None:
        self.engine = engine(**kwargs)
        self.accountant = self.engine.accountant

    def make_private(self, **arguments: Any) -> Any:
        return self.engine.make_private(noise_generator=torch.Generator().manual_seed(1), **arguments)

    def make_private_with_epsilon(self, **arguments: Any) -> Any:
        return self.engine.make_private_with_epsilon(
            noise_generator=torch.Generator().manual_seed(1), **arguments
        )


@pytest.mark.filterwarnings("ignore:Opacus's clipping='adaptive'")
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
@pytest.mark.parametrize("case", CASES)
def test_what_opacus_raises_as_a_value_error_is_one_here(case: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - Opacus's words are Opacus's business
        CASES[case](stock())
    for ours in (engine, Seeded):
        with pytest.raises(ValueError):  # noqa: PT011
            CASES[case](ours(accountant="rdp"))


@pytest.mark.parametrize("clipping", ["flat", "batch"])
def test_another_noise_is_a_value_error_with_the_gdp_accountant_and_nothing_moves(clipping: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        makers = (opacus.PrivacyEngine(accountant="gdp"), engine(accountant="gdp"))
        for maker in makers[clipping == "batch" :]:
            model = mlp()
            wrapper, optimizer, loader = private(maker, module=model, clipping=clipping)
            batches = (batch for _ in range(9) for batch in loader if len(batch[0]))
            for number in range(2):
                optimizer.zero_grad()
                backward(wrapper, *next(batches))
                before = weights(model)
                if number == 0:
                    optimizer.step()
                    optimizer.noise_multiplier = 2.0
                else:
                    with pytest.raises(ValueError, match="constant"):
                        optimizer.step()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("make", [opacus.PrivacyEngine, engine])
def test_an_accountant_that_nobody_knows_is_a_value_error(make: Callable[..., Any]) -> None:
    with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match="nonsense"):
        make(accountant="nonsense")


def test_a_noise_generator_in_secure_mode_is_a_value_error() -> None:
    """Opacus's secure mode needs a package that no longer exists; its message is the same."""
    with pytest.raises(ValueError, match="noise_generator"):
        private(engine(secure_mode=True), noise_generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheduler", [ExponentialGradClip, ExponentialNoise])
def test_opacus_schedulers_refuse_a_plain_optimizer_and_take_ours(scheduler: Any) -> None:
    with pytest.raises(ValueError, match="DPOptimizer"):
        scheduler(optim.SGD(mlp().parameters(), lr=0.1), gamma=0.9)
    _, optimizer, _ = private(engine(), clipping="batch")
    assert isinstance(optimizer, DPOptimizer)
    scheduler(optimizer, gamma=0.9)


@pytest.mark.parametrize("clipping", ["flat", "batch"])
def test_a_step_without_a_fresh_batch_is_a_value_error_and_a_runtime_error(clipping: str) -> None:
    """The first is Opacus's for missing gradients, the second what it is."""
    _, optimizer, _ = private(engine(), clipping=clipping)
    for kind in (NoFreshBatchError, RuntimeError, ValueError):
        with pytest.raises(kind):
            optimizer.step()


@pytest.mark.parametrize(
    "arguments", [{}, {"grad_sample_mode": "bk"}, {"grad_sample_mode": "hooks"}, {"clipping": "batch"}]
)
def test_an_optimizer_over_a_head_that_was_replaced_is_a_value_error(arguments: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model(torch.randn(8, 3))  # BatchNorm has statistics that can be frozen
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(4, 3)
    data = TensorDataset(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match="parameters"):
        engine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            batch_norm="frozen",
            **arguments,
        )
