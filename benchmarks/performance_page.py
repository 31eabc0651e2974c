"""docs/performance.md and its pictures, from kept results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binom

from opacus_bc.accounting.display import rounded_up

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
Rows = Sequence[Mapping[str, Any]]
TARGETS = {  # (network, method): (limit, relative to)
    ("resnet18", "BC"): (1.05, "plain SGD"),
    ("resnet18", "GBC s=16"): (1.30, "plain SGD"),
    ("resnet18", "IC + public BatchNorm, hooks"): (1.0, "Opacus, hooks"),
    ("convnet", "IC + public BatchNorm, hooks"): (1.0, "Opacus, hooks"),
    ("bn_lenet5", "IC + public BatchNorm, hooks"): (1.0, "Opacus, hooks"),
    ("resnet18", "IC + public BatchNorm, bk"): (1.15, "plain SGD"),
    ("convnet", "IC + public BatchNorm, bk"): (1.15, "plain SGD"),
    ("bn_lenet5", "IC + public BatchNorm, bk"): (1.25, "plain SGD"),
    ("tf_efficientnet_lite0", "IC + public BatchNorm, bk"): (1.6, "plain SGD"),
}
MEMORY_TARGETS = {  # (network, method): (limit, relative to)
    ("resnet18", "IC + public BatchNorm, bk"): (1.3, "plain SGD"),
    ("convnet", "IC + public BatchNorm, bk"): (1.15, "plain SGD"),
    ("bn_lenet5", "IC + public BatchNorm, bk"): (1.3, "plain SGD"),
}
OVER_HOOKS = ("resnet18", "IC + public BatchNorm, bk", "Opacus, hooks")
HOOKS_TIME, HOOKS_MEMORY = 0.45, 0.25


def write_page(results: Mapping[str, Any], sampling: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
    """Write the page; parts that were not measured are left out."""
    parts = [_HEAD]
    for name, render in _PARTS.items():
        if name in results:
            parts.append(render(results[name]))
    parts += [_choice(choice), _sampling(sampling)]
    PAGE.write_text("\n\n".join(parts) + "\n")


_HEAD = """# Performance

The tables of this page are written from kept measurements by `benchmarks/performance.py`,
`benchmarks/norm_choice.py` and `benchmarks/sampling.py`; `make benchmarks` measures anew. Times are ratios
of the CPU time of whole steps (loader, forward, backward, optimizer), measured in turns in one process with
one thread: the median over rounds, with the quartiles in brackets. Memory is that of all tensors but the
data set, at its peak: the same on every machine. Stock Opacus trains the same network with GroupNorm (the
transformer with LayerNorm). Public statistics of individual clipping are refreshed every tenth step, from a
quarter of a batch: steps with and without are measured apart, and the figure is their mean, one to nine.
What a GPU would show was not measured."""


def _figure(row: Mapping[str, Any]) -> str:
    return f"{row['time']:.2f} ({row['low']:.2f}–{row['high']:.2f})"


def _rounds(rows: Rows) -> str:
    """How many rounds each network had."""
    counts = {row["network"]: len(row["ratios"]) for row in rows if "load" not in row}
    return "rounds: " + _counts(counts or {row["network"]: len(row["ratios"]) for row in rows})


def _loads(rows: Rows) -> str:
    """How busy the machine was and how many rounds there were, where that was kept."""
    seen = [row for row in rows if "load" in row and row["method"] != "plain SGD"]
    if not seen:
        return ""
    loads = [row["load"] for row in seen]
    rounds = {row["network"]: len(row["ratios"]) for row in seen}
    return (
        f"Rows of bk and those measured with them come from runs of their own, with plain SGD in turns "
        f"({_counts(rounds)} rounds), while "
        f"{min(loads):.0f} to {max(loads):.0f} processes wanted the two cores. The load of other rows' runs "
        "was not kept, so that a difference between rows of both kinds may be the machine's."
    )


def _counts(rounds: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in rounds.items())


def _breakdown(part: Mapping[str, Any]) -> str:
    rows = part["rows"]
    phases = list(rows[0]["shares"])
    body = [
        [f"{row['network']}, {'plain SGD' if row['method'] == 'plain SGD' else 'bk'}"]
        + [f"{row['shares'][phase]:.2f}" for phase in phases]
        + [f"{sum(row['shares'].values()):.2f}"]
        for row in rows
    ]
    return "\n\n".join(
        [
            "## What a step of one-backward individual clipping is made of",
            "Shares of a whole step of plain SGD (= 1), medians of single steps without new statistics. "
            "*Backward* of bk makes gradients of activations only. *Rows kept* is what is written down then: "
            "small layers' per-sample gradients, sums for biases and BatchNorm. *Norms* has Gram matrices "
            "of the others, *weighted gradients* their one weight gradient. *Rest*: loader, ledger, SGD.",
            _table(["", *phases, "sum"], body),
        ]
    )


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Order statistics that hold the median with at least 95 % confidence (the range if rounds are few)."""
    below = int(binom.ppf(0.025, len(ordered), 0.5))
    low = max(0, below - 1)
    return ordered[low], ordered[len(ordered) - 1 - low]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _against(mine: Mapping[str, Any], other: Mapping[str, Any], limit: float) -> tuple[str, str]:
    """Time of a row over another one's, round by round where both come from one run, and the verdict."""
    if other["method"] != "plain SGD" and mine.get("run") != other.get("run"):
        ratio = mine["time"] / other["time"]
        return f"{ratio:.2f} (medians of different runs)", "met" if ratio <= limit else "**missed**"
    against = [1.0] * len(mine["ratios"]) if other["method"] == "plain SGD" else other["ratios"]
    ratios = sorted(a / b for a, b in zip(mine["ratios"], against, strict=True))
    ratio, (low, high) = statistics.median(ratios), _median_interval(ratios)
    verdict = "met" if ratio <= limit else "**missed**" if low > limit else "not told apart"
    return f"{ratio:.3f} ({low:.3f}–{high:.3f})", verdict


def _networks(part: Mapping[str, Any]) -> str:
    rows = part["rows"]
    names = list(dict.fromkeys(row["network"] for row in rows))
    found = {(row["network"], row["method"]): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    sizes = {row["network"]: row["parameters"] for row in rows}
    head = ["", *(f"{name} ({sizes[name]:,} parameters)" for name in names)]

    def cells(method: str, figure: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [method, *(figure(found[n, method]) if (n, method) in found else "–" for n in names)]

    times = _table(head, [cells(m, _figure) for m in methods])
    memory = _table(head, [cells(m, lambda row: f"{row['memory']:.2f}") for m in methods])
    checks = []
    for (network, method), (limit, relative) in TARGETS.items():
        if (network, method) not in found:
            continue
        mine, other = found[network, method], found[network, relative]
        words, verdict = _against(mine, other, limit)
        checks.append([f"{method}, {network}", f"{limit:g} × {relative}", words, verdict])
    for (network, method), (limit, relative) in MEMORY_TARGETS.items():
        if (network, method) in found:
            ratio = found[network, method]["memory"] / found[network, relative]["memory"]
            verdict = "met" if ratio <= limit else "**missed**"
            checks.append(
                [f"memory: {method}, {network}", f"{limit:g} × {relative}", f"{ratio:.2f}", verdict]
            )
    network, method, relative = OVER_HOOKS
    if (network, method) in found:
        mine, other = found[network, method], found[network, relative]
        words, verdict = _against(mine, other, HOOKS_TIME)
        checks.append([f"{method}, {network}", f"{HOOKS_TIME:g} × {relative}", words, verdict])
        ratio = mine["memory"] / other["memory"]
        verdict = "met" if ratio <= HOOKS_MEMORY else "**missed**"
        checks.append(
            [f"memory: {method}, {network}", f"{HOOKS_MEMORY:g} × {relative}", f"{ratio:.2f}", verdict]
        )
    return "\n\n".join(
        [
            "## A step, by network",
            f"Batch {rows[0]['batch']}; {_rounds(rows)}. **Time** of a step over plain SGD's:",
            times,
            "**Peak memory** over plain SGD's:",
            memory,
            _loads(rows),
            "What we hold ourselves to, and the median of the rounds' ratios (its 95 % confidence interval):",
            _table(["", "at most", "measured", ""], checks),
            *_not_cheaper(names, found),
        ]
    )


def _not_cheaper(names: Sequence[str], found: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """Networks on which one backward saves no time against Opacus's hooks."""
    _, bk, hooks = OVER_HOOKS
    slow = [n for n in names if (n, bk) in found and (n, hooks) in found]
    slow = [n for n in slow if found[n, bk]["time"] > 0.9 * found[n, hooks]["time"]]
    return [
        f"**Where one backward is not cheaper**: on the {name} it takes {found[name, bk]['time']:.2f} times "
        f"plain SGD's time where Opacus's hooks take {found[name, hooks]['time']:.2f}. Many small layers "
        "over a sequence leave little arithmetic to save, and each costs calls. Its memory is "
        f"{found[name, bk]['memory'] / found[name, hooks]['memory']:.2f} of theirs all the same. On the "
        "smallest networks the calls count too: bn_lenet5 has the largest ratio of the convolutional ones."
        for name in slow
    ]


def _growth(title: str, words: str, key: str, picture: str) -> Any:
    def render(part: Mapping[str, Any]) -> str:
        rows = part["rows"]
        _draw(rows, key, picture)
        values = sorted({row[key] for row in rows})
        found = {(row[key], row["method"]): row for row in rows}
        methods = list(dict.fromkeys(row["method"] for row in rows))
        head = ["", *(f"{value:,}" for value in values)]
        methods = [method for method in methods if method != "plain SGD"]
        methods = [method for method in methods if all((value, method) in found for value in values)]
        times = _table(head, [[m, *(_figure(found[v, m]) for v in values)] for m in methods])
        memory = _table(head, [[m, *(f"{found[v, m]['memory']:.2f}" for v in values)] for m in methods])
        return "\n\n".join(
            [
                f"## {title}",
                f"{words} {part['rounds']} rounds.",
                f"![{title}]({picture})",
                "**Time** of a step over plain SGD's:",
                times,
                "**Peak memory** over plain SGD's:",
                memory,
            ]
        )

    return render


def _draw(rows: Rows, key: str, picture: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, what in zip(panels, ("time", "memory"), strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = sorted((row for row in rows if row["method"] == method), key=lambda row: row[key])
            x, y = [row[key] for row in mine], [row[what] for row in mine]
            axes.plot(x, y, marker="o", markersize=3, label=method)
            if what == "time":
                axes.fill_between(x, [row["low"] for row in mine], [row["high"] for row in mine], alpha=0.12)
        values = sorted({row[key] for row in rows})
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(values, [f"{value:,}" for value in values], fontsize=8)
        axes.minorticks_off()
        ticks = [
            t
            for t in (1 / 16, 1 / 8, 0.25, 0.5, 1, 1.5, 2, 4, 8, 16, 32, 64)
            if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]
        ]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.set_xlabel({"batch": "batch size", "parameters": "parameters"}[key])
        axes.set_ylabel(f"{what} of a step / plain SGD" if what == "time" else "peak memory / plain SGD")
        axes.grid(alpha=0.3)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(PAGE.parent / picture, dpi=130)


def _panels(picture: str, curves: Sequence[tuple[str, str, Rows, str, str]]) -> None:
    """One panel for each (x label, y label, rows, key of x, key of y), with quartiles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(curves), 3.4), layout="constrained")
    for axes, (x_label, y_label, rows, x_key, y_key) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True
    ):
        mine = sorted(rows, key=lambda row: float(row[x_key]))
        x, y = [row[x_key] for row in mine], [row[y_key] for row in mine]
        axes.plot(x, y, marker="o", markersize=4)
        axes.fill_between(x, [row["low"] for row in mine], [row["high"] for row in mine], alpha=0.15)
        axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
        axes.set_xticks(x, [f"{value:,}" for value in x], fontsize=8)
        axes.minorticks_off()
        bottom, top = axes.get_ylim()
        ticks = [t for t in (0.25, 0.5, 0.7, 1, 2, 4, 8, 16, 64, 256, 1024) if bottom <= t <= top]
        axes.set_yticks(ticks, [f"{t:,g}" for t in ticks])
        axes.grid(alpha=0.3)
    figure.savefig(PAGE.parent / picture, dpi=130)


def _choice(choice: Mapping[str, Any]) -> str:
    words = {"keep": "kept", "ghost": "Gram matrices"}
    body = [
        [row["layer"], f"{row['keep']:.2f}", f"{row['ghost']:.2f}", words[row["rule"]]]
        for row in choice["rows"]
    ]
    return "\n\n".join(
        [
            "## How norms are computed, layer by layer",
            "A layer's per-sample gradients are formed and kept until the clipped sum, or only their norms "
            "are computed, from Gram matrices over the T output positions. The rule keeps weights of at most "
            "4 T² entries (T² times the groups); a linear layer at one position needs neither. Norms and "
            "clipped "
            "sum over the layer's plain weight gradient, batch 64, medians of "
            f'{choice["rounds"]} calls (`benchmarks/norm_choice.py`); `grad_sample_mode="bk-rows"` and '
            '`"bk-ghost"` choose one way for all layers.',
            _table(["layer", "kept", "Gram matrices", "the rule takes"], body),
            "By the rule all these layers together take "
            f"{choice['rule_over_best']:.2f} times what the better way for each would take.",
        ]
    )


def _accounting(part: Mapping[str, Any]) -> str:
    relative = "time / that of σ = 1, T = 1,000"
    _panels(
        "performance_accounting.png",
        [
            ("steps T, σ = 1", relative, [r for r in part["rows"] if r["sigma"] == 1], "steps", "time"),
            ("σ, T = 1,000", relative, [r for r in part["rows"] if r["steps"] == 1_000], "sigma", "time"),
        ],
    )
    body = [
        [f"{row['sigma']:g}", f"{row['steps']:,}", rounded_up(row["epsilon"]), _figure(row)]
        for row in part["rows"]
    ]
    return "\n\n".join(
        [
            "## Accounting",
            "CPU time of a certified upper bound on ε at q = 0.01, δ = 10⁻⁵, over that of σ = 1, T = 1,000, "
            f"{part['rounds']} rounds:",
            "![Accounting time over T and σ](performance_accounting.png)",
            _table(["σ", "steps T", "ε", "time"], body),
            "Against dp-accounting and Opacus's PRV at equal certified width: `benchmarks/accounting.py`.",
        ]
    )


def _sampling(sampling: Mapping[str, Any]) -> str:
    labels = ("samples N", "Opacus's draw / ours")
    _panels("performance_sampling.png", [(*labels, sampling["rows"], "N", "ratio")])
    body = [
        [f"{row['N']:,}", f"{row['ratio']:.3g} ({row['low']:.3g}–{row['high']:.3g})"]
        for row in sampling["rows"]
    ]
    return "\n\n".join(
        [
            "## Sampling",
            f"CPU time of Opacus's Poisson draw over ours, expected batch {sampling['batch']:,}, "
            f"{sampling['rounds']} rounds (median and quartiles):",
            "![Sampling over N](performance_sampling.png)",
            _table(["N", "ratio"], body),
        ]
    )


_PARTS = {
    "networks": _networks,
    "batch": _growth(
        "Over the batch size",
        "The convnet. The memory of every method but GBC grows with the batch as plain SGD's does, so these "
        "ratios are flat; GBC holds one mini-set's activations whatever the batch, so its ratio falls.",
        "batch",
        "performance_batch.png",
    ),
    "parameters": _growth(
        "Over the number of parameters",
        "Networks of three wide linear layers. A step of theirs computes little for each parameter, so that "
        "clipping and noise, both linear in the parameters as SGD is, are a large part of it; per-sample "
        "gradients are m copies of the parameters.",
        "parameters",
        "performance_parameters.png",
    ),
    "breakdown": _breakdown,
    "accounting": _accounting,
}
