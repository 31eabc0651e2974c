"""What this package adds to Opacus's own modes: it refuses what cannot be accounted, and nothing else."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from opacus_bc._opacus import (
    DPOptimizer,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
    StockPrivacyEngine,
    UniformWithReplacementSampler,
    get_optimizer_class,
)
from opacus_bc.block_optimizer import GRAD_SCALER
from opacus_bc.ledger import NoFreshBatchError
from opacus_bc.noise import global_randomness
from opacus_bc.sampling import Sampling, check_loader


def check_keywords(extra: dict[str, Any], *, clipping: str, distributed: bool, grad_sample_mode: str) -> None:
    """Raise TypeError for keywords that Opacus would swallow.

    Raises:
        TypeError: Names the keywords.
        ValueError: Opacus knows no such mode.
    """
    known = set(inspect.signature(get_optimizer_class(clipping, distributed, grad_sample_mode)).parameters)
    unknown = sorted(set(extra) - known)
    if unknown:
        raise unexpected_keywords(unknown)


def unexpected_keywords(unknown: Iterable[str]) -> TypeError:
    """What to raise for keywords that nobody takes, with the one that each of them resembles.

    >>> str(unexpected_keywords(["max_gradient_norm", "batchnorm"]))
    'unexpected keyword arguments: batchnorm (batch_norm?), max_gradient_norm (max_grad_norm?)'
    """
    stock = inspect.signature(StockPrivacyEngine.make_private).parameters
    known = [*stock, "mini_batch_size", "sampling", "batch_norm", "batch_norm_refresh", "alc"]
    close = {name: difflib.get_close_matches(name, known, 1) for name in sorted(unknown)}
    words = [f"{name} ({found[0]}?)" if found else name for name, found in close.items()]
    return TypeError(f"unexpected keyword arguments: {', '.join(words)}")


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


class DistributedPerLayerOptimizer(_FixedBounds, SimpleDistributedPerLayerOptimizer):  # type: ignore[misc]  # untyped
    """Opacus's SimpleDistributedPerLayerOptimizer whose bounds cannot drift away from its noise."""


def guard_per_layer_bounds(optimizer: DPOptimizer) -> None:
    """Make a change of ``max_grad_norm`` an error for Opacus's per-layer optimizers."""
    guarded = {
        DPPerLayerOptimizer: PerLayerOptimizer,
        SimpleDistributedPerLayerOptimizer: DistributedPerLayerOptimizer,
    }
    optimizer.__class__ = guarded.get(type(optimizer), type(optimizer))


def check_adaptive(mechanism: str, sampling: Sampling) -> None:
    """Refuse a certified epsilon where Opacus's adaptive clipping has none.

    Under Poisson sampling it divides the noised count of unclipped samples by the exact batch size, and books
    the count with half of its sensitivity. With a shuffled loader the size is public and replacing a sample
    is booked in full.

    Raises:
        ValueError: With the accountant ``"fdp"``; the others warn.
    """
    if sampling != "poisson":
        return
    message = (
        "Opacus's clipping='adaptive' uses the exact batch size and half of the count's sensitivity, so "
        "under Poisson sampling its epsilon is not an upper bound"
    )
    if mechanism == "fdp":
        raise ValueError(
            f"{message}: use poisson_sampling=False, or accountant='prv' for Opacus's own figure"
        )
    warnings.warn(message, stacklevel=4)


def guard_frozen_parameters(optimizer: DPOptimizer) -> None:
    """Let no parameter move by a raw gradient: Opacus skips frozen ones, the wrapped optimizer does not."""

    def drop(wrapped: Any, args: Any, kwargs: Any) -> None:
        for group in wrapped.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    p.grad = None

    optimizer.original_optimizer.register_step_pre_hook(drop)


def guard_noise(optimizer: DPOptimizer) -> None:
    """Let Opacus's own optimizers take noise from torch's default generator in no other thread's time."""
    pre_step = optimizer.pre_step

    def alone(closure: Any = None) -> Any:
        with global_randomness():
            return pre_step(closure)

    optimizer.pre_step = alone


def guard_accumulation(optimizer: DPOptimizer) -> None:
    """Let a physical batch count once: one backward and one step for each that was delivered.

    Opacus adds further backward passes on a chunk of a `BatchMemoryManager` to the draw's sum, and takes a
    second ``step()`` on it for the one that ends the draw.
    """
    pre_step, signal = optimizer.pre_step, optimizer.signal_skip_step
    optimizer.in_chunks = False

    def signalled(do_skip: bool = True) -> None:
        optimizer.in_chunks = True
        signal(do_skip)

    def once(closure: Any = None) -> Any:
        held = [getattr(p, "grad_sample", None) for p in optimizer.params]
        most = max((len(chunks) for chunks in held if isinstance(chunks, list)), default=1)
        if most > 1:
            raise RuntimeError(
                f"{most} batches were accumulated for one step: a step must use one batch "
                "(BatchMemoryManager splits large ones)"
            )
        if optimizer.in_chunks and not optimizer._step_skip_queue:
            raise NoFreshBatchError("a second step() on one chunk of a BatchMemoryManager: take the next one")
        return pre_step(closure)

    optimizer.pre_step, optimizer.signal_skip_step = once, signalled


def guard_grad_scaler(optimizer: DPOptimizer) -> None:
    """Refuse ``torch.amp.GradScaler``, whose scale and skipped steps follow from private gradients."""

    def refuse(*_: Any) -> None:
        if hasattr(optimizer, "found_inf"):
            raise RuntimeError(GRAD_SCALER)

    optimizer._step_supports_amp_scaling = True  # then the scaler tells of itself instead of skipping steps
    optimizer.original_optimizer.register_step_pre_hook(refuse)


class DrawCounter:
    """How many batches were drawn in the current pass, and whether one of them is left for a step.

    **Formal guarantee**: a pass makes no more steps than draws. Without workers a batch is drawn when it is
    delivered, so a step needs a batch that no step has used; with workers, which draw ahead, the count may
    run ahead by what they prefetch.

    Args:
        ahead: Whether draws run ahead of deliveries.
        on_pass: Called at the start of a pass, to drop what an abandoned one left behind.
    """

    def __init__(self, *, ahead: bool, on_pass: Callable[[], None]) -> None:
        self.ahead = ahead
        self.on_pass = on_pass
        self.pass_index = 0
        self._left = 0

    def begin_pass(self) -> int:
        """A new pass starts; older ones are over."""
        self.pass_index += 1
        self._left = 0
        self.on_pass()
        return self.pass_index

    def drawn(self) -> None:
        """One more batch; a batch that was delivered and not used is never used later."""
        self._left = self._left + 1 if self.ahead else 1

    def begin_delivery(self) -> None:
        """One batch reaches the loop."""
        self._left = 1

    def use(self) -> None:
        """A step takes a batch.

        Raises:
            NoFreshBatchError: There is none left.
        """
        if self._left < 1:
            raise NoFreshBatchError("drawn")
        self._left -= 1


class CountedPoissonSampler(UniformWithReplacementSampler):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's Poisson sampler, counting its draws."""

    counter: DrawCounter

    def __iter__(self) -> Iterator[list[int]]:
        self.counter.begin_pass()
        batches = super().__iter__()
        while True:
            with global_randomness():
                batch = next(batches, None)
            if batch is None:
                return
            self.counter.drawn()
            yield batch


class _CountingSampler(Sampler[Any]):
    """The user's batch sampler, counting its draws; a newer pass ends an older one."""

    counter: DrawCounter

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        mine = self.counter.begin_pass()
        for batch in self.batches:
            if self.counter.pass_index != mine:
                raise RuntimeError("this iterator was superseded by a newer iter(loader)")
            if not self.counter.ahead:
                self.counter.drawn()
            yield batch


class ShuffledLoader(DataLoader[Any]):
    """The user's own loader, in its own order, counting passes and deliveries."""

    def __init__(self, data_loader: DataLoader[Any]) -> None:
        check_loader(data_loader)
        super().__init__(
            dataset=data_loader.dataset,
            batch_sampler=_CountingSampler(data_loader.batch_sampler),
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

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names its private iterator
        assert isinstance(self.batch_sampler, _CountingSampler)
        counter = self.batch_sampler.counter
        iterator = super().__iter__()
        if not counter.ahead:
            return iterator
        return self._delivered(iterator, counter, counter.pass_index)

    def _delivered(self, iterator: Iterator[Any], counter: DrawCounter, mine: int) -> Iterator[Any]:
        for batch in iterator:
            if counter.pass_index != mine:
                raise RuntimeError("this iterator was superseded by a newer iter(loader)")
            counter.begin_delivery()
            yield batch


def count_draws(loader: Any, optimizer: DPOptimizer) -> DrawCounter | None:
    """Count the draws of a loader that Opacus returned; None where several processes draw together."""

    def forget() -> None:
        """A batch that BatchMemoryManager had split and a ``break`` left unfinished."""
        optimizer._step_skip_queue.clear()
        optimizer.in_chunks = False
        optimizer._is_last_step_skipped = False
        for p in optimizer.params:
            p.summed_grad = None

    sampler = loader.batch_sampler
    if type(sampler) is UniformWithReplacementSampler:
        sampler.__class__ = CountedPoissonSampler
    elif not isinstance(sampler, _CountingSampler):
        return None
    sampler.counter = DrawCounter(ahead=loader.num_workers > 0, on_pass=forget)
    counter: DrawCounter = sampler.counter
    return counter


def one_step_per_draw(
    hook: Callable[[DPOptimizer], None], counter: DrawCounter
) -> Callable[[DPOptimizer], None]:
    """The step hook, refusing a step for which nothing was drawn."""

    def checked(optimizer: DPOptimizer) -> None:
        counter.use()
        hook(optimizer)

    return checked


class PassBook:
    """Tells an accountant of steps, and of passes where these count.

    **Edge cases**: if somebody else wrote into the accountant's history since the last step, the next one
    opens a new pass: that can only book too much.
    """

    def __init__(self, accountant: Any) -> None:
        self.accountant = accountant
        self._last: tuple[int, int, Any] | None = None

    def _mark(self, pass_index: int) -> tuple[int, int, Any]:
        history = self.accountant.history
        return pass_index, len(history), tuple(history[-1]) if history else None

    def step(
        self, *, noise_multiplier: float, sample_rate: float, sampling: Sampling, pass_index: int
    ) -> None:
        """Book one step."""
        extra: dict[str, Any] = {}
        if self.accountant.mechanism() == "fdp":
            extra = {"sampling": sampling, "new_pass": self._mark(pass_index) != self._last}
        self.accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, **extra)
        self._last = self._mark(pass_index)


def individual_hook(
    accountant: Any, counter: DrawCounter | None, *, sample_rate: float, sampling: Sampling
) -> Callable[[Any], None]:
    """Step hook of individual clipping where Opacus's own would book something else.

    With ``sampling="shuffle"`` replacing a sample moves the sum by up to 2C while Opacus's noise is
    ``sigma * C``: the effective noise multiplier is sigma / 2. Optimizers that release blocks say theirs.
    """
    book = PassBook(accountant)

    def hook(optimizer: Any) -> None:
        effective = getattr(optimizer, "effective_noise_multiplier", optimizer.noise_multiplier / 2)
        book.step(
            noise_multiplier=effective,
            sample_rate=sample_rate,
            sampling=sampling,
            pass_index=0 if counter is None else counter.pass_index,
        )

    return hook
