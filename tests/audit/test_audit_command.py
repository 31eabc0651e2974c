"""The command, its table and the copy of it in docs/audit.md."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from scipy.stats import binom

from opacus_bc import cli
from opacus_bc.audit import report
from opacus_bc.audit.claims import Claim, audit_scores
from opacus_bc.audit.command import all_audits, run_audits
from opacus_bc.audit.modes import MODES

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_the_command_prints_claims_bounds_and_verdicts_and_draws_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "audit.png"
    assert cli.main(["audit", "--quick", "--only", "BC, one round", "--plot", str(picture)]) == 0
    captured = capsys.readouterr()
    assert "holds" in captured.out
    assert "95 % confidence" in captured.out
    assert "audit" in captured.err  # the progress bar
    assert picture.stat().st_size > 10_000


def test_json_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--quick", "--only", "IC, one round", "--json"]) == 0
    facts, *_ = json.loads(capsys.readouterr().out)
    assert facts["claimed_epsilon"] > facts["audited_epsilon"] > 0
    assert facts["verdict"] == "holds"


def test_the_table_is_put_between_the_marks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n")
    arguments = ["audit", "--quick", "--only", "BC, one round", "--markdown", "--update", str(page)]
    assert cli.main(arguments) == 0
    text = page.read_text()
    assert "stale" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert capsys.readouterr().out.strip() in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no lines"):
        report.update(page, "table")


def test_the_committed_table_has_the_commands_format_and_refutes_no_claim() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(report.BEGIN) : text.index(report.END)]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert lines[0] == "| " + " | ".join(report.COLUMNS) + " |"
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [cells[0] for cells in rows] == list(all_audits(quick=True))
    assert all(cells[-1] == "holds" for cells in rows)
    assert all(len(cells) == len(report.COLUMNS) for cells in rows)
    # A bound at 95 % may be above a claim that is tight: so many of all rows in one table of a thousand.
    above = [cells[0] for cells in rows if float(cells[-2]) > 1]
    assert len(above) <= binom.isf(1e-3, len(rows), 0.05)
    assert all(float(cells[-2]) < 1.1 for cells in rows)
    assert "`opacus-bc audit" in table
    fifty = [cells for cells in rows if cells[1].startswith("T = 50, q = 0.1, σ_eff = 1")]
    vectorised = [cells for cells in fifty if cells[0] in ("BC", "GBC", "IC", "BK", "BC + ALC")]
    assert len(vectorised) == 5
    assert all(float(cells[4]) >= 0.45 * float(cells[3]) for cells in vectorised)  # assuming nothing
    gaussian = [cells for cells in rows if cells[0].endswith((", one round", ", four rounds"))]
    assert len(gaussian) == len(MODES)
    assert all(float(cells[-2]) >= 0.85 for cells in gaussian)


def test_a_refuted_claim_is_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> object:
        return audit_scores([5.0] * 99, [0.0] * 99, Claim(noise_multiplier=9.0, sample_rate=1.0, steps=1))

    monkeypatch.setattr("opacus_bc.audit.command.all_audits", lambda quick: {"broken": broken})
    assert cli.main(["audit", "--json"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("--only nothing", "names none of"), ("--delta 2", "delta=2.0"), ("--seed -1", "seed=-1")],
)
def test_wrong_values_get_one_line_and_exit_code_two(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", "--quick", *arguments.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:batch_norm='private'")
def test_the_quick_command_takes_less_than_six_minutes_and_holds_everywhere() -> None:
    start = time.process_time()
    results = run_audits(all_audits(quick=True), seed=1)
    assert time.process_time() - start < 360  # of one core: a loaded machine does not count
    assert all(result.verdict == "holds" for result in results)
    assert all(result.audited_epsilon <= result.claimed_epsilon for result in results)


def test_claims_are_rounded_up_and_audited_bounds_down() -> None:
    assert (report.claimed(0.92634), report.audited(0.92675)) == ("0.927", "0.926")
    assert (report.claimed(None), report.audited(math.inf)) == ("–", "∞")
