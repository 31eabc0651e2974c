"""A cell is trained at its budget, reports what it cost, and survives being killed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from opacus.validators import ModuleValidator
from support.experiments import other_epsilon, tiny_cell, tiny_data
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from opacus_bc.experiments.training.methods import METHODS, NEEDS_WEIGHTS
from opacus_bc.experiments.training.models import build
from opacus_bc.experiments.training.noise_to_signal import noise_to_signal
from opacus_bc.experiments.training.session import prepare
from opacus_bc.experiments.training.train import train
from opacus_bc.mechanism.rules import FlatClipping

DATA = tiny_data()
NAMES = [name for name in METHODS if name not in NEEDS_WEIGHTS and not METHODS[name].users]
PRIVATE = [name for name in NAMES if METHODS[name].private]
LAYERS = 8  # of BN-LeNet-5 by module


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """One finished cell of every method."""
    torch.set_num_threads(1)
    return {name: train(tiny_cell(name), DATA) for name in NAMES}


@pytest.mark.parametrize("name", PRIVATE)
def test_every_method_spends_its_budget_and_no_more(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert 0.998 * 8.0 <= result["epsilon"] <= 8.0
    assert sum(entry[2] for entry in result["history"]) == 2 * 3
    if METHODS[name].adjacency == "add/remove one":
        other = other_epsilon(result["history"], 1e-3)
        # Both are upper bounds of one number; dp-accounting's default grid is 1e-4 wide.
        assert result["epsilon"] == pytest.approx(other, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "groups", "factor"),
    [
        ("opacus", 1, 1), ("ic", 1, 1), ("bc", 1, 32), ("bc-alc", LAYERS, 32), ("bc-alc-tensor", 16, 32),
        ("bc-alc-4", 4, 32), ("bc-scale", 1, 32), ("zhang", LAYERS, 32), ("gbc-4", 1, 8), ("gbc-8", 1, 16),
        ("gbc-16-scale", 1, 32), ("ic-alc", LAYERS, 1),
    ],
)  # fmt: skip
def test_sigma_eff_is_sigma_over_root_l_and_the_noise_factor_2s(
    name: str, groups: int, factor: float, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["groups"] == groups
    assert result["noise_factor"] == factor
    assert result["sigma_eff"] == pytest.approx(result["noise_multiplier"] / math.sqrt(groups))
    assert [entry[0] for entry in result["history"]] == [pytest.approx(result["sigma_eff"])]


def test_without_privacy_there_is_no_epsilon(results: dict[str, dict[str, Any]]) -> None:
    assert results["no-dp"]["epsilon"] is None
    assert results["no-dp"]["adjacency"] == "none"


class Killed(Exception):
    pass


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_ends_with_the_numbers_of_one_that_was_not(
    name: str, results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "cell.pt"

    def kill(epoch: int) -> None:
        if epoch == 1:
            raise Killed

    with pytest.raises(Killed):
        train(tiny_cell(name), DATA, checkpoint=checkpoint, on_epoch=kill)
    seen: list[int] = []
    resumed = train(tiny_cell(name), DATA, checkpoint=checkpoint, on_epoch=seen.append)
    assert seen == [1, 2], "the first epoch must not be trained again"
    left_out = {"seconds_per_epoch"}
    assert {k: v for k, v in resumed.items() if k not in left_out} == {
        k: v for k, v in results[name].items() if k not in left_out
    }


@pytest.mark.filterwarnings("ignore:batch_norm='unprotected'")
def test_a_killed_run_whose_statistics_leak_goes_on_too(tmp_path: Path) -> None:
    method = replace(METHODS["bc-alc"], batch_norm="unprotected")
    cell = replace(tiny_cell("bc-alc", epsilon=None, noise_multiplier=1.0), method=method)

    def kill(epoch: int) -> None:
        if epoch == 1:
            raise Killed

    with pytest.raises(Killed):
        train(cell, DATA, checkpoint=tmp_path / "c.pt", on_epoch=kill)
    resumed, whole = train(cell, DATA, checkpoint=tmp_path / "c.pt"), train(cell, DATA)
    assert resumed["layers"] == whole["layers"]
    assert resumed["accuracies"] == whole["accuracies"]


def test_schedules_survive_a_kill(tmp_path: Path) -> None:
    cell = tiny_cell("gbc-8", epochs=3, lr_decay=0.5, clip_decay=0.7, augment=True)
    whole = train(cell, DATA)

    def kill(epoch: int) -> None:
        if epoch == 2:
            raise Killed

    with pytest.raises(Killed):
        train(cell, DATA, checkpoint=tmp_path / "c.pt", on_epoch=kill)
    resumed = train(cell, DATA, checkpoint=tmp_path / "c.pt")
    assert resumed["layers"] == whole["layers"]
    assert resumed["accuracies"] == whole["accuracies"]
    constant = train(replace(cell, clip_decay=1.0), DATA)
    assert constant["layers"][0]["noise"] == pytest.approx(whole["layers"][0]["noise"] / 0.7**3)


def test_a_damaged_checkpoint_means_starting_again(tmp_path: Path) -> None:
    (tmp_path / "c.pt").write_bytes(b"half a file")
    seen: list[int] = []
    train(tiny_cell("no-dp"), DATA, checkpoint=tmp_path / "c.pt", on_epoch=seen.append)
    assert seen == [0, 1, 2]


def test_seeds_differ_and_equal_seeds_do_not() -> None:
    first, again, other = (train(tiny_cell("ic", seed=seed), DATA)["layers"] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_the_opacus_row_is_stock_opacus_at_equal_sigma() -> None:
    cell = tiny_cell("opacus", epsilon=None, noise_multiplier=1.3)
    training = prepare(cell, DATA)
    torch.manual_seed(cell.seed)
    model = ModuleValidator.fix(build("bn_lenet5"))
    assert any(isinstance(module, nn.GroupNorm) for module in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=cell.lr, momentum=cell.momentum)
    draws, noise = torch.Generator(), torch.Generator()
    stock, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(DATA.private, batch_size=cell.batch_size, shuffle=True, generator=draws),
        noise_multiplier=1.3,
        max_grad_norm=cell.clip,
        noise_generator=noise,
    )
    for generator in (training.streams["sampling"], draws):
        generator.manual_seed(11)
    for generator in (training.streams["noise"], noise):
        generator.manual_seed(12)
    for x, y in training.batches():
        training.step(x, y)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(stock(x), y).backward()
        optimizer.step()
    ours = training.model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)


def test_large_models_get_their_sample_gradients_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tiny_cell("opacus"), DATA)
    monkeypatch.setattr("opacus_bc.experiments.training.session.PER_SAMPLE_FLOATS", 9 * 61_990)
    sizes: list[int] = []
    training = prepare(tiny_cell("opacus"), DATA)
    for x, y in training.batches():
        sizes.append(len(x))
        training.step(x, y)
    assert max(sizes) <= 9
    chunked = train(tiny_cell("opacus"), DATA)
    assert chunked["history"] == whole["history"]
    assert chunked["accuracies"] == pytest.approx(whole["accuracies"], abs=10.1)


def test_budget_and_noise_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        tiny_cell("bc", noise_multiplier=1.0)
    with pytest.raises(ValueError, match="exactly one"):
        tiny_cell("bc", epsilon=None)
    with pytest.raises(ValueError, match="neither"):
        tiny_cell("no-dp", epsilon=8.0)


def test_noise_to_signal_is_what_ten_lines_of_autograd_give() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 10))
    named = list(model.named_parameters())
    rule = FlatClipping(unit="mini-set", adjacency="add/remove one")
    sigma, bound, size, vectors = 1.5, 0.4, 6, 10
    blocks = rule.blocks(named, noise_multiplier=sigma, max_grad_norm=bound)
    found = noise_to_signal(model, blocks, DATA.public, unit=size, vectors=vectors, batch_statistics=True)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(10 * 1024 + 10)
    for part in order.reshape(4, 6):
        x, y = DATA.public[part]
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), [p for _, p in named])
        flat = torch.cat([g.reshape(-1) for g in grads])
        total += flat / max(1.0, float(flat.norm()) / bound) / 4
    noise = sigma * 2 * bound * math.sqrt(len(total)) / vectors
    assert [row["layer"] for row in found] == ["1"]
    assert found[0]["noise"] == pytest.approx(noise)
    assert found[0]["signal"] == pytest.approx(float(total.norm()), rel=1e-4)
    assert found[0]["noise_to_signal"] == pytest.approx(noise / float(total.norm()), rel=1e-4)
