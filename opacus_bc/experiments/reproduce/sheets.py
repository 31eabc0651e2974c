"""The paper's tables: architectures and settings, read off the models and the registry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from types import MappingProxyType

import torch
from torch import nn

from opacus_bc.experiments.reproduce.facts import Fact, Sheet
from opacus_bc.experiments.reproduce.guarantees import GUARANTEES
from opacus_bc.experiments.reproduce.resnet_figures import FIGURES
from opacus_bc.experiments.reproduce.specs import cell_of
from opacus_bc.experiments.training.models import build


@lru_cache
def _model(name: str) -> nn.Module:
    return build(name)


def _tensors(name: str) -> float:
    return float(len(list(_model(name).parameters())))


def _layers(name: str) -> float:
    return float(sum(bool(list(m.parameters(recurse=False))) for m in _model(name).modules()))


def _parameters(name: str) -> float:
    return float(sum(p.numel() for p in _model(name).parameters()))


def _shape_after(name: str, layer: str, channels: int) -> str:
    """Height x width x channels behind a layer, for one image of 32 x 32."""
    seen: list[str] = []
    model = build(name).eval()

    def look(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        seen.append("x".join(str(n) for n in (*output.shape[2:], output.shape[1])))

    handle = dict(model.named_modules())[layer].register_forward_hook(look)
    with torch.no_grad():
        model(torch.zeros(1, channels, 32, 32))
    handle.remove()
    return seen[0]


def _architecture(
    name: str, layers: float | None, shapes: Mapping[str, str], channels: int
) -> tuple[Fact, ...]:
    counts = (
        Fact(key="layers", name="layers with parameters", paper=layers, ours=partial(_layers, name)),
        Fact(key="tensors", name="parameter tensors", paper=None, ours=partial(_tensors, name)),
        Fact(key="parameters", name="parameters", paper=None, ours=partial(_parameters, name)),
    )
    outputs = [
        (layer, shape, partial(_shape_after, name, layer, channels)) for layer, shape in shapes.items()
    ]
    return counts + tuple(
        Fact(key=layer, name=f"output behind {layer}", paper=shape, ours=ours)
        for layer, shape, ours in outputs
    )


def _settings() -> tuple[Fact, ...]:
    spec = next(spec for spec in FIGURES if spec.id == "fig16")
    cells = [cell_of(spec, run, "paper") for run in spec.runs]
    values = (
        ("lr", "learning rate η", 0.025, cells[0].lr),
        ("clip", "master clip bound C", 0.095, cells[0].clip),
        ("sigma", "noise multiplier σ", 0.01875, cells[0].noise_multiplier),
        ("lr_decay", "step size decay (dss)", 0.9, min(cell.lr_decay for cell in cells)),
        ("clip_decay", "decay of a diminishing C", 0.9, min(cell.clip_decay for cell in cells)),
        (
            "batches",
            "batch sizes m",
            "64, 128, 256, 512, 1028",
            ", ".join(sorted({str(c.batch_size) for c in cells})),
        ),
        ("epochs", "epochs E", 50.0, float(cells[0].epochs)),
    )
    return tuple(
        Fact(key=key, name=name, paper=paper, ours=partial(_same, ours)) for key, name, paper, ours in values
    )


def _same(value: float | str | None) -> float | str:
    return "" if value is None else value


_CONVNET_SHAPES = {"pool1": "16x16x3", "pool2": "8x8x32", "pool3": "4x4x64", "pool4": "1x1x128"}
_LENET_SHAPES = {
    "conv1": "28x28x6",
    "pool1": "14x14x6",
    "conv2": "10x10x16",
    "pool2": "10x10x16",
    "conv3": "5x5x120",
}

SHEETS: Mapping[str, Sheet] = MappingProxyType(
    {
        sheet.id: sheet
        for sheet in (
            Sheet(
                id="table1",
                title="The convnet",
                where="table 1, section A.1",
                facts=_architecture("convnet", 5.0, _CONVNET_SHAPES, 3),
            ),
            Sheet(
                id="table2",
                title="BN-LeNet-5",
                where="table 2, section A.2; its L = 8 in section B.1",
                facts=_architecture("bn_lenet5", 8.0, _LENET_SHAPES, 1),
            ),
            Sheet(
                id="table3",
                title="Settings of figures 15 to 17",
                where="table 3, section A.3",
                facts=_settings(),
            ),
            Sheet(
                id="layers",
                title="What counts as a layer of ResNet-18",
                where="L = 62 in sections A.4 and B.1",
                facts=(
                    Fact(
                        key="tensors",
                        name="parameter tensors",
                        paper=62.0,
                        ours=partial(_tensors, "resnet18"),
                    ),
                    Fact(
                        key="layers",
                        name="layers with parameters",
                        paper=None,
                        ours=partial(_layers, "resnet18"),
                    ),
                ),
            ),
            GUARANTEES,
        )
    }
)
