"""``grad_sample_mode="bk"`` through make_private and real loaders: the weights and epsilons of hooks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import GivenDraws, engine, weights
from support.batch_norm import images, network, public
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC, BatchMemoryManager, PrivateDataLoader
from opacus_bc._opacus import StockBatchMemoryManager
from opacus_bc.gradients.book_keeping.products import Rows
from opacus_bc.optimizers.book_keeping import BookKeepingOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on one core
]
PARAMETERS = 10
DRAWS = [[0, 3, 7, 9, 12, 30], [], [5], list(range(10, 28))]
Kwargs = dict[str, Any]


class Training:
    """A small network with BatchNorm made private without noise, and steps over given draws."""

    def __init__(self, mode: str, model: nn.Module | None = None, **kwargs: Any) -> None:
        self.model = network() if model is None else model
        self.engine = engine(secure_mode=kwargs.pop("secure", False))
        if kwargs.pop("pretrained", False):
            for layer in (self.model[1], self.model[4]):
                nn.init.constant_(layer.running_mean, 0.3)
                nn.init.constant_(layer.running_var, 2.0)
        self.dataset = kwargs.pop("dataset", images())
        options = kwargs.pop("loader", {})
        trained = kwargs.pop("trained", lambda m: m.parameters())(self.model)
        given = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "batch_norm": public(), **kwargs}
        self.wrapper, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optim.SGD(trained, lr=0.2, momentum=0.5),
            data_loader=DataLoader(self.dataset, batch_size=12, **options),
            grad_sample_mode=mode,
            **given,
        )
        self.reduction = given.get("loss_reduction", "mean")

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.wrapper(x), y, reduction=self.reduction).backward()
        self.optimizer.step()

    def train(self, batches: Any) -> Training:
        for x, y in batches:
            self.step(x, y)
        return self

    def given(self, draws: list[list[int]] | None = None) -> PrivateDataLoader:
        draws = DRAWS if draws is None else draws
        source = GivenDraws(self.loader.plan, [[draw] for draw in draws])
        return PrivateDataLoader(self.loader, draws=source, ledger=self.loader.ledger, part=self.loader.part)


def close(one: nn.Module, two: nn.Module, tolerance: float = 1e-5) -> None:
    """How far both have moved is the same."""
    start, found, expected = (
        nn.utils.parameters_to_vector(m.parameters()).detach() for m in (network(), one, two)
    )
    found, expected = found - start, expected - start
    assert float(expected.norm()) > 0.01
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


def alc(**kwargs: Any) -> Kwargs:
    return {"alc": ALC(public(), max_batches=8, **kwargs)}


SETTINGS: dict[str, Kwargs] = {
    "flat": {},
    "loose": {"max_grad_norm": 100.0},
    "per_layer": {"clipping": "per_layer", "max_grad_norm": [0.1 * (i + 1) for i in range(PARAMETERS)]},
    "alc": alc(),
    "alc, scaling": alc(apply="scale"),
    "alc, by parameter": alc(layers="parameter"),
    "alc, two groups": alc(layers=2, rule="norm"),
    "alc, every draw": alc(refresh=1),
    "sum": {"loss_reduction": "sum"},
    "frozen statistics": {"batch_norm": "frozen", "pretrained": True},
    "statistics every third step": {"batch_norm_refresh": 3},
    "the head alone": {"trained": lambda m: m[7].parameters()},
    "norms alone": {"trained": lambda m: [*m[1].parameters(), *m[4].parameters()]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_those_of_hooks_over_poisson_draws_of_any_size(name: str) -> None:
    """An empty draw and a draw of one sample are among them."""
    ours, hooks = (Training(mode, **SETTINGS[name]) for mode in ("bk", "hooks"))
    assert isinstance(ours.optimizer, BookKeepingOptimizer)
    ours.train(ours.given())
    hooks.train(hooks.given())
    close(ours.model, hooks.model)
    assert list(ours.engine.accountant.history) == list(hooks.engine.accountant.history)
    assert ours.engine.accountant.history[-1][2] == len(DRAWS)


def frozen_layer() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


def test_frozen_layers_stay_and_the_rest_is_that_of_hooks() -> None:
    ours, hooks = (Training(mode, frozen_layer()) for mode in ("bk", "hooks"))
    ours.train(ours.given())
    hooks.train(hooks.given())
    for (name, p), q in zip(ours.model.named_parameters(), hooks.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)
    assert torch.equal(ours.model[0].weight, network()[0].weight)


def test_converged_entries_are_left_out_as_with_hooks() -> None:
    """Half of the first layer's entries are frozen by hand, and count in no norm."""
    found = []
    for mode in ("bk", "hooks"):
        run = Training(mode, **alc(refresh="once"))
        name = "0.weight"
        mask = torch.zeros_like(dict(run.model.named_parameters())[name], dtype=torch.bool)
        mask[:2] = True
        run.optimizer.adaptive.frozen[name] = mask
        before = run.model[0].weight.detach().clone()
        run.train(run.given())
        assert torch.equal(run.model[0].weight[:2], before[:2])
        assert not torch.equal(run.model[0].weight[2:], before[2:])
        found.append(run.model)
    close(*found)


LOADERS: dict[str, Kwargs] = {
    "in order": {},
    "two workers": {"loader": {"num_workers": 2}},
    "the last batch is smaller": {"dataset": images(40)},
}


@pytest.mark.parametrize("name", LOADERS)
def test_weights_are_those_of_hooks_over_a_users_own_order(name: str) -> None:
    kwargs = {"poisson_sampling": False, **LOADERS[name]}
    ours, hooks = (Training(mode, **kwargs) for mode in ("bk", "hooks"))
    ours.train(ours.loader)
    hooks.train(hooks.loader)
    close(ours.model, hooks.model)


@pytest.mark.parametrize("manager", [BatchMemoryManager, StockBatchMemoryManager])
@pytest.mark.parametrize("name", ["flat", "per_layer", "alc, scaling", "sum"])
def test_chunks_of_a_draw_are_clipped_and_noised_as_the_whole(name: str, manager: Any) -> None:
    whole, chunked = (Training("bk", **SETTINGS[name]) for _ in range(2))
    whole.train(whole.given())
    with manager(
        data_loader=chunked.given(), max_physical_batch_size=5, optimizer=chunked.optimizer
    ) as chunks:
        for x, y in chunks:
            assert len(x) <= 5
            if chunked.reduction == "mean" and len(x):
                chunked.optimizer.zero_grad()
            chunked.step(x, y)
    assert chunked.optimizer.steps_taken == len(DRAWS)
    close(chunked.model, whole.model)


def test_real_poisson_draws_are_taken_booked_and_noised() -> None:
    run = Training("bk", noise_multiplier=1.0)
    sizes = []
    for _ in range(3):
        for x, y in run.loader:
            sizes.append(len(x))
            run.step(x, y)
    assert len(set(sizes)) > 1
    assert len(run.engine.accountant) == 12
    assert run.engine.get_epsilon(1e-5) > 0


def test_bfloat16_autocast_is_that_of_hooks_and_norms_are_in_float32() -> None:
    found = []
    for mode in ("bk", "hooks"):
        run = Training(mode, loss_reduction="sum")
        for x, y in run.given():
            run.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = run.wrapper(x)
            F.cross_entropy(output.float(), y, reduction="sum").backward()
            if mode == "bk" and len(x):
                entries = run.optimizer._book.read(run.model.parameters())
                assert all(entry.rows().dtype == torch.float32 for entry in entries.values())
            run.optimizer.step()
        found.append(run.model)
    assert all(p.dtype == torch.float32 for p in found[0].parameters())
    close(*found, tolerance=0.05)


def test_a_model_in_bfloat16_is_clipped_in_float32() -> None:
    model = nn.Sequential(nn.Linear(108, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
    x, y = images().tensors
    data = TensorDataset(x.flatten(1).bfloat16(), y)
    run = Training("bk", model, dataset=data, batch_norm=None, loss_reduction="sum")
    run.optimizer.noise = Noted()
    run.train(run.given([list(range(24))]))
    assert {value.dtype for value in run.optimizer.noise.sums} == {torch.float32}
    total = torch.cat([value.flatten() for value in run.optimizer.noise.sums])
    assert 0 < float(total.norm()) <= 0.5 * 24


class Noted:
    """Stands for the noise: keeps what would have been noised."""

    secure = False

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def add_(self, tensor: Tensor, std: float) -> None:
        self.sums.append(tensor.clone())


def test_samples_that_are_not_finite_count_as_zero_and_spoil_nobody() -> None:
    """Oracle: the same draws without them. In one draw there are no others."""
    x, y = (t.clone() for t in images().tensors)
    x[3], x[7] = float("nan"), float("inf")
    spoiled = Training("bk", dataset=TensorDataset(x, y), loss_reduction="sum")
    clean = Training("bk", loss_reduction="sum")
    spoiled.train(spoiled.given([[0, 3, 7, 12, 30], [3, 7], list(range(24))]))
    kept = [i for i in range(24) if i not in (3, 7)]
    clean.train(clean.given([[0, 12, 30], [], kept]))
    assert bool(torch.isfinite(weights(spoiled.model)).all())
    close(spoiled.model, clean.model)


def test_no_per_sample_work_is_done_for_parameters_that_are_not_trained() -> None:
    run = Training("bk", trained=lambda m: m[7].parameters())
    x, y = next(iter(run.given()))
    F.cross_entropy(run.wrapper(x), y).backward()
    book = run.optimizer._book
    assert {book.names[key] for key in book._entries} == {"7.weight", "7.bias"}


def test_nothing_is_instantiated_where_norms_need_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus_bc.gradients.book_keeping import products

    for kind in (products.LinearProduct, products.ConvolutionProduct):
        monkeypatch.setattr(kind, "rows", lambda *_: pytest.fail("instantiated"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.Tanh(),
        nn.Linear(64, 2),
    )
    run = Training("bk", model, batch_norm=None)
    for guest in run.engine._runs[0].guests:
        guest.remove() if type(guest).__name__ == "CouplingProbe" else None
    run.train(run.given([list(range(20))]))
    assert run.optimizer.steps_taken == 1


@pytest.mark.parametrize(("mode", "instantiated"), [("bk-ghost", 0), ("bk-rows", 3), ("bk", 1)])
def test_the_way_to_a_norm_can_be_chosen_and_changes_no_weight(mode: str, instantiated: int) -> None:
    """Left to itself, book-keeping instantiates the first layer's gradients alone."""
    ours, hooks = Training(mode), Training("hooks")
    x, y = next(iter(ours.given([[1, 2, 3]])))
    F.cross_entropy(ours.wrapper(x), y).backward()
    entries = ours.optimizer._book.read(
        [layer.weight for layer in (ours.model[0], ours.model[3], ours.model[7])]
    )
    assert sum(isinstance(entry, Rows) for entry in entries.values()) == instantiated
    assert len(entries) == 3
    ours.train(ours.given())
    hooks.train(hooks.given())
    close(ours.model, hooks.model)


def parametric() -> nn.Module:
    """A network with an activation of which no rule tells the per-sample gradients."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3), nn.PReLU(3), nn.Flatten(), nn.Linear(108, 2))


def test_a_function_without_a_rule_is_named_once_and_is_exact() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = Training("bk", parametric())
        ours.train(ours.given())
    told = [str(w.message) for w in caught if "row by row" in str(w.message)]
    assert len(told) == 1
    assert "1.weight meets the batch in prelu" in told[0]
    assert next(w.filename for w in caught if "row by row" in str(w.message)) == __file__
    hooks = Training("hooks", parametric())
    hooks.train(hooks.given())
    torch.testing.assert_close(weights(ours.model), weights(hooks.model), rtol=1e-4, atol=1e-6)


def test_secure_mode_noises_with_the_cryptographic_generator() -> None:
    pytest.importorskip("randomgen")
    run = Training("bk", secure=True, noise_multiplier=1.0)
    assert run.optimizer.noise.secure
    assert type(run.loader.draws.generator.bit_generator).__name__ == "AESCounter"
    run.train(run.given([[], [1, 2]]))
    assert "cryptographic" in run.engine.statement(1e-5)


def statement(run: Training) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run.engine.statement(1e-5, format="json"))
    return facts


@pytest.mark.parametrize("name", ["flat", "per_layer", "alc, scaling", "alc"])
def test_statement_and_epsilon_are_those_of_hooks(name: str) -> None:
    runs = [Training(mode, **{**SETTINGS[name], "noise_multiplier": 1.0}) for mode in ("bk", "hooks")]
    for run in runs:
        run.train(run.given())
    ours, hooks = runs
    assert ours.engine.get_epsilon(1e-5) == hooks.engine.get_epsilon(1e-5)
    assert statement(ours) == statement(hooks)


def test_calibration_and_finalize_are_those_of_hooks() -> None:
    multipliers = []
    for mode in ("bk", "hooks"):
        model, maker = network(), engine()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapper, optimizer, _ = maker.make_private_with_epsilon(
                module=model,
                optimizer=optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(images(), batch_size=12),
                target_epsilon=3.0,
                target_delta=1e-3,
                epochs=2,
                max_grad_norm=1.0,
                batch_norm=public(),
                grad_sample_mode=mode,
            )
        multipliers.append(optimizer.noise_multiplier)
        plain = maker.finalize(wrapper)
        assert plain is model
        assert plain.state_dict().keys() == network().state_dict().keys()
        assert not plain._forward_pre_hooks
        assert not plain._forward_hooks
    assert multipliers[0] == multipliers[1]


@pytest.mark.parametrize("exact", [False, True])
def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path, exact: bool) -> None:
    straight, first, second = (Training("bk", noise_multiplier=0.5) for _ in range(3))
    if exact:
        for run in (straight, first):
            run.optimizer.noise.reseed(3)
    path = tmp_path / "run.pt"
    straight.train(straight.given(DRAWS + DRAWS))
    first.train(first.given())
    first.engine.save_checkpoint(path=path, module=first.wrapper, optimizer=first.optimizer, exact=exact)
    second.engine.load_checkpoint(path=path, module=second.wrapper, optimizer=second.optimizer)
    assert torch.equal(weights(second.model), weights(first.model))
    second.train(second.given())
    assert second.engine.get_epsilon(1e-5) == straight.engine.get_epsilon(1e-5)
    assert second.optimizer.steps_taken + first.optimizer.steps_taken >= 8
    assert torch.equal(weights(second.model), weights(straight.model)) == exact


def test_a_batch_too_wide_for_memory_is_not_kept_after_its_norm() -> None:
    """Rows of an entry are the delivered samples', whatever was delivered before."""
    run = Training("bk")
    for size, (x, y) in zip((6, 0, 1, 18), run.given(), strict=True):
        run.optimizer.zero_grad()
        F.cross_entropy(run.wrapper(x), y).backward()
        if size:
            entries = run.optimizer._book.read(run.model.parameters()).values()
            assert {len(entry.rows()) for entry in entries} == {size}
            assert any(isinstance(entry, Rows) for entry in entries)
        run.optimizer.step()
        assert not run.optimizer._book._entries


def test_a_model_of_several_inputs_and_outputs_is_trained_as_by_hooks() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.heads = nn.Linear(108, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Tensor]:
            hidden = torch.tanh(self.a(x.flatten(1)) + self.b(extra["means"]))
            return {"one": self.heads(hidden), "two": self.heads(hidden.square())}

    found = []
    for mode in ("bk", "hooks"):
        torch.manual_seed(0)
        run = Training(mode, Two(), batch_norm=None)
        for x, y in run.given([list(range(12)), list(range(20, 40))]):
            run.optimizer.zero_grad()
            out = run.wrapper(x, extra={"means": x.mean((2, 3))})
            (F.cross_entropy(out["one"], y) + 0.5 * F.cross_entropy(out["two"], y)).backward()
            run.optimizer.step()
        found.append(weights(run.model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
