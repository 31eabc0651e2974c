"""The paper's own procedure: it is what the paper says, and it never passes for private."""

from __future__ import annotations

import ast
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experiments import tiny_cell, tiny_data
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

import opacus_bc
from opacus_bc import PrivacyEngine
from opacus_bc.experiments.reproduce.as_published import WithReplacement, trained_on_public_data
from opacus_bc.experiments.reproduce.as_published import published as recipe
from opacus_bc.experiments.training import session
from opacus_bc.experiments.training import train as loop
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.models import build
from opacus_bc.experiments.training.store import key

DATA = tiny_data()
prepare = partial(session.prepare, recipe=recipe)
train = partial(loop.train, recipe=recipe)


def published(name: str, **changes: Any) -> Cell:
    return tiny_cell(
        name, **({"epsilon": None, "noise_multiplier": 0.5, "published": True, "momentum": 0.0} | changes)
    )


@pytest.mark.parametrize(("name", "size"), [("bc", 16), ("bc-alc-tensor", 16), ("ic-alc", 1)])
def test_an_update_is_the_papers_formula(name: str, size: int) -> None:
    # smallnet: BN-LeNet-5 ends in 1 x 1 images, whose BatchNorm has no statistics for a single sample
    cell = published(name, model="smallnet", noise_multiplier=0.0, clip=0.03)
    training = prepare(cell, DATA)
    training.reseed(0)
    batches = [batch for batch, _ in zip(training.batches(), range(16 // size), strict=False)]
    oracle = build("smallnet")
    oracle.load_state_dict(training.model.state_dict())
    bounds = {n: b.clip_bound for b in training.optimizer.blocks() for n in b.names}
    groups = [b.names for b in training.optimizer.blocks()]
    total = {n: torch.zeros_like(p) for n, p in oracle.named_parameters()}
    for x, y in batches:
        oracle.zero_grad()
        F.cross_entropy(oracle(x), y).backward()
        grads = {n: p.grad for n, p in oracle.named_parameters()}
        for names in groups:
            norm = math.sqrt(sum(float(grads[n].square().sum()) for n in names))  # type: ignore[union-attr]
            for n in names:
                total[n] += grads[n] / max(1.0, norm / bounds[n])
    expected = {n: p.detach() - cell.lr * total[n] / len(batches) for n, p in oracle.named_parameters()}
    for x, y in batches:
        training.step(x, y)
    assert any(not torch.equal(p, oracle.get_parameter(n)) for n, p in training.model.named_parameters())
    for n, p in training.model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[n], rtol=1e-4, atol=1e-7)


def test_noise_has_twice_the_bound_times_sigma_in_every_layer() -> None:
    cell = published("bc-alc", clip=0.2)
    noisy, quiet = prepare(cell, DATA), prepare(replace(cell, noise_multiplier=0.0), DATA)
    bounds = {n: b.clip_bound for b in noisy.optimizer.blocks() for n in b.names}
    for training in (noisy, quiet):
        training.reseed(0)
        training.step(*next(iter(training.batches())))
    for (n, a), (_, b) in zip(noisy.model.named_parameters(), quiet.model.named_parameters(), strict=True):
        if a.numel() < 2000:
            continue
        noise = (a - b).detach() / cell.lr
        # A sample deviation of k >= 2000 normals is off by 8 % with probability < 2 exp(-0.08^2 k) < 1e-5.
        assert float(noise.std()) == pytest.approx(2 * bounds[n] * 0.5, rel=0.08)


def test_bounds_of_a_public_model_come_from_public_data_alone_and_stay() -> None:
    cell = published("bc-alc-tensor", model="smallnet", noise_multiplier=0.0, clip=0.1, epochs=2)
    fixed = replace(cell, reading="bounds of a public model")
    training = prepare(fixed, DATA)
    first = [block.clip_bound for block in training.optimizer.blocks()]
    assert first != [block.clip_bound for block in prepare(cell, DATA).optimizer.blocks()]
    for epoch in range(2):
        training.reseed(epoch)
        for x, y in training.batches():
            training.step(x, y)
    assert [block.clip_bound for block in training.optimizer.blocks()] == first
    trained = trained_on_public_data(fixed, DATA, training.model)
    moved = [
        not torch.equal(p, q) for p, q in zip(trained.parameters(), training.model.parameters(), strict=True)
    ]
    assert all(moved)


def test_noise_once_an_epoch_is_noise_in_one_update_of_each_epoch() -> None:
    cell = published("bc", model="smallnet", reading="noise once an epoch")
    training, noisy = prepare(cell, DATA), []
    for epoch in range(2):
        training.reseed(epoch)
        before = training.streams["noise"].get_state()
        for x, y in training.batches():
            training.step(x, y)
            after = training.streams["noise"].get_state()
            noisy.append(not torch.equal(before, after))
            before = after
    steps = len(noisy) // 2
    assert steps > 1
    assert noisy == ([True] + [False] * (steps - 1)) * 2


def test_other_readings_never_pass_for_private() -> None:
    with pytest.raises(ValueError, match="not private"):
        tiny_cell("bc", reading="noise once an epoch")


def test_draws_are_independent_and_with_replacement() -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = WithReplacement(50, 16, 4, generator)
    draws = [i for mini_set in sampler for i in mini_set]
    assert sampler.steps == 4
    assert len(sampler) == 16
    assert len(draws) == 4 * 16
    assert max(Counter(draws).values()) > 1
    many = Counter(i for _ in range(200) for mini_set in sampler for i in mini_set)
    # 12,800 uniform draws over 50: counts of 256 with deviation 15.8; 6 of those: probability below 1e-7.
    assert all(abs(many[i] - 256) < 95 for i in range(50))


def test_it_never_has_an_epsilon_and_says_so() -> None:
    result = train(published("bc-alc", epochs=1), DATA)
    assert result["epsilon"] is None
    assert result["protected"] is False
    assert result["adjacency"] == "none"
    assert "history" not in result
    assert prepare(published("bc-alc"), DATA).engine is None
    with pytest.raises(ValueError, match="published=True is not private"):
        session.prepare(published("bc-alc"), DATA)
    with pytest.raises(ValueError, match="published=True has no budget"):
        tiny_cell("bc", published=True)


def test_it_cannot_be_reached_through_the_engine() -> None:
    data = DATA.private
    loader = DataLoader(data, batch_size=16, sampler=RandomSampler(data, replacement=True))
    model = build("bn_lenet5")
    with pytest.raises(ValueError, match="replacement=True"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, clipping="batch", batch_norm="batch",
        )  # fmt: skip
    root = Path(opacus_bc.__file__).parent
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("as_published")
    }
    assert users == {"experiments/reproduce/runs.py"}


class Killed(Exception):
    pass


@pytest.mark.parametrize("changes", [{}, {"lr_on_plateau": True, "lr_decay": 0.5}, {"record_norms": True}])
def test_a_killed_run_ends_with_the_numbers_of_one_that_was_not(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    cell = published("bc-alc", epochs=4, clip_decay=0.7, augment=True, **changes)

    def kill(epoch: int) -> None:
        if epoch == 3:
            raise Killed

    with pytest.raises(Killed):
        train(cell, DATA, checkpoint=tmp_path / "c.pt", on_epoch=kill)
    resumed, whole = train(cell, DATA, checkpoint=tmp_path / "c.pt"), train(cell, DATA)
    for result in (resumed, whole):
        del result["seconds_per_epoch"]
    assert resumed == whole
    assert whole["layers"][0]["noise"] > 0


def test_a_longer_run_continues_a_shorter_one(tmp_path: Path) -> None:
    cell = published("bc-alc", epochs=2, lr_decay=0.9)
    partial: list[dict[str, Any]] = []
    train(cell, DATA, checkpoint=tmp_path / "c.pt", keep_last=True, on_partial=partial.append)
    assert [len(result["accuracies"]) for result in partial] == [1]
    seen: list[int] = []
    longer = train(replace(cell, epochs=3), DATA, checkpoint=tmp_path / "c.pt", on_epoch=seen.append)
    assert seen == [2, 3]
    assert longer["layers"] == train(replace(cell, epochs=3), DATA)["layers"]


def test_on_a_plateau_and_only_there_the_learning_rate_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([10.0, 9.0, 9.0, 12.0, 11.0, 50.0])
    monkeypatch.setattr("opacus_bc.experiments.training.train.accuracy", lambda model, part: next(accuracies))
    monkeypatch.setattr("opacus_bc.experiments.training.train.report", lambda training, *_: training)
    cell = published("bc", epochs=5, lr_decay=0.5, lr_on_plateau=True, lr=1.0)
    training: Any = train(cell, DATA)
    assert (
        training.plain_optimizer.param_groups[0]["lr"] == 0.25
    )  # after epochs 3 and 5; never before the third


def test_recorded_norms_are_those_of_autograd() -> None:
    cell = tiny_cell("no-dp", epochs=1, record_norms=True, batch_size=24)
    norms = train(cell, DATA)["layer_norms"]
    assert len(norms) == 1
    training = prepare(cell, DATA)
    training.reseed(0)
    for x, y in training.batches():
        training.step(x, y)
    x, y = DATA.public.tensors  # one mini-set of 24 is all there is
    training.model.train().zero_grad()
    F.cross_entropy(training.model(x), y).backward()
    for name, p in training.model.named_parameters():
        assert p.grad is not None
        # The biases before BatchNorm have gradients of rounding errors only.
        assert norms[0][name] == pytest.approx(float(p.grad.norm()), rel=1e-2, abs=1e-6)


def test_new_fields_leave_the_keys_of_old_results_alone() -> None:
    assert key(tiny_cell("bc-alc")) == "f0513dd95440446251ad"
    assert key(tiny_cell("no-dp")) == "0da42b3f12701cdc4a04"
    base = tiny_cell("no-dp")
    others = [
        replace(base, norm="none"), replace(base, limit=9), replace(base, lr_on_plateau=True),
        replace(base, record_norms=True), published("bc"), replace(published("bc"), published=False),
    ]  # fmt: skip
    assert len({key(cell) for cell in [base, *others]}) == 7
