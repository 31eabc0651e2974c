"""Guards for Opacus's backward hooks: what would pair or count per-sample gradients wrongly raises.

Opacus clips row i of every parameter's per-sample gradients together, as those of sample i. Its bound on a
sample's share is only as good as these rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opacus_bc._opacus import DPRNNBase


def guard_backward(wrapper: Any) -> None:
    """Refuse backward passes of which Opacus would make wrong per-sample gradients or norms, or none."""
    if hasattr(wrapper, "rearrange_grad_samples"):  # ExpandedWeights and functorch have no such hooks
        wrapper.rearrange_grad_samples = _Guarded(wrapper.rearrange_grad_samples)


class _Guarded:
    """Opacus's ``rearrange_grad_samples``, with which each layer's hook begins. Pickles with the model."""

    def __init__(self, rearrange: Any) -> None:
        self._rearrange = rearrange

    def __call__(self, *, module: Any, **kwargs: Any) -> Any:
        kind = type(module).__name__
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
        if any(hasattr(p, "_norm_sample") for p in module.parameters(recurse=False)):
            forget_norms(self._rearrange.__self__)
            raise RuntimeError(
                f"ghost clipping has norms of a {kind} already: it was used twice (inside and outside of a "
                "checkpoint, for instance), or an earlier backward was interrupted. Nothing was released; "
                "take a new batch, or use grad_sample_mode='hooks'"
            )
        return self._rearrange(module=module, **kwargs)


def forget_norms(wrapper: Any) -> None:
    """Take away the norms that ghost clipping has left on the parameters."""
    for p in wrapper.trainable_parameters:
        p.__dict__.pop("_norm_sample", None)


class SortedSequences:
    """Refuses packed sequences in another order than the batch's, until it is detached.

    Opacus's recurrent layers make per-sample gradients in the packed order and all other layers in that of
    the batch: one sample's length would decide which rows are clipped together.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, DPRNNBase)]
        self._handles = [
            layer.register_forward_pre_hook(_refuse_unsorted, with_kwargs=True) for layer in layers
        ]

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _refuse_unsorted(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    orders = [getattr(given, "sorted_indices", None) for given in (*inputs, *named.values())]
    if any(o is not None and not torch.equal(o, torch.arange(len(o), device=o.device)) for o in orders):
        raise ValueError(
            f"{type(layer).__name__} got sequences packed with enforce_sorted=False: their per-sample "
            "gradients come in another order than those of other layers, and would be clipped with them in "
            "the wrong pairs. Sort the batch by length, or use clipping='batch'"
        )
