"""Opacus's layers in the place of those whose per-sample gradients cannot be told; BatchNorm stays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from opacus_bc._opacus import DPGRU, DPLSTM, DPRNN, ModuleValidator
from opacus_bc.batch_norm.layers import NORM_LAYERS
from opacus_bc.gradients.attention import PrivateMultiheadAttention
from opacus_bc.mechanism.names import type_name
from opacus_bc.parallel.wrappers import is_distributed, unwrap

_BATCH_NORM_WORDS = ("num_groups", "replace_bn_with_in")


def fix(module: nn.Module, **kwargs: Any) -> nn.Module:
    """A copy of ``module`` that per-sample modes can train: ``ModuleValidator.fix`` that keeps BatchNorm.

    ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and ``nn.MultiheadAttention`` with trainable parameters become
    Opacus's ``DPLSTM``, ``DPGRU`` and ``DPRNN``, and a ``DPMultiheadAttention`` that computes what torch's
    does (Opacus's own does not with ``batch_first=True`` and several heads). Types with a fixer that you
    registered with Opacus become what it makes. BatchNorm and all other normalisation layers stay:
    ``batch_norm=`` of ``make_private`` answers for them. Make the optimizer on what is returned.

    **Formal guarantee**: ``module`` is not changed. The replacements have its weights, device, precision,
    mode and ``requires_grad``, and in evaluation mode they compute the same function, up to rounding.

    **Edge cases**: in training mode Opacus's recurrent layers apply dropout after every time step of every
    layer, torch's only between layers. They have no ``flatten_parameters()``, call the initial state
    ``state_init`` and not ``hx``, and take no single sequence without a batch dimension.

    Args:
        module: The model, before anything is wrapped around it.
        **kwargs: For fixers that you registered with Opacus.

    Raises:
        ValueError: A layer has what its replacement would lose (hooks, projections, parameters that another
            layer shares), or the module is wrapped already.
        TypeError: A keyword that no fixer takes.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(5), nn.LSTM(8, 4, batch_first=True)).eval()
        >>> fixed, x = fix(model), torch.randn(3, 5, 8)
        >>> print(*(type(layer).__name__ for layer in fixed))
        BatchNorm1d DPLSTM
        >>> torch.allclose(fixed(x)[0], model(x)[0], atol=1e-5)
        True
    """
    if unwrap(module) is not module or is_distributed(module):
        raise ValueError(f"fix() got a {type_name(module)}: fix the plain module, then wrap it")
    fixed = copy.deepcopy(module)
    chosen = {layer: name for name, layer in fixed.named_modules() if _wants_fixing(layer)}
    _check_keywords(kwargs, chosen)
    _check_apart(fixed, chosen)
    replaced = {layer: _replacement(name, layer, kwargs) for layer, name in chosen.items()}
    for parent in list(fixed.modules()):
        for name, child in parent.named_children():
            if child in replaced:
                parent.add_module(name, replaced[child])
    return replaced.get(fixed, fixed)


def _wants_fixing(layer: nn.Module) -> bool:
    if isinstance(layer, NORM_LAYERS) or not any(p.requires_grad for p in layer.parameters()):
        return False
    return type(layer) in REPLACED or type(layer) in ModuleValidator.FIXERS


def _check_keywords(kwargs: Mapping[str, Any], chosen: Mapping[nn.Module, str]) -> None:
    given = ", ".join(f"{name}=" for name in kwargs)
    if any(name in kwargs for name in _BATCH_NORM_WORDS):
        raise TypeError(
            f"fix() got {given}, which say what to put in BatchNorm's place, and it leaves BatchNorm alone: "
            "use opacus.validators.ModuleValidator.fix to replace it"
        )
    if kwargs and all(type(layer) in REPLACED for layer in chosen):
        raise TypeError(f"fix() got {given}, and no fixer of these layers takes keyword arguments")


def _check_apart(root: nn.Module, chosen: Mapping[nn.Module, str]) -> None:
    """Refuse layers that are more than their replacements could be."""
    inside = {part for layer in chosen for part in layer.modules()}
    others = {p for part in root.modules() if part not in inside for p in part.parameters(recurse=False)}
    for layer, name in chosen.items():
        own = set(layer.parameters())
        if own & others:
            raise _lost(name, layer, "shares a parameter with another layer, and would have one of its own")
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            raise _lost(name, layer, "has hooks, and would lose them: remove them, and register them again")
        if getattr(layer, "proj_size", 0):
            raise _lost(name, layer, f"has proj_size={layer.proj_size}, which Opacus's layers do not know")
        others |= own


def _lost(name: str, layer: nn.Module, reason: str) -> ValueError:
    return ValueError(f"fix() cannot replace {name or 'the model'} ({type_name(layer)}): it {reason}")


def _replacement(name: str, layer: Any, kwargs: Mapping[str, Any]) -> nn.Module:
    make = REPLACED.get(type(layer))
    like = next(layer.parameters())
    if make is None:
        made: nn.Module = ModuleValidator.FIXERS[type(layer)](layer, **kwargs)
        return made.to(like.device)
    made = make(layer).to(device=like.device, dtype=like.dtype)
    made.load_state_dict(layer.state_dict())
    given, names = dict(layer.named_parameters()), _names_in_torch(layer)
    for new, p in made.named_parameters():
        p.requires_grad_(given[names.get(new, new)].requires_grad)
    return made.train(layer.training)


def _names_in_torch(layer: nn.Module) -> dict[str, str]:
    """Which parameter of torch's attention a parameter of Opacus's comes from; others keep their names."""
    if not isinstance(layer, nn.MultiheadAttention):
        return {}
    names = {"seq_bias_k.bias": "bias_k", "seq_bias_v.bias": "bias_v"}
    for each in "qkv":
        whole = layer.in_proj_weight is not None
        names[f"{each}linear.weight"] = "in_proj_weight" if whole else f"{each}_proj_weight"
        names[f"{each}linear.bias"] = "in_proj_bias"
    return names


def _recurrent(kind: Any) -> Callable[[Any], Any]:
    def make(layer: Any) -> Any:
        more = {"nonlinearity": layer.nonlinearity} if isinstance(layer, nn.RNN) else {}
        return kind(
            layer.input_size,
            layer.hidden_size,
            num_layers=layer.num_layers,
            bias=layer.bias,
            batch_first=layer.batch_first,
            dropout=layer.dropout,
            bidirectional=layer.bidirectional,
            **more,
        )

    return make


def _attention(layer: nn.MultiheadAttention) -> Any:
    return PrivateMultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=layer.in_proj_bias is not None,
        add_bias_kv=layer.bias_k is not None,
        add_zero_attn=layer.add_zero_attn,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
    )


# Layers that torch computes in one piece, and what makes Opacus's layer with new weights.
REPLACED: Mapping[type, Callable[[Any], Any]] = {
    nn.LSTM: _recurrent(DPLSTM),
    nn.GRU: _recurrent(DPGRU),
    nn.RNN: _recurrent(DPRNN),
    nn.MultiheadAttention: _attention,
}
