"""The comparison of methods deals images out to made-up users and protects them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opacus_bc.experiments.compare.command import run_cell
from opacus_bc.experiments.compare.presets import Setting, fitted, preset
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Source, limited, load
from opacus_bc.experiments.training.methods import GROUPS, METHODS, select
from opacus_bc.experiments.training.train import train
from opacus_bc.experiments.training.users import made_up_users


def test_everybody_has_images_and_the_draw_is_repeatable() -> None:
    labels = np.arange(200) % 5
    ids = made_up_users(labels, 40, seed=1)
    assert set(ids.tolist()) == set(range(40))
    assert np.array_equal(ids, made_up_users(labels, 40, seed=1))
    assert np.bincount(ids).max() > 2 * np.bincount(ids).min()
    with pytest.raises(ValueError, match="users=201: must lie between 2 and the 200 images"):
        made_up_users(labels, 201)


@pytest.mark.parametrize("name", ["user-ic", "user-gbc", "user-fedavg"])
def test_methods_of_users_book_users_at_the_rate_of_users(name: str) -> None:
    method = replace(METHODS[name], users=40)
    assert method.adjacency == "add/remove one user"
    data = limited(load("digits"), 300)
    setting = fitted(Setting(batch_size=20, lr=0.3, clip=0.5), method, len(data.private))
    cell = Cell(
        method=method, dataset="digits", model="smallnet", epsilon=8.0, delta=1e-3, epochs=2,
        batch_size=setting.batch_size, lr=setting.lr, clip=setting.clip, seed=0,
    )  # fmt: skip
    result = train(cell, data)
    ((_, rate, steps, kind),) = result["history"]
    assert (rate, steps, kind) == (1 / 2, 4, "poisson over users")
    assert result["adjacency"] == "add/remove one user"
    assert result["noise_factor"] == 1.0
    assert 7.0 < result["epsilon"] <= 8.0


def test_a_finished_cell_of_users_leaves_nothing_but_its_result(tmp_path: Path) -> None:
    method = replace(METHODS["user-ic"], users=40)
    cell = Cell(
        method=method, dataset="digits", model="smallnet", epsilon=8.0, delta=1e-3, epochs=2, batch_size=20,
        lr=0.3, clip=0.5, seed=0,
    )  # fmt: skip
    run_cell(cell, lambda _: None, root=tmp_path, source=Source(dataset="digits", root=tmp_path))
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".json"]


def test_the_comparison_of_users_has_one_name_and_settings_of_its_own() -> None:
    """A thousand users, caps of 8 and of 32, mini-sets of samples beside them; one setting for all."""
    chosen = select(["users"])
    assert {method.name for method in chosen} == set(GROUPS["users"])
    protected = [method for method in chosen if method.users]
    assert [method.name for method in chosen if not method.users] == ["gbc-8"]
    assert {(method.users, method.clipping, method.mini_set, method.local_steps) for method in protected} == {
        (1000, "flat", 8, 0), (1000, "flat", 32, 0), (1000, "batch", 8, 0), (1000, "batch", 32, 0),
        (1000, "batch", 8, 3),
    }  # fmt: skip
    settings = {fitted(preset("mnist").setting(method), method, 54_000) for method in protected}
    assert settings == {Setting(batch_size=200, lr=0.5, clip=0.5)}
    with pytest.raises(ValueError, match=r"--methods user: did you mean --methods users"):
        select(["user"])
