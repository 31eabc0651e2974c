"""Running statistics from the private data itself, released with noise: ``batch_norm="private"``.

Layer by layer, with the earlier layers fixed to what was released for them, every sample contributes the
vector of its channel means and channel second moments, clipped to norm R. The sum, divided by a public
constant, is released with Gaussian noise. Where users are protected, the vector that is clipped is the mean
over a user's samples, of which there are at most as many as in a step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn

from opacus_bc.batch_norm.buffers import MovingBufferError
from opacus_bc.batch_norm.estimating import ModelKeeper, weights_fingerprint
from opacus_bc.batch_norm.gradients import positions
from opacus_bc.batch_norm.layers import PolicyLayer
from opacus_bc.mechanism.blocks import over_layers, sensitivity
from opacus_bc.mechanism.names import Adjacency, Unit, neighbours
from opacus_bc.mechanism.noise import NoiseSource
from opacus_bc.mechanism.numbers import check_positive
from opacus_bc.mechanism.randomness import fresh_seed, isolated_randomness
from opacus_bc.mechanism.segments import segment_means
from opacus_bc.mechanism.types import State
from opacus_bc.mechanism.warn import users_level
from opacus_bc.public.row_tests import Rows, Run, first_difference, row_count
from opacus_bc.public.running import (
    batch_input,
    evaluation_mode,
    forward,
    samples,
    untouched_buffers,
    zeros,
)

# Released variances are noisy differences; below this they would blow the layer up.
VARIANCE_FLOOR = 1e-3
# Noise on the statistics above which a model whose activations are of scale 1 suffers visibly.
LARGE_NOISE = 0.1


@dataclass(frozen=True, kw_only=True)
class PrivateStatistics:
    """What the final release of the running statistics costs; ``batch_norm="private"`` takes the defaults.

    Attributes:
        noise_multiplier: Noise standard deviation over L2-sensitivity, for each layer.
        bound: R, the L2 bound of a sample's vector of channel means and second moments; None takes
            ``2 * sqrt(2 * channels)`` for each layer, which leaves activations of scale 1 unclipped.
    """

    noise_multiplier: float = 50.0
    bound: float | None = None

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        if self.bound is not None:
            check_positive("bound", self.bound)


def release_multiplier(noise_multiplier: float, layers: int) -> float:
    """``sigma_eff`` of releasing ``layers`` layers one after the other: ``sigma / sqrt(layers)``.

    **Formal guarantee**: each layer's release is ``G_{1/sigma}``-DP given the earlier ones, and adaptive
    composition of Gaussian mechanisms adds the squares of their parameters.

    >>> round(1 / release_multiplier(50.0, 3), 4)
    0.0346
    """
    return over_layers(noise_multiplier, layers)


def moments(x: Tensor) -> Tensor:
    """Channel means and channel second moments of every sample: shape ``(n, 2 * channels)``, in float64."""
    flat = positions(x.detach().double())
    return torch.cat([flat.mean(2), flat.square().mean(2)], dim=1)


def clipped_sum(vectors: Tensor, bound: float) -> Tensor:
    """Sum of the rows, each scaled into the ball of radius ``bound``.

    **Formal guarantee**: one row more or less moves the result by at most ``bound``, one row replaced by
    another by at most twice that.

    **Edge cases**: a row that is not finite counts as zero.
    """
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    finite = torch.isfinite(norms)
    scale = torch.where(finite, (bound * (1 - 1e-12) / norms.clamp_min(1e-300)).clamp_max(1.0), 0.0)
    return (torch.nan_to_num(vectors, posinf=0.0, neginf=0.0) * scale).sum(0)


def statistics_from(released: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and floored variance out of released first and second moments."""
    mean, second = released.chunk(2)
    return mean, (second - mean.square()).clamp_min(VARIANCE_FLOOR)


_PENDING = (
    "running statistics at the current weights are not released yet: finalize() does it, with Gaussian "
    "noise, and adds its cost to the epsilon stated here"
)


class _Reached(Exception):
    """The layer in question has its input: the rest of the forward is not needed."""


def layer_sum(
    root: nn.Module,
    layer: PolicyLayer,
    batches: Iterable[object],
    bound: float,
    counts: Iterable[Sequence[int]] | None = None,
) -> Tensor:
    """Sum over all samples of their clipped moments at the layer's input, which needs a row for each.

    With ``counts`` a batch consists of whole users with so many samples each, and the mean of a user's
    moments is clipped.
    """
    total = torch.zeros(2 * layer.num_features, dtype=torch.float64)

    def take(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        vectors.append(moments(inputs[0]))
        raise _Reached

    vectors: list[Tensor] = []
    handle = layer.register_forward_pre_hook(take)
    try:
        for batch, owned in zip(batches, repeat(None) if counts is None else counts, strict=False):
            vectors.clear()
            try:
                forward(root, batch)
            except _Reached:
                count = samples(batch_input(batch))
                if len(vectors[0]) != count:
                    raise ValueError(
                        f"a {layer.plain_type.__name__} gets {len(vectors[0])} rows for {count} samples: "
                        "batch_norm='private' needs one row for each sample; use a public loader"
                    ) from None
                found = vectors[0] if owned is None else segment_means(vectors[0], owned)
                total += clipped_sum(found, bound).cpu()
    finally:
        handle.remove()
    return total


class PrivateKeeper(ModelKeeper):
    """Holds the released statistics; evaluation before the first release raises."""

    def __init__(
        self,
        root: nn.Module,
        config: PrivateStatistics,
        *,
        normaliser: int,
        adjacency: Adjacency,
        unit: Unit = "sample",
    ) -> None:
        super().__init__(
            root, "running statistics are released from private data with Gaussian noise, counted in epsilon"
        )
        self.config = config
        self.normaliser = normaliser
        self.adjacency, self.unit = adjacency, unit
        self.releases = 0
        self.finished = False
        self._released: list[tuple[PolicyLayer, Tensor, Tensor]] = []

    def start(self) -> None:
        """Say before training if the final statistics will be useless: all of it is public."""
        channels = max(layer.num_features for layer in self.layers().values())
        per_unit = self._noise(1.0, self.config.bound or default_bound(channels))
        if self.config.noise_multiplier * per_unit > LARGE_NOISE:
            right = math.floor(LARGE_NOISE / per_unit)
            instead = f"PrivateStatistics(noise_multiplier={right}) has {LARGE_NOISE}, for more epsilon"
            warnings.warn(
                f"batch_norm='private': with {self.normaliser} {self.unit}s the released statistics of "
                f"{channels} channels will carry noise of standard deviation "
                f"{self.config.noise_multiplier * per_unit:.2g}, where activations are of scale 1. "
                + (instead if right >= 1 else "Use public data, or batch_norm='batch'"),
                stacklevel=users_level(),
            )

    def _noise(self, noise_multiplier: float, radius: float) -> float:
        """Standard deviation of the noise on each released moment."""
        delta = sensitivity(radius, unit=self.unit, adjacency=self.adjacency) / self.normaliser
        return noise_multiplier * delta

    def before_evaluation(self) -> None:
        """Raise unless statistics have been released."""
        if self.releases == 0 and not self._busy:
            raise RuntimeError(
                "batch_norm='private': no running statistics have been released yet. Call "
                "engine.recalibrate_batch_norm(noise_multiplier=..., bound=...) before evaluating (it costs "
                "privacy), or engine.finalize(model) at the end"
            )

    @property
    def neighbours(self) -> str:
        """The adjacency with the name of who is protected."""
        return neighbours(self.adjacency, self.unit)

    @property
    def owes_release(self) -> bool:
        """Whether the statistics were not released at the current weights."""
        return not self.up_to_date

    def describe(self) -> str:
        return _PENDING if self.owes_release and not self.finished else super().describe()

    def state_dict(self) -> State:
        names = {layer: name for name, layer in self.layers().items()}
        return {
            "releases": self.releases,
            "current": not self.owes_release,
            "released": {names[layer]: (mean.clone(), var.clone()) for layer, mean, var in self._released},
        }

    def load_state_dict(self, state: State | None) -> None:
        root = self._root()
        if state is None or root is None:
            return
        layers = self.layers()
        self.releases = state["releases"]
        self.written = {id(layers[name]) for name in state["released"]}
        self._released = [(layers[name], mean, var) for name, (mean, var) in state["released"].items()]
        self._estimated_at = weights_fingerprint(root) if state["current"] else None

    def finish(self) -> None:
        """Raise if a layer holds anything but what was released for it."""
        for layer, mean, var in self._released:
            held = layer.running_mean, layer.running_var
            if not all(
                isinstance(h, Tensor) and torch.equal(h, r) for h, r in zip(held, (mean, var), strict=True)
            ):
                raise MovingBufferError(
                    f"the running statistics of a {layer.plain_type.__name__} are not the released ones: "
                    "call engine.recalibrate_batch_norm() again before releasing the model"
                )
        self.finished = True

    def release(
        self,
        layers: Sequence[PolicyLayer],
        batches: Iterable[object],
        *,
        noise: NoiseSource,
        noise_multiplier: float,
        bound: float | None,
        counts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Release the statistics of all layers in the given order; accounting is the caller's duty.

        ``counts`` says how many samples each user of a batch has, where users are protected.

        **Formal guarantee**: each layer's release is ``G_{1/noise_multiplier}``-DP given the earlier ones:
        its sum has sensitivity R (add/remove one) or 2R (replace one), the normaliser is public, and every
        layer before it uses released statistics, so that a sample's vector depends on that sample alone. The
        same holds for users, each of whom has one vector.
        """
        if (self.unit == "user") != (counts is not None):
            raise ValueError("the statistics of users need batches of whole users")
        with self.running() as root, evaluation_mode(root), torch.no_grad():
            self._released.clear()
            self.written.clear()
            for layer in layers:
                radius = default_bound(layer.num_features) if bound is None else bound
                # A fresh seed: with a fixed one, a sample more would shift the others' augmentation.
                with isolated_randomness(fresh_seed()), untouched_buffers(root):
                    total = layer_sum(root, layer, batches, radius, counts)
                std = self._noise(noise_multiplier, radius)
                released = total / self.normaliser + noise.normal(total, std)
                self._released.append((layer, *layer.write_statistics(*statistics_from(released))))
                self.written.add(id(layer))
            self.releases += 1
            self._estimated_at = weights_fingerprint(root)


def default_bound(channels: int) -> float:
    """``2 * sqrt(2 * channels)``: see :class:`PrivateStatistics`."""
    return 2.0 * math.sqrt(2.0 * channels)


def check_rows_apart(root: nn.Module, layers: Sequence[PolicyLayer], batch: object) -> None:
    """Refuse a model in which the input of a layer has another sample's share in a sample's row.

    On a few rows in evaluation mode, once as they are and twice with a row replaced; a pass is evidence and
    no proof. Weights, buffers, modes and random streams are left as they were.

    Raises:
        ValueError: Names the first layer.
    """
    inputs = batch_input(batch)
    count = row_count(inputs)
    rows = Rows(count=min(count, 5))
    if rows.count < 2:
        return
    few = Rows(count=count).first(inputs, rows.count)

    def seen(value: object) -> Run:
        run = Run()
        handles = [
            layer.register_forward_pre_hook(lambda _, args, name=name: run.add(name, args[0].clone()))
            for name, layer in named
        ]
        try:
            with isolated_randomness(0):
                forward(root, value)
        finally:
            for handle in handles:
                handle.remove()
        return run

    named = [(name, layer) for name, layer in root.named_modules() if layer in layers]
    with _unasked(layers), evaluation_mode(root), untouched_buffers(root), torch.no_grad():
        plain = seen(few)
        for row, factor in ((rows.count - 1, 1.0), (1, -10.0)):
            found = first_difference(plain, seen(rows.replaced(few, row, factor)), rows, row, tolerance=1e-5)
            if found is not None:
                raise ValueError(
                    f"batch_norm='private': replacing one sample changes what other samples bring to "
                    f"{found}, so one sample would move the released sum by more than its bound. Use "
                    "public data or batch_norm='batch', or let every sample pass through the model "
                    "by itself in evaluation"
                )


@contextmanager
def _unasked(layers: Sequence[PolicyLayer]) -> Iterator[None]:
    """While it is open, the layers normalise with what they hold and ask nobody."""
    keepers = [layer.keeper for layer in layers]
    try:
        for layer in layers:
            layer.keeper = None
        yield
    finally:
        for layer, keeper in zip(layers, keepers, strict=True):
            layer.keeper = keeper


def execution_order(root: nn.Module, layers: Sequence[PolicyLayer], batch: object) -> list[PolicyLayer]:
    """The layers that a forward on zeros in the batch's shape reaches, in this order."""
    order: list[PolicyLayer] = []
    handles = [layer.register_forward_pre_hook(lambda module, _: order.append(module)) for layer in layers]
    try:
        with (
            _unasked(layers),
            evaluation_mode(root),
            untouched_buffers(root),
            torch.no_grad(),
            isolated_randomness(0),
        ):
            forward(root, zeros(batch_input(batch)))
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(order))
