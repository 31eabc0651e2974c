"""The page's numbers: whatever stands between markers is written from kept results, the words stay.

A marker is an HTML comment, so that the page reads as ordinary Markdown:

    <!-- table fig11 -->...<!-- end -->      a figure's or a sheet's table
    <!-- summary -->...<!-- end -->          every number that the paper prints
    <!-- value guarantees.eps_2.5 -->...<!-- end -->   one computed fact, inside a sentence
    <!-- state -->...<!-- end -->            what was run
"""

from __future__ import annotations

import re
from pathlib import Path

from opacus_bc.experiments.reproduce import drawings, tables
from opacus_bc.experiments.reproduce.facts import Sheet
from opacus_bc.experiments.reproduce.guarantees import GUARANTEES
from opacus_bc.experiments.reproduce.registry import SPECS
from opacus_bc.experiments.reproduce.results import Results, rows_of, slow_norms
from opacus_bc.experiments.reproduce.runs import family
from opacus_bc.experiments.reproduce.sheets import SHEETS
from opacus_bc.experiments.reproduce.specs import Spec, cell_of
from opacus_bc.experiments.training.store import write_file

PICTURES = "images/reproduction"  # beside the page
_ENOUGH_EPOCHS = 5
_MARKER = re.compile(r"(<!-- (table|value|summary|state)(?: ([\w.]+))? -->)(.*?)(<!-- end -->)", re.DOTALL)


def render(text: str, results: Results) -> str:
    """The page with every marked part written anew.

    Raises:
        ValueError: A marker names something that does not exist, or is not closed.
    """
    if text.count("<!-- end -->") != len(_MARKER.findall(text)):
        raise ValueError("the page has a marker that is unknown or not closed by <!-- end -->")

    def fill(found: re.Match[str]) -> str:
        opening, kind, name, _, closing = found.groups(default="")
        content = _content(kind, name, results)
        return opening + (content if kind == "value" else f"\n\n{content}\n\n") + closing

    return _MARKER.sub(fill, text)


def _content(kind: str, name: str, results: Results) -> str:
    if kind == "summary":
        return tables.summary_table(results)
    if kind == "state":
        return _state(results)
    if kind == "table" and name in SPECS:
        picture = f"\n\n{_link(SPECS[name])}" if _drawn(SPECS[name], results) else ""
        return _title(SPECS[name]) + tables.spec_table(SPECS[name], results) + picture
    if kind == "table" and name in SHEETS:
        picture = f"\n\n{_link(SHEETS[name])}" if name == GUARANTEES.id else ""
        return _title(SHEETS[name]) + tables.sheet_table(SHEETS[name]) + picture
    sheet, _, key = name.partition(".")
    if kind == "value" and sheet in SHEETS:
        for fact in SHEETS[sheet].facts:
            if fact.key == key:
                return tables.fact_value(fact)
    raise ValueError(f"the page has a marker '{kind} {name}': there is no such {kind}")


def _link(part: Spec | Sheet) -> str:
    return f"![{part.title}]({PICTURES}/{part.id}.png)"


def _drawn(spec: Spec, results: Results) -> bool:
    """Whether a figure has curves that are worth a picture."""
    return any(row.epoch >= _ENOUGH_EPOCHS for row in rows_of(spec, results))


def _title(part: Spec | Sheet) -> str:
    return f"**{part.id}: {part.title}** ({part.where})\n\n"


def _state(results: Results) -> str:
    """How many runs there are, how long they are, and what became of the paper's numbers."""
    everything = [result for group in results.values() for result in group]
    epochs = sum(len(result["accuracies"]) for result in everything)
    printed = {  # several figures share runs and print their numbers again
        (family(cell_of(spec, row.run, row.variant)), row.limit, row.paper): row.verdict
        for spec in SPECS.values()
        for row in rows_of(spec, results)
        if row.paper and row.ours is not None
    }
    counts = {
        verdict: sum(found == verdict for found in printed.values())
        for verdict in ("reached", "above", "below", "partial run")
    }
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [
        f"{len(everything)} runs with {epochs:,} epochs in all are kept. Of {len(printed)} different pairs "
        f"of a run and a printed number: {words} (a partial run has fewer epochs or images)."
    ]
    for result in everything:
        if result.get("layer_norms"):
            slow, total = slow_norms(result)
            first, last = result["layer_norms"][0], result["layer_norms"][-1]
            grown = sum(last[name] > first[name] for name in first if name in last)
            lines.append(
                f"Figure 1: after {len(result['accuracies'])} epochs {slow} of {total} tensors keep more "
                f"than half of their first gradient norm, and {grown} of them have grown: too short a run to "
                "show the slow fall."
            )
    return " ".join(lines)


def refresh(path: Path, results: Results) -> bool:
    """Write the page's marked parts and its pictures anew; returns whether the text changed.

    Raises:
        ValueError: The page does not exist or has a marker that makes no sense.
    """
    if not path.is_file():
        raise ValueError(f"--page {path}: no such file; the words of the page are not generated")
    before = path.read_text(encoding="utf-8")
    after = render(before, results)
    if after != before:
        write_file(path, after.encode())
    folder = path.parent / PICTURES
    for spec in SPECS.values():
        if _link(spec) in after:
            folder.mkdir(parents=True, exist_ok=True)
            drawings.draw(spec, results, folder)
    if _link(GUARANTEES) in after:
        folder.mkdir(parents=True, exist_ok=True)
        drawings.draw_guarantees(folder)
    return after != before
