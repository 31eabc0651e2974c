"""Tutorials run at their smallest setting, and what the notebooks show is what the scripts say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jupytext
import matplotlib as mpl
import pytest
import torch

mpl.use("agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent.parent / "tutorials"
NAMES = (
    "quickstart",
    "keep_your_batchnorm",
    "fine_tune_a_pretrained_model",
    "adaptive_layerwise_clipping",
    "privacy_accounting",
    "protect_users",
    "auditing",
    "scaling_out",
    "reproduce_the_paper",
)


def notebook(name: str) -> list[dict[str, Any]]:
    """The cells of a notebook."""
    cells: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return cells


def source(cell: Any) -> str:
    return "".join(cell["source"])


def test_every_tutorial_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs_at_its_smallest_setting(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[list[int]] = []
    plt.close("all")  # what a failed tutorial left open
    monkeypatch.setenv("OPACUS_BC_QUICK", "1")
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.get_fignums()) or plt.close("all"))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with mpl.rc_context():
        runpy.run_path(str(FOLDER / f"{name}.py"))
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    pictures = sum("plt.show()" in source(cell) for cell in notebook(name) if cell["cell_type"] == "code")
    assert len(shown) == pictures
    assert all(len(figures) == 1 for figures in shown)
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_script_executed_from_top_to_bottom(name: str) -> None:
    script, cells = jupytext.read(FOLDER / f"{name}.py").cells, notebook(name)
    assert [(c["cell_type"], source(c)) for c in cells] == [(c["cell_type"], c["source"]) for c in script]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert "error" not in kinds
        drawn = any("image/png" in output.get("data", {}) for output in cell["outputs"])
        assert drawn == ("plt.show()" in source(cell))
