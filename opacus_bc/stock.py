"""What this package adds to Opacus's own modes: it refuses what cannot be accounted, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from opacus_bc._opacus import (
    DPOptimizer,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
    get_optimizer_class,
)
from opacus_bc.sampling import check_loader


def check_keywords(extra: dict[str, Any], *, clipping: str, distributed: bool, grad_sample_mode: str) -> None:
    """Raise TypeError for keywords that Opacus would swallow.

    Raises:
        TypeError: Names the keywords.
        ValueError: Opacus knows no such mode.
    """
    known = set(inspect.signature(get_optimizer_class(clipping, distributed, grad_sample_mode)).parameters)
    unknown = sorted(set(extra) - known)
    if unknown:
        raise TypeError(f"make_private() got unexpected keyword arguments: {', '.join(unknown)}")


class _FixedBounds:
    """Opacus's per-layer optimizers clip to bounds stored at construction; their noise follows this value.

    A grad-clip scheduler would lower the noise and keep the clipping, so setting it is an error.
    """

    @property
    def max_grad_norm(self) -> Any:
        return self.__dict__["max_grad_norm"]

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        if self.__dict__.setdefault("max_grad_norm", value) != value:
            raise ValueError(
                f"max_grad_norm={value!r} cannot be set with clipping='per_layer': the layers would still be "
                "clipped to their old bounds while the noise moves"
            )


class PerLayerOptimizer(_FixedBounds, DPPerLayerOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's DPPerLayerOptimizer whose bounds cannot drift away from its noise."""


class DistributedPerLayerOptimizer(_FixedBounds, SimpleDistributedPerLayerOptimizer):  # type: ignore[misc]
    """Opacus's SimpleDistributedPerLayerOptimizer whose bounds cannot drift away from its noise."""


def guard_per_layer_bounds(optimizer: DPOptimizer) -> None:
    """Make a change of ``max_grad_norm`` an error for Opacus's per-layer optimizers."""
    guarded = {
        DPPerLayerOptimizer: PerLayerOptimizer,
        SimpleDistributedPerLayerOptimizer: DistributedPerLayerOptimizer,
    }
    optimizer.__class__ = guarded.get(type(optimizer), type(optimizer))


class _CountingSampler(Sampler[Any]):
    """A batch sampler that counts how often it was started."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.passes = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self.batches


class PassCountingLoader(DataLoader[Any]):
    """The user's own loader, in its own order, counting the passes that were started."""

    def __init__(self, data_loader: DataLoader[Any]) -> None:
        check_loader(data_loader)
        self.counter = _CountingSampler(data_loader.batch_sampler)
        super().__init__(
            dataset=data_loader.dataset,
            batch_sampler=self.counter,
            num_workers=data_loader.num_workers,
            collate_fn=data_loader.collate_fn,
            pin_memory=data_loader.pin_memory,
            timeout=data_loader.timeout,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            generator=data_loader.generator,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
        )


def shuffle_hook(
    accountant: Any, loader: PassCountingLoader, *, sample_rate: float
) -> Callable[[DPOptimizer], None]:
    """Step hook for Opacus's individual clipping over an ordinary loader.

    Replacing a sample moves the sum by up to 2C while Opacus's noise is ``sigma * C``: the effective noise
    multiplier is sigma / 2. A pass is a parallel composition, passes compose; see ``FDPAccountant``.
    """
    accounted = 0

    def hook(optimizer: DPOptimizer) -> None:
        nonlocal accounted
        if optimizer.accumulated_iterations != 1:
            raise RuntimeError(
                f"{optimizer.accumulated_iterations} batches were accumulated for one step: with "
                "sampling='shuffle' a step must use one batch (BatchMemoryManager splits large ones)"
            )
        passes = loader.counter.passes
        accountant.step(
            noise_multiplier=optimizer.noise_multiplier / 2,
            sample_rate=sample_rate,
            sampling="shuffle",
            new_pass=passes != accounted,
        )
        accounted = passes

    return hook
