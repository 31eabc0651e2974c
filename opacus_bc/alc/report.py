"""What clipping and noise do to each layer, from public data only: a table, and a plot over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from opacus_bc.alc.adaptive import AdaptiveClipping
from opacus_bc.mechanism.blocks import Block
from opacus_bc.mechanism.layerwise import Groups
from opacus_bc.mechanism.names import Unit
from opacus_bc.public.norms import mean_group_norms


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer; at least ``noise_to_signal`` of its update is noise.

    That is the expected norm of the layer's noise over the largest signal that clipping lets through: what
    there would be if all k clipped vectors pointed the same way. For ALC it is
    ``tau sqrt(d) / (k min(e_h, C_h))``.
    """

    layer: str
    group: str  # the clip group that it belongs to
    entries: int  # those that are not frozen
    norm: float  # e_h, the mean gradient norm on public data
    clip_bound: float  # C_h of its group; 0 if all entries are frozen
    noise_std: float  # of the noise on an entry of the released sum
    signal: float  # the norm of what clipping lets through in a step, at most

    @property
    def noise(self) -> float:
        """The expected norm of the layer's noise in the released sum."""
        return self.noise_std * math.sqrt(self.entries)

    @property
    def noise_to_signal(self) -> float:
        """Noise over signal, at least."""
        return ratio(self.noise, self.signal)


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Rows for every layer as it is now, and the history: (step, e_h by layer) for every estimation."""

    rows: Sequence[LayerRow]
    history: Sequence[tuple[int, dict[str, float]]]
    unit: Unit = "sample"  # what one clipped vector belongs to

    @property
    def noise_to_signal(self) -> float:
        """Noise over signal of the whole update, at least."""
        noise = math.hypot(*(row.noise for row in self.rows))
        return ratio(noise, math.hypot(*(row.signal for row in self.rows)))

    def table(self) -> str:
        """The rows as text."""
        head = ("layer", "group", "entries", "e_h", "C_h", "noise std", "noise/signal")
        body = []
        for row in self.rows:
            values = (row.norm, row.clip_bound, row.noise_std, row.noise_to_signal)
            body.append((row.layer, row.group, str(row.entries), *(f"{value:.3g}" for value in values)))
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
    live = live_entries(parameters, adaptive.frozen)
    groups = {name: group for group, names in adaptive.rule.groups.items() for name in names}
    scales = _scales(blocks)
    rows = []
    for layer, names in adaptive.layers.items():
        group, (bound, std) = groups[names[0]], scales[names[0]]
        if not any(live[name] for name in adaptive.rule.groups[group]):
            bound = 0.0  # a frozen group rides along in another one's block
        entries, norm = sum(live[name] for name in names), adaptive.norms[layer]
        rows.append(
            LayerRow(
                layer=layer,
                group=group,
                entries=entries,
                norm=norm,
                clip_bound=bound,
                noise_std=std if entries else 0.0,
                signal=vectors * min(norm, bound),
            )
        )
    return LayerReport(rows=rows, history=list(adaptive.history), unit=adaptive.rule.unit)


def measured_report(
    measured: Sequence[Mapping[str, float]],
    layers: Groups,
    groups: Groups,
    *,
    live: Mapping[str, int],
    blocks: Sequence[Block],
    vectors: int,
    unit: Unit,
    step: int,
) -> LayerReport:
    """Any clip rule on the next step's blocks, from norms of public gradients.

    Args:
        measured: The norm of every parameter's gradient, for each vector that would be clipped.
        layers: Parameter names by layer.
        groups: Parameter names by clip group.
        live: How many entries of each parameter are not frozen.
        blocks: What the next step releases.
        vectors: How many vectors it clips.
        unit: What one of them belongs to.
        step: How many steps were made.
    """
    norms, kept = mean_group_norms(measured, layers), [clipped_norms(each, blocks) for each in measured]
    signals, scales = mean_group_norms(kept, layers), _scales(blocks)
    homes = {name: group for group, names in groups.items() for name in names}
    rows = [
        LayerRow(
            layer=layer,
            group=homes[names[0]] if len({homes[name] for name in names}) == 1 else layer,
            entries=sum(live[name] for name in names),
            norm=norms[layer],
            clip_bound=math.hypot(*{homes[name]: scales[name][0] for name in names}.values()),
            noise_std=scales[names[0]][1] if any(live[name] for name in names) else 0.0,
            signal=vectors * signals[layer],
        )
        for layer, names in layers.items()
    ]
    return LayerReport(rows=rows, history=[(step, norms)], unit=unit)


def clipped_norms(norms: Mapping[str, float], blocks: Sequence[Block]) -> dict[str, float]:
    """What is left of the norm of every parameter's gradient when each block is clipped.

    >>> block = Block(names=("w", "b"), factors=(1.0, 1.0), clip_bound=2.5, sensitivity=2.5,
    ...               noise_multiplier=1.0, dimension=2)
    >>> clipped_norms({"w": 3.0, "b": 4.0}, [block])
    {'w': 1.5, 'b': 2.0}
    """
    left = {}
    for block in blocks:
        whole = math.hypot(*(f * norms[name] for name, f in zip(block.names, block.factors, strict=True)))
        coefficient = min(1.0, block.clip_bound / whole) if whole else 1.0
        left.update({name: coefficient * norms[name] for name in block.names})
    return left


def ratio(noise: float, signal: float) -> float:
    """Noise over signal, where one of them may be nothing."""
    return noise / signal if signal else (math.inf if noise else 0.0)


def live_entries(parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, int]:
    """How many entries of each parameter are not frozen."""
    return {
        name: p.numel() - (int(frozen[name].sum()) if name in frozen else 0) for name, p in parameters.items()
    }


def _scales(blocks: Sequence[Block]) -> dict[str, tuple[float, float]]:
    """Clip bound and noise of every parameter, in its own coordinates."""
    return {
        name: (block.clip_bound / factor, block.noise_std / factor)
        for block in blocks
        for name, factor in zip(block.names, block.factors, strict=True)
    }
