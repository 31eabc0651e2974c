"""Constants of individual clipping: statistics of one public batch, new ones every few steps of training."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from opacus_bc.batch_norm.estimating import collect
from opacus_bc.batch_norm.layers import ConstantStatistics
from opacus_bc.batch_norm.public import PublicBatches, PublicKeeper
from opacus_bc.batch_norm.tracing import tracing
from opacus_bc.mechanism.types import State
from opacus_bc.mechanism.warn import users_level
from opacus_bc.public.data import PublicDataError


class ConstantsKeeper(PublicKeeper):
    """Also gives the layers of individual clipping their training constants every ``refresh_every`` steps.

    Args:
        root: The model.
        batches: The public data.
        refresh_every: Steps between new constants.
        follow: Whether gradients follow the statistics into the layers before.
    """

    def __init__(
        self, root: nn.Module, batches: PublicBatches, *, refresh_every: int = 1, follow: bool = False
    ) -> None:
        super().__init__(root, batches)
        self.refresh_every = refresh_every
        self.follow = follow
        self.steps = 0
        self.refreshes = 0
        self.not_followed: dict[str, str] = {}  # BatchNorm layers at the last refresh, and why

    def _for(self, root: nn.Module) -> ConstantsKeeper:
        return ConstantsKeeper(root, self.batches, refresh_every=self.refresh_every, follow=self.follow)

    def start(self) -> None:
        """Try the public data out and take the first constants."""
        if isinstance(self.batches.first(), list):
            raise PublicDataError(
                "the public loader's batches are lists with a tensor for each sample. Individual clipping "
                "needs tensors with a row for each sample: give both loaders such a collate_fn, or use "
                "clipping='batch'"
            )
        super().start()
        self.refresh_constants()
        if self.not_followed and self.batches.config.differentiate:  # asked for by name
            which = "; ".join(f"{name}: {reason}" for name, reason in self.not_followed.items())
            warnings.warn(
                f"differentiate=True changes nothing for these BatchNorm layers, whose statistics stay "
                f"constants ({which})",
                stacklevel=users_level(),
            )

    def describe(self) -> str:
        text = (
            "training and evaluation normalise with statistics of public batches, as constants (new ones "
            f"every {_ordinal(self.refresh_every)}step in training), so every sample's gradient is its own"
        )
        if self.follow:
            text += "; it also follows these statistics into the last layers that feed them by channel"
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
        layers = self.layers()
        batch, config = self.batches[self.refreshes], self.batches.config
        norms: dict[nn.Module, str] = {
            m: name for name, m in layers.items() if issubclass(m.plain_type, _BatchNorm)
        }
        with self.running() as root, tracing(root, norms if self.follow else ()) as trace:
            seen = collect(root, layers.values(), [batch], seed=config.seed, differentiable=self.follow)
        for layer, pairs in seen.items():
            if pairs and isinstance(layer, ConstantStatistics):
                averages = (torch.stack(each).mean(0) for each in zip(*pairs, strict=True))
                layer.constant_mean, layer.constant_var = pairs[0] if len(pairs) == 1 else averages
                layer.upstream = trace.found.get(layer, ())
                if layer.upstream and not layer.normalises_input:
                    layer.upstream = ()
                    trace.reasons[layer] = "its own forward normalises something else than its input"
        self.not_followed = {norms[layer]: reason for layer, reason in trace.reasons.items()}
        self.refreshes += 1


def _ordinal(number: int) -> str:
    """What stands between "every" and "step".

    >>> _ordinal(1), _ordinal(10)
    ('', '10th ')
    """
    suffix = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return "" if number == 1 else f"{number}{suffix} "
