"""Running statistics from public data: estimated lazily for evaluation, and as constants for training.

Nothing here reads private data. Weights are released already, so statistics of public data at these weights
are post-processing of what the accountant has counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from opacus_bc.batch_norm.estimating import ModelKeeper, collect, weights_fingerprint
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.numbers import check_count
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.mechanism.types import Loader, Memo
from opacus_bc.public.data import PublicDataError, check_public_loader, public_batches
from opacus_bc.public.running import batch_input, called, samples, tensors

_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class PublicStatistics:
    """How public data serves BatchNorm; ``batch_norm=loader`` means ``PublicStatistics(loader=loader)``.

    Attributes:
        loader: The public data.
        max_batches: At most this many of its batches are used (and at most 256 MB of them). They are read
            once and kept.
        seed: Order and augmentation of the public data follow from it.
        differentiate: With individual clipping: each sample's gradient also follows the statistics into the
            weights and biases of the layers before, of which they are functions at the public batch. Learns
            faster (BatchNorm's gradient is then free of what the statistics would undo), costs a backward
            over the public batch at every refresh and a second pass over these layers' per-sample gradients;
            sensitivity and noise stay what they are. None: wherever it can be had, which is individual
            clipping in one backward and with hooks. False: the statistics are constants to a gradient.

    **Edge cases** of ``differentiate``: a BatchNorm is followed into every linear and convolution layer that
    feeds it channel by channel, which is found by tracing the public batch: through activations, pooling,
    dropout, gates, sums, concatenations and reordered channels, out of several layers, and out of one layer
    into several BatchNorms. Left out: a layer of which one row moves several channels of the BatchNorm
    (softmax over channels, a channel repeated, positions that are flattened into channels); whatever lies
    behind such a layer, behind another BatchNorm or behind any other layer with weights, PReLU included (so
    the inputs of the layers that are followed count as constants); a BatchNorm that is used twice or has
    nothing to train. With True a warning names each BatchNorm for which nothing is left to follow.
    """

    loader: Loader
    max_batches: int = 32
    seed: int = 0
    differentiate: bool | None = None

    def __post_init__(self) -> None:
        check_public_loader(self.loader)
        check_count("max_batches", self.max_batches)
        if not isinstance(self.differentiate, bool | None):
            raise ValueError(f"differentiate must be True, False or None, got {self.differentiate!r}")


class PublicBatches:
    """The first batches of a public loader, read once in a fixed order and kept in memory."""

    def __init__(self, config: PublicStatistics) -> None:
        self.config = config
        self._batches: list[object] = []

    def all(self) -> list[object]:
        """The batches' inputs; the first call reads them."""
        if not self._batches:
            self._read()
        return self._batches

    def first(self) -> object:
        """Two samples to try the model on; the rest is not kept in memory before it is needed."""
        source = self
        if not self._batches and not isinstance(self.config.loader.dataset, IterableDataset):
            source = PublicBatches(self.config)  # a stream may be readable only once
            source._read(enough=1)
        batch = source[0]
        if isinstance(batch, (Tensor, list)):
            return batch[:2]
        assert isinstance(batch, Mapping)  # nothing else has samples
        rows = samples(batch)
        return {
            key: value[:2] if isinstance(value, Tensor) and value.dim() and len(value) == rows else value
            for key, value in batch.items()
        }

    def __getitem__(self, index: int) -> object:
        batches = self.all()
        return batches[index % len(batches)]

    def _read(self, enough: int | None = None) -> None:
        loader, kept, other = self.config.loader, 0, ""
        with isolated_randomness(self.config.seed, loader):
            for batch in public_batches(loader, limit=self.config.max_batches):
                inputs = batch_input(batch)
                if (len(tensors(inputs)) if isinstance(inputs, list) else samples(inputs)) < 2:
                    other = "" if isinstance(inputs, (Tensor, Mapping, list)) else type_name(inputs)
                    continue  # one sample has no statistics
                kept += sum(t.numel() * t.element_size() for t in tensors(inputs))
                if self._batches and kept > _CACHE_BYTES:
                    break
                self._batches.append(inputs)
                if len(self._batches) == enough:
                    break
        if not self._batches and other:
            raise PublicDataError(
                f"a batch of the public loader, or its first element, is a {other}. It must be a tensor with "
                "a row for each sample, a mapping of those (the model is called as model(**batch)), or a "
                "list with a tensor for each sample (model(batch)): give the loader such a collate_fn"
            )
        if not self._batches:
            raise PublicDataError(
                f"no batch of the public loader has two samples (batch_size={loader.batch_size}): statistics "
                "need at least two, some hundred are better"
            )


class PublicKeeper(ModelKeeper):
    """Keeps running statistics in step with the weights: re-estimated when stale and about to be read.

    **Formal guarantee**: what it writes into a layer is a function of the public batches, the seed and the
    weights.

    **Edge cases**: a deep copy of the whole model gets a keeper of its own; a deep copy of a part keeps the
    statistics it has. Layers that the public batches do not reach keep theirs. Weights written through
    ``p.data`` are not noticed before :meth:`refresh` (``engine.finalize`` calls it).
    """

    def __init__(self, root: nn.Module, batches: PublicBatches) -> None:
        super().__init__(
            root, "running statistics are re-estimated on public data; private forwards never write them"
        )
        self.batches = batches

    def before_evaluation(self) -> None:
        """Re-estimate if the weights have moved since the last time."""
        if not self._busy and not self.up_to_date:
            self.refresh()

    before_saving = before_evaluation

    def copied(self, memo: Memo) -> PublicKeeper | None:
        if id(self) not in memo:
            root = memo.get(id(self._root()))
            memo[id(self)] = None if root is None else self._for(root)
        keeper: PublicKeeper | None = memo[id(self)]
        return keeper

    def _for(self, root: nn.Module) -> PublicKeeper:
        return PublicKeeper(root, self.batches)

    def start(self) -> None:
        """Run the model on one public batch, so that what does not fit is found before training."""
        batch = self.batches.first()
        try:
            with self.running() as root:
                collect(root, self.layers().values(), [batch], seed=self.batches.config.seed)
        except Exception as error:
            raise PublicDataError(
                f"the model fails on a batch of the public loader, called as {called(batch)} "
                f"({type(error).__name__}: {error}): public samples must look like private ones, and the "
                "batch, or its first element, must be all that the model's forward takes"
            ) from error

    def finish(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Cumulative average of the batches' means and (unbiased) variances, as torch's ``update_bn``."""
        if self._busy or self._root() is None:
            return
        batches, seed = self.batches.all(), self.batches.config.seed
        with self.running() as root:
            for layer, pairs in collect(root, self.layers().values(), batches, seed=seed).items():
                if pairs and layer.running_mean is not None:
                    means, variances = (torch.stack(each).double() for each in zip(*pairs, strict=True))
                    layer.write_statistics(means.mean(0), variances.mean(0), len(pairs))
                    self.written.add(id(layer))
            self._estimated_at = weights_fingerprint(root)
