"""Kept results are whole or absent, and named by everything they depend on."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.experiments import tiny_cell

from opacus_bc.experiments.training import store
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.methods import METHODS

CHANGES = {
    "method": METHODS["bc-alc"], "dataset": "mnist", "model": "convnet", "epsilon": 7.0, "delta": 1e-5,
    "epochs": 3, "batch_size": 8, "lr": 0.1, "clip": 0.1, "seed": 4, "optimizer": "adam", "momentum": 0.0,
    "weight_decay": 0.1, "lr_decay": 0.9, "clip_decay": 0.9, "augment": True,
}  # fmt: skip


def test_every_field_of_a_cell_moves_its_key() -> None:
    base = tiny_cell("bc")
    assert set(CHANGES) <= {f.name for f in fields(Cell)} - {"noise_multiplier"}
    keys = {store.key(replace(base, **{name: value})) for name, value in CHANGES.items()}
    keys.add(store.key(replace(base, epsilon=None, noise_multiplier=8.0)))
    assert len(keys | {store.key(base)}) == len(CHANGES) + 2


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_keys_are_equal_exactly_when_configurations_are(a: float, b: float) -> None:
    """But for digits that depend on the machine which calibrated a noise."""
    same = store.key(tiny_cell("ic", lr=a)) == store.key(tiny_cell("ic", lr=b))
    if same:
        assert math.isclose(a, b, rel_tol=1e-11)
    else:
        assert not math.isclose(a, b, rel_tol=0.0)


@pytest.mark.parametrize("noise", [0.02502743853090997, 0.5688054211570633, 1.0123456789])
def test_keys_do_not_depend_on_the_last_digits_of_a_calibrated_noise(noise: float) -> None:
    keys = {
        store.key(tiny_cell("ic", epsilon=None, noise_multiplier=noise * (1 + shift)))
        for shift in (0.0, 3e-14, -3e-14)
    }
    assert len(keys) == 1


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "result.json"
    store.write_json(path, {"a": 1})

    def broken(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        store.write_json(path, {"a": 2})
    assert store.read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_infinities_never_reach_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.write_json(tmp_path / "x.json", {"epsilon": float("inf")})
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("content", [None, b"", b"{half", b"\xff\xfe"])
def test_missing_and_damaged_files_count_as_absent(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert store.read_json(path) is None
    assert store.read_checkpoint(path) is None


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("evil"),))


def test_a_checkpoint_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"training": Evil()}, tmp_path / "c.pt")
    assert store.read_checkpoint(tmp_path / "c.pt") is None
    assert not (tmp_path / "evil").exists()


def test_checkpoints_come_back(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "history": [(1.0, 0.1, 3, "poisson")]}
    store.write_checkpoint(tmp_path / "c.pt", state)
    back = store.read_checkpoint(tmp_path / "c.pt")
    assert torch.equal(back["w"], state["w"])
    assert back["history"] == state["history"]


def test_results_are_readable_by_anybody(tmp_path: Path) -> None:
    store.write_json(tmp_path / "x.json", {"a": [1.5, None]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [1.5, None]}
