"""Users, and K views of one sample: the mean of a unit's rows is clipped, and nothing else changes."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_bc import (
    ALC,
    BatchMemoryManager,
    PrivacyEngine,
    PublicStatistics,
    Units,
    accounting,
    local_update,
)
from opacus_bc.draws.ledger import cut_at_units
from opacus_bc.draws.loader import PrivateDataLoader

C, LR = 0.3, 0.05
STEPS = 3


class Augmented(Dataset[Any]):
    """Images with a random shift; a sample comes with its index, so that an oracle knows whose view it is."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 3, 6, 6, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index] + torch.randn(3, 1, 1), self.y[index], index


class Tokens(nn.Module):
    """A linear layer over positions, as transformers have it, larger than its positions' square."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 40)
        self.norm = nn.LayerNorm(40)
        self.out = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1).view(len(x), 9, 12)
        return self.out(torch.tanh(self.norm(self.inner(tokens))).mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, stride=2, groups=4),
        nn.Tanh(),
        nn.Conv2d(8, 24, 2, bias=False),  # a weight larger than the square of its positions
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.Tanh(), nn.Linear(16, 3))


MODELS = {"dense": dense, "convolutions": convolutions, "tokens": Tokens}


def quiet(engine: PrivacyEngine, **arguments: Any) -> tuple[Any, ...]:
    """make_private with so little noise that weights can be compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine.make_private(**{"noise_multiplier": 1e-9, "max_grad_norm": C, **arguments})


def mean_gradients(model: nn.Module, x: Tensor, y: Tensor, owner: Any) -> Iterator[list[Tensor]]:
    """The oracle: for every unit the mean of its rows' gradients, one ordinary backward for each row."""
    for unit in sorted(set(owner)):
        rows = [r for r, whose in enumerate(owner) if whose == unit]
        grads = [
            torch.autograd.grad(
                nn.functional.cross_entropy(model(x[r : r + 1]), y[r : r + 1]), model.parameters()
            )
            for r in rows
        ]
        yield [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]


def norm_of(vector: list[Tensor]) -> float:
    return float(torch.sqrt(sum(g.double().square().sum() for g in vector)))


def oracle_step(
    model: nn.Module, x: Tensor, y: Tensor, owner: Any, bound: float, divisor: float
) -> list[bool]:
    """One step of the oracle; returns which units were clipped."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    clipped = []
    for vector in mean_gradients(model, x, y, owner):
        clipped.append(norm_of(vector) > bound)
        for t, g in zip(total, vector, strict=True):
            t += g * min(1.0, bound / norm_of(vector))
    with torch.no_grad():
        for p, t in zip(model.parameters(), total, strict=True):
            p -= LR * t / divisor
    return clipped


def train_and_compare(owner_of: Any, data: Dataset[Any], batch_size: int, model: nn.Module, **options: Any):
    """Train privately and by the oracle on the very same batches, and compare the weights."""
    twin = copy.deepcopy(model)
    rows = [i for i in range(len(data)) for _ in range(options.get("views", 1))]
    x, y, _ = zip(*(data[i] for i in rows), strict=True)
    norms = mean_gradients(model, torch.stack(x), torch.stack(y), [owner_of(i) for i in rows])
    bound = float(np.median([norm_of(vector) for vector in norms]))
    private, optimizer, loader = quiet(
        PrivacyEngine(),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(data, batch_size=batch_size, generator=torch.Generator().manual_seed(5)),
        clipping="flat",
        max_grad_norm=bound,
        **options,
    )
    steps, clipped = 0, []
    for x, y, index in loader:
        owner = [owner_of(i) for i in index.tolist()]
        assert owner == sorted(owner, key=owner.index)  # a unit's rows stand together
        loss = nn.functional.cross_entropy(private(x), y, reduction=options.get("loss_reduction", "mean"))
        loss.backward()
        optimizer.step()
        divisor = 1.0 if options.get("loss_reduction") == "sum" else optimizer.expected_batch_size
        clipped += oracle_step(twin, x, y, owner, bound, divisor)
        if (steps := steps + 1) == STEPS:
            break
    assert 0 < sum(clipped) < len(clipped)  # or a sum would pass for a mean
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    return loader


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["hooks", "bk"])
@pytest.mark.parametrize("name", MODELS)
def test_views_equal_an_oracle_that_averages_and_clips(name, mode, reduction):
    torch.manual_seed(1)
    loader = train_and_compare(
        lambda i: i,
        Augmented(40),
        8,
        MODELS[name](),
        views=4,
        grad_sample_mode=mode,
        loss_reduction=reduction,
    )
    assert loader.plan.sample_rate == 1 / 5
    assert loader.plan.vectors == 8


IDS = np.array([0] * 9 + [1] + [2] * 4 + [3] * 2 + [4 + i % 6 for i in range(24)])


@pytest.mark.parametrize("sampling", ["poisson", "partition", "shuffle"])
@pytest.mark.parametrize("mode", ["hooks", "bk"])
@pytest.mark.parametrize("name", MODELS)
def test_users_under_flat_clipping_equal_an_oracle_that_averages_and_clips(name, mode, sampling):
    torch.manual_seed(2)
    loader = train_and_compare(
        lambda i: IDS[i],
        Augmented(40),
        5,
        MODELS[name](),
        unit=IDS,
        mini_batch_size=5,
        grad_sample_mode=mode,
        sampling=sampling,
        poisson_sampling=sampling != "shuffle",
    )
    assert (loader.plan.dataset_size, loader.plan.sample_rate, loader.plan.vectors) == (10, 1 / 2, 5)


def test_users_and_views_together_average_over_all_rows_of_a_user():
    torch.manual_seed(2)
    train_and_compare(
        lambda i: IDS[i],
        Augmented(40),
        5,
        dense(),
        unit=IDS,
        mini_batch_size=3,
        views=2,
        grad_sample_mode="bk",
    )


@pytest.mark.parametrize("mode", ["hooks", "bk"])
def test_a_chunk_of_a_batch_holds_whole_units(mode):
    """Chunks by opacus_bc.BatchMemoryManager give the weights of one large batch."""
    sizes, results = [], []
    for most in (None, 9):
        torch.manual_seed(4)
        model = dense()
        private, optimizer, loader = quiet(
            PrivacyEngine(),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LR),
            data_loader=DataLoader(
                TensorDataset(Augmented(40).x, Augmented(40).y),
                batch_size=5,
                generator=torch.Generator().manual_seed(6),
            ),
            clipping="flat",
            unit=IDS,
            mini_batch_size=5,
            grad_sample_mode=mode,
        )
        if most is not None:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=most, optimizer=optimizer
            ) as loader:
                one_epoch(private, optimizer, loader, sizes)
        else:
            one_epoch(private, optimizer, loader, [])
        results.append([p.detach().clone() for p in model.parameters()])
    assert max(sizes) <= 9
    assert len(sizes) > 2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def one_epoch(model: nn.Module, optimizer: Any, loader: Any, sizes: list[int]) -> None:
    for x, y in loader:
        sizes.append(len(x))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_chunk_cut_inside_a_unit_is_refused():
    with pytest.raises(RuntimeError, match="cut a user's or a sample's rows in two"):
        cut_at_units((4, 4), 0, 6)
    with pytest.raises(RuntimeError, match="cut a user's or a sample's rows in two"):
        cut_at_units((4, 4), 2, 6)
    assert cut_at_units((4, 4, 1), 4, 5) == (4, 1)


def flat_run(data: Dataset[Any] | None = None, **options: Any) -> tuple[Any, ...]:
    model = dense()
    data = data or TensorDataset(Augmented(40).x, Augmented(40).y)
    engine = PrivacyEngine()
    made = quiet(
        engine,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(data, batch_size=5, generator=torch.Generator().manual_seed(0)),
        **{"clipping": "flat", **options},
    )
    return (engine, *made)


def test_opacus_own_memory_manager_cannot_cut_a_unit():
    from opacus.utils.batch_memory_manager import BatchMemoryManager as Stock

    _, model, optimizer, loader = flat_run(views=4)
    with (
        pytest.raises(RuntimeError, match=r"use opacus_bc\.BatchMemoryManager"),
        Stock(data_loader=loader, max_physical_batch_size=6, optimizer=optimizer) as chunks,
    ):
        one_epoch(model, optimizer, chunks, [])


@pytest.mark.parametrize(
    ("options", "rows"), [({"views": 4}, 4), ({"unit": IDS, "mini_batch_size": 5}, 5)], ids=["views", "users"]
)
def test_a_physical_batch_smaller_than_a_unit_is_refused(options, rows):
    *_, loader = flat_run(**options)
    with pytest.raises(ValueError, match=f"take at least {rows}"):
        loader.with_max_physical_batch_size(rows - 1)


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_epsilon_is_the_accountants_for_users(clipping):
    """Noise over sensitivity is sigma, the rate is that of users, and a step is booked for each draw."""
    model = dense()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(Augmented(40).x, Augmented(40).y), batch_size=3),
        noise_multiplier=1.3,
        max_grad_norm=C,
        clipping=clipping,
        unit=IDS,
        mini_batch_size=4,
    )
    for _ in range(2):
        one_epoch(model, optimizer, loader, [])
    (block,) = optimizer.blocks()
    assert block.sensitivity == C
    assert block.noise_std == pytest.approx(1.3 * C)
    steps = 2 * 4  # ceil(10 users / 3)
    assert engine.accountant.history == [(1.3, 1 / 4, steps, "poisson over users")]
    expected = accounting.epsilon(noise_multiplier=1.3, sample_rate=1 / 4, steps=steps, delta=1e-5)
    assert engine.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_calibration_counts_users(clipping):
    model = dense()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(Augmented(40).x, Augmented(40).y), batch_size=3),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=C,
        clipping=clipping,
        unit=IDS,
        mini_batch_size=4,
    )
    for _ in range(2):
        one_epoch(model, optimizer, loader, [])
    assert 2.9 < engine.get_epsilon(1e-5) <= 3.0


@pytest.mark.parametrize("sampling", ["partition", "shuffle"])
@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_replacing_a_user_costs_two_bounds(clipping, sampling):
    _, _, optimizer, _ = flat_run(
        clipping=clipping,
        unit=IDS,
        mini_batch_size=4,
        sampling=sampling,
        poisson_sampling=sampling != "shuffle",
    )
    (block,) = optimizer.blocks()
    assert block.sensitivity == 2 * C


def test_views_of_one_are_todays_behaviour_bit_by_bit():
    """views=1 and no views: the same draws, weights and history."""
    results = []
    for options in ({}, {"views": 1}):
        torch.manual_seed(7)
        engine, model, optimizer, loader = flat_run(
            noise_multiplier=1.0, noise_generator=torch.Generator().manual_seed(1), **options
        )
        one_epoch(model, optimizer, loader, [])
        results.append((engine.accountant.history, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_the_bound_of_layers_is_measured_on_public_sets_of_a_users_size():
    generator = torch.Generator().manual_seed(9)
    public = TensorDataset(torch.randn(24, 3, 6, 6, generator=generator), torch.arange(24) % 3)
    seen: list[int] = []

    def gradient(module: nn.Module, batch: Any) -> None:
        seen.append(len(batch[0]))
        nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()

    for options, rows in (({"unit": IDS, "mini_batch_size": 4}, 4), ({"views": 3}, 3)):
        seen.clear()
        _, model, optimizer, loader = flat_run(
            alc=ALC(DataLoader(public, batch_size=4), gradient=gradient), grad_sample_mode="bk", **options
        )
        assert set(seen) == {rows}
        one_epoch(model, optimizer, loader, [])
        blocks = optimizer.blocks()
        assert len(blocks) > 1
        assert all(block.sensitivity == block.clip_bound for block in blocks)


def test_differentiated_public_statistics_average_over_views_too():
    """The terms through public statistics add up over a unit's rows: hooks and book-keeping agree."""
    generator = torch.Generator().manual_seed(9)
    public = DataLoader(
        TensorDataset(torch.randn(16, 3, 6, 6, generator=generator), torch.arange(16) % 3), batch_size=16
    )

    def trained(mode: str) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.Tanh(), nn.Conv2d(24, 4, 3), nn.BatchNorm2d(4),
            nn.Flatten(), nn.Linear(16, 3),
        )  # fmt: skip
        private, optimizer, loader = quiet(
            PrivacyEngine(),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LR),
            data_loader=DataLoader(Augmented(24), batch_size=8),
            clipping="flat",
            views=3,
            grad_sample_mode=mode,
            batch_norm=PublicStatistics(loader=public, differentiate=True),
            poisson_sampling=False,
        )
        torch.manual_seed(8)  # of the views
        for x, y, _ in loader:
            nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for one, other in zip(trained("hooks"), trained("bk"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def fed_avg_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def test_local_updates_of_users_are_dp_fedavg():
    """A user's weight change over a few local steps is one clipped vector: sensitivity C."""
    model = fed_avg_model()
    engine = PrivacyEngine()
    model, optimizer, loader = quiet(
        engine,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(Augmented(40).x, Augmented(40).y), batch_size=5),
        clipping="batch",
        unit=IDS,
        mini_batch_size=4,
        batch_norm="batch",
    )
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in loader:
        assert 2 <= len(x) <= 4  # the user with one sample has no batch statistics and counts as zero
        local_update(
            model,
            lambda params: torch.optim.SGD(params, lr=0.1),
            [lambda x=x, y=y: nn.functional.cross_entropy(model(x), y)] * 2,
        )
        optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.blocks()[0].sensitivity == C


def delivered_sizes(model: nn.Module, **options: Any) -> list[int]:
    _, optimizer, loader = quiet(
        PrivacyEngine(),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(Augmented(40).x, Augmented(40).y), batch_size=10),
        clipping="batch",
        unit=IDS,
        mini_batch_size=4,
        **options,
    )
    assert isinstance(loader, PrivateDataLoader)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return sorted(sizes)


def test_a_user_with_one_sample_counts_where_no_batch_statistics_are_used():
    """Sample rate 1: every user is drawn, each as one mini-set of at most four samples."""
    everybody = sorted(min(int(n), 4) for n in np.bincount(IDS))
    assert delivered_sizes(dense()) == everybody
    assert delivered_sizes(fed_avg_model(), batch_norm="frozen") == everybody
    assert delivered_sizes(fed_avg_model(), batch_norm="batch") == [n for n in everybody if n > 1]


def test_units_know_their_users():
    index = Units(np.array(["b", "a", "b", "c"])).index(4)
    assert index.users == 3
    assert [index.samples_of(u).tolist() for u in range(3)] == [[1], [0, 2], [3]]
    other = Units(lambda i: "xyx!"[i]).index(4)
    assert other.fingerprint() == index.fingerprint() != Units([0, 0, 1, 2]).index(4).fingerprint()


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_the_statement_says_who_is_protected(clipping):
    engine, model, optimizer, loader = flat_run(
        clipping=clipping, unit=IDS, mini_batch_size=4, noise_multiplier=2.0
    )
    one_epoch(model, optimizer, loader, [])
    text = engine.statement(1e-5)
    assert "differential privacy of users with all their samples" in text
    assert "one user with all their samples, at most 4 per step (add/remove one user)" in text
    assert "rate 0.5, 10 private users" in text
    assert "one vector for each drawn user" in text
    assert "every sample has the id of the one user" in text
    assert "one person is one sample" not in text
    facts = json.loads(engine.statement(1e-5, format="json"))["runs"][0]
    assert (facts["protects"], facts["dataset_size"], facts["sensitivity"]) == ("user", 10, "0.3")


def test_the_statement_says_that_views_are_averaged():
    engine, model, optimizer, loader = flat_run(views=3, noise_multiplier=2.0)
    one_epoch(model, optimizer, loader, [])
    text = engine.statement(1e-5)
    assert "the mean of 3 views of a sample" in text
    assert "one sample with all its views (add/remove one)" in text
    assert "40 private samples" in text


def test_the_layer_report_says_who_is_protected():
    public = DataLoader(TensorDataset(Augmented(12).x + 1.0, Augmented(12).y), batch_size=4)
    engine, *_ = flat_run(alc=public, unit=IDS, mini_batch_size=4)
    assert str(engine.layer_report()).endswith(
        "one clipped vector is one user, with all their samples of a step"
    )
    engine, *_ = flat_run(alc=public)
    assert "user" not in str(engine.layer_report())


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_budget_of_users_ends_the_loader(sampling):
    engine, model, optimizer, loader = flat_run(
        unit=IDS,
        mini_batch_size=4,
        noise_multiplier=1.0,
        sampling=sampling,
        poisson_sampling=sampling != "shuffle",
    )
    engine.stop_at(6.0, 1e-5)
    for _ in range(9):
        one_epoch(model, optimizer, loader, [])
    assert 0 < engine.get_epsilon(1e-5) <= 6.0
    assert optimizer.steps_taken < 18


@pytest.mark.parametrize(
    "options", [{"unit": IDS, "mini_batch_size": 4}, {"views": 2}], ids=["users", "views"]
)
@pytest.mark.parametrize("mode", ["hooks", "bk"])
def test_secure_mode_draws_units_from_a_cryptographic_generator(mode, options):
    model = dense()
    engine = PrivacyEngine(secure_mode=True)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(Augmented(40).x, Augmented(40).y), batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=C,
        grad_sample_mode=mode,
        **options,
    )
    assert type(loader.draws.generator.bit_generator).__name__ == "AESCounter"
    assert optimizer.noise.secure
    one_epoch(model, optimizer, loader, [])


def test_an_exact_resume_of_users_goes_on_bit_by_bit(tmp_path):
    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        return flat_run(unit=IDS, mini_batch_size=2, grad_sample_mode="bk", noise_multiplier=1.0)

    engine, model, optimizer, loader = start()
    one_epoch(model, optimizer, loader, [])
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, exact=True)
    one_epoch(model, optimizer, loader, [])
    expected = [p.detach().clone() for p in model.parameters()]
    engine, model, optimizer, loader = start()
    engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    one_epoch(model, optimizer, loader, [])
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))
