"""Layers that make_private refuses: those whose forward or per-sample gradients would escape the clipping."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from opacus_bc._opacus import GradSampleHooks, UnsupportedModuleError
from opacus_bc.gradients.fixer import REPLACED
from opacus_bc.mechanism.names import type_name


def check_layers(
    module: nn.Module, *, grad_sample_mode: str | None, trained: Collection[nn.Parameter]
) -> None:
    """Refuse layers for which no clipping keeps what it promises.

    Args:
        module: The model, before anything is attached to it.
        grad_sample_mode: Opacus's, under individual clipping; None for batch clipping.
        trained: What the optimizer holds; other parameters have no per-sample gradients.

    Raises:
        ValueError: Names the layer and says what would be right.
        UnsupportedModuleError: Also a ValueError: :func:`opacus_bc.fix` replaces the layer.
    """
    for name, layer in module.named_modules():
        learns = any(p.requires_grad and p in trained for p in layer.parameters())
        if learns and _in_one_piece(layer, grad_sample_mode):
            raise UnsupportedModuleError(f"{name or 'the model'} ({type_name(layer)}): {_FIX}")
        reason = _moves_weights(layer)
        if reason is None and any(p.requires_grad and p in trained for p in layer.parameters(recurse=False)):
            if grad_sample_mode in ("hooks", "ghost", "bk"):
                reason = _shared_gradient(layer)
            if reason is None and grad_sample_mode in ("hooks", "ghost"):
                reason = _wrong_gradient(layer)
            if reason is None and grad_sample_mode == "ghost":
                reason = _unknown_norm(layer)
        if reason is not None:
            raise ValueError(f"{name or 'the model'} ({type_name(layer)}): {reason}")


def _in_one_piece(layer: nn.Module, grad_sample_mode: str | None) -> bool:
    """Whether torch computes the layer in one function, in which samples' gradients cannot be told apart."""
    if grad_sample_mode is None or (type(layer) is nn.RNN and grad_sample_mode == "ew"):  # torch tells them
        return False
    return type(layer) in REPLACED


def _moves_weights(layer: nn.Module) -> str | None:
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
        return (
            f"max_norm={layer.max_norm} rewrites the rows of the samples that it sees, in the forward pass "
            "and without noise: use max_norm=None"
        )
    return None


def _shared_gradient(layer: nn.Module) -> str | None:
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
        return (
            "scale_grad_by_freq=True divides a sample's gradient by how often others use the row: use False"
        )
    return None


def _wrong_gradient(layer: nn.Module) -> str | None:
    """Where Opacus's rule for per-sample gradients is not the layer's gradient."""
    if isinstance(layer, _ConvNd) and layer.padding_mode != "zeros" and type(layer) in _RULES:
        return (
            f"padding_mode={layer.padding_mode!r}, which Opacus's per-sample gradients take for zeros: use "
            "zeros, or clipping='batch'"
        )
    if isinstance(layer, nn.EmbeddingBag):
        return (
            "Opacus's per-sample gradients of it miss indices that occur twice, and all of mode='max': use "
            "nn.Embedding and a sum, or clipping='batch'"
        )
    return None


def _unknown_norm(layer: nn.Module) -> str | None:
    """Ghost clipping differentiates a copy of such a layer, taken now, by its first argument alone."""
    known = type(layer) in _RULES or isinstance(layer, _BatchNorm)
    if known or (type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, nn.Bilinear)):
        return None
    return (
        "Opacus has no rule for its per-sample gradients, and ghost clipping would not notice if they differ "
        "from what it releases: use grad_sample_mode='hooks'"
    )


_FIX = (
    "torch computes it in one piece, so that no sample's gradient can be told apart. Call model = "
    "opacus_bc.fix(model) before the optimizer is made: it puts Opacus's layer there, with the same weights, "
    "and keeps BatchNorm. Or use clipping='batch'"
)
_RULES: dict[Any, Any] = GradSampleHooks.GRAD_SAMPLERS
