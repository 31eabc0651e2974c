"""docs/zoo.md out of what the zoo has kept."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zoo_models

PAGE = Path(__file__).parent.parent / "docs" / "zoo.md"
OURS = ("BC", "GBC", "IC public", "IC frozen")
# A further mode needs a method in zoo.py and its column's name here.
COLUMNS = (*OURS, "IC one backward", "oracle", "oracle of one backward", "stock Opacus")

_HEAD = """# The zoo

Does your network train privately with its BatchNorm in place? For every network below: random weights, four
random images (of the smallest size that the plain network takes, 32 pixels for most), **one private step** in
each mode, `finalize`, a strict load of the released weights into a plain network, and equal outputs. Families
of [timm](https://github.com/huggingface/pytorch-image-models) 1.0.31 are there with their smallest variant, a
few with several; those whose smallest variant has more than 60 million parameters are left out.

- **BC**, **GBC**: `clipping="batch"`, the latter with mini-sets of two; public statistics.
- **IC public**, **IC frozen**: `clipping="flat", grad_sample_mode="hooks"` with `batch_norm=public_loader`
  and `batch_norm="frozen"`.
- **IC one backward**: IC public with `grad_sample_mode="bk"`, the default.
- **oracle**: the release of IC frozen, without noise and in float64, is the one of a loop over single samples
  in plain autograd, to 10⁻⁴ (the clip bound alone is 10⁻⁵ smaller, so that it holds in floats);
  **oracle of one backward**: the same with `"bk"`. Both for one or two networks of each kind.
- **stock Opacus**: the same step after `ModuleValidator.fix`, which replaces BatchNorm by fresh GroupNorms.

A blank was not run. `python benchmarks/zoo.py` makes this page out of `benchmarks/results/zoo.json`, where
the errors are longer.
"""


def write_page(kept: dict[str, Any]) -> None:
    """Write the page."""
    groups = {
        "torchvision": [f"torchvision {name}" for name in zoo_models.TORCHVISION.split()],
        "timm, convolutional networks with BatchNorm": [f"timm {name}" for name in zoo_models.TIMM.split()],
        "timm, others": [f"timm {name}" for name in zoo_models.OTHERS.split()],
    }
    columns = [c for c in COLUMNS if any(c in row for row in kept.values())]
    parts = [_HEAD, "## In short\n", _table(["", "networks", *columns], _summaries(groups, kept, columns))]
    reasons: list[str] = []
    for title, networks in groups.items():
        rows = [[name.split()[1], *_cells(kept.get(name, {}), columns, reasons)] for name in networks]
        parts += [f"## {title}\n", _table(["network", *columns], rows)]
    if reasons:
        listed = (f"{i}. {text}" for i, text in enumerate(reasons, 1))
        wrapped = (textwrap.fill(text, 110, subsequent_indent="   ") for text in listed)
        parts += ["## What the numbers in brackets say\n", "\n".join(wrapped)]
    PAGE.write_text("\n".join(part.rstrip("\n") + "\n" for part in parts))


def _summaries(groups: dict[str, list[str]], kept: dict[str, Any], columns: list[str]) -> Iterable[list[str]]:
    for title, networks in groups.items():
        yield [title, str(len(networks)), *(_share(networks, kept, column) for column in columns)]


def _share(networks: list[str], kept: dict[str, Any], column: str) -> str:
    tried = [kept[n][column]["outcome"] for n in networks if column in kept.get(n, {})]
    return f"{sum(outcome == 'ok' for outcome in tried)} of {len(tried)}" if tried else ""


def _cells(row: dict[str, Any], columns: list[str], reasons: list[str]) -> Iterable[str]:
    for column in columns:
        outcome = row.get(column, {}).get("outcome", "")
        if outcome in ("", "ok"):
            yield outcome
            continue
        text = _in_short(outcome)
        if text not in reasons:
            reasons.append(text)
        yield f"no ({reasons.index(text) + 1})"


def _in_short(outcome: str) -> str:
    """The first sentence of an error, without what differs from layer to layer."""
    if "trainable layer with buffers" in outcome:
        return (
            "NotImplementedError: Model contains a trainable layer with buffers (BatchNorm that `fix` missed)"
        )
    if "BackwardHookFunction is a view" in outcome:
        return "RuntimeError: Output 0 of BackwardHookFunction is a view and is being modified inplace"
    line = " ".join(outcome.split())
    return line if len(line) <= 300 else line[:297] + "..."


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
