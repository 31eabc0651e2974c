"""`opacus-bc reproduce`: all of the paper is in it, nothing is trained twice, the page tells the truth."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from sklearn.datasets import load_digits

from opacus_bc import accounting, cli
from opacus_bc.experiments.reproduce import page, runs, tables
from opacus_bc.experiments.reproduce.guarantees import Setting
from opacus_bc.experiments.reproduce.registry import SPECS, select
from opacus_bc.experiments.reproduce.results import check, rows_of
from opacus_bc.experiments.reproduce.runs import family, jobs_of, load_results
from opacus_bc.experiments.reproduce.sheets import SHEETS
from opacus_bc.experiments.reproduce.specs import VARIANTS, Claim, Run, Spec, cell_of, variants_of
from opacus_bc.experiments.training.models import build
from opacus_bc.experiments.training.store import Store, read_json, write_json

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reproduction.md"
COMMITTED = ROOT / "benchmarks" / "results" / "reproduce"


def test_every_figure_table_and_printed_number_is_in_the_registry() -> None:
    figures = {f"fig{n}" for n in range(1, 19)} - {"fig9", "fig12", "fig18"}
    assert set(SPECS) == figures | {"fig9a", "fig9b", "fig12a", "fig12b", "fig18a", "fig18b"}
    assert set(SHEETS) == {"table1", "table2", "table3", "layers", "guarantees"}
    printed = {(p.value, p.epoch) for spec in SPECS.values() for run in spec.runs for p in run.paper}
    assert printed == {
        (88.31, 20), (90.24, 50), (60, 20), (67, 50), (20, 10), (59.02, 50), (40.58, 50), (80.55, 50),
        (61.19, 50), (43.42, 50), (35, 50), (40, 50), (84.80, 50), (50.38, 50), (45.11, 50), (21.12, 50),
        (66.66, 50), (46.35, 50),
    }  # fmt: skip
    facts = {fact.paper for fact in SHEETS["guarantees"].facts}
    assert {1.513, 0.52, 5.783, 1.99, 0.51} <= facts
    bounds = {run.clip for run in SPECS["fig3"].runs}
    assert bounds == {0.095, 0.0095}
    for spec in SPECS.values():
        assert spec.where.startswith("figure")
        for run in spec.runs:
            for variant in variants_of(run, tuple(VARIANTS)):
                cell_of(spec, run, variant)  # no contradiction in any setting


def test_only_the_sound_variant_can_have_an_epsilon() -> None:
    for spec in SPECS.values():
        for run in spec.runs:
            for variant in variants_of(run, tuple(VARIANTS)):
                cell = cell_of(spec, run, variant)
                assert cell.published == (run.mode != "none" and variant in ("paper", "code"))
                if variant == "sound" and run.mode != "none":
                    assert cell.method.batch_norm == ("public" if run.norm == "batch" else None)
                if variant == "unprotected":
                    assert cell.method.batch_norm in ("unprotected", None)
                    assert run.mode == "none" or cell.method.batch_norm == "unprotected"


def test_settings_are_the_papers() -> None:
    spec = SPECS["fig12b"]
    run = next(run for run in spec.runs if run.label == "σ = 2.5")
    cell = cell_of(spec, run, "paper")
    assert (cell.lr, cell.lr_decay, cell.momentum, cell.batch_size, cell.clip) == (0.025, 0.9, 0.0, 64, 0.2)
    assert (cell.noise_multiplier, cell.epochs, cell.augment) == (2.5, 50, True)
    assert cell.method.alc is not None
    assert cell.method.alc.layers == "module"
    zhang = next(run for run in SPECS["fig4"].runs if run.label == "Zhang")
    method = cell_of(SPECS["fig4"], zhang, "sound").method
    assert method.alc is not None
    assert (method.alc.rule, method.alc.layers, zhang.clip) == ("norm", "parameter", 1.0)


@pytest.mark.parametrize(
    ("sigma", "layers", "size", "h", "mu"), [(2.5, 8, 54_000, 1.514, 0.521), (1.5, 8, 54_000, 5.783, 1.991)]
)
def test_guarantees_follow_from_the_papers_formula(
    sigma: float, layers: int, size: int, h: float, mu: float
) -> None:
    setting = Setting(sigma=sigma, layers=layers, size=size)
    a = math.sqrt(layers) / sigma
    by_hand = math.sqrt(math.exp(a * a) * ndtr(1.5 * a) + 3 * ndtr(-0.5 * a) - 2)
    assert setting.h() == pytest.approx(by_hand, rel=1e-9) == pytest.approx(h, abs=6e-4)
    # T is a whole number of steps here, 42,188 instead of the paper's 42,187.5
    assert setting.mu() == pytest.approx(math.sqrt(2 * 50 * 64 / size) * by_hand, rel=1e-4)
    assert setting.mu() == pytest.approx(mu, abs=6e-4)


@pytest.mark.parametrize(
    ("setting", "sampling", "lower", "upper"),
    [
        # epsilon at delta = 1e-5 by independent tools, from below and from above
        (Setting(sigma=2.5, layers=8), "poisson", 1.55459, 1.56505),
        (Setting(sigma=2.5, layers=8), "partition", 1.55459, 2.08267),
        (Setting(sigma=2.5, layers=8), "shuffle", 65.3192, 65.3193),
        (Setting(sigma=2.5, layers=8, batch_size=1024), "poisson", 7.92779, 7.93840),
        (Setting(sigma=0.01875, layers=62), "poisson", 7.296e6, 7.318e6),
    ],
)
def test_certified_values_lie_where_independent_tools_put_them(
    setting: Setting, sampling: Any, lower: float, upper: float
) -> None:
    assert lower <= setting.epsilon(sampling) <= upper


def test_the_clt_promises_more_than_the_papers_own_trade_off_function_gives() -> None:
    setting = Setting(sigma=1.5, layers=8)
    assert setting.epsilon_of_mu(1e-10) < 0.95 * setting.epsilon_of_theory(1e-10)


# A small registry of its own, on data that needs no files ------------------------------------------------


def small(**changes: Any) -> Spec:
    base = Run(label="a", clip=0.2, sigma=0.5, layers="module")
    values: dict[str, Any] = {
        "id": "fig99", "title": "a test", "where": "figure 99", "model": "bn_lenet5", "dataset": "digits",
        "axis": "C", "epochs": 2, "runs": (base, replace(base, label="b", clip=0.4)),
        "claims": (Claim(words="a is better than b", above=("a", "b")),),
    }  # fmt: skip
    return Spec(**(values | changes))


def result_of(
    spec: Spec, label: str, variant: Any, accuracies: list[float], **changes: Any
) -> dict[str, Any]:
    run = next(run for run in spec.runs if run.label == label)
    cell = cell_of(spec, run, variant)
    return {
        "family": family(cell),
        "cell": {"limit": None, "delta": 1e-5},
        "accuracies": accuracies,
        "protected": variant == "sound",
        "epsilon": 3.0 if variant == "sound" else None,
        "history": [[1.0, 0.1, 10 * len(accuracies), "poisson"]] if variant == "sound" else [],
    } | changes


def collect(*results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(result["family"], []).append(result)
    return found


def test_rows_put_ours_next_to_theirs_at_the_same_epoch() -> None:
    from opacus_bc.experiments.reproduce.sweeps import prints

    spec = small()
    spec = replace(spec, runs=(replace(spec.runs[0], paper=prints(50.0, epoch=2)), spec.runs[1]))
    kept = collect(
        result_of(spec, "a", "paper", [10.0, 52.0, 90.0]),
        result_of(spec, "a", "paper", [10.0, 50.0]),
        result_of(spec, "a", "sound", [40.0, 30.0, 20.0], epsilon=5.0),
        result_of(spec, "b", "paper", [60.0], cell={"limit": 500, "delta": 1e-5}),
    )
    first, sound, second = [row for row in rows_of(spec, kept) if row.ours is not None]
    assert (first.ours, first.best, first.seeds, first.epoch, first.difference) == (51.0, 51.0, 2, 2, 1.0)
    assert first.verdict == "reached"
    assert (sound.ours, sound.best, sound.verdict) == (30.0, 40.0, "below")
    # fewer epochs than were run cost less, and a number that is not private shows none
    assert sound.epsilon is not None
    by_hand = accounting.epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=20, delta=1e-5)
    assert sound.epsilon == pytest.approx(by_hand)
    assert first.epsilon is None
    assert "not private" in tables.cells(first)
    assert (second.limit, second.paper, second.verdict) == (500, None, "")
    halfway = rows_of(spec, collect(result_of(spec, "a", "paper", [49.0])))[0]
    assert (halfway.verdict, halfway.comparable) == ("partial run", False)
    assert tables.cells(halfway)[6] == "-1.00 *"
    assert {row.verdict for row in rows_of(spec, {}) if row.paper} == {"not run"}


def test_an_epsilon_is_shown_only_if_all_seeds_have_one() -> None:
    spec = small()
    kept = collect(
        result_of(spec, "a", "sound", [1.0, 2.0]), result_of(spec, "a", "sound", [1.0, 2.0], epsilon=None)
    )
    assert next(row for row in rows_of(spec, kept) if row.ours is not None).epsilon is None
    leaking = collect(result_of(spec, "a", "unprotected", [1.0, 2.0], epsilon=2.0, protected=False))
    assert next(row for row in rows_of(spec, leaking) if row.ours is not None).epsilon is None


def test_claims_are_checked_at_equal_epochs_and_data() -> None:
    spec = small()
    claim = spec.claims[0]
    kept = collect(result_of(spec, "a", "paper", [50.0, 10.0]), result_of(spec, "b", "paper", [40.0]))
    assert check(claim, rows_of(spec, kept), "paper") == "holds at epoch 1"
    assert check(claim, rows_of(spec, kept), "sound") == "not run"
    kept = collect(
        result_of(spec, "a", "paper", [50.0]),
        result_of(spec, "b", "paper", [60.0], cell={"limit": 900, "delta": 1e-5}),
    )
    assert check(claim, rows_of(spec, kept), "paper") == "not run"
    most = Claim(words="a stays low", at_most=("a", 45.0))
    assert check(most, rows_of(spec, kept), "paper") == "fails at epoch 1"
    kept = collect(result_of(spec, "a", "paper", [50.0]), result_of(spec, "b", "paper", [40.0]))
    for one, words in (
        (Claim(words="", best=("a", "b")), "holds"),
        (Claim(words="", best=("b", "a")), "fails"),
        (Claim(words="", within=(("a", "b"), 40.0, 50.0)), "holds"),
        (Claim(words="", within=(("a", "b"), 41.0, 50.0)), "fails"),
        (Claim(words="", gap=("b", "a")), "-10.0 points"),
    ):
        assert check(one, rows_of(spec, kept), "paper") == f"{words} at epoch 1"
    with pytest.raises(ValueError, match="no run"):
        small(claims=(Claim(words="", above=("a", "c")),))


def test_kept_runs_are_not_trained_again_and_longer_ones_go_on(tmp_path: Path) -> None:
    spec, store = small(), Store(tmp_path)
    ((_, one),) = jobs_of([spec], variants=("sound",), epochs=1, limit=700)[:1]
    seen: list[int] = []
    arguments: dict[str, Any] = {"root": tmp_path, "data": tmp_path, "download": False}
    first = runs.run_cell(one, seen.append, **arguments)
    assert seen == [0, 1]
    assert not runs.missing([("", one)], store)
    two = replace(one, epochs=2)
    assert runs.missing([("", two)], store)
    longer = runs.run_cell(two, seen.append, **arguments)
    assert seen == [0, 1, 1, 2]
    assert longer["accuracies"][:1] == first["accuracies"]
    assert len(longer["accuracies"]) == 2
    assert longer["epsilon"] > first["epsilon"]
    whole = runs.run_cell(two, seen.append, **(arguments | {"root": tmp_path / "new"}))
    assert {k: v for k, v in whole.items() if k != "seconds_per_epoch"} == {
        k: v for k, v in longer.items() if k != "seconds_per_epoch"
    }
    # A lost checkpoint costs time, never a result.
    for path in tmp_path.glob("cells/*.pt"):
        path.unlink()

    class Stopped(Exception):
        pass

    def stop(epoch: int) -> None:
        if epoch == 1:
            raise Stopped

    with pytest.raises(Stopped):
        runs.run_cell(replace(one, epochs=3), stop, **arguments)
    kept = read_json(store.cell(replace(one, epochs=0)))
    assert kept["accuracies"] == longer["accuracies"]
    assert list(load_results(store)) == [family(one)]


def test_equal_runs_of_different_figures_are_trained_once() -> None:
    names = [name for name, _ in jobs_of([SPECS["fig11"], SPECS["fig12b"]], variants=("paper",), core=True)]
    assert len(names) == 5  # C = 0.2 of figure 11 is sigma = 0.5 of figure 12b
    plain = jobs_of([SPECS["fig8"], SPECS["fig13"]], variants=("paper", "sound"))
    assert len(plain) == 5 + 5
    both = jobs_of([SPECS["fig18a"]], variants=("paper",), seeds=2)
    assert [cell.seed for _, cell in both] == [0, 0, 1, 1]


def test_every_committed_result_is_found_by_the_command() -> None:
    paths = sorted((COMMITTED / "cells").glob("*.json"))
    assert paths
    cells = {path.name: read_json(path)["cell"] for path in paths}
    assert "opacus_bc.experiments.reproduction.networks:bn_lenet5" in {c["model"] for c in cells.values()}
    seeds = 1 + max(cell["seed"] for cell in cells.values())
    for limit in {cell["limit"] for cell in cells.values()}:
        jobs = jobs_of(list(SPECS.values()), variants=tuple(VARIANTS), seeds=seeds, limit=limit)
        names = {Store(COMMITTED).cell(replace(cell, epochs=0)).name for _, cell in jobs}
        assert {name for name, cell in cells.items() if cell["limit"] == limit} <= names


def test_the_network_behind_a_kept_name_is_the_one_it_was() -> None:
    spec = SPECS["fig11"]
    name = cell_of(spec, spec.runs[0], "code").model
    assert name == "opacus_bc.experiments.reproduction.networks:bn_lenet5"
    layers = [type(layer).__name__ for layer in build(name).children()]
    assert layers[:4] == ["Conv2d", "BatchNorm2d", "Tanh", "AvgPool2d"]


# From the command line, on a small set in MNIST's own file format -----------------------------------------


def write_mnist(folder: Path) -> None:
    """scikit-learn's digits as MNIST files: 2,000 training and 400 test images of 28 x 28."""
    bunch = load_digits()
    images = np.kron(bunch.images, np.ones((3, 3))) * 255 / 16
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, index in (("train", np.arange(2000) % 1400), ("t10k", np.arange(1397, 1797))):
        x, y = images[index], bunch.target[index].astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, len(x), 28, 28) + x.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, len(y)) + y.tobytes())


def test_one_figure_runs_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    write_mnist(tmp_path)
    out = tmp_path / "out"
    command = [
        "reproduce", "--only", "fig11", "guarantees", "--runs", "C = 0.2", "--epochs", "1", "--limit", "2000",
        "--jobs", "1", "--data", str(tmp_path), "--out", str(out),
    ]  # fmt: skip
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert "2/2" in printed.err
    for words in ("C = 0.2", "84.80", "not private", "1/50, 2,000", "0.5213", "7.318e+06"):
        assert words in printed.out
    assert (out / "fig11.png").stat().st_size > 5000
    assert "| C = 0.2 | sound | 1/50, 2,000 images |" in (out / "report.md").read_text()
    files = {path: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}
    assert len(files) == 2
    assert cli.main([*command, "--json"]) == 0
    again = capsys.readouterr()
    assert {path: path.stat().st_mtime_ns for path in files} == files, "nothing is trained again"
    rows = json.loads(again.out)["figures"]["fig11"]["rows"]
    done = {row["variant"]: row["epsilon"] for row in rows if row["ours"] is not None}
    rate = 1 / math.ceil(1800 / 64)
    expected = accounting.epsilon(noise_multiplier=0.5, layers=8, sample_rate=rate, steps=29, delta=1e-5)
    assert done == {"paper": None, "sound": pytest.approx(expected)}


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    for name in (*SPECS, *SHEETS):
        assert f"│ {name} " in printed
    assert "84.80" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--only fig99", "--only fig99: not among fig1,"),
        ("--only fig11 --runs C=9", "--runs 'C=9': not among 'C = 0.05'"),
        ("--epochs 0", "--epochs"),
        ("--seeds 0", "--seeds"),
        ("--limit 99", "--limit 99"),
        ("--jobs 0", "--jobs"),
        ("--only fig11 --data nowhere", "MNIST is not in"),
        ("--only fig11 --out /proc/nowhere", "cannot write there"),
        ("--page nowhere.md", "no such file"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_models_select_their_figures() -> None:
    specs, sheets = select(["resnet18"])
    assert [spec.id for spec in specs] == [
        "fig1",
        "fig2",
        "fig3",
        "fig4",
        "fig5",
        "fig16",
        "fig17",
        "fig18a",
        "fig18b",
    ]
    assert sheets == []


# The page ------------------------------------------------------------------------------------------------


def test_the_pages_numbers_are_those_of_the_committed_results() -> None:
    text = PAGE.read_text()
    assert page.render(text, load_results(Store(COMMITTED))) == text, (
        "run: opacus-bc reproduce --out benchmarks/results/reproduce --page docs/reproduction.md"
    )


def test_a_figure_shows_what_was_run_and_names_what_was_not() -> None:
    kept = collect(result_of(SPECS["fig12b"], "σ = 2.5", "paper", [50.0] * 50))
    text = tables.spec_table(SPECS["fig12b"], kept)
    assert text.count("| σ = ") == 1
    assert "σ = 1.5: ≈ 67 (paper, sound)" in text
    assert "σ = 2.5: 50.38 (sound)" in text
    nothing = tables.spec_table(SPECS["fig2"], {})
    assert "|" not in nothing
    assert "m = 64: 88.31 at epoch 20; m = 64: 90.24 at epoch 50." in nothing
    assert "curves only" in tables.spec_table(SPECS["fig14"], {})
    every = {v: result_of(SPECS["fig7"], "C = 0.1", v, [40.0] * 50) for v in ("paper", "sound")}
    assert "Not run" not in tables.spec_table(SPECS["fig7"], collect(*every.values()))


def test_the_page_changes_with_the_results_and_only_between_its_markers(tmp_path: Path) -> None:
    text = "before <!-- table fig11 -->old<!-- end --> after"
    spec = SPECS["fig11"]
    kept = collect(result_of(spec, "C = 0.2", "paper", [71.25] * 50))
    filled = page.render(text, kept)
    assert filled.startswith("before <!-- table fig11 -->")
    assert filled.endswith("<!-- end --> after")
    assert "| C = 0.2 | paper | 50/50 | 71.25 | 71.25 | 84.80 | -13.55 | not private |" in filled
    assert "old" not in filled
    assert page.render(filled, kept) == filled
    value = page.render("h = <!-- value guarantees.h_1.5 --><!-- end -->.", {})
    assert value == "h = <!-- value guarantees.h_1.5 -->5.783<!-- end -->."
    state = page.render("<!-- state --><!-- end -->", kept)
    assert "1 runs with 50 epochs" in state
    assert "1 below" in state  # figure 12b has the same run and the same number
    write_json(tmp_path / "cells" / "x.json", next(iter(kept.values()))[0])
    (tmp_path / "page.md").write_text(text)
    assert page.refresh(tmp_path / "page.md", load_results(Store(tmp_path)))
    assert (tmp_path / "page.md").read_text() == filled


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table fig99 --><!-- end -->",
        "<!-- value guarantees.pi --><!-- end -->",
        "<!-- tabel fig11 --><!-- end -->",
    ],
)
def test_a_marker_that_makes_no_sense_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="marker"):
        page.render(text, {})
