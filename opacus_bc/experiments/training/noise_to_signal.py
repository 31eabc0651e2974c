"""How much of an update is noise, layer by layer, measured on public data at the released weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from opacus_bc.alc.groups import by_module
from opacus_bc.mechanism.blocks import Block
from opacus_bc.mechanism.clipping import clip_coefficients

MINI_SETS, SAMPLES = 32, 128  # gradients that are averaged: enough for a norm to within about ten per cent


def noise_to_signal(
    model: nn.Module,
    blocks: Sequence[Block],
    public: TensorDataset,
    *,
    unit: int,
    vectors: int,
    batch_statistics: bool,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Expected norm of each layer's noise over the norm of its mean clipped gradient.

    Both are those of the update, the released sum divided by the number of clipped vectors. The signal is
    estimated from disjoint public mini-sets of the size that is clipped, at the present weights, so this is a
    function of released weights and public data.

    Args:
        model: The plain module; left as it was.
        blocks: What a step releases.
        public: Public images and labels.
        unit: Samples that are clipped together.
        vectors: Clipped vectors in a step.
        batch_statistics: Whether a mini-set is normalised with its own statistics (mini-sets), or with the
            running ones (individual clipping).
        seed: Chooses the mini-sets.
    """
    scratch = copy.deepcopy(model).train(batch_statistics)
    named = dict(scratch.named_parameters())
    names = [name for block in blocks for name in block.names]
    order = torch.randperm(len(public), generator=torch.Generator().manual_seed(seed))
    wanted = SAMPLES if unit == 1 else MINI_SETS
    # A public set smaller than one mini-set is used as one.
    mini_sets = [order[j * unit : (j + 1) * unit] for j in range(max(1, min(wanted, len(order) // unit)))]
    means: list[Tensor] = [torch.zeros_like(named[name]) for name in names]
    for mini_set in mini_sets:
        x, y = public[mini_set]
        scratch.zero_grad()
        torch.autograd.backward(F.cross_entropy(scratch(x), y))
        grads = [_gradient(named[name]) for name in names]
        coefficients = clip_coefficients(grads, blocks)
        if coefficients is not None:
            for mean, grad, coefficient in zip(means, grads, coefficients, strict=True):
                mean.add_(grad, alpha=coefficient / len(mini_sets))
    signals = {name: float(mean.norm()) for name, mean in zip(names, means, strict=True)}
    noises = {
        name: block.noise_std / factor * math.sqrt(named[name].numel()) / vectors
        for block in blocks
        for name, factor in zip(block.names, block.factors, strict=True)
    }
    rows = []
    for layer, members in by_module(names).items():
        noise = math.hypot(*(noises[name] for name in members))
        signal = math.hypot(*(signals[name] for name in members))
        ratio = noise / signal if signal > 0 else None
        rows.append({"layer": layer, "noise": noise, "signal": signal, "noise_to_signal": ratio})
    return rows


def _gradient(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.detach()
