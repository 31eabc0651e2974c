"""The main command: table and files, nothing computed twice, nothing lost, one line for a mistake."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import linecache
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experiments import other_epsilon, tiny_cell, tiny_data

from opacus_bc import cli
from opacus_bc.experiments.compare import command, plan, presets, report
from opacus_bc.experiments.training import measure
from opacus_bc.experiments.training.data import Source
from opacus_bc.experiments.training.methods import METHODS
from opacus_bc.experiments.training.store import Store, key

ROOT = Path(__file__).parents[3]
QUICK = ["compare", "--methods", "opacus", "gbc-16", "--seeds", "2", "--epochs", "1", "--jobs", "1"]
PICTURES = (
    "accuracy_methods",
    "accuracy_epochs",
    "accuracy_epsilon",
    "accuracy_cost",
    "tradeoff",
    "noise_to_signal",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small comparison on digits, made from the command line."""
    out = tmp_path_factory.mktemp("compare")
    torch.set_num_threads(1)
    assert cli.main([*QUICK, "--out", str(out)]) == 0
    return out


def test_a_comparison_leaves_a_report_and_its_pictures(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"report.md", "report.html", "compare.json", "cells", "costs"} <= names
    for picture in PICTURES:
        assert (finished / f"{picture}.png").stat().st_size > 5000
    assert not list(finished.rglob("*.pt")), "finished cells need no checkpoint"
    assert not list(finished.rglob("*.tmp"))


def test_the_page_needs_no_other_file(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == len(PICTURES)
    for source in sources:
        kind, _, content = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content).startswith(b"\x89PNG")
    assert "$" not in re.sub(r"base64,[^\"]*", "", page), "a placeholder was left"
    for row in json.loads((finished / "compare.json").read_text())["rows"]:
        assert row["title"].replace("'", "&#x27;") in page


def test_every_epsilon_in_the_table_is_confirmed_by_dp_accounting(finished: Path) -> None:
    rows = json.loads((finished / "compare.json").read_text())["rows"]
    private = [row for row in rows if row["budget"] is not None]
    assert len(private) == 2
    for row in private:
        assert row["epsilon"] <= row["budget"] == 8.0
        assert row["epsilon"] == pytest.approx(other_epsilon(row["history"], row["delta"]), rel=1e-3)


def test_the_json_the_table_and_the_files_say_the_same(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*QUICK, "--out", str(finished), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((finished / "compare.json").read_text())
    assert cli.main([*QUICK, "--out", str(finished)]) == 0
    table = capsys.readouterr().out
    text = (finished / "report.md").read_text()
    for row in printed["rows"]:
        shown = f"{row['mean']:.1f} ± {row['spread']:.1f} %"
        assert row["title"] in table
        assert shown in table
        assert f"| {row['title']} | {shown} |" in text
    for head in report.HEAD:
        assert head in table
        assert head in text


def test_a_second_run_trains_and_measures_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("this was done before")

    before = {path: path.read_bytes() for path in finished.rglob("*.json")}
    for module, name in ((command, "train"), (measure, "peak_bytes"), (measure, "time_ratio")):
        monkeypatch.setattr(module, name, forbidden)
    start = time.monotonic()
    assert cli.main([*QUICK, "--out", str(finished)]) == 0
    assert time.monotonic() - start < 100
    assert {path: path.read_bytes() for path in finished.rglob("*.json")} == before


def test_the_command_that_a_report_names_makes_it_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((finished / "compare.json").read_text())
    text = before["facts"]["command"]
    assert f"`{text}`" in (finished / "report.md").read_text()
    monkeypatch.setattr(command, "train", lambda *_, **__: pytest.fail("trained anew"))
    program, *arguments = shlex.split(text)
    assert program == "opacus-bc"
    assert cli.main([*arguments, "--out", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == before


def test_plain_sgd_costs_as_much_as_plain_sgd(finished: Path) -> None:
    rows = {row["name"]: row for row in json.loads((finished / "compare.json").read_text())["rows"]}
    assert rows["no-dp"]["time"] == 1
    assert rows["no-dp"]["memory"] == 1
    for row in rows.values():
        assert 0 < row["time_low"] <= row["time"] <= row["time_high"]
    assert rows["opacus"]["memory"] > 2, "per-sample gradients take memory"
    assert all(row["peak_mib"] > 0 for row in rows.values())


def test_a_method_that_fails_is_told_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = command.train

    def fails(cell: Any, *rest: Any, **named: Any) -> Any:
        if cell.method.name == "gbc-16":
            raise RuntimeError("no such luck\nand more")
        return real(cell, *rest, **named)

    monkeypatch.setattr(command, "train", fails)
    arguments = [
        "compare",
        "--methods",
        "gbc-16",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--jobs",
        "1",
        "--no-costs",
    ]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "GBC s=16 could not be trained: RuntimeError: no such luck\n" in capsys.readouterr().err
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["no-dp"]


def test_tuning_tries_every_method_equally_often_and_says_that_it_is_not_accounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials: list[Any] = []

    def pretend(cell: Any, data: Any, **_: Any) -> dict[str, Any]:
        trials.append(cell)
        return {
            "cell": asdict(cell), "accuracies": [50.0], "public_accuracy": 100 / (1 + abs(cell.lr - wanted)),
            "adjacency": cell.method.adjacency, "test_size": 100, "majority_share": 10.0,
            "protected": cell.method.private, "history": [[1.0, 0.5, 2, "poisson"]], "epsilon": cell.epsilon,
        }  # fmt: skip

    wanted = 3.0
    monkeypatch.setattr(command, "train", pretend)
    arguments = ["compare", "--methods", "opacus", "bc", "gbc-8", "--seeds", "2", "--jobs", "1", "--no-costs"]
    assert cli.main([*arguments, "--tune", "--out", str(tmp_path)]) == 0
    first_seed = [cell for cell in trials if cell.seed == 0]
    assert Counter(c.method.name for c in first_seed) == {"no-dp": 5, "opacus": 5, "bc": 5, "gbc-8": 5}
    assert len(trials) == len(set(trials)), "no trial is repeated as a final run"
    assert len(trials) == 4 * 5 + 4
    assert "not accounted" in capsys.readouterr().out
    for cell in trials:
        if cell.seed == 1:
            rivals = [c for c in first_seed if c.method == cell.method]
            assert abs(cell.lr - wanted) == min(abs(c.lr - wanted) for c in rivals)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dataset mnst", "dataset 'mnst': neither one of digits, mnist"),
        ("--dataset mnist --data nowhere", "MNIST is not in"),
        ("--epsilon 0", "--epsilon 0: must be a positive number"),
        ("--epsilon -3", "--epsilon -3: must be"),
        ("--epsilon nan", "--epsilon nan: must be"),
        ("--epsilon inf", "--epsilon inf: must be"),
        ("--delta 0", "delta=0"),
        ("--delta 1.5", "delta=1.5"),
        ("--methods bc nonsense", "--methods nonsense: not among no-dp, "),
        ("--methods icfrozen", "--methods icfrozen: did you mean --methods ic-frozen? There are no-dp, "),
        ("--methods bc,ic", "--methods bc,ic: did you mean --methods bc ic? Spaces separate names. There"),
        ("--data .", "--data .: --dataset digits reads nothing there; to train on images of your own say"),
        ("--model resnet", "model 'resnet': not one of bn_lenet5"),
        ("--model nowhere:factory", "cannot import module 'nowhere'"),
        ("--model opacus_bc:missing", "module 'opacus_bc' has no 'missing'"),
        ("--model torch.nn:Identity", "--model torch.nn:Identity: gives"),
        ("--seeds 0", "--seeds"),
        ("--epochs 0", "--epochs"),
        ("--jobs 0", "--jobs"),
        ("--out {file}", "cannot write there"),
        ("--out /proc/nowhere", "cannot write there"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_any_work(
    arguments: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("work has begun")

    monkeypatch.setattr(command, "execute", forbidden)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    given = [part.format(file=tmp_path / "file" / "x") for part in arguments.split()]
    assert cli.main(["compare", *(["--out", "results"] if "--out" not in given else []), *given]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_automatic_delta_is_below_one_over_n() -> None:
    from opacus_bc.experiments.compare.plan import automatic_delta

    for size in (2, 9, 10, 11, 999, 1000, 1350, 54_000, 10**6):
        assert 0.0666 / size <= automatic_delta(size) < 0.667 / size


@pytest.mark.parametrize(
    ("model", "methods"),
    [
        ("own_network:tiny", ("ic", "gbc-8")),
        pytest.param("torchvision.models:resnet18", ("opacus", "ic"), marks=pytest.mark.slow),
    ],
)
def test_a_users_own_folder_and_factory_are_accepted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    methods: tuple[str, ...],
) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "pets" / part / label
            folder.mkdir(parents=True)
            for i in range(30):
                level = 60 + 120 * (label == "dog") + int(torch.randint(0, 30, (), generator=generator))
                Image.new("RGB", (20, 24), (level, level, 40)).save(folder / f"{i}.png")
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\n"
        "def tiny(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(inplace=True),\n"
        "                         nn.Flatten(), nn.Linear(256, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    arguments = ["--dataset", "pets", "--model", model, "--methods", *methods, "--seeds", "1"]
    assert cli.main(["compare", *arguments, "--epochs", "1", "--jobs", "1", "--no-costs", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["facts"]["dataset"] == "pets"
    assert printed["facts"]["delta"] == 0.01
    assert (tmp_path / "runs" / "compare-pets" / "report.html").exists()
    kept = (tmp_path / "runs" / "compare-pets" / "cells").glob("*.json")
    assert all(len(json.loads(path.read_text())["cell"]["content"]) == 20 for path in kept)


def test_kept_results_are_of_the_same_data_and_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny_data()
    module = tmp_path / "my_model_of_today.py"
    module.write_text("def factory(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(module.stem)
    before = plan.fingerprint(data, f"{module.stem}:factory")
    assert before == plan.fingerprint(data, f"{module.stem}:factory")
    assert plan.fingerprint(None, None) == ""
    data.test.tensors[0][0, 0, 0, 0] += 1
    other_data = plan.fingerprint(data, f"{module.stem}:factory")
    module.write_text("def factory(): pass")
    linecache.clearcache()
    other_model = plan.fingerprint(data, f"{module.stem}:factory")
    assert len({before, other_data, other_model}) == 3
    cell = tiny_cell("no-dp", epochs=1)
    assert key(cell) == key(replace(cell, content="")) != key(replace(cell, content=before))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def factory(:", "cannot import module"),
        ("raise KeyError('x')", "cannot import module"),
        ("def factory(): raise AttributeError('no such layer')", "no such layer"),
        ("def factory(): assert False", "AssertionError"),
    ],
)
def test_a_broken_model_factory_gives_one_line(
    source: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "broken_" + hashlib.sha256(source.encode()).hexdigest()[:8]
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["compare", "--model", f"{name}:factory"]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_budget_is_shared_by_name_with_its_plot() -> None:
    from opacus_bc.experiments.training.result import spent

    history = ((1.2, 0.1, 40, "poisson"),)
    values = [spent(history, 1e-4, epoch, 4) for epoch in range(1, 5)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(other_epsilon(history, 1e-4), rel=1e-3)
    assert values[0] == pytest.approx(other_epsilon([(1.2, 0.1, 10, "poisson")], 1e-4), rel=1e-3)


def start(out: Path) -> subprocess.Popen[str]:
    arguments = ["compare", "--methods", "ic", "gbc-8", "--seeds", "2", "--epochs", "6", "--jobs", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "opacus_bc", *arguments, "--no-costs", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        start_new_session=True,
    )


def wait_for_a_checkpoint_and_a_result(out: Path) -> None:
    for _ in range(1200):
        if list(out.glob("cells/*.pt")) and list(out.glob("cells/*.json")):
            return
        time.sleep(0.1)
    raise AssertionError("nothing was finished in two minutes")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_by_force_loses_nothing_and_repeats_nothing(how: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(out)
    wait_for_a_checkpoint_and_a_result(out)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # what Ctrl-C does: everybody in the foreground gets it
    else:
        process.kill()
    _, err = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert err.strip().splitlines()[-1].startswith("opacus-bc: interrupted; what is finished is kept in")
        assert "Traceback" not in err
    time.sleep(2)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}
    unfinished = list(out.glob("cells/*.pt"))
    assert kept
    time.sleep(3)
    assert {p: p.stat().st_mtime_ns for p in out.glob("cells/*.json")} == kept, "a worker went on"
    assert [p.stat().st_size > 0 for p in unfinished]
    second = start(out)
    printed, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert not list(out.glob("cells/*.pt"))
    assert "recommend" not in printed or "use" in printed


COMMITTED = sorted((ROOT / "benchmarks" / "results" / "compare").glob("*/compare.json"))
FROM_SCRATCH = [path for path in COMMITTED if not path.parent.name.startswith("pretrained")]


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_every_committed_epsilon_is_confirmed_by_dp_accounting(path: Path) -> None:
    done: dict[tuple[Any, ...], float] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["budget"] is None or row["adjacency"] != "add/remove one":
            continue
        which = (str(row["history"]), row["delta"])
        if which not in done:
            done[which] = other_epsilon(row["history"], row["delta"])
        assert row["epsilon"] <= row["budget"]
        assert row["epsilon"] == pytest.approx(done[which], rel=2e-3)


@pytest.mark.parametrize("path", FROM_SCRATCH, ids=lambda path: path.parent.name)
def test_every_committed_result_is_found_by_the_command(path: Path) -> None:
    facts = json.loads(path.read_text())["facts"]
    dataset = facts["dataset"]
    preset = presets.preset(dataset)
    planned = plan.Plan(
        source=Source(dataset=dataset, root=path), preset=preset, model=facts["model"],
        budgets=tuple(facts["epsilon"]), delta=facts["delta"], methods=tuple(METHODS.values()),
        seeds=facts["seeds"], epochs=facts["epochs"], jobs=1, store=Store(path.parent),
    )  # fmt: skip
    names = {
        planned.store.cell(planned.cell(method, budget, setting, seed)).name
        for method, budget in planned.rows()
        for setting in [presets.fitted(preset.setting(method), method, facts["private_size"])]
        for seed in range(planned.seeds)
    }
    committed = {cell.name for cell in (path.parent / "cells").glob("*.json")}
    assert committed
    assert committed <= names


def test_help_says_how_a_folder_is_split_and_which_delta_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "A folder with subfolders train and test" in shown
    assert "a sixth, drawn at random, is held out as test images" in shown
    assert "the largest power of ten below 2/(3N)" in shown


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in ["dataset", "model", "epsilon", "delta", "methods", "seeds", "tune", "out", "jobs", "json"]:
        assert f"--{option}" in text


def test_the_terminal_table_fits_an_ordinary_width(finished: Path) -> None:
    from rich.console import Console

    from opacus_bc.experiments.compare.summary import make_rows

    results = [json.loads(path.read_text()) for path in sorted((finished / "cells").glob("*.json"))]
    rows = make_rows(results, {})
    facts = json.loads((finished / "compare.json").read_text())["facts"]
    stream = io.StringIO()
    report.print_table(report.Comparison(facts=facts, rows=rows), Console(file=stream, width=150))
    assert max(map(len, stream.getvalue().splitlines())) <= 150
    assert "…" not in stream.getvalue()
    assert len(METHODS) >= len(rows)
