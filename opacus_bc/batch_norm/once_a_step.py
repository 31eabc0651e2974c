"""Buffers that forwards may move, because they read no data: they move once a step, not once a delivery.

Counters and the vectors of spectral norm move in every training forward. A step has as many forwards as
mini-sets, users or chunks were drawn, and one sample more may mean one forward more: all later ones would see
other values, and what ships with the model would tell how many there were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from opacus_bc.batch_norm.buffers import is_counter, watched

SHARDED = (
    "spectral norm is not built for fully_shard: its vectors move once a step, with the whole weight. Use "
    "DistributedDataParallel, or remove spectral norm"
)


@dataclass(kw_only=True, eq=False)
class _Kept:
    """A buffer, and the value that it has at every delivery of the present draw."""

    module: nn.Module
    name: str
    value: Tensor
    moved: Tensor | None = None  # of a counter: whether a forward of this draw has moved it

    def now(self) -> Tensor | None:
        """The buffer itself, if it is what it was but for its value."""
        found = self.module._buffers.get(self.name)
        if found is None or found.shape != self.value.shape or found.dtype != self.value.dtype:
            return None
        self.value = self.value.to(found.device)
        return found

    def put_back(self) -> None:
        """Give the buffer the value that is kept, and note whether it was another."""
        found = self.now()
        if found is None:
            return
        if self.moved is not None:
            self.moved = self.moved.to(found.device) | (found != self.value)
        found.copy_(self.value)

    def count(self) -> None:
        """Let a counter that was moved grow by one."""
        if self.moved is not None and (found := self.now()) is not None:
            found.copy_(self.value.to(torch.int64) + self.moved)
            self.moved = torch.zeros_like(self.moved)

    def keep(self) -> None:
        """Keep the value that the buffer has now."""
        found = self.module._buffers.get(self.name)
        if found is not None:
            self.value = found.detach().clone()


class OnceAStep:
    """Counters and spectral norm's vectors of a model, which must not count deliveries.

    **Formal guarantee**: at every delivery of a draw they have equal values. After a step a counter has grown
    by one if forwards move it; spectral norm's vectors have made the power iteration of one forward, at the
    released weights. So they are functions of released weights and of the number of steps.

    **Edge cases**: in evaluation mode spectral norm stands still, as it does without this.

    Args:
        root: The model.
        leave_out: Modules, by ``id``, whose statistics a policy answers for.

    Raises:
        NotImplementedError: Spectral norm of a weight in shards.
    """

    def __init__(self, root: nn.Module, leave_out: Collection[int] = ()) -> None:
        self._root = root
        if any(isinstance(p.data, DTensor) for owner, _ in _normed(root) for p in owner.parameters()):
            raise NotImplementedError(SHARDED)
        self._kept = [
            _Kept(module=child, name=name, value=value.detach().clone(), moved=torch.zeros_like(value).bool())
            for (_, child, name), value in watched(root, frozenset(leave_out))
            if is_counter(value)
        ]
        self._kept += [
            _Kept(module=child, name=name, value=child._buffers[name].detach().clone())  # type: ignore[union-attr]  # it is there
            for child, name in _vectors(root)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """A batch is about to be delivered, or has been used: all forwards of a draw begin alike."""
        for kept in self._kept:
            kept.put_back()

    @torch.no_grad()
    def after_step(self) -> None:
        """The weights have moved by a release."""
        self.put_back()
        for kept in self._kept:
            kept.count()
        for owner, what in _normed(self._root) if self._kept else ():
            if isinstance(what, SpectralNorm):
                what.compute_weight(owner, do_power_iteration=owner.training)
            else:
                getattr(owner, what)  # a parametrized weight is computed when it is read
        self.keep()

    def keep(self) -> None:
        """Go on from the values that the buffers have now: a checkpoint was loaded."""
        for kept in self._kept:
            kept.keep()


def _normed(root: nn.Module) -> Iterator[tuple[nn.Module, str | SpectralNorm]]:
    """The modules with a spectral norm, and the parametrized weight's name or the old-style hook."""
    for child in root.modules():
        if parametrize.is_parametrized(child):
            chains: nn.ModuleDict = child.parametrizations  # type: ignore[assignment]  # torch's
            for name, chain in chains.items():
                if any(isinstance(each, _SpectralNorm) for each in chain):  # type: ignore[attr-defined]
                    yield child, name
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield child, hook


def _vectors(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Spectral norm's buffers, which only reads of weights move."""
    for child in root.modules():
        hooks = [hook for hook in child._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        names = [f"{hook.name}{end}" for hook in hooks for end in ("_u", "_v")]
        if isinstance(child, _SpectralNorm):
            names += ["_u", "_v"]
        for name in names:
            if child._buffers.get(name) is not None:  # a normalised vector has none
                yield child, name
