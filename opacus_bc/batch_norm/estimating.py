"""What keepers share that run the model: which layers are theirs, and whether weights have moved since."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opacus_bc.batch_norm.keeper import Keeper
from opacus_bc.batch_norm.layers import PolicyLayer
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.public.running import evaluation_mode, run_on, untouched_buffers

Collected = list[tuple[Tensor, Tensor]]
Weights = tuple[tuple[int, int, int], ...]


def weights_fingerprint(root: nn.Module) -> Weights:
    """Changes whenever a parameter is replaced or written in place (by an optimizer, a load, an average)."""
    return tuple((id(p), *_version(p)) for p in root.parameters())


def _version(p: Tensor) -> tuple[int, int]:
    try:
        return p._version, p.data_ptr()
    except RuntimeError:  # inference tensors count no versions, wrapped ones have no address
        return 0, 0


class ModelKeeper(Keeper):
    """A keeper that runs the model itself; it does not keep the model alive."""

    def __init__(self, root: nn.Module, words: str) -> None:
        super().__init__(words)
        self._root = weakref.ref(root)
        self._busy = False
        self._estimated_at: Weights | None = None

    def layers(self) -> dict[str, PolicyLayer]:
        """The layers that this keeper answers for, by name."""
        root = self._root()
        modules = () if root is None else root.named_modules()
        return {name: m for name, m in modules if isinstance(m, PolicyLayer) and m.keeper is self}

    def _model(self) -> nn.Module:
        root = self._root()
        if root is None:
            raise RuntimeError("the model of this policy no longer exists")
        return root

    @property
    def up_to_date(self) -> bool:
        """Whether the model still has the weights at which statistics were last estimated."""
        root = self._root()
        return root is not None and self._estimated_at == weights_fingerprint(root)

    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        """The model, while the keeper runs it and its layers must not ask for statistics."""
        root = self._model()
        self._busy = True
        try:
            yield root
        finally:
            self._busy = False


def collect(
    root: nn.Module,
    layers: Iterable[PolicyLayer],
    inputs: Iterable[object],
    *,
    seed: int,
    differentiable: bool = False,
) -> dict[PolicyLayer, Collected]:
    """Mean and variance of every layer's input, once for each time that an input reaches it.

    Each layer normalises with the batch's own statistics, as in training; all other modules are in evaluation
    mode. Modes, buffers, gradients and random streams are left as they were; hooks of the user run. The
    forward has an autograd graph if ``differentiable``.
    """
    found: dict[PolicyLayer, Collected] = {layer: [] for layer in layers}
    try:
        for layer, pairs in found.items():
            layer.collecting = pairs
        with (
            evaluation_mode(root),
            untouched_buffers(root),
            torch.set_grad_enabled(differentiable),
            isolated_randomness(seed),
        ):
            for each in inputs:
                run_on(root, each)
        return found
    finally:
        for layer in found:
            layer.collecting = None
