"""The command line prints what the library computes, and answers mistakes with one line."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import pytest

from opacus_bc import accounting, cli
from opacus_bc.cli import budget, mistakes
from opacus_bc.cli.mistakes import mistyped, options
from opacus_bc.experiments.training.methods import DEFAULT, GROUPS, METHODS, NEEDS_WEIGHTS

FRAME = str.maketrans("│|", "  ")
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
        ("epsilon --noise-multiplier -1 --sample-rate 0.1 --steps 3", "--noise-multiplier=-1.0"),
        ("epsilon --noise-multiplier 1 --sample-rate 1.5 --steps 3", "--sample-rate=1.5"),
        ("epsilon --noise-multiplier 1 --sample-rate 0.5 --steps 3 --delta 0", "--delta=0.0"),
        ("epsilon --noise-multiplier 1", "--batch-size, --dataset-size (or --users) and --epochs"),
        (
            "epsilon --noise-multiplier 1 --batch-size 10 --dataset-size 5 --epochs 1",
            "--batch-size=10 must not exceed --dataset-size=5",
        ),
        ("epsilon --noise-multiplier 1 --layers 0 --sample-rate 0.5 --steps 3", "--layers=0 must be"),
        ("epsilon --noise-multiplier 1 --sample-rate 0.5 --steps -3", "--steps=-3"),
        ("epsilon --noise-multiplier 1 --users 1 --batch-size 1 --epochs 1", "--users=1"),
        ("epsilon --noise-multiplier 1 --batch-size 0 --dataset-size 5 --epochs 1", "--batch-size=0"),
        ("epsilon --noise-multiplier 1 --batch-size 1 --dataset-size 0 --epochs 1", "--dataset-size=0"),
        ("epsilon --noise-multiplier 1 --batch-size 1 --dataset-size 5 --epochs -1", "--epochs=-1"),
        ("calibrate --sample-rate 0.5 --steps 3", "exactly one target: --epsilon, --mu, or --tpr with --fpr"),
        ("calibrate --epsilon 3 --mu 1 --sample-rate 0.5 --steps 3", "got --epsilon 3 and --mu 1."),
        ("calibrate --epsilon -2 --sample-rate 0.5 --steps 3", "--epsilon=-2.0 must be a number above 0"),
        ("calibrate --epsilon 2 --delta 2 --sample-rate 0.5 --steps 3", "--delta=2.0 must lie"),
        ("calibrate --epsilon 2 --layers 0 --sample-rate 0.5 --steps 3", "--layers=0 must be"),
        ("calibrate --mu -1 --sample-rate 0.5 --steps 3", "--mu=-1.0 must be a number above 0"),
        ("calibrate --tpr 0.5 --sample-rate 0.5 --steps 3", "--tpr and --fpr go together"),
        ("calibrate --epsilon 2 --fpr 0.5 --sample-rate 0.5 --steps 3", "--tpr and --fpr go together"),
        ("calibrate --tpr 0.5 --fpr 1 --sample-rate 0.5 --steps 3", "--fpr=1.0 must lie strictly between"),
        ("calibrate --tpr 0.1 --fpr 0.5 --sample-rate 0.5 --steps 3", "--tpr=0.1 must lie strictly between"),
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
    assert not re.search(r"\b(target|at|sample|batch|dataset)_\w+|noise_multiplier", captured.err)


@pytest.mark.parametrize("size", [["--dataset-size=1000"], ["--users=1000"]], ids=["samples", "users"])
@pytest.mark.parametrize("command", [["epsilon", "--noise-multiplier=1"], ["calibrate", "--epsilon=8"]])
def test_a_delta_of_one_over_n_or_more_is_warned_of(
    command: list[str],
    size: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "report", lambda plan, sigma, layers, delta, *rest: {"delta": delta})
    who = "all samples of a random user" if "users" in size[0] else "a random sample"
    run = [*command, *size, "--batch-size=500", "--epochs=1", "--json"]
    for delta, warned in (("1e-3", True), ("9e-4", False)):
        assert cli.main([*run, f"--delta={delta}"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["delta"] == float(delta), "standard output stays JSON"
        expected = f"opacus-bc: warning: --delta={float(delta):g} is no less than 1/1000: publishing {who}"
        assert printed.err.startswith(expected) if warned else not printed.err


def test_users_are_enough_to_warn_of_delta_where_a_sample_rate_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "report", lambda *_: {})
    run = ["epsilon", "--noise-multiplier=1", "--sample-rate=0.5", "--steps=2", "--delta=0.01", "--json"]
    assert cli.main([*run, "--users=100"]) == 0
    assert "--delta=0.01 is no less than 1/100" in capsys.readouterr().err
    assert cli.main(run) == 0
    assert not capsys.readouterr().err, "nobody knows N"


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
        (["epsilon", "--nois", "3"], "--nois: epsilon has no such option; did you mean --noise-multiplier?"),
        (
            ["epsilon", "--sigma", "3"],
            "--sigma: epsilon has no such option; did you mean --noise-multiplier?",
        ),
        (["calibrate", "--eps=3"], "did you mean --epsilon?"),
        (["calibrate", "--target-epsilon", "3"], "did you mean --epsilon?"),
        (["calibrate", "--target_delta", "3"], "did you mean --delta?"),
        (["calibrate", "--epsilom", "3"], "did you mean --epsilon?"),
        (["calibrate", "--bach-size", "3"], "did you mean --batch-size?"),
        (["compare", "--method", "bc"], "did you mean --methods?"),
        (["compare", "--no-cost"], "did you mean --no-costs?"),
        (["compare", "--no-json"], "--no-json: compare has no such option"),
        (
            ["epsilon", "--epsilon", "3"],
            "--epsilon: epsilon has no such option; calibrate and compare have it",
        ),
        (["epsilon", "--seeds", "3"], "compare and reproduce have it"),
        (["compare", "--tpr", "3"], "calibrate has it"),
        (["--sigma", "3"], "--sigma: name a command first: epsilon, calibrate"),
        (["epsilonn"], "did you mean epsilon?"),
        (["epsilon"], "--noise-multiplier"),
        ([], "epsilon, calibrate"),
        (["epsilon", "--noise-multiplier=1", "--steps=3", "--sample-rate=1", "--sampling=foo"], "'foo'"),
        (
            ["calibrate", "--xyz=1", "--epsilon=8"],
            "--xyz: calibrate has no such option; opacus-bc calibrate --h",
        ),
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


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_that_help_shows_is_known_to_the_one_who_answers_mistakes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = set(
        re.findall(r"^[│ ] {1,2}(?:-h, )?(--[\w-]+)(?:, (--[\w-]+))?", capsys.readouterr().out, re.MULTILINE)
    )
    named = {option for pair in shown for option in pair if option} - {"--help"}
    assert named == options(cli.COMMANDS[command])


def test_other_names_lead_to_options_that_exist() -> None:
    known = set().union(*map(options, cli.COMMANDS.values()))
    assert set(mistakes._OTHER_NAMES.values()) <= known
    for name, meant in mistakes._OTHER_NAMES.items():
        (said,) = {
            found
            for command, made in cli.COMMANDS.items()
            if meant in options(made) and name not in options(made)
            if (found := str(mistyped([command, name], cli.COMMANDS)).partition("mean ")[2].split("?")[0])
        }
        assert said == meant


def test_options_may_be_written_with_underscores_as_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["epsilon", "--noise_multiplier=1", "--sample_rate=0.1", "--steps=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_help_shows_both_names_of_a_switch_that_is_on_and_the_text_fits_its_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    text = " ".join(capsys.readouterr().out.translate(FRAME).split())
    assert "--costs, --no-costs measure time and memory relative to plain SGD; --no-costs leaves them" in text
    assert "out. (default: True)" in text
    assert "--no-json" not in text


def test_help_lists_every_method_and_every_group_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    text = " ".join(capsys.readouterr().out.translate(FRAME).split())
    for name, method in METHODS.items():
        mark = "* " if name in DEFAULT else "w " if name in NEEDS_WEIGHTS else ""
        assert f" {mark}{name}: {method.title} " in text
    for name, members in GROUPS.items():
        assert f" {name}: the group {' '.join(members)} " in text
