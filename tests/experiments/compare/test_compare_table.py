"""`opacus-bc compare` on a CSV file of the user's own, and what it says of delta and batch sizes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_breast_cancer

from opacus_bc import cli
from opacus_bc.experiments.compare import command, presets
from opacus_bc.experiments.compare.plan import automatic_delta
from opacus_bc.experiments.training.methods import METHODS


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """569 rows of 30 numbers, and a diagnosis."""
    path = tmp_path_factory.mktemp("table") / "cancer.csv"
    found = load_breast_cancer()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*found.feature_names, "diagnosis"])
        for numbers, label in zip(found.data, found.target, strict=True):
            writer.writerow([*numbers, found.target_names[label]])
    return path


def arguments(table: Path, out: Path, *more: str) -> list[str]:
    own = ["compare", "--dataset", str(table), "--target", "diagnosis", "--methods", "ic", "gbc-8"]
    return [*own, "--seeds=1", "--epochs=3", "--jobs=1", "--no-costs", "--json", "--out", str(out), *more]


def test_a_csv_file_is_compared_with_a_network_that_keeps_its_batch_norm(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(table, tmp_path)) == 0
    printed = json.loads(capsys.readouterr().out)
    facts = printed["facts"]
    assert (facts["model"], facts["dataset"], facts["samples"]) == ("mlp", "cancer.csv", "rows")
    assert (facts["private_size"], facts["public_size"], facts["test_size"]) == (427, 48, 94)
    assert facts["delta"] == automatic_delta(427) == 1e-3 < 1 / 427
    assert "--target diagnosis" in facts["command"]
    rows = {row["name"]: row for row in printed["rows"]}
    assert list(rows) == ["no-dp", "ic", "gbc-8"]
    assert rows["ic"]["mean"] > 85 > rows["ic"]["majority_share"]
    assert all(row["epsilon"] <= 8 for row in rows.values() if row["budget"])
    page = (tmp_path / "report.md").read_text()
    assert "48 public and 94 test rows" in page
    assert "columns are standardised by the public rows" in page
    assert "image" not in page.partition("## ")[0].replace("images, and scaled", "")


def test_a_large_delta_is_told_once_and_not_again_by_every_run(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments(table, tmp_path, "--delta=0.1"), "--epochs=1", "--methods", "ic"]) == 0
    assert capsys.readouterr().err.count("is no less than 1/427") == 1


def test_batch_sizes_of_a_table_follow_the_number_of_its_rows(table: Path) -> None:
    preset = presets.preset(str(table))
    assert preset.model == "mlp"
    for name in ("ic", "gbc-8", "bc"):
        setting = preset.setting(METHODS[name])
        for size in (427, 4_500, 45_000):
            expected = setting.batch_size * math.sqrt(size / 45_000)
            assert presets.scaled(setting, preset.private_size, size).batch_size == round(expected)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--dataset", "{table}"], "name its column of classes: --target COLUMN"),
        (["--target", "x"], "--target x: goes with a CSV file as --dataset"),
        (
            ["--dataset", "{table}", "--target", "x"],
            "--target x: {table} has no such column; it has mean radius",
        ),
        (["--dataset", "nowhere.csv", "--target", "x"], "nowhere.csv: no such file"),
        (["--dataset", "{table}", "--target", "diagnosis", "--model", "smallnet"], "fails on rows of (30,)"),
        (
            ["--dataset", "{table}", "--target", "diagnosis", "--weights", "{table}", "--model", "timm:x"],
            "goes with images, not with",
        ),
        (
            ["--dataset", "{table}", "--target", "diagnosis", "--public", "."],
            "--public .: goes with a folder",
        ),
    ],
)
def test_a_mistake_about_a_table_is_told_in_one_line_before_any_work(
    more: list[str],
    words: str,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "execute", lambda *_, **__: pytest.fail("work has begun"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *(word.format(table=table) for word in more)]) == 2
    captured = capsys.readouterr()
    assert words.format(table=table) in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("delta", "methods", "warned"),
    [
        ("0.01", ["ic"], "--delta=0.01 is no less than 1/1350: publishing a random sample of 1350"),
        ("0.01", ["ic", "user-ic"], "--delta=0.01 is no less than 1/1350: publishing a random sample"),
        ("0.01", ["user-ic"], "--delta=0.01 is no less than 1/1000: publishing all samples of a random user"),
        ("0.0009", ["user-ic"], ""),
        ("0.0007", ["ic"], ""),
        ("auto", ["ic"], ""),
        ("0.01", ["no-dp"], ""),
    ],
)
def test_compare_warns_of_a_delta_of_one_over_n_or_more(
    delta: str,
    methods: list[str],
    warned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise ValueError("far enough")

    monkeypatch.setattr(command, "execute", stop)
    run = ["compare", "--delta", delta, "--methods", *methods, "--out", str(tmp_path)]
    assert cli.main(run) == 2
    said = capsys.readouterr().err.removesuffix("opacus-bc: far enough\n")
    assert said.startswith(f"opacus-bc: warning: {warned}") if warned else not said
