"""What layerwise clipping does to each layer, from public data only: a table, and a plot over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from torch import Tensor

from opacus_bc.alc.adaptive import AdaptiveClipping
from opacus_bc.mechanism.blocks import Block
from opacus_bc.mechanism.names import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer; at least ``noise_to_signal`` of its update is noise.

    That is the expected norm of the layer's noise over the largest signal that clipping lets through,
    ``tau sqrt(d) / (k min(e_h, C_h))`` for k clipped vectors.
    """

    layer: str
    group: str  # the clip group that it belongs to
    entries: int  # those that are not frozen
    norm: float  # e_h, the mean gradient norm on public data
    clip_bound: float  # C_h of its group; 0 if all entries are frozen
    noise_std: float  # of the noise on an entry of the released sum
    noise_to_signal: float


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Rows for every layer as it is now, and the history: (step, e_h by layer) for every estimation."""

    rows: Sequence[LayerRow]
    history: Sequence[tuple[int, dict[str, float]]]
    unit: Unit = "sample"  # what one clipped vector belongs to

    def table(self) -> str:
        """The rows as text."""
        head = ("layer", "group", "entries", "e_h", "C_h", "noise std", "noise/signal")
        body = [
            (layer, group, str(entries), *(f"{value:.3g}" for value in values))
            for layer, group, entries, *values in map(astuple, self.rows)
        ]
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (head, *body)
        )

    def __str__(self) -> str:
        """The table, and who is protected where that is not a sample."""
        if self.unit != "user":
            return self.table()
        return f"{self.table()}\none clipped vector is one user, with all their samples of a step"

    def plot(self, path: str | Path) -> None:
        """Draw the layer norms over training (the paper's first figure) into a file."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "layer_report().plot() needs matplotlib: pip install 'opacus-bc[experiments]'"
            ) from error
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        steps = [step for step, _ in self.history]
        for row in self.rows:
            values = [norms[row.layer] for _, norms in self.history]
            axes.plot(steps, values, marker="o", markersize=2, label=row.layer)
        if any(value > 0 for _, norms in self.history for value in norms.values()):
            axes.set_yscale("log", nonpositive="mask")
        axes.set_xlabel("step")
        axes.set_ylabel("mean gradient norm on public data")
        if len(self.rows) <= 20:
            axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path)


def layer_report(
    adaptive: AdaptiveClipping, parameters: Mapping[str, Tensor], blocks: Sequence[Block], *, vectors: int
) -> LayerReport:
    """ALC on the next step's blocks of ``vectors`` clipped vectors; of the weights only sizes are read."""
    live = {name: p.numel() for name, p in parameters.items()}
    for name, mask in adaptive.frozen.items():
        live[name] -= int(mask.sum())
    scales = {
        name: (block.clip_bound / factor, block.noise_std / factor)
        for block in blocks
        for name, factor in zip(block.names, block.factors, strict=True)
    }
    groups = {name: group for group, names in adaptive.rule.groups.items() for name in names}
    rows = []
    for layer, names in adaptive.layers.items():
        group = groups[names[0]]
        entries = sum(live[name] for name in names)
        bound, std = scales[names[0]]
        if not any(live[name] for name in adaptive.rule.groups[group]):
            bound = 0.0  # a frozen group rides along in another one's block
        std = std if entries else 0.0
        norm = adaptive.norms[layer]
        signal, noise = vectors * min(norm, bound), std * math.sqrt(entries)
        rows.append(
            LayerRow(
                layer=layer,
                group=group,
                entries=entries,
                norm=norm,
                clip_bound=bound,
                noise_std=std,
                noise_to_signal=noise / signal if signal else (math.inf if noise else 0.0),
            )
        )
    return LayerReport(rows=rows, history=list(adaptive.history), unit=adaptive.rule.unit)
