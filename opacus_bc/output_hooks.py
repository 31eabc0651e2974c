"""Opacus's backward hooks, attached so that a layer's output may be overwritten.

torch's full backward hooks hand a layer's output on as a view that refuses in-place operations. A model with
``ReLU(inplace=True)`` or ``out += identity`` behind a layer (torchvision's ResNets have both) then fails in
its first private forward. A hook on the output tensor itself sees the same gradient, the one with respect to
the values that the layer computed, whatever is written over them later.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn


def hook_outputs(wrapper: Any) -> None:
    """Move Opacus's backward hooks to the outputs of the layers.

    **Formal guarantee**: none of its own. Per-sample gradients are what they were; a layer whose hook does
    not fire has none, and Opacus's optimizer refuses to step.

    **Edge cases**: wrappers without such hooks (ExpandedWeights) and layers that functorch differentiates,
    whose output may be more than one tensor, stay as they are.
    """
    handles = getattr(wrapper, "autograd_grad_sample_hooks", None)
    if handles is None:
        return
    for layer in wrapper.iterate_submodules(wrapper._module):
        if type(layer) not in wrapper.GRAD_SAMPLERS:
            continue
        for key, hook in list(layer._backward_hooks.items()):
            if _is_opacus(hook, wrapper):
                del layer._backward_hooks[key]
                handles.append(layer.register_forward_hook(_OnOutput(hook)))


def _is_opacus(hook: Any, wrapper: Any) -> bool:
    return isinstance(hook, partial) and getattr(hook.func, "__self__", None) is wrapper


class _OnOutput:
    """A forward hook that puts a module's backward hook on its output. A class, since models pickle."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(  # type: ignore[no-untyped-call]  # torch's has no types
                lambda gradient: self._hook(layer, None, (gradient,))
            )
