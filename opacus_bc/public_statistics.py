"""Running statistics from public data: estimated lazily for evaluation, and as constants for training.

Nothing here reads private data. Weights are released already, so statistics of public data at these weights
are post-processing of what the accountant has counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from opacus_bc.buffers import untouched_buffers
from opacus_bc.norm_gradients import ROW_LAYERS, upstream
from opacus_bc.norm_types import ConstantStatistics, PolicyLayer
from opacus_bc.public_data import (
    PublicDataError,
    batch_input,
    check_public_loader,
    forward,
    isolated_randomness,
    public_batches,
)

_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class PublicStatistics:
    """How public data serves BatchNorm; ``batch_norm=loader`` means ``PublicStatistics(loader=loader)``.

    Attributes:
        loader: The public data.
        max_batches: At most this many of its batches are used (and at most 256 MB of them). They are read
            once and kept.
        seed: Order and augmentation of the public data follow from it.
        differentiate: With individual clipping: each sample's gradient also follows the statistics, as the
            functions of the convolution or linear layer directly before that they are at the public batch.
            Learns faster (BatchNorm's gradient is then free of what the statistics would undo), costs a
            second pass over that layer's per-sample gradients; sensitivity and noise stay what they are.
    """

    loader: DataLoader[Any]
    max_batches: int = 32
    seed: int = 0
    differentiate: bool = False

    def __post_init__(self) -> None:
        check_public_loader(self.loader)
        count = self.max_batches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"max_batches must be a whole number >= 1, got {count!r}")
        if not isinstance(self.differentiate, bool):
            raise ValueError(f"differentiate must be True or False, got {self.differentiate!r}")


class PublicBatches:
    """The first batches of a public loader, read once in a fixed order and kept in memory."""

    def __init__(self, config: PublicStatistics) -> None:
        self.config = config
        self._batches: list[Any] = []

    def all(self) -> list[Any]:
        """The batches' inputs; the first call reads them."""
        if not self._batches:
            self._read()
        return self._batches

    def first(self) -> Any:
        """Two samples to try the model on; the rest is not kept in memory before it is needed."""
        source = self
        if not self._batches and not isinstance(self.config.loader.dataset, IterableDataset):
            source = PublicBatches(self.config)  # a stream may be readable only once
            source._read(enough=1)
        batch = source[0]
        rows = _rows(batch)
        if not isinstance(batch, dict):
            return batch[:2]
        return {
            key: value[:2] if isinstance(value, Tensor) and value.dim() and len(value) == rows else value
            for key, value in batch.items()
        }

    def __getitem__(self, index: int) -> Any:
        batches = self.all()
        return batches[index % len(batches)]

    def _read(self, enough: int | None = None) -> None:
        loader, kept = self.config.loader, 0
        with isolated_randomness(self.config.seed, loader):
            for batch in public_batches(loader, limit=self.config.max_batches):
                inputs = batch_input(batch)
                if _rows(inputs) < 2:
                    continue  # one sample has no statistics
                kept += _bytes(inputs)
                if self._batches and kept > _CACHE_BYTES:
                    break
                self._batches.append(inputs)
                if len(self._batches) == enough:
                    break
        if not self._batches:
            raise PublicDataError(
                f"no batch of the public loader has two samples (batch_size={loader.batch_size}): statistics "
                "need at least two, some hundred are better"
            )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else ()
    return [entry for entry in entries if isinstance(entry, Tensor)]


def _rows(inputs: Any) -> int:
    tensors = _tensors(inputs)
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 0


def _bytes(inputs: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(inputs))


@contextmanager
def evaluation_mode(root: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, whatever its ``train`` method does; afterwards as before."""
    modes = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in modes:
            module.__dict__["training"] = False  # Module.__setattr__ would take as long as a small layer
        yield
    finally:
        for module, mode in modes:
            module.__dict__["training"] = mode


Collected = list[tuple[Tensor, Tensor]]


def collect(
    root: nn.Module, layers: Sequence[PolicyLayer], batches: Iterable[Any], *, seed: int = 0
) -> list[Collected]:
    """Mean and variance of every layer's input, once for each time that a batch reaches it.

    Each layer normalises with the batch's own statistics, as in training; all other modules are in evaluation
    mode. Modes, gradients and random streams are left as they were, and no process talks to another. Hooks of
    the user run as in any other forward, since they may be part of what the model computes.
    """
    try:
        for layer in layers:
            layer.collecting = []
        with evaluation_mode(root), torch.no_grad(), isolated_randomness(seed):
            for batch in batches:
                forward(root, batch)
        return [layer.collecting or [] for layer in layers]
    finally:
        for layer in layers:
            layer.collecting = None


def weights_fingerprint(root: nn.Module) -> tuple[Any, ...]:
    """Changes whenever a parameter is replaced or written in place (by an optimizer, a load, an average)."""
    return tuple((id(p), _version(p)) for p in root.parameters())


def _version(p: Tensor) -> tuple[int, int]:
    try:
        return p._version, p.data_ptr()
    except RuntimeError:  # inference tensors count no versions, wrapped ones have no address
        return 0, 0


class PublicKeeper:
    """Keeps running statistics in step with the weights: re-estimated when stale and about to be read.

    **Formal guarantee**: what it writes into a layer is a function of the public batches, the seed and the
    weights.

    **Edge cases**: a deep copy of the whole model gets a keeper of its own; a deep copy of a part keeps the
    statistics it has. Layers that the public batches do not reach keep theirs. Weights written through
    ``p.data`` are not noticed before :meth:`refresh` (``engine.finalize`` calls it).
    """

    def __init__(self, root: nn.Module, batches: PublicBatches) -> None:
        self._root = weakref.ref(root)
        self.batches = batches
        self._estimated_at: tuple[Any, ...] | None = None
        self._busy = False

    def layers(self, root: nn.Module) -> list[PolicyLayer]:
        """The layers of ``root`` that this keeper answers for."""
        return [m for m in root.modules() if isinstance(m, PolicyLayer) and m.keeper is self]

    def before_evaluation(self) -> None:
        """Re-estimate if the weights have moved since the last time."""
        root = self._root()
        if root is not None and not self._busy and weights_fingerprint(root) != self._estimated_at:
            self.refresh()

    before_saving = before_evaluation

    def copied(self, memo: dict[int, Any]) -> PublicKeeper | None:
        """See :class:`~opacus_bc.norm_types.Keeper`."""
        if id(self) not in memo:
            root = memo.get(id(self._root()))
            memo[id(self)] = None if root is None else type(self)(root, self.batches)
        keeper: PublicKeeper | None = memo[id(self)]
        return keeper

    def try_out(self) -> None:
        """Run the model on one public batch, so that what does not fit is found before training.

        Raises:
            PublicDataError: There is no batch to take statistics of, or the model cannot take it.
        """
        root, batch = self._root(), self.batches.first()
        assert root is not None
        self._busy = True
        try:
            with untouched_buffers(root):
                collect(root, self.layers(root), [batch], seed=self.batches.config.seed)
        except Exception as error:
            raise PublicDataError(
                f"the model fails on a batch of the public loader ({type(error).__name__}: {error}): public "
                "samples must look like private ones"
            ) from error
        finally:
            self._busy = False

    def refresh(self) -> None:
        """Cumulative average of the batches' means and (unbiased) variances, as torch's ``update_bn``."""
        root = self._root()
        if root is None or self._busy:
            return
        self._busy = True  # the forwards below must not ask again
        try:
            layers = self.layers(root)
            collected = collect(root, layers, self.batches.all(), seed=self.batches.config.seed)
            for layer, pairs in zip(layers, collected, strict=True):
                write_statistics(layer, pairs)
            self._estimated_at = weights_fingerprint(root)
        finally:
            self._busy = False


@torch.no_grad()
def write_statistics(layer: PolicyLayer, pairs: Collected) -> None:
    """Write the average of ``pairs`` into the layer's running statistics, if it has any."""
    mean, var, count = layer.running_mean, layer.running_var, getattr(layer, "num_batches_tracked", None)
    if not pairs or mean is None or var is None:
        return
    mean.copy_(torch.stack([m for m, _ in pairs]).double().mean(0))
    var.copy_(torch.stack([v for _, v in pairs]).double().mean(0))
    if count is not None:
        count.fill_(len(pairs))


def _average(pairs: Collected) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return torch.stack([m for m, _ in pairs]).mean(0), torch.stack([v for _, v in pairs]).mean(0)


Feeding = dict[PolicyLayer, tuple[Any, ...]]


@contextmanager
def feeding_layers(root: nn.Module, layers: Sequence[PolicyLayer]) -> Iterator[Feeding]:
    """While it is open: which layer's output each of ``layers`` normalises, and what that layer was given.

    An entry is (layer before, its input), or empty where a BatchNorm is used twice, something stands in
    between, or the BatchNorm has nothing to train (Opacus then asks for none of its gradients).
    """
    outputs: dict[int, tuple[Tensor, nn.Module, Tensor]] = {}
    feeding: Feeding = {}

    def produced(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if args and (output.dim() == 2 or not isinstance(module, nn.Linear)):  # channels in dimension 1
            outputs[id(output)] = output, module, args[0]  # holding the output keeps its id its own

    def consumed(layer: Any, args: tuple[Any, ...]) -> None:
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        entry = outputs.get(id(args[0])) if args and trained and layer not in feeding else None
        feeding[layer] = entry[1:] if entry else ()

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
    """Also gives the layers of individual clipping their training constants, every ``refresh_every`` steps.

    The constants of one refresh are the statistics of one public batch at the weights of that moment; the
    next refresh takes the next batch.
    """

    refresh_every: int = 1

    def __init__(self, root: nn.Module, batches: PublicBatches) -> None:
        super().__init__(root, batches)
        self.steps = 0
        self.refreshes = 0
        self.followed = 0  # BatchNorm layers whose statistics gradients followed at the last refresh

    def after_step(self) -> None:
        """Count an optimizer step."""
        self.steps += 1
        if self.steps % self.refresh_every == 0:
            self.refresh_constants()

    def refresh_constants(self) -> None:
        """Take the next public batch's statistics at the current weights."""
        root = self._root()
        if root is None:
            return
        layers = self.layers(root)
        batch = self.batches[self.refreshes]
        config = self.batches.config
        self._busy = True
        try:
            with feeding_layers(root, layers if config.differentiate else ()) as feeding:
                collected = collect(root, layers, [batch], seed=config.seed)
        finally:
            self._busy = False
        for layer, pairs in zip(layers, collected, strict=True):
            if pairs and isinstance(layer, ConstantStatistics):
                layer.constant_mean, layer.constant_var = _average(pairs)
                layer.upstream = upstream(*feeding[layer]) if len(feeding.get(layer, ())) == 2 else None
        self.followed = sum(len(entry) == 2 for entry in feeding.values())
        self.refreshes += 1
