"""The report: one table, one recommendation, as text for the terminal, Markdown, HTML and JSON."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from opacus_bc.accounting.display import rounded_up
from opacus_bc.engine.statement import counted
from opacus_bc.experiments.compare import plots
from opacus_bc.experiments.compare.looks import looks
from opacus_bc.experiments.compare.recommendation import recommend
from opacus_bc.experiments.compare.summary import Row
from opacus_bc.experiments.training import canvas
from opacus_bc.experiments.training.store import write_file, write_json

HEAD = (
    "method", "accuracy", "certified ε", "adjacency", "σ", "σ_eff", "L", "2s", "time", "memory",
    "batch", "lr", "C",
)  # fmt: skip
LEGEND = (
    "**accuracy**: test accuracy after the last epoch, mean and standard deviation over seeds. "
    "**certified ε**: upper bound at the given δ, by the f-DP accountant. "
    "**σ**: noise multiplier (noise over L2-sensitivity); **σ_eff**: what is left of it for the accountant, "
    "σ/√L for L separately clipped groups. "
    "**2s**: noise on the mean update relative to individual clipping at equal C, σ and batch size (2s for "
    "mini-sets of s samples). "
    "**time**: per epoch, the median of three rounds and their range; **memory**: of all tensors but the "
    "data set, at its peak; both relative to plain "
    "SGD, as trained here. "
    "**batch**, **lr**, **C**: expected batch size, learning rate, clip bound."
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything the report says.

    Attributes:
        facts: What was compared: data set, model, epochs and so on.
        rows: One a method and budget.
        tuned: Whether learning rates and clip bounds were searched for.
        tuned_on_public: Whether that search saw public images alone.
        public_apart: Whether the user brought public images, and none were cut off the training set.
        failures: Method -> why it could not be trained.
    """

    facts: Mapping[str, Any]
    rows: Sequence[Row]
    tuned: bool = False
    tuned_on_public: bool = False
    public_apart: bool = False
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """One line."""
        f = self.facts
        return (
            f"{f['model']} on {f['dataset']}: {f['private_size']} private, {f['public_size']} public and "
            f"{f['test_size']} test {self.samples}, {counted(f['epochs'], 'epoch')}, "
            f"{counted(f['seeds'], 'seed')}"
        )

    @property
    def samples(self) -> str:
        """What the data consist of."""
        return str(self.facts.get("samples", "images"))

    @property
    def recommendation(self) -> list[str]:
        """See `opacus_bc.experiments.compare.recommendation.recommend`."""
        return recommend(
            self.rows,
            tuned=self.tuned,
            tuned_on_public=self.tuned_on_public,
            public_apart=self.public_apart,
            samples=self.samples,
        )


def cells(row: Row) -> list[str]:
    """A row of the table as text; a dash where there is no such number."""
    spread = "" if row.spread is None else f" ± {row.spread:.1f}"
    return [
        row.title,
        f"{row.mean:.1f}{spread} %",
        "∞" if not row.private else "–" if row.epsilon is None else rounded_up(row.epsilon),
        row.adjacency if row.private else "–",
        _number(row.noise_multiplier, ".3g"),
        _number(row.sigma_eff, ".3g"),
        "–" if row.groups is None else str(row.groups),
        _number(row.noise_factor, "g"),
        _number(row.time, ".2f", " ×") + _range(row),
        _number(row.memory, ".2f", " ×"),
        str(row.batch_size),
        f"{row.lr:.3g}",
        f"{row.clip:.3g}" if row.private else "–",
    ]


def _range(row: Row) -> str:
    """Least and largest ratio of the rounds; nothing for plain SGD itself."""
    if row.time_low is None or row.time_high is None or row.time_low == row.time_high:
        return ""
    return f" ({row.time_low:.2f}–{row.time_high:.2f})"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def print_table(comparison: Comparison, console: Any) -> None:
    """The table and the recommendation in the terminal."""
    from rich.table import Table

    table = Table(title=comparison.title, title_justify="left", header_style="bold", padding=(0, 1))
    for name in HEAD:
        left = name in ("method", "adjacency")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "method")
    budget = None
    for row in comparison.rows:
        if budget is not None and row.budget != budget:
            table.add_section()
        budget = row.budget
        table.add_row(*cells(row))
    console.print(table)
    for name, reason in comparison.failures.items():
        console.print(f"{name} failed: {reason}", markup=False, highlight=False)
    for paragraph in comparison.recommendation:
        console.print("\n" + re.sub(r"\*\*(.+?)\*\*", r"[bold]\1[/bold]", paragraph), highlight=False)


def markdown(comparison: Comparison, pictures: Mapping[str, Path]) -> str:
    """The report as Markdown, with links to the pictures beside it."""
    lines = [f"# {comparison.title}", "", f"`{comparison.facts['command']}`", ""]
    lines += _spaced(comparison.recommendation)
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in comparison.rows]
    told = ("optimizer", "individual clipping", "sampling", "start")
    facts = comparison.facts
    lines += ["", LEGEND, "", *(f"- {name}: {facts[name]}" for name in told if name in facts), ""]
    lines += [f"- {name} failed: {reason}" for name, reason in comparison.failures.items()]
    for title, path in pictures.items():
        lines += ["", f"## {title}", "", f"![{title}]({path.name})"]
    return "\n".join(lines) + "\n"


def page(comparison: Comparison, pictures: Mapping[str, Path]) -> str:
    """The report as one HTML file that needs no other."""
    template = Template(resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    best = {
        (row.budget, row.adjacency): row.mean
        for row in sorted(comparison.rows, key=lambda row: row.mean)
        if row.protected
    }
    styles = looks(comparison.rows)
    body = []
    before: float | None = None
    for row in comparison.rows:
        new = " first" if row.budget != before else ""
        before = row.budget
        wins = row.protected and best[row.budget, row.adjacency] == row.mean
        columns = "".join(f"<td>{html.escape(text)}</td>" for text in cells(row))
        colour = f"--method: {styles[row.name].colour}"
        body.append(f'<tr class="{row.family}{new}{" best" if wins else ""}" style="{colour}">{columns}</tr>')
    figures = "".join(_picture(title, path.read_bytes()) for title, path in pictures.items())
    failed = "".join(
        f"<li>{html.escape(name)} failed: {html.escape(reason)}</li>"
        for name, reason in comparison.failures.items()
    )
    return template.substitute(
        title=html.escape(comparison.title),
        recommendation="".join(f"<p>{_inline(text)}</p>" for text in comparison.recommendation),
        head="".join(f"<th>{html.escape(name)}</th>" for name in HEAD),
        body="\n".join(body),
        legend=_inline(LEGEND),
        failures=f"<ul>{failed}</ul>" if failed else "",
        figures=figures,
        facts="".join(
            f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(_fact(value))}</dd>"
            for name, value in comparison.facts.items()
        ),
    )


def _picture(title: str, png: bytes) -> str:
    """A figure in the size in which it was drawn, however many pixels it has."""
    width = round(int.from_bytes(png[16:20]) / canvas.DPI * 80)  # the header of a PNG file starts with it
    name = html.escape(title)
    content = base64.b64encode(png).decode()
    return (
        f'<figure><figcaption>{name}</figcaption><img alt="{name}" width="{width}" '
        f'src="data:image/png;base64,{content}"></figure>'
    )


def _inline(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))


def _fact(value: Any) -> str:
    return ", ".join(map(_fact, value)) if isinstance(value, (list, tuple)) else str(value)


def _spaced(paragraphs: Sequence[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (paragraph, "")]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The report as plain values; every number that the table rounds is here in full."""
    rows = []
    for row in comparison.rows:
        values = asdict(row) | {"mean": row.mean, "spread": row.spread, "standard_error": row.standard_error}
        rows.append(values)
    return {
        "facts": dict(comparison.facts),
        "tuned": comparison.tuned,
        "recommendation": comparison.recommendation,
        "rows": rows,
        "failures": dict(comparison.failures),
    }


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Write report.md, report.html, compare.json and the pictures; returns the files."""
    pictures = plots.draw_all(comparison.rows, folder)
    files = {"report.md": markdown(comparison, pictures), "report.html": page(comparison, pictures)}
    for name, text in files.items():
        write_file(folder / name, text.encode())
    write_json(folder / "compare.json", as_json(comparison))
    return [folder / name for name in (*files, "compare.json")] + list(pictures.values())
