"""What layerwise clipping does to each layer, from public data only: a table, and a plot over training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opacus_bc.block_optimizer import BlockOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer.

    Attributes:
        layer: Its name.
        group: The clip group that it belongs to.
        entries: Weight entries that are not frozen.
        norm: e_h, its mean gradient norm on public data.
        clip_bound: C_h of its group; 0 if all entries are frozen.
        noise_std: Standard deviation of the noise on an entry of the released sum.
        noise_to_signal: Expected norm of the layer's noise over the largest signal that clipping lets
            through, ``tau sqrt(d) / (k min(e_h, C_h))`` for k clipped vectors: at least this much of an
            update is noise.
    """

    layer: str
    group: str
    entries: int
    norm: float
    clip_bound: float
    noise_std: float
    noise_to_signal: float


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Rows for every layer, and the layer norms at every estimation so far.

    Attributes:
        rows: The layers as they are now.
        history: (step, e_h by layer) for every estimation.
    """

    rows: Sequence[LayerRow]
    history: Sequence[tuple[int, dict[str, float]]]

    def table(self) -> str:
        """The rows as text."""
        head = ("layer", "group", "entries", "e_h", "C_h", "noise std", "noise/signal")
        body = [
            (
                row.layer,
                row.group,
                str(row.entries),
                *(f"{v:.3g}" for v in (row.norm, row.clip_bound, row.noise_std, row.noise_to_signal)),
            )
            for row in self.rows
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
        return self.table()

    def plot(self, path: str | Path) -> None:
        """Draw the layer norms over training (the paper's first figure) into a file.

        Raises:
            ImportError: matplotlib is not installed.
        """
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


def layer_report(optimizer: BlockOptimizer) -> LayerReport:
    """The report of an optimizer with ALC; reads nothing that comes from private data but the weights' sizes.

    Raises:
        ValueError: The optimizer has no ALC.
    """
    adaptive = optimizer.adaptive
    if adaptive is None:
        raise ValueError("layer_report() needs layer norms from public data: pass alc= to make_private")
    sizes = {name: p.numel() for name, p in optimizer._named_params()}
    for name, mask in adaptive.frozen.items():
        sizes[name] -= int(mask.sum())
    stds = {
        name: block.noise_std / factor
        for block in optimizer.blocks()
        for name, factor in zip(block.names, block.factors, strict=True)
    }
    groups = {name: group for group, names in optimizer.layers.items() for name in names}
    bounds = optimizer.clip_bounds
    vectors = float(optimizer.expected_batch_size)
    rows = []
    for layer, names in adaptive.layers.items():
        entries = sum(sizes[name] for name in names)
        norm, bound = adaptive.norms[layer], bounds.get(groups[names[0]], 0.0)
        std = stds[names[0]] if entries else 0.0
        signal = vectors * min(norm, bound)
        noise = std * math.sqrt(entries)
        rows.append(
            LayerRow(
                layer=layer,
                group=groups[names[0]],
                entries=entries,
                norm=norm,
                clip_bound=bound,
                noise_std=std,
                noise_to_signal=noise / signal if signal else (math.inf if noise else 0.0),
            )
        )
    return LayerReport(rows=rows, history=list(adaptive.history))
