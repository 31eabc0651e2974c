"""The layer types that obey a BatchNorm policy: each is a subclass of the type whose place it takes.

A policy swaps a layer's class and swaps it back in the end; parameters, buffers and names stay where they
are. Types are made on demand (users subclass BatchNorm too), can be pickled, copied and compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, SupportsIndex, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from opacus_bc._opacus import compute_instance_norm_grad_sample, register_grad_sampler
from opacus_bc.batch_norm.gradients import Upstream, constant_batch_norm, constant_statistics_grad_sample
from opacus_bc.batch_norm.keeper import Keeper
from opacus_bc.batch_norm.subclasses import Tap, answering, has_own_forward, tap
from opacus_bc.mechanism.types import Memo, State

NORM_LAYERS = (_BatchNorm, _InstanceNorm)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Not for copies: their keeper measures anew, their forwards tap anew.
_OWN_ONLY = ("upstream", "tap", "normalises_input")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
def _before_evaluation(keeper: Keeper) -> None:
    keeper.before_evaluation()


class PolicyLayer(nn.Module):
    """What all patched types share. Without a keeper (after unpickling) the statistics stay as they are."""

    plain_type: ClassVar[type[nn.Module]]
    mixin: ClassVar[type[PolicyLayer]]
    # What the plain types have:
    num_features: int
    eps: float
    momentum: float | None
    track_running_stats: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    keeper: Keeper | None = None
    collecting: list[tuple[Tensor, Tensor]] | None = None

    def install(self) -> None:
        """Called once after the class was swapped in."""

    def remove(self) -> None:
        """Called once before the plain class comes back."""
        for name in ("keeper", "collecting"):
            self.__dict__.pop(name, None)

    def _ask_keeper(self) -> None:
        """Before running statistics are read."""
        if not self.training and self.keeper is not None and self.collecting is None:
            _before_evaluation(self.keeper)

    @torch.no_grad()
    def write_statistics(self, mean: Tensor, var: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Write running statistics (and after how many batches), and return copies of what is held then."""
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.copy_(mean)
        self.running_var.copy_(var)
        if count is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.fill_(count)
        return self.running_mean.clone(), self.running_var.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        if self.keeper is not None:
            self.keeper.before_saving()
        state = {key: value for key, value in self.__dict__.items() if key not in ("keeper", *_OWN_ONLY)}
        return _new, (self.mixin, self.plain_type), state

    def __deepcopy__(self, memo: Memo) -> PolicyLayer:
        duplicate = _new(self.mixin, self.plain_type)
        memo[id(self)] = duplicate
        for key, value in self.__dict__.items():
            if key in _OWN_ONLY:
                continue
            keeper = key == "keeper" and value is not None
            duplicate.__dict__[key] = value.copied(memo) if keeper else copy.deepcopy(value, memo)
        return duplicate

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        if self.keeper is not None:
            self.keeper.before_saving()
        super()._save_to_state_dict(destination, prefix, keep_vars)


class FrozenStatistics(PolicyLayer):
    """Uses the given statistics in every mode and never writes them."""

    def install(self) -> None:
        self.training = False

    def train(self, mode: bool = True) -> FrozenStatistics:
        """Stays in evaluation mode, where nothing is written; modules inside (dropout) change theirs."""
        super().train(mode)
        self.training = False
        return self


class MiniSetStatistics(PolicyLayer):
    """Training forwards use the batch's own statistics and write nothing; evaluation asks the keeper first.

    **Formal guarantee**: outside of a collecting pass no forward changes a buffer.
    """

    def install(self) -> None:
        self.track_running_stats = False  # buffers stay, serve in evaluation mode and are not written

    def remove(self) -> None:
        super().remove()
        self.track_running_stats = True

    def forward(self, x: Tensor) -> Tensor:
        if self.collecting is not None:
            return self._collect(x)
        self._ask_keeper()
        result: Tensor = super().forward(x)
        return result

    def _collect(self, x: Tensor) -> Tensor:
        assert self.collecting is not None
        if issubclass(self.plain_type, nn.SyncBatchNorm):  # its own forward would talk to other processes
            return _collect(self, x)
        before = self.training, self.momentum
        self.training, self.momentum, self.track_running_stats = True, 1.0, True
        try:
            result: Tensor = super().forward(x)
        finally:
            (self.training, self.momentum), self.track_running_stats = before, False
        assert self.running_mean is not None
        assert self.running_var is not None
        self.collecting.append((self.running_mean.clone(), self.running_var.clone()))
        return result

    def _apply_instance_norm(self, x: Tensor) -> Tensor:
        if self.track_running_stats:
            collected: Tensor = super()._apply_instance_norm(x)  # type: ignore[misc]  # an InstanceNorm's
            return collected
        return _instance_norm(self, x)


class ConstantStatistics(PolicyLayer):
    """Normalises training batches with constants, so that each sample's gradient is its own.

    The running statistics become plain attributes: Opacus refuses trainable layers with buffers, rightly,
    since it cannot know who writes them. State dicts have the plain type's keys.

    **Formal guarantee**: outside of a collecting pass row i of a training forward's output is a function of
    row i of its input, of the parameters and of ``constant_mean`` and ``constant_var``; row i of the
    per-sample gradients is one of these and of ``upstream``, which knows public data only. (Of types with a
    forward of their own :mod:`opacus_bc.batch_norm.subclass_check` has seen it.)
    """

    constant_mean: Tensor
    constant_var: Tensor
    upstream: tuple[Upstream, ...] = ()
    tap: Tap | None = None  # of the last forward, until per-sample hooks take it
    normalises_input: bool = True  # itself, and not what an own forward makes of it

    def install(self) -> None:
        if self.running_mean is None or self.running_var is None:
            device = None if self.weight is None else self.weight.device
            self.constant_mean = torch.zeros(self.num_features, device=device)
            self.constant_var = torch.ones(self.num_features, device=device)
        self.take_running_statistics()
        _move_statistics(self._buffers, self.__dict__)

    def remove(self) -> None:
        super().remove()
        for name in _OWN_ONLY:
            self.__dict__.pop(name, None)
        _move_statistics(self.__dict__, self._buffers)
        del self.constant_mean, self.constant_var

    def forward(self, x: Tensor) -> Tensor:
        if issubclass(self.plain_type, _InstanceNorm):
            self._ask_keeper()
            instance: Tensor = super().forward(x)
            return instance
        if has_own_forward(self.plain_type):
            return self._own_forward(x)
        self._check_input_dim(x)  # type: ignore[operator]  # BatchNorm's
        if self.collecting is not None:
            return _collect(self, x)
        if self.training:
            return self._normalise(x)
        self._ask_keeper()
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, self.weight, self.bias, mean is None, 0.0, self.eps)

    def _normalise(self, x: Tensor) -> Tensor:
        constants = (self.constant_mean, self.constant_var, self.eps)
        return constant_batch_norm(self, x, self.weight, self.bias, *constants)

    def _own_forward(self, x: Tensor) -> Tensor:
        """The plain type's forward; in training and while collecting its normalisation is ours."""
        result: Tensor
        if not self.training and self.collecting is None:
            self._ask_keeper()
            result = super().forward(x)
            return result

        def collected(given: Tensor) -> Tensor:
            self.normalises_input = given is x
            return _collect(self, given)

        answer = self._tapped if self.collecting is None else collected
        with answering(self, answer, self.constant_mean, self.constant_var):
            result = super().forward(x)
        return result

    def _tapped(self, x: Tensor) -> Tensor:
        normalised = self._normalise(x)
        self.tap = tap(x, normalised)
        return normalised

    def take_tap(self) -> Tap | None:
        """Where the last forward has normalised, once; None for torch's types, which do nothing else."""
        taken, self.tap = self.tap, None
        return taken

    def _apply_instance_norm(self, x: Tensor) -> Tensor:
        return _instance_norm(self, x) if self.collecting is None else _collect(self, x)

    def take_running_statistics(self) -> None:
        """Normalise training batches with the running statistics as they are now."""
        if self.running_mean is not None and self.running_var is not None:
            self.constant_mean = self.running_mean.detach().clone()
            self.constant_var = self.running_var.detach().clone()

    def constants(self, paths: Mapping[nn.Module, str]) -> State:
        """The training constants, for a checkpoint; ``paths`` names the model's modules."""
        return {
            "mean": self.constant_mean.clone(),
            "var": self.constant_var.clone(),
            "upstream": [(paths[entry.layer], entry.tensors()) for entry in self.upstream],
        }

    def load_constants(self, held: State, modules: Mapping[str, nn.Module]) -> None:
        """Put back what :meth:`constants` gave."""
        device = self.constant_mean.device
        self.constant_mean = held["mean"].to(device=device, copy=True)
        self.constant_var = held["var"].to(device=device, copy=True)
        entries = (Upstream(layer=modules[path], **tensors) for path, tensors in held["upstream"])
        self.upstream = tuple(entry.applied(partial(_copied, device=device)) for entry in entries)

    @contextmanager
    def with_buffers(self) -> Iterator[None]:
        """While it is open, the running statistics are buffers."""
        _move_statistics(self.__dict__, self._buffers)
        try:
            yield
        finally:
            _move_statistics(self._buffers, self.__dict__)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ConstantStatistics:
        with self.with_buffers():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's has no types
        self.constant_mean, self.constant_var = fn(self.constant_mean), fn(self.constant_var)
        self.upstream = tuple(entry.applied(fn) for entry in self.upstream)
        return self

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        if self.keeper is not None:
            self.keeper.before_saving()
        with self.with_buffers():
            nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: object) -> None:
        with self.with_buffers():
            super()._load_from_state_dict(*args)


def _copied(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device=device, copy=True)


def _move_statistics(source: State, target: State) -> None:
    target.update((name, source.pop(name)) for name in STATISTICS if name in source)


def _collect(layer: PolicyLayer, x: Tensor) -> Tensor:
    """Normalise with the statistics of ``x`` and append them; one fused kernel, momentum 1 stores them."""
    dtype = x.dtype if layer.running_mean is None else layer.running_mean.dtype
    mean = torch.zeros(layer.num_features, device=x.device, dtype=dtype)
    var = torch.ones_like(mean)
    normalise = F.instance_norm if issubclass(layer.plain_type, _InstanceNorm) else F.batch_norm
    result = normalise(x, mean, var, layer.weight, layer.bias, True, 1.0, layer.eps)
    assert layer.collecting is not None
    layer.collecting.append((mean, var))
    return result


def _instance_norm(layer: PolicyLayer, x: Tensor) -> Tensor:
    """Own statistics of each sample in training mode, running ones (if there are any) otherwise."""
    own = layer.training or layer.running_mean is None
    mean, var = (None, None) if own else (layer.running_mean, layer.running_var)
    return F.instance_norm(x, mean, var, layer.weight, layer.bias, own, 0.0, layer.eps)


_TYPES: dict[tuple[type[PolicyLayer], type[nn.Module]], type[PolicyLayer]] = {}


def patched_type(mixin: type[PolicyLayer], plain: type[nn.Module]) -> type[PolicyLayer]:
    """The subclass of ``plain`` that obeys ``mixin``, the same one every time."""
    if (mixin, plain) not in _TYPES:
        name = mixin.__name__.removesuffix("Statistics") + plain.__name__
        kind = type(name, (mixin, plain), {"plain_type": plain, "mixin": mixin, "__module__": __name__})
        if issubclass(mixin, ConstantStatistics):
            per_sample = compute_instance_norm_grad_sample
            if issubclass(plain, _BatchNorm):
                per_sample = constant_statistics_grad_sample
            register_grad_sampler(kind)(per_sample)
        _TYPES[mixin, plain] = kind
    return _TYPES[mixin, plain]


def _new(mixin: type[PolicyLayer], plain: type[nn.Module]) -> PolicyLayer:
    kind = patched_type(mixin, plain)
    return kind.__new__(kind)


def patch(layer: nn.Module, mixin: type[PolicyLayer], keeper: Keeper | None = None) -> None:
    """Swap the layer's class for one that obeys ``mixin``."""
    layer.__class__ = patched_type(mixin, type(layer))
    assert isinstance(layer, PolicyLayer)
    layer.keeper = keeper
    layer.install()


def unpatch(layer: nn.Module) -> None:
    """Give the layer its plain type back; layers that were not patched stay as they are."""
    if isinstance(layer, PolicyLayer):
        layer.remove()
        cast(nn.Module, layer).__class__ = layer.plain_type
