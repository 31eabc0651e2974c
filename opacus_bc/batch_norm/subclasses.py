"""BatchNorm types with a forward of their own: theirs runs, and only the normalisation inside is answered.

timm's ``BatchNormAct2d`` drops and activates after it has normalised, a user's type may convert or scale.
Such a forward runs as in evaluation mode, where it writes nothing; its call of ``F.batch_norm`` gets ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Answer = Callable[[Tensor], Tensor]

_SIGNATURE = inspect.signature(F.batch_norm)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_TORCH_FORWARDS = frozenset(kind.forward for kind in (*_BATCH_NORMS, *_INSTANCE_NORMS))


def has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether a norm layer's type computes anything that torch's types do not.

    >>> class Renamed(nn.BatchNorm2d): pass
    >>> class Doubled(nn.BatchNorm2d):
    ...     def forward(self, x): return 2 * super().forward(x)
    >>> has_own_forward(Renamed), has_own_forward(Doubled)
    (False, True)
    """
    return kind.forward not in _TORCH_FORWARDS


@dataclass(frozen=True)
class Tap:
    """Where a layer has normalised: the gradients of weight and bias are read there, sample by sample.

    What follows in the same layer (dropout, an activation) lies between this place and the layer's output.
    """

    given: Tensor  # what was normalised, detached
    node: Any  # the autograd node of the normalised values
    place: int  # which of the node's outputs they are


def tap(given: Tensor, normalised: Tensor) -> Tap | None:
    """The tap at ``normalised``, before anything overwrites it; None where nothing has a gradient."""
    if normalised.grad_fn is None:
        return None
    return Tap(given.detach(), normalised.grad_fn, normalised.output_nr)


class Answering(TorchFunctionMode):
    """While it is active, ``F.batch_norm`` with the layer's own statistics and parameters gets our answer."""

    def __init__(self, layer: Any, answer: Answer) -> None:
        super().__init__()
        self._own = layer.running_mean, layer.running_var, layer.weight, layer.bias
        self._answer = answer

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Opens what the layer's forward calls; everything but its normalisation goes on as it is."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            given = _SIGNATURE.bind(*args, **kwargs).arguments
            used = (given.get(name) for name in ("running_mean", "running_var", "weight", "bias"))
            if all(one is own for one, own in zip(used, self._own, strict=True)):
                return self._answer(given["input"])
        return func(*args, **kwargs)


@contextmanager
def answering(layer: Any, answer: Answer, mean: Tensor, var: Tensor) -> Iterator[None]:
    """Let the layer's own forward run as in evaluation mode with these statistics, and answer for it.

    The modules inside (dropout, say) keep their modes.
    """
    held = {name: layer.__dict__[name] for name in ("training", "running_mean", "running_var")}
    layer.__dict__.update(training=False, running_mean=mean, running_var=var)
    try:
        with Answering(layer, answer):
            yield
    finally:
        layer.__dict__.update(held)
