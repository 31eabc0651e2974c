"""Opacus's wrappers that make per-sample gradients, with guards.

Opacus clips row i of every parameter's per-sample gradients together, as those of sample i. Its bound on a
sample's share is only as good as these rows: what would pair or count them wrongly raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from opacus_bc._opacus import (
    AbstractGradSampleModule,
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    RNNLinear,
    get_gsm_class,
    get_hooks_class,
)
from opacus_bc.gradients.ghost import GhostNorms
from opacus_bc.gradients.output_hooks import hook_outputs
from opacus_bc.gradients.unruled import buffers_aside, run_live
from opacus_bc.mechanism.names import type_name


class Activations(list[Any]):
    """A layer's recorded inputs, which are private data: pickles and copies of the layer have none."""

    def __reduce__(self) -> tuple[type[Activations], tuple[()]]:
        return Activations, ()


class GuardedHooks:
    """Refuses backward passes of which Opacus would make wrong per-sample gradients, or none.

    Its backward hooks sit on the layers' outputs, which may then be overwritten in place.
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Opacus refuses every buffer beside trainable parameters, tables of indices too.

        Here they are watched: a training forward that moves one raises (``batch_norm/buffers.py``), and no
        model is handed out in which one has moved (``batch_norm/snapshot.py``).
        """
        return []

    def add_hooks(self, **kwargs: Any) -> None:
        """Opacus's hooks, on the outputs."""
        with buffers_aside(self._module):  # type: ignore[attr-defined]  # a mixin over Opacus's wrappers
            super().add_hooks(**kwargs)  # type: ignore[misc]  # see above
        hook_outputs(self)
        run_live(self)

    def capture_activations_hook(self, module: Any, *inputs_and_output: Any) -> None:
        """Opacus's forward hook; what it records is never pickled."""
        if not hasattr(module, "activations"):
            module.activations = Activations()
        super().capture_activations_hook(module, *inputs_and_output)  # type: ignore[misc]  # see add_hooks

    def rearrange_grad_samples(self, *, module: Any, **kwargs: Any) -> Any:
        """Opacus's first move in a layer's backward hook.

        Opacus's rule for convolutions reads its input's memory as if it were contiguous. In other layouts
        (``torch.channels_last``, permuted dimensions) it would read other pixels, or other samples.

        Raises:
            RuntimeError: The rows would not be those of the batch.
        """
        kind = type_name(module)
        if not module.training:
            raise RuntimeError(
                f"a {kind} is in evaluation mode, where Opacus makes no per-sample gradients: call "
                "model.train() before the forward pass"
            )
        if not getattr(module, "activations", None):
            raise RuntimeError(
                f"a second backward pass went through a {kind} after one forward pass (torch.autograd.grad "
                "is one too): repeat the forward pass, or use clipping='batch'"
            )
        activations, backprops = super().rearrange_grad_samples(module=module, **kwargs)  # type: ignore[misc]
        if isinstance(module, _ConvNd):
            activations = [given.contiguous() for given in activations]
        _refuse_unequal_rows(module, len(activations[-1]))
        return activations, backprops


def _refuse_unequal_rows(layer: Any, rows: int) -> None:
    """Opacus adds a parameter's rows up over its uses, the first one to the first, however many there are.

    Recurrent layers have fewer rows for the end of packed sequences, in the samples' order.
    """
    uses = {layer.max_batch_len} if type(layer) is RNNLinear else {rows, layer.max_batch_len}
    uses |= {len(p._current_grad_sample) for p in layer.parameters() if hasattr(p, "_current_grad_sample")}
    if len(uses) > 1:
        raise RuntimeError(
            f"the parameters of a {type_name(layer)} were used with {min(uses)} and {max(uses)} rows in "
            "one forward pass: rows that are not the same samples would be added up and clipped together. "
            "Give the layer one row for each sample in every use, or use clipping='batch'"
        )


class PrivateGradSampleModule(GuardedHooks, GradSampleModule):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's GradSampleModule with guards."""


class PrivateGradSampleHooks(GuardedHooks, GradSampleHooks):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's GradSampleHooks with guards."""


class PrivateGhostModule(GhostNorms, GuardedHooks, GradSampleModuleFastGradientClipping):  # type: ignore[misc]  # untyped
    """Opacus's wrapper for ghost clipping with guards."""


class PrivateGhostHooks(GhostNorms, GuardedHooks, GradSampleHooksFastGradientClipping):  # type: ignore[misc]  # untyped
    """Opacus's hooks for ghost clipping with guards."""


GUARDED: Mapping[type, type] = MappingProxyType(
    {
        GradSampleModule: PrivateGradSampleModule,
        GradSampleHooks: PrivateGradSampleHooks,
        GradSampleModuleFastGradientClipping: PrivateGhostModule,
        GradSampleHooksFastGradientClipping: PrivateGhostHooks,
    }
)


@contextmanager
def without_recording(wrapper: Any) -> Iterator[None]:
    """While it is open, forward and backward passes leave no per-sample gradients; not of ExpandedWeights."""
    hooks = isinstance(wrapper, GradSampleHooks) and wrapper.hooks_enabled
    if hooks:
        wrapper.disable_hooks()
    try:
        yield
    finally:
        if hooks:
            wrapper.enable_hooks()


def wrapped(
    module: nn.Module,
    *,
    grad_sample_mode: str,
    wrap_model: bool,
    batch_first: bool,
    loss_reduction: str,
    max_grad_norm: Any,
) -> Any:
    """The module in Opacus's wrapper for its mode, with guards where Opacus has hooks.

    Raises:
        ValueError: The mode is unknown, or the module is in another wrapper already.
    """
    stock = get_gsm_class(grad_sample_mode) if wrap_model else get_hooks_class(grad_sample_mode)
    kind = GUARDED.get(stock, stock)
    if isinstance(module, AbstractGradSampleModule):
        same = (module.batch_first, module.loss_reduction) == (batch_first, loss_reduction)
        if not (same and type(module) is kind and wrap_model):
            raise ValueError(
                f"module is wrapped for per-sample gradients already ({type_name(module)}, "
                f"batch_first={module.batch_first}, loss_reduction={module.loss_reduction!r}): pass the "
                "plain nn.Module"
            )
        return module
    if hasattr(module, "autograd_grad_sample_hooks"):
        raise ValueError(
            "this module is private already: go on with what make_private returned, or call "
            "engine.finalize(module) first"
        )
    options: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction}
    if grad_sample_mode == "functorch":
        options["force_functorch"] = True
    if issubclass(kind, GradSampleHooksFastGradientClipping):
        options["max_grad_norm"] = max_grad_norm
    return kind(module, **options)
