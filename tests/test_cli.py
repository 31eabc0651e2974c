"""The command line prints what the library computes, and answers mistakes with one line."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from opacus_bc import accounting, cli

PAPER = ["--layers=8", "--batch-size=64", "--dataset-size=54000", "--epochs=50", "--delta=1e-5"]


def test_the_papers_setting_is_reported_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["epsilon", "--noise-multiplier", "2.5", *PAPER]) == 0
    printed = capsys.readouterr().out
    for words in (
        "1.565",  # 1.5642, never rounded down
        "add/remove one",
        "approximation",
        "0.5212",
        "advantage",
        "65.32",
        "not a bound",
        "prv",
        "rdp",
        "gdp",
    ):
        assert words in printed
    assert printed.count("approximation, not a bound") == 2


def test_users_are_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 users, 60 a step: the rate is 1/17, and the epsilon that of 17 steps an epoch."""
    budget = ["--noise-multiplier", "1.1", "--json"]
    assert cli.main(["epsilon", *budget, "--users=1000", "--batch-size=60", "--epochs=2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["adjacency"], facts["protects"]) == (
        "add/remove one user",
        "one user with all their samples",
    )
    expected = accounting.epsilon(noise_multiplier=1.1, sample_rate=1 / 17, steps=34, delta=1e-5)
    assert facts["epsilon"] == expected
    assert cli.main(["epsilon", *budget, "--users=1000", f"--sample-rate={1 / 17}", "--steps=34"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == expected
    assert cli.main(["calibrate", "--epsilon=3", "--users=1000", "--batch-size=60", "--epochs=2"]) == 0
    assert "add/remove one user" in capsys.readouterr().out
    wrong = ["--users=1000", "--dataset-size=9", "--batch-size=60", "--epochs=2"]
    assert cli.main(["epsilon", *budget, *wrong]) == 2
    assert "give --users or --dataset-size, not both" in capsys.readouterr().err


def test_json_holds_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["epsilon", "--noise-multiplier", "2.5", *PAPER, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    run = {"sample_rate": 1 / 844, "steps": 42200, "noise_multiplier": 2.5, "delta": 1e-5}
    assert facts["steps"] == 42200
    assert facts["epsilon"] == accounting.epsilon(layers=8, **run)  # type: ignore[arg-type]
    assert facts["epsilon_without_layers"] == accounting.epsilon(**run)  # type: ignore[arg-type]
    assert facts["opacus"]["gdp"] < facts["epsilon"] < facts["opacus"]["rdp"]
    assert facts["mu_clt_approximation"] == pytest.approx(0.52, abs=0.005)


def test_settings_that_exhaust_stock_accountants_are_answered_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["epsilon", "--noise-multiplier", "0.5", *PAPER]) == 0
    printed = capsys.readouterr().out
    assert "no answer" in printed
    assert "no meaningful protection" in printed


def test_no_noise_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["epsilon", "--noise-multiplier", "0", "--sample-rate", "0.1", "--steps", "3", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["epsilon"] == "inf"


def test_calibration_meets_the_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "curve.png"
    assert cli.main(["calibrate", "--epsilon", "8", *PAPER, "--json", "--plot", str(plot)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 7.992 <= facts["epsilon"] <= 8.0
    assert facts["effective_noise_multiplier"] == pytest.approx(facts["noise_multiplier"] / 8**0.5)
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("epsilon --noise-multiplier -1 --sample-rate 0.1 --steps 3", "noise_multiplier=-1.0"),
        ("epsilon --noise-multiplier 1 --sample-rate 1.5 --steps 3", "sample_rate=1.5"),
        ("epsilon --noise-multiplier 1 --sample-rate 0.5 --steps 3 --delta 0", "delta=0.0"),
        ("epsilon --noise-multiplier 1", "--batch-size, --dataset-size (or --users) and --epochs"),
        ("epsilon --noise-multiplier 1 --batch-size 10 --dataset-size 5 --epochs 1", "batch_size=10"),
        ("calibrate --sample-rate 0.5 --steps 3", "exactly one"),
        ("calibrate --epsilon -2 --sample-rate 0.5 --steps 3", "target_epsilon=-2.0"),
    ],
)
def test_wrong_values_get_one_line_and_exit_code_two(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cli.COMMANDS)


def test_without_the_extra_one_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: object, **named: object) -> object:
        if name == "tyro":
            raise ImportError(name)
        return real(name, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    assert cli.main(["epsilon"]) == 2
    assert capsys.readouterr().err == cli.EXTRA + "\n"
    assert "opacus-bc[experiments]" in cli.EXTRA


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["epsilon", "--noise-multiplier", "abc"],
            "--noise-multiplier: could not convert string to float: 'abc'",
        ),
        (["epsilonn"], "epsilonn"),
        (["epsilon", "--nois", "3"], "--nois"),
        (["epsilon"], "--noise-multiplier"),
        ([], "epsilon, calibrate"),
        (["epsilon", "--noise-multiplier=1", "--steps=3", "--sample-rate=1", "--sampling=foo"], "'foo'"),
        (["calibrate", "--no-such-option=1", "--epsilon=8"], "no-such-option"),
    ],
)
def test_options_that_cannot_be_read_get_one_line_and_exit_code_two(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("opacus-bc: ")
    assert words in printed.err
