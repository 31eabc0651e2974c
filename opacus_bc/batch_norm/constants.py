"""Constants of individual clipping: statistics of one public batch, new ones every few steps of training."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opacus_bc.batch_norm.estimating import collect
from opacus_bc.batch_norm.gradients import ROW_LAYERS, upstream
from opacus_bc.batch_norm.layers import ConstantStatistics, PolicyLayer
from opacus_bc.batch_norm.public import PublicBatches, PublicKeeper
from opacus_bc.mechanism.types import State
from opacus_bc.mechanism.warn import users_level

Feeding = dict[nn.Module, tuple[nn.Module, Tensor] | None]


@contextmanager
def feeding_layers(root: nn.Module, layers: Collection[PolicyLayer]) -> Iterator[Feeding]:
    """While it is open: the layer whose output each of ``layers`` normalises, and that layer's input.

    None where a BatchNorm is used twice, has nothing to train, or something stands in between.
    """
    outputs: dict[int, tuple[Tensor, nn.Module, Tensor]] = {}
    feeding: Feeding = {}

    def produced(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if args and (output.dim() == 2 or not isinstance(module, nn.Linear)):  # channels in dimension 1
            outputs[id(output)] = output, module, args[0]  # holding the output keeps its id its own

    def consumed(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        entry = outputs.get(id(args[0])) if args and trained and layer not in feeding else None
        feeding[layer] = entry and entry[1:]

    handles = []
    try:
        if layers:
            rows = [module for module in root.modules() if type(module) in ROW_LAYERS]
            handles += [module.register_forward_hook(produced) for module in rows]
            handles += [layer.register_forward_pre_hook(consumed) for layer in layers]
        yield feeding
    finally:
        for handle in handles:
            handle.remove()


class ConstantsKeeper(PublicKeeper):
    """Also gives the layers of individual clipping their training constants every ``refresh_every`` steps."""

    def __init__(self, root: nn.Module, batches: PublicBatches, *, refresh_every: int = 1) -> None:
        super().__init__(root, batches)
        self.refresh_every = refresh_every
        self.steps = 0
        self.refreshes = 0
        self.followed = 0  # BatchNorm layers whose statistics gradients followed at the last refresh

    def _for(self, root: nn.Module) -> ConstantsKeeper:
        return ConstantsKeeper(root, self.batches, refresh_every=self.refresh_every)

    def start(self) -> None:
        """Try the public data out and take the first constants."""
        super().start()
        self.refresh_constants()
        if self.batches.config.differentiate and not self.followed:
            warnings.warn(
                "differentiate=True changes nothing here: no BatchNorm layer with trainable weights "
                "normalises the output of a linear or convolution layer directly",
                stacklevel=users_level(),
            )

    def describe(self) -> str:
        text = (
            "training and evaluation normalise with statistics of public batches, as constants (new ones "
            f"every {_ordinal(self.refresh_every)}step in training), so every sample's gradient is its own"
        )
        if self.batches.config.differentiate:
            text += "; it also follows these statistics into the layer directly before"
        return text

    def state_dict(self) -> State:
        paths = {module: name for name, module in self._model().named_modules()}
        constants = {name: layer.constants(paths) for name, layer in self._constant_layers().items()}
        return {"steps": self.steps, "refreshes": self.refreshes, "constants": constants}

    def load_state_dict(self, state: State | None) -> None:
        if state is None:
            self.refresh_constants()
            return
        self.steps, self.refreshes = state["steps"], state["refreshes"]
        modules = dict(self._model().named_modules())
        for name, layer in self._constant_layers().items():
            layer.load_constants(state["constants"][name], modules)

    def _constant_layers(self) -> dict[str, ConstantStatistics]:
        return {k: layer for k, layer in self.layers().items() if isinstance(layer, ConstantStatistics)}

    def after_step(self) -> None:
        """Count an optimizer step."""
        self.steps += 1
        if self.steps % self.refresh_every == 0:
            self.refresh_constants()

    def refresh_constants(self) -> None:
        """Take the next public batch's statistics at the current weights."""
        if self._root() is None:
            return
        layers = self.layers().values()
        batch, config = self.batches[self.refreshes], self.batches.config
        with self.running() as root, feeding_layers(root, layers if config.differentiate else ()) as feeding:
            collected = collect(root, layers, [batch], seed=config.seed)
        for layer, pairs in collected.items():
            if pairs and isinstance(layer, ConstantStatistics):
                averages = (torch.stack(each).mean(0) for each in zip(*pairs, strict=True))
                layer.constant_mean, layer.constant_var = pairs[0] if len(pairs) == 1 else averages
                before = feeding.get(layer)
                layer.upstream = None if before is None else upstream(*before)
        self.followed = sum(entry is not None for entry in feeding.values())
        self.refreshes += 1


def _ordinal(number: int) -> str:
    """What stands between "every" and "step".

    >>> _ordinal(1), _ordinal(10)
    ('', '10th ')
    """
    suffix = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return "" if number == 1 else f"{number}{suffix} "
