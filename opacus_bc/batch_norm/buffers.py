"""What private forwards must not move, found in the first training forwards; see also ``snapshot.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from opacus_bc.batch_norm.layers import STATISTICS
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.types import Memo, State

Owned = tuple[str, nn.Module, str]
Held = list[tuple[Owned, Tensor]]
_WATCHED_FORWARDS = 3


class MovingBufferError(RuntimeError):
    """A private forward wrote into a buffer or a parameter, which would ship with the model un-noised."""


def _weight_only(module: nn.Module, name: str) -> bool:
    """Spectral norm's vectors read weights alone; ``once_a_step.py`` sees to how often they move."""
    if isinstance(module, _SpectralNorm):
        return name in ("_u", "_v")
    old_style = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    return any(name in (f"{hook.name}_u", f"{hook.name}_v") for hook in old_style)


def is_counter(value: Tensor) -> bool:
    """Whether a buffer is one whole number."""
    return value.numel() == 1 and not value.is_floating_point() and not value.is_complex()


def watched(
    module: nn.Module, leave_out: frozenset[int] = frozenset(), *, empty: bool = False
) -> Iterator[tuple[Owned, Any]]:
    """Every buffer that private data could move, with ``empty`` those that are None as well.

    A policy answers for the statistics of modules with an id in ``leave_out``, and for nothing else of them.
    """
    for path, child in module.named_modules():
        for name, value in child._buffers.items():
            answered = id(child) in leave_out and name in STATISTICS
            if not answered and (empty or value is not None) and not _weight_only(child, name):
                yield (path, child, name), value


def same(before: Tensor, after: Tensor) -> bool:
    """Whether a buffer is what it was; a counter may have grown by one."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if is_counter(before):  # one more for one more forward says nothing about the data
        return int(after) - int(before) in (0, 1)
    difference = (before != after) & ~((before != before) & (after != after))
    return not bool(difference.any())


def owner(owned: Owned) -> str:
    """What a message calls a buffer."""
    path, module, name = owned
    return f"buffer {name!r} of {path or 'the module'} ({type_name(module)})"


class _Watch:
    """Hooks that look at the first training forwards of a model and then take themselves off."""

    _before: dict[Any, Any]  # each watch's own

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._left = _WATCHED_FORWARDS
        self._handles: list[RemovableHandle] = []
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._remember))
            self._handles.append(module.register_forward_hook(self._compare))

    def _remember(self, module: nn.Module, _inputs: object) -> None:
        raise NotImplementedError

    def _compare(self, module: nn.Module, _inputs: object, _output: object) -> None:
        raise NotImplementedError

    def __deepcopy__(self, memo: Memo) -> Self:
        return self  # a copy of the model is watched by the same counter

    def __getstate__(self) -> State:
        return {**self.__dict__, "_handles": [], "_before": {}, "_left": 0}

    def remove(self) -> None:
        """Take every hook off."""
        while self._handles:
            self._handles.pop().remove()
        self._before.clear()

    def _seen_one(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.remove()


class BufferWatch(_Watch):
    """Compares buffers around the first training forwards, also of a part that is called on its own.

    Counters may grow by one; spectral norm's vectors may move, and so may the statistics of modules whose
    ``id`` is in ``leave_out``.
    """

    def __init__(self, root: nn.Module, leave_out: frozenset[int] = frozenset()) -> None:
        self.leave_out = leave_out
        self._root = id(root)
        self._before: dict[int, Held] = {}
        super().__init__(child for child in root.modules() if any(True for _ in watched(child, leave_out)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
    def _remember(self, module: nn.Module, _inputs: object) -> None:
        if module.training and self._left > 0:
            self._before[id(module)] = [
                (o, value.detach().clone()) for o, value in watched(module, self.leave_out)
            ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
    def _compare(self, module: nn.Module, _inputs: object, _output: object) -> None:
        before = self._before.pop(id(module), None)
        if before is None:
            return
        held = {(id(child), name) for (_, child, name), _ in before}
        now = [owned for owned, _ in watched(module, self.leave_out)]
        moved = [owned for owned in now if (id(owned[1]), owned[2]) not in held]
        for owned, value in before:
            after = owned[1]._buffers.get(owned[2])
            if after is None or not same(value, after):
                moved.append(owned)
        if moved:
            raise MovingBufferError(
                f"a training forward moved {owner(moved[0])}: it would carry private statistics out with the "
                "model, without noise. Leave it unchanged in training mode, or update it from public data"
            )
        if id(module) == self._root or len(self._handles) == 2:
            self._seen_one()


class ParameterWatch(_Watch):
    """Finds layers that initialise weights from the first batch (ActNorm, learned quantisers).

    **Edge cases**: compiled forwards and parameters in shards are not watched.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before: dict[str, Tensor] = {}
        super().__init__([root])

    def _remember(self, module: nn.Module, _inputs: object) -> None:
        if not torch.compiler.is_compiling() and module.training and self._left > 0:
            self._before = _marks(module)

    def _compare(self, module: nn.Module, _inputs: object, _output: object) -> None:
        if torch.compiler.is_compiling() or not self._before:
            return
        before, self._before = self._before, {}
        after = _marks(module)
        for name, mark in before.items():
            if name in after and not torch.equal(mark.nan_to_num(), after[name].nan_to_num()):
                raise MovingBufferError(
                    f"a training forward moved parameter {name!r}: it would carry private statistics out "
                    "with the model, without noise. Initialise it from public data before make_private"
                )
        self._seen_one()


@torch.no_grad()
def _marks(module: nn.Module) -> dict[str, Tensor]:
    """Two numbers for each parameter that change whenever it does, but for rare accidents."""
    return {
        name: torch.stack([p.sum(), torch.linalg.vector_norm(p)])
        for name, p in module.named_parameters()
        if type(p) is nn.Parameter and p.is_floating_point() and not isinstance(p.data, DTensor)
    }
