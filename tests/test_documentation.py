"""The documentation names what exists, and the numbers that a script prints are the ones on the page."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import opacus
import pytest
from support import opacus_differences

import opacus_bc
from opacus_bc import accounting, audit

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = {"CHANGELOG.md", "SECURITY.md"}  # docs/hooks.py takes them from the root folder


def test_every_public_name_has_its_place_in_the_api() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    for module in (opacus_bc, accounting, audit):
        assert set(module.__all__) - {"accounting", "register"} <= documented


def test_every_method_of_the_engine_has_its_place_too() -> None:
    engine = opacus_bc.PrivacyEngine
    ours = [kind for kind in engine.__mro__ if kind.__module__.startswith("opacus_bc.")]
    methods = {name for kind in ours for name in vars(kind) if not name.startswith("_")}
    text = (DOCS / "api" / "engine.md").read_text()
    options = text.partition("::: opacus_bc.PrivacyEngine\n")[2].partition(":::")[0]
    assert set(re.findall(r"^        - (\w+)$", options, re.MULTILINE)) == methods
    assert "inherited_members: true" in options  # most answers are AccountedEngine's


def test_every_page_of_the_navigation_exists_and_every_page_is_in_it() -> None:
    named = set(
        re.findall(r"^ +- (?:[^:\n]+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    )
    notebooks = {f"tutorials/{path.stem}.md" for path in (ROOT / "tutorials").glob("*.ipynb")}
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | MADE | notebooks


def test_links_between_documents_lead_somewhere_in_the_repository_too() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")]
    pages += [ROOT / "benchmarks" / "README.md"]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead


SCRIPTS_WRITE = {"performance.md", "reproduction.md"}  # paragraphs on one line each


def test_prose_is_wrapped() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("[be]*/README.md")]
    long = []
    for page in pages:
        blocks = re.split(r"^```.*$", page.read_text(), flags=re.MULTILINE)
        prose = "\n".join(blocks[::2]).splitlines() if page.name not in SCRIPTS_WRITE else []
        long += [f"{page.name}: {line}" for line in prose if len(line) > 120 and not line.startswith("|")]
    assert not long


def test_the_scaling_page_shows_what_the_model_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "benchmarks" / "scaling_model.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    table, memory = capsys.readouterr().out.strip().split("\n\n")
    page = (DOCS / "scaling.md").read_text()
    assert table in page
    assert memory.rpartition(": ")[2] in page


def test_the_scaling_page_shows_what_was_measured_of_sampling() -> None:
    page = (DOCS / "scaling.md").read_text()
    for row in json.loads((ROOT / "benchmarks" / "results" / "sampling.json").read_text())["rows"]:
        assert f"| {row['N']:,} | {row['ours_us']:,} | {row['opacus_us']:,} |" in page


def test_the_page_on_several_runs_states_upper_bounds_of_what_may_be_quoted() -> None:
    page = (DOCS / "several_runs.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) runs? \| ([\d.]+) \|$", page, re.MULTILINE))
    assert list(rows) == ["one", "two", "five", "ten"]
    accountant = accounting.FDPAccountant()
    for runs, stated in zip((1, 2, 5, 10), map(float, rows.values()), strict=True):
        accountant.history = [(0.6434, 0.01, runs * 2000, "poisson")]
        assert stated - 0.1 < accountant.get_epsilon(1e-5) <= stated
    for words in (
        "All folds share people, so they share an engine",
        "Early stopping",
        "A choice between runs",
    ):
        assert words in page


def test_the_mathematics_names_tests_that_exist() -> None:
    page = (DOCS / "mathematics.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", page))
    assert named
    assert all((ROOT / name).is_file() for name in named)
    assert not re.findall(r"`test_\w+\.py`", page)  # with their folder


def test_documents_name_modules_and_tests_that_exist() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("[be]*/README.md")]
    for page in pages:
        named = re.findall(r"\b((?:opacus_bc|tests|benchmarks|examples)/[\w/]+\.py)\b", page.read_text())
        assert not [name for name in named if not _exists(name)], page


def _exists(name: str) -> bool:
    """Whether a document's path leads somewhere; the package may be installed elsewhere."""
    package = Path(opacus_bc.__file__).parent
    return (package.parent if name.startswith(f"{package.name}/") else ROOT).joinpath(name).is_file()


def test_the_version_stands_in_one_place() -> None:
    for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml"):
        assert opacus_bc.__version__ not in (ROOT / name).read_text(), name


def test_the_changelog_has_a_dated_section_for_this_version_and_nothing_newer() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", name) for name in sections[1:])
    assert sections[1].startswith(f"[{opacus_bc.__version__}] - ")


def test_types_are_visible_to_users() -> None:
    assert (Path(opacus_bc.__file__).parent / "py.typed").is_file()


COSTS = {
    "IC, stock Opacus": ("opacus", "Opacus, hooks"),
    "IC + public BatchNorm": ("ic", "IC + public BatchNorm, bk, differentiated, refresh 1"),
    "GBC, s = 8": ("gbc-8", "GBC s=8"),
    "BC": ("bc", "BC"),
    "BC + ALC by scaling": ("bc-scale", None),
    "BC + ALC, L groups": ("bc-alc", None),
}


@pytest.mark.parametrize("mode", COSTS)
def test_the_table_of_costs_shows_the_numbers_of_the_committed_results(mode: str) -> None:
    method, timed = COSTS[mode]
    results = ROOT / "benchmarks" / "results"
    compared = json.loads((results / "compare" / "mnist" / "compare.json").read_text())["rows"]
    accuracies = {
        row["budget"]: f"{row['mean']:.1f} ± {row['spread']:.1f} %"
        for row in compared
        if row["name"] == method
    }
    networks = json.loads((results / "performance.json").read_text())["networks"]["rows"]
    costs = {
        row["network"]: f"{row['time']:.2f} ×, {row['memory']:.2f} ×"
        for row in networks
        if row["method"] == timed
    }
    small, large = costs.get("bn_lenet5", "BC's, estimates ≤ 5 %"), costs.get("resnet18", "not measured")
    line = next(
        line for line in (DOCS / "choosing.md").read_text().splitlines() if line.startswith(f"| {mode} |")
    )
    assert line.endswith(f"| {small} | {large} | {accuracies[1.57]} | {accuracies[8.0]} |")


@pytest.mark.parametrize(
    ("beginning", "method"),
    [
        ("`PublicStatistics(loader=public, differentiate=False)`", "IC + public BatchNorm, bk"),
        ("`public`, `batch_norm_refresh=10`", "IC + public BatchNorm, bk, differentiated"),
        ("`public`, new statistics in every step", "IC + public BatchNorm, bk, differentiated, refresh 1"),
    ],
)
def test_the_table_of_steps_shows_the_committed_measurements(beginning: str, method: str) -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "performance.json").read_text())["networks"]["rows"]
    times = {row["network"]: f"{row['time']:.2f} ×" for row in rows if row["method"] == method}
    line = next(
        line for line in (DOCS / "choosing.md").read_text().splitlines() if line.startswith(f"| {beginning}")
    )
    assert line.endswith(f"| {times['bn_lenet5']} | {times['convnet']} | {times['resnet18']} |")


def test_the_table_of_views_shows_the_committed_runs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "views.json").read_text())
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for views in (1, 8):
        found = [run["accuracy"] for name, run in runs.items() if f" views={views} " in name]
        cells = [f"{accuracy:.2f} %" for accuracy in (*found, sum(found) / len(found))]
        assert f"| {views} | {' | '.join(cells)} | " in page


def test_the_tables_from_scratch_show_the_committed_runs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "from_scratch.json").read_text())
    page = (ROOT / "benchmarks" / "README.md").read_text()
    section = page.split("## From scratch on CIFAR-10")[1].split("\n## ")[0]
    shown = sorted(re.findall(r"\d\d\.\d\d %", section))
    committed = [
        f"{run['accuracy']:.2f} %" for run in runs.values() if run["epsilon"] == 8 or run["epochs"] > 3
    ]
    assert set(committed) <= set(shown)
    assert set(shown) <= set(committed)


def test_the_migration_page_lists_opacus_tests_that_differ_as_the_plugin_does() -> None:
    assert opacus_differences.table() in (DOCS / "migration.md").read_text()
    names = [name for found in opacus_differences.DIFFERENCES for name in found.tests]
    assert len(names) == len(set(names)) > 0
    assert all(found.why and found.words for found in opacus_differences.DIFFERENCES)


def test_tests_of_opacus_that_are_listed_exist() -> None:
    folder = Path(opacus.__file__).parent / "tests"
    text = "\n".join(page.read_text() for page in folder.rglob("*_test.py"))
    for found in opacus_differences.DIFFERENCES:
        for name in found.tests:
            owner, test = name.split("::")
            assert re.search(rf"^class {owner.replace('*', '[A-Za-z]*')}\(", text, re.MULTILINE)
            assert f"    def {test}(" in text
        assert all(f"class {name}(" in text for name in found.but)
