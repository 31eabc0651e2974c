"""Layer gradient norms on public data, measured without leaving a trace in the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import IterableDataset

from opacus_bc.mechanism.clipping import tensor_norms
from opacus_bc.mechanism.layerwise import Groups
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.randomness import isolated_randomness
from opacus_bc.mechanism.types import Loader, Loss
from opacus_bc.public.data import PublicDataError
from opacus_bc.public.running import forward, training_mode

Gradient = Callable[[nn.Module, Any], None]


def loss_gradient(criterion: Loss | None = None) -> Gradient:
    """The usual g: the gradient of ``criterion(module(x), y)`` for ``(x, y)``; None: cross entropy."""
    loss: Loss = criterion or nn.functional.cross_entropy

    def gradient(module: nn.Module, batch: object) -> None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise PublicDataError(
                f"the public loader yields {type(batch).__name__}, not pairs (x, y): pass gradient=f, for "
                "instance ALC(..., gradient=f), where f(module, batch) calls backward() as the training loop "
                "does"
            )
        output = forward(module, batch)
        if criterion is None and not (isinstance(output, Tensor) and isinstance(batch[1], Tensor)):
            raise PublicDataError(
                f"the model returns {type_name(output)} and y is {type_name(batch[1])}; cross entropy, the "
                "default loss of alc=, takes a tensor each: pass the loss of your training loop, "
                "make_private(criterion=f) with f(model(x), y)"
            )
        like = output if isinstance(output, Tensor) else next(module.parameters())
        target = batch[1].to(like.device) if isinstance(batch[1], Tensor) else batch[1]
        loss(output, target).backward()  # type: ignore[no-untyped-call]  # torch's

    return gradient


class _Detour(nn.Module):
    """Runs a gradient function on a module whose tensors ``functional_call`` has exchanged."""

    def __init__(self, module: nn.Module, gradient: Gradient) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self.gradient = gradient

    def forward(self, batch: object) -> None:
        self.gradient(self.module, batch)


def check_drawable(loader: Loader) -> None:
    """Refuse public data from which no mini-sets can be drawn: streams, and sets of unknown size."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise PublicDataError(
            f"mini-sets are drawn from the public data, which needs an index and a length, got "
            f"{type_name(dataset)}: read a stream into a list, DataLoader(list(dataset), batch_size=...)"
        )


def batch_of(loader: Loader, indices: Sequence[int]) -> Any:
    """The batch that the loader would make of these samples."""
    return loader.collate_fn([loader.dataset[i] for i in indices])


def measure(
    module: nn.Module,
    names: Sequence[str],
    norms_of: Callable[[list[int]], list[float]],
    *,
    loader: Loader,
    size: int,
    count: int,
    seed: int,
    views: int = 1,
) -> list[dict[str, float]]:
    """Norms on up to ``count`` disjoint mini-sets of ``size`` public samples, in training mode.

    **Edge cases**: a public set smaller than ``size`` comes as one mini-set. A mini-set with a norm
    that is not finite is left out. With ``views`` every sample comes so often, each time as the data set's
    own transform makes it.
    """
    dataset = loader.dataset
    check_drawable(loader)
    assert hasattr(dataset, "__len__")  # which was checked
    order = np.random.default_rng(seed).permutation(len(dataset)).tolist()
    found = []
    with isolated_randomness(seed, loader), training_mode(module), torch.enable_grad():
        for j in range(max(1, min(count, len(order) // size))):
            chosen = order[j * size : (j + 1) * size]
            norms = norms_of([index for index in chosen for _ in range(views)])
            if all(map(math.isfinite, norms)):
                found.append(dict(zip(names, norms, strict=True)))
    return found


def parameter_norms(
    module: nn.Module,
    names: Sequence[str],
    *,
    loader: Loader,
    gradient: Gradient,
    mini_set_size: int,
    count: int,
    seed: int,
    frozen: Mapping[str, Tensor] | None = None,
    views: int = 1,
) -> list[dict[str, float]]:
    """Norm of every named parameter's g on each of ``count`` public mini-sets.

    **Formal guarantee**: weights, buffers, gradients, modes and random states are bitwise what they were,
    whether this returns or raises, and the result is a function of the weights, the public data and ``seed``.
    Proof: ``functional_call`` runs the model on copies of all parameters and buffers, so every write goes to
    a copy; flags and random streams are saved and put back.

    **Edge cases**: a mini-set with a gradient that is not finite is left out; a parameter without a gradient
    counts as 0, as do ``frozen`` entries (masks by name); hooks of the user's stay and fire. A module in
    evaluation mode is measured in training mode.
    """

    def norms_of(indices: list[int]) -> list[float]:
        copies: dict[str, Tensor] = {
            f"module.{name}": nn.Parameter(p.detach().clone())
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        buffers = {f"module.{name}": b.detach().clone() for name, b in module.named_buffers()}
        functional_call(_Detour(module, gradient), copies | buffers, (batch_of(loader, indices),))
        return tensor_norms([_masked(copies[f"module.{name}"], (frozen or {}).get(name)) for name in names])

    return measure(
        module, names, norms_of, loader=loader, size=mini_set_size, count=count, seed=seed, views=views
    )


def _masked(parameter: Tensor, mask: Tensor | None) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros(1)
    return grad if mask is None else grad.masked_fill(mask, 0.0)


def mean_group_norms(measured: Sequence[Mapping[str, float]], groups: Groups) -> dict[str, float]:
    """``e_h``: the mean over mini-sets of the norm of each group's whole vector.

    >>> mean_group_norms([{"w": 3.0, "b": 4.0}, {"w": 0.0, "b": 1.0}], {"all": ("w", "b")})
    {'all': 3.0}
    """
    return {
        group: math.fsum(math.hypot(*(norms[name] for name in names)) for norms in measured) / len(measured)
        for group, names in groups.items()
    }
