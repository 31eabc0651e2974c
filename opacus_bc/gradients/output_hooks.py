"""Opacus's backward hooks, attached so that a layer's output may be overwritten.

torch's full backward hooks hand a layer's output on as a view that refuses in-place operations. A model with
``ReLU(inplace=True)`` or ``out += identity`` behind a layer (torchvision's ResNets have both) then fails in
its first private forward. Here the same hook sits on the autograd node that made the output.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from opacus_bc.batch_norm.layers import ConstantStatistics
from opacus_bc.mechanism.names import type_name

_ONE_TENSOR = ("torch.nn.", "opacus.", "opacus_bc.")  # whose layers with a grad sampler return one tensor


def hook_outputs(wrapper: Any) -> None:
    """Move the backward hooks that ``wrapper`` has just added to the autograd nodes of the layers' outputs.

    **Formal guarantee**: the hook gets the gradient that the backward pass itself sends into the layer: with
    respect to the values that the layer's own forward returned, after tensor hooks on them, whatever is
    written over them and whatever later forward hooks make of them. So the norms that clip are those of the
    gradient that is released (ghost clipping), and per-sample gradients are autograd's.

    **Edge cases**: layers of other packages with a rule keep torch's full hooks: their output may be more
    than one tensor. A layer without a rule must have one tensor as its input and one as its output: Opacus
    would not look at the others. A layer whose hook does not fire has no per-sample gradient, and the
    optimizer refuses to step.
    """
    handles = wrapper.autograd_grad_sample_hooks
    for layer in wrapper.iterate_submodules(wrapper._module):
        ruled = type(layer) in wrapper.GRAD_SAMPLERS
        if ruled and not type(layer).__module__.startswith(_ONE_TENSOR):
            continue
        for key, hook in list(layer._backward_hooks.items()):
            if _is_opacus(hook, wrapper):
                del layer._backward_hooks[key]
                handles.append(layer.register_forward_hook(_OnOutput(hook), prepend=True))
                if not ruled:
                    handles.append(layer.register_forward_hook(_one_tensor, prepend=True, with_kwargs=True))


def _is_opacus(hook: Any, wrapper: Any) -> bool:
    return isinstance(hook, partial) and getattr(hook.func, "__self__", None) is wrapper


def _one_tensor(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
    """Refuse what a second forward with the first input alone would not repeat."""
    if not layer.training or not torch.is_grad_enabled():
        return
    if len(inputs) != 1 or named or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
        raise RuntimeError(
            f"a {type_name(layer)} has parameters of its own that Opacus has no rule for, and its "
            "forward has more than one tensor as input or output: put these parameters into a layer with one "
            "of each, or use clipping='batch'"
        )


class _OnOutput:
    """A forward hook that puts a module's backward hook on its output. A class, since models pickle."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if torch._C._are_functorch_transforms_active() or not isinstance(output, Tensor):
            return None
        if not output.requires_grad or output.grad_fn is None:
            return None
        # Writing into a view replaces its node, and our hook would miss what comes through the new one.
        fresh = output.clone() if output._is_view() else None
        watched = output if fresh is None else fresh
        node, place = watched.grad_fn, watched.output_nr
        assert node is not None
        self._refuse_hooks_before(layer)
        tap = layer.take_tap() if isinstance(layer, ConstantStatistics) else None
        if tap is not None:  # the layer has normalised here and goes on to drop and activate
            node, place, inputs = tap.node, tap.place, (tap.given,)
        seen = [(given, given._version) for given in inputs if isinstance(given, Tensor)]
        recorded = layer.training

        def backward(_inputs: Any, outputs: Any) -> None:
            if not recorded:
                raise RuntimeError(
                    f"a {type_name(layer)} was in evaluation mode in the forward pass, where Opacus "
                    "records nothing: call model.train() before it"
                )
            _refuse_overwritten(layer, seen)
            held: Any = getattr(layer, "activations", None)
            if tap is not None and held:
                held[-1] = [tap.given]
            self._hook(layer, None, (outputs[place],))

        node.register_hook(backward)
        return fresh

    def _refuse_hooks_before(self, layer: nn.Module) -> None:
        """Ghost norms are of what the layer returned, the release is of what a hook made of it before us."""
        ghost = hasattr(self._hook.func.__self__, "get_clipping_coef")
        if ghost and (next(iter(layer._forward_hooks.values())) is not self or _global_forward_hooks):
            raise RuntimeError(
                f"a forward hook comes before those of ghost clipping on a {type_name(layer)}: register "
                "it without prepend=True and not for all modules, or use grad_sample_mode='hooks'"
            )


def _refuse_overwritten(layer: nn.Module, seen: list[tuple[Tensor, int]]) -> None:
    """Opacus keeps a layer's input without a copy; autograd may have one of its own, as under autocast."""
    if any(given._version != version for given, version in seen):
        raise RuntimeError(
            f"the input of a {type_name(layer)} was overwritten in place after its forward pass, so its "
            "per-sample gradients would be those of other values: write x = x + y for x += y, or use "
            "clipping='batch'"
        )
