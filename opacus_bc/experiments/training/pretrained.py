"""Networks that start from weights in a file: what of them is trained, and features of what is not.

A cell with ``weights`` fine-tunes: ``train`` says which parameters move, ``train_from`` names the first layer
of which any does. What lies before it is frozen, so its outputs (*features*) are computed once, kept in a
file beside the results and trained on like any other data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data, limited
from opacus_bc.experiments.training.models import build, replace_batch_norm
from opacus_bc.experiments.training.store import key, read_checkpoint, write_checkpoint

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CHUNK = 64  # images a forward of the frozen part
_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


class Inputs(nn.Module):
    """From bytes (B, 1 or 3, height, width) to what a network was pretrained on: normalised, enlarged."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.to(torch.float32) / 255 - self.mean) / self.std
        if x.shape[-2:] == (self.size, self.size):
            return x
        return F.interpolate(
            x, size=(self.size, self.size), mode="bicubic", antialias=x.shape[-1] > self.size
        )


def start(cell: Cell, data: Data) -> tuple[nn.Module, Data]:
    """The module that a cell trains, and the data that it is trained on.

    Without ``cell.weights``: the network with random weights, and the data as they are. With them: the part
    of the network from its first trained layer on, and the outputs of the part before.

    Raises:
        ValueError: The weights do not fit the network, or the network cannot be cut where the cell says.
    """
    if not cell.weights:
        model = build(cell.model, norm=cell.norm, in_channels=data.in_channels, num_classes=data.num_classes)
        return ModuleValidator.fix(model) if cell.method.group_norm else model, limited(data, cell.limit)
    if data.weights is None:
        raise ValueError(f"cell.weights={cell.weights!r}: the data do not say where that file is")
    network = _network(cell, data.weights, data.num_classes)
    data = limited(data, cell.limit)
    inputs = Inputs(cell.image_size or 224, *_normalisation(network))
    everywhere = cell.method.group_norm and (_head_only(cell) or not cell.train_from)
    if everywhere:
        network = _with_group_norm(network)
    stages, trained = _cut(network, cell)
    if cell.method.group_norm and not everywhere:
        trained = _with_group_norm(trained)
    if not stages:
        return nn.Sequential(inputs, trained), _part(data, cell)
    stages = [nn.Sequential(inputs, stages[0]), *stages[1:]]
    for number, stage in enumerate(stages):
        fast = stage.eval().to(memory_format=torch.channels_last)
        data = _features(
            _Frozen(fast, _feature_key(cell, everywhere, head=number > 0 or not cell.train_from)), data
        )
    return trained, _part(_standardised(data) if _head_only(cell) else data, cell)


def check_start(cell: Cell, data: Data) -> None:
    """See that the weights fit and that the network can be cut, without computing any features.

    Raises:
        ValueError: As in `start`.
    """
    if cell.weights and data.weights is not None:
        _cut(_network(cell, data.weights, data.num_classes), cell)


def trained_parameters(cell: Cell, model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer of a cell holds; the rest of the model is frozen here and costs nothing."""
    which = cell.method.train or cell.train
    norms = {id(p) for layer in model.modules() if isinstance(layer, _NORMS) for p in layer.parameters()}
    head = {id(p) for p in _head(model)[1].parameters()} if which != "all" else set()
    everything = {id(p) for p in model.parameters()}
    wanted = {
        "all": everything,
        "head": head,
        "norm+head": norms | head,
        "convolutions+head": everything - norms,
    }[which]
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and id(p) in wanted)
    return [p for p in model.parameters() if p.requires_grad]


def _network(cell: Cell, weights: Path, num_classes: int) -> nn.Module:
    """The network with its pretrained weights, and a new head where the file's has other classes.

    A new head starts at zero: clipped steps are short, and many of them would go into unlearning random
    scores (timm's EfficientNets start with a standard deviation of six).
    """
    model = build(cell.model, num_classes=num_classes)
    name, head = _head(model)
    for p in head.parameters():
        nn.init.zeros_(p)
    try:
        state: dict[str, Tensor] = torch.load(weights, weights_only=True)
    except Exception as error:  # a file of any kind fails in any way it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--weights {weights}: not a state dict of tensors ({reason})") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"--weights {weights}: not a state dict of tensors ({type(state).__name__})")
    own = model.state_dict()
    ends = [entry for entry in own if entry.startswith(f"{name}.")]
    if any(entry in state and state[entry].shape != own[entry].shape for entry in ends):
        state = {entry: value for entry, value in state.items() if entry not in ends}
    try:
        answer = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n\t")[:2])  # a heading, and the first of the tensors
        raise ValueError(f"--weights {weights}: does not fit {cell.model}: {reason}") from error
    missing = [entry for entry in answer.missing_keys if entry not in ends]
    if missing or answer.unexpected_keys:
        raise ValueError(
            f"--weights {weights}: does not fit {cell.model}: missing {missing[:3]}, "
            f"not known {answer.unexpected_keys[:3]}"
        )
    return model


def _normalisation(network: nn.Module) -> tuple[Sequence[float], Sequence[float]]:
    """The constants that the weights were trained with: timm says them, others are ImageNet's."""
    said: dict[str, Any] = getattr(network, "pretrained_cfg", None) or {}
    return said.get("mean", IMAGENET[0]), said.get("std", IMAGENET[1])


def _with_group_norm(network: nn.Module) -> nn.Module:
    """What Opacus's repair makes of it; subclasses of BatchNorm, which it does not know, follow suit."""
    return replace_batch_norm(ModuleValidator.fix(network), "group")


def _head(model: nn.Module) -> tuple[str, nn.Module]:
    """The last linear layer, or what timm calls the classifier, and its name."""
    get: Callable[[], Any] = getattr(model, "get_classifier", lambda: None)
    said = get()
    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    linear = [(name, layer) for name, layer in linear if layer is said] or linear
    if not linear:
        raise ValueError(f"{type(model).__name__}: has no linear layer that could be its head")
    return linear[-1]


def _head_only(cell: Cell) -> bool:
    return (cell.method.train or cell.train) == "head"


def _cut(network: nn.Module, cell: Cell) -> tuple[list[nn.Module], nn.Module]:
    """What is frozen, in the order in which it runs, and what is trained.

    With a head alone that is trained and ``train_from`` there are two frozen parts, and the first one is that
    of the cells that train more, so they share its outputs.
    """
    if not cell.train_from:
        if not _head_only(cell):
            return [], network
        name, head = _head(network)
        network.set_submodule(name, nn.Identity())
        return [network], head
    try:
        first = network.get_submodule(cell.train_from)
    except AttributeError as error:
        near = get_close_matches(cell.train_from, [name for name, _ in network.named_modules()], n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"--train-from {cell.train_from}: {cell.model} has no such layer{hint}") from error
    whole: Any = getattr(network, "as_sequential", None)
    layers = list(network if isinstance(network, nn.Sequential) else whole() if whole is not None else ())
    places = [place for place, layer in enumerate(layers) if layer is first]
    if not places:
        raise ValueError(
            f"--train-from {cell.train_from}: the layers of {cell.model} do not run one after the other there"
            f" (they can be cut at {len(layers)} places): leave it out, or use --train head"
        )
    before, after = nn.Sequential(*layers[: places[0]]), nn.Sequential(*layers[places[0] :])
    return ([before, after[:-1]], after[-1]) if _head_only(cell) else ([before], after)


class _Frozen:
    """A module that is known by a name: equal names, equal outputs."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def _feature_key(cell: Cell, swapped: bool, *, head: bool) -> str:
    """Names everything that features depend on: cells that differ in the rest share them."""
    method = replace(
        cell.method, name="", title="", private=False, grad_sample_mode="hooks",
        clipping="flat", mini_set=None, batch_norm=None,
        alc=None, differentiate=False, sampling="poisson",
        group_norm=swapped, train="head" if head else None,
    )  # fmt: skip
    return key(
        replace(
            cell, method=method, train="all", epsilon=None, noise_multiplier=None, delta=0.5,
            epochs=1, batch_size=1, lr=1.0, clip=1.0, seed=0, trial=False, channels_last=False,
        )
    )  # fmt: skip


@lru_cache(maxsize=2)
def _features(frozen: _Frozen, data: Data) -> Data:
    """The data with the frozen part's outputs in the place of images; read from their file if it is there."""
    path = None if data.features is None else data.features / f"{frozen.name}.pt"
    kept = None if path is None else read_checkpoint(path)
    parts = {"private": data.private, "public": data.public, "test": data.test}
    if kept is None:
        kept = {name: _outputs(frozen.module, part) for name, part in parts.items()}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(path, kept)
    found = {name: TensorDataset(kept[name].float(), part.tensors[1]) for name, part in parts.items()}
    return replace(data, private=found["private"], public=found["public"], test=found["test"])


def _standardised(data: Data) -> Data:
    """A head's inputs with mean 0 and variance 1 on the public part: no other layer can take their scale off.

    **Formal guarantee**: an image's numbers depend on that image and on public ones alone.
    """
    public = data.public.tensors[0]
    mean, std = public.mean(0), public.std(0).clamp_min(1e-3)

    def part(old: TensorDataset) -> TensorDataset:
        return TensorDataset((old.tensors[0] - mean) / std, *old.tensors[1:])

    return replace(data, private=part(data.private), public=part(data.public), test=part(data.test))


def _outputs(module: nn.Module, part: TensorDataset) -> Tensor:
    """In half precision: what follows does not feel it, and files and memory are half as large."""
    with torch.no_grad():
        return torch.cat([module(x).half() for x, _ in DataLoader(part, batch_size=CHUNK)])


def _part(data: Data, cell: Cell) -> Data:
    """All of the data; for a trial public images alone, two fifths of them in the place of private ones, two
    fifths in that of public ones, and the last fifth to choose settings by.
    """
    if not cell.trial:
        return data
    first, second = trial_sizes(len(data.public))

    def rows(start: int, end: int) -> TensorDataset:
        return TensorDataset(*(tensor[start:end] for tensor in data.public.tensors))

    return replace(
        data,
        private=rows(0, first),
        public=rows(first, second),
        test=rows(second, len(data.public)),
    )


def trial_sizes(public_size: int) -> tuple[int, int]:
    """Where the public images are cut for trials.

    >>> trial_sizes(5000)
    (2000, 4000)
    """
    return 2 * public_size // 5, 4 * public_size // 5
