"""How per-sample gradients are made if nobody says so: in one backward with BatchNorm, else as in Opacus."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from support import GivenDraws, engine, weights
from support.batch_norm import images, network, public
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from opacus_bc import ALC, PrivacyEngine, PrivateDataLoader
from opacus_bc.engine.request import Request
from opacus_bc.gradients.book_keeping.book import BookKeepingError
from opacus_bc.optimizers.book_keeping import BookKeepingOptimizer
from opacus_bc.optimizers.samples import IndividualClippingOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:batch_norm= changes nothing"),
]
Kwargs = dict[str, Any]


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 2))


def wrapped() -> nn.Module:
    """With a BatchNorm that Opacus's wrapper does not mind."""
    norm = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    return GradSampleModule(nn.Sequential(norm, plain()))


def arguments(model: nn.Module | None = None, **kwargs: Any) -> Kwargs:
    model = network() if model is None else model
    return {
        "module": model,
        "optimizer": optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(images(), batch_size=12),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        **kwargs,
    }


def request(model: nn.Module | None = None, **kwargs: Any) -> Request:
    return Request.of(arguments(model, **kwargs))


PARAMETERS = len(list(network().parameters()))
IN_ONE_BACKWARD: dict[str, Kwargs] = {
    "public statistics": {"batch_norm": public()},
    "frozen statistics": {"batch_norm": "frozen"},
    "the loader of ALC": {"alc": public()},
    "ALC by scaling": {"alc": ALC(public(), apply="scale")},
    "per layer": {"batch_norm": public(), "clipping": "per_layer", "max_grad_norm": [1.0] * PARAMETERS},
    "shuffled": {"batch_norm": public(), "poisson_sampling": False},
    "asked for": {
        "batch_norm": public(),
        "grad_sample_mode": "bk",
        "noise_generator": torch.Generator().manual_seed(1),
    },
}
BY_HOOKS: dict[str, Kwargs] = {
    "no BatchNorm": {"model": plain()},
    "no BatchNorm, though a policy": {"model": plain(), "batch_norm": public()},
    "no BatchNorm, ALC": {"model": plain(), "alc": public()},
    "Opacus bit for bit": {"batch_norm": public(), "noise_generator": torch.Generator().manual_seed(1)},
    "asked for": {"batch_norm": public(), "grad_sample_mode": "hooks"},
    "adaptive": {"batch_norm": public(), "clipping": "adaptive", "poisson_sampling": False},
    "unwrapped hooks": {"batch_norm": public(), "wrap_model": False},
    "samples in the second dimension": {"batch_norm": public(), "batch_first": False},
    "wrapped by the user": {"model": wrapped(), "batch_norm": public()},
    "compiled": {"model": torch.compile(network(), backend="eager"), "batch_norm": public()},
}
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.1,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 1.0,
}


@pytest.mark.parametrize("name", IN_ONE_BACKWARD)
def test_batch_norm_with_a_policy_is_trained_in_one_backward(name: str) -> None:
    assert request(**IN_ONE_BACKWARD[name]).mode == "bk"


@pytest.mark.parametrize("name", BY_HOOKS)
def test_what_is_promised_to_be_opacus_or_cannot_be_recorded_stays_with_hooks(name: str) -> None:
    extra = ADAPTIVE if name == "adaptive" else {}
    assert request(**BY_HOOKS[name], **extra).mode == "hooks"


def test_a_part_of_the_model_that_was_compiled_stays_with_hooks() -> None:
    model = network()
    model[0].compile(backend="eager")
    assert request(model, batch_norm=public()).mode == "hooks"


@pytest.mark.parametrize("mode", ["ghost", "ew", "functorch"])
def test_a_mode_that_is_given_is_kept(mode: str) -> None:
    assert request(plain(), grad_sample_mode=mode).mode == mode


def test_batch_clipping_takes_the_default_and_hooks_and_refuses_other_modes() -> None:
    for mode in (None, "hooks"):
        assert not request(clipping="batch", batch_norm="batch", grad_sample_mode=mode).book_keeping
    with pytest.raises(ValueError, match="clipping='batch' makes none"):
        request(clipping="batch", batch_norm="batch", grad_sample_mode="bk")


def test_both_entrances_have_the_same_default() -> None:
    default = inspect.signature(PrivacyEngine.make_private).parameters["grad_sample_mode"].default
    assert default is Request.__dataclass_fields__["grad_sample_mode"].default is None


class Training:
    def __init__(self, mode: str | None, model: nn.Module | None = None, **kwargs: Any) -> None:
        self.model, self.engine = network() if model is None else model, engine()
        self.wrapper, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5),
            data_loader=DataLoader(images(), batch_size=12),
            batch_norm=public(),
            grad_sample_mode=mode,
            **{"noise_multiplier": 0.5, "max_grad_norm": 0.5, **kwargs},
        )

    def train(self, batches: Any = None) -> Training:
        for x, y in self.loader if batches is None else batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.wrapper(x), y).backward()
            self.optimizer.step()
        return self

    def given(self, draws: list[list[int]]) -> PrivateDataLoader:
        source = GivenDraws(self.loader.plan, [[draw] for draw in draws])
        return PrivateDataLoader(self.loader, draws=source, ledger=self.loader.ledger, part=self.loader.part)

    def save(self, path: Path, *, exact: bool) -> None:
        self.engine.save_checkpoint(path=path, module=self.wrapper, optimizer=self.optimizer, exact=exact)

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(path=path, module=self.wrapper, optimizer=self.optimizer)


def test_the_users_own_module_comes_back_and_the_loop_is_the_usual_one() -> None:
    run = Training(None).train()
    assert run.wrapper is run.model
    assert isinstance(run.optimizer, BookKeepingOptimizer)
    assert len(run.engine.accountant) == 4


@pytest.mark.parametrize("modes", [("hooks", None), (None, "hooks")], ids=["hooks first", "bk first"])
def test_a_checkpoint_of_the_other_mode_goes_on_exactly(tmp_path: Path, modes: tuple[Any, Any]) -> None:
    """Oracle: one run in the first mode. Draws, noise and epsilon are its own, weights up to rounding."""
    straight, first = Training(modes[0]), Training(modes[0])
    straight.loader.draws.generator.bit_generator.state = first.loader.draws.generator.bit_generator.state
    for run in (straight, first):
        run.optimizer.noise.reseed(3)
    straight.train().train()
    first.train().save(tmp_path / "run.pt", exact=True)
    second = Training(modes[1])
    second.load(tmp_path / "run.pt")
    assert torch.equal(weights(second.model), weights(first.model))
    second.train()
    torch.testing.assert_close(weights(second.model), weights(straight.model), rtol=1e-4, atol=1e-5)
    assert list(second.engine.accountant.history) == list(straight.engine.accountant.history)
    kinds = [type(run.optimizer) for run in (first, second)]
    assert set(kinds) == {BookKeepingOptimizer, IndividualClippingOptimizer}


class Unwatched(nn.Module):
    """A layer whose product no torch function shows: hooks know it by its type's rule-free gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm2d(3), nn.Parameter(torch.ones(108))
        self.head = nn.Linear(108, 2)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = _Times.apply(self.norm(x).flatten(1), self.scale)
        return self.head(h)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


def test_a_model_that_one_backward_cannot_serve_is_told_of_hooks() -> None:
    run = Training(None, Unwatched())
    before = weights(run.model).clone()
    with pytest.raises(BookKeepingError, match="grad_sample_mode='hooks'"):
        run.train(run.given([[0, 1, 2]]))
    assert torch.equal(weights(run.model), before)
    assert len(run.engine.accountant) == 0


@pytest.mark.parametrize("how", ["around", "inside", "a part"])
def test_a_model_that_is_compiled_afterwards_is_told_of_hooks(how: str) -> None:
    torch._dynamo.reset()  # after many models of other tests it would leave this one as it is
    run = Training(None)
    if how == "around":
        run.wrapper = torch.compile(run.wrapper, backend="eager")
    else:
        (run.model if how == "inside" else run.model[0]).compile(backend="eager")
    with pytest.raises(BookKeepingError, match=r"torch\.compile.*grad_sample_mode='hooks'"):
        run.train(run.given([[0, 1, 2]]))


def started(model: nn.Module | None = None, **kwargs: Any) -> list[str]:
    """What make_private says."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine().make_private(**arguments(model, **kwargs))
    return [str(one.message) for one in said]


def test_hooks_left_over_from_an_opacus_script_are_said_to_cost_more() -> None:
    def costly(said: list[str]) -> bool:
        return any("in a fraction of the time and memory" in one for one in said)

    assert costly(started(batch_norm=public(), grad_sample_mode="hooks"))
    assert not costly(started(batch_norm=public()))
    assert not costly(started(plain(), grad_sample_mode="hooks"))  # 'bk' is not the default there
    seeded = torch.Generator().manual_seed(3)
    assert not costly(started(batch_norm=public(), grad_sample_mode="hooks", noise_generator=seeded))
    assert not costly(started(batch_norm=public(), clipping="batch"))


def test_a_generator_that_was_never_seeded_is_said_to_be_anybodys() -> None:
    def loader(generator: torch.Generator | None) -> DataLoader[Any]:
        return DataLoader(images(), batch_size=12, generator=generator)

    def constant(said: list[str]) -> list[str]:
        return [one.split(" was never seeded")[0] for one in said if "was never seeded" in one]

    drawn = torch.Generator()
    drawn.seed()
    for given, expected in (
        (None, []),
        (torch.Generator(), ["data_loader's generator"]),
        (drawn, []),
        (torch.Generator().manual_seed(3), []),
    ):
        for clipping in ("flat", "batch"):
            assert constant(started(plain(), data_loader=loader(given), clipping=clipping)) == expected
    assert constant(started(plain(), noise_generator=torch.Generator())) == ["noise_generator"]
