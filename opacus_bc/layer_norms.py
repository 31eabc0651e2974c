"""Layer gradient norms on public data, measured without leaving a trace in the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, IterableDataset

from opacus_bc.clipping import tensor_norms
from opacus_bc.layer_groups import Groups
from opacus_bc.public_data import PublicDataError, forward, isolated_randomness

Gradient = Callable[[nn.Module, Any], None]


def loss_gradient(criterion: Callable[..., Tensor]) -> Gradient:
    """The usual g: the gradient of ``criterion(module(x), y)`` for batches ``(x, y)``."""

    def gradient(module: nn.Module, batch: Any) -> None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise PublicDataError(
                f"the public loader yields {type(batch).__name__}, not pairs (x, y): pass ALC(..., "
                "gradient=f) where f(module, batch) calls backward() as the training loop does"
            )
        output = forward(module, batch)
        target = batch[1].to(output.device) if isinstance(batch[1], Tensor) else batch[1]
        criterion(output, target).backward()  # type: ignore[no-untyped-call]  # torch's

    return gradient


class _Detour(nn.Module):
    """Runs a gradient function on a module whose tensors ``functional_call`` has exchanged."""

    def __init__(self, module: nn.Module, gradient: Gradient) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self.gradient = gradient

    def forward(self, batch: Any) -> None:
        self.gradient(self.module, batch)


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Put a module that is evaluated as a whole into training mode; put every flag back afterwards."""
    flags = [(child, child.training) for child in module.modules()]
    try:
        if not module.training:
            module.train()
        yield
    finally:
        for child, flag in flags:
            child.training = flag


def public_indices(loader: DataLoader[Any], *, size: int, count: int, seed: int) -> Iterator[list[int]]:
    """The samples of up to ``count`` disjoint mini-sets of ``size`` public samples, chosen by ``seed``.

    **Edge cases**: a public set smaller than ``size`` comes as one mini-set.

    Raises:
        PublicDataError: The data set has no index.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise PublicDataError("ALC's public loader must be over a data set with an index and a length")
    order = np.random.default_rng(seed).permutation(len(dataset))
    for j in range(max(1, min(count, len(order) // size))):
        yield order[j * size : (j + 1) * size].tolist()


def parameter_norms(
    module: nn.Module,
    names: Sequence[str],
    *,
    loader: DataLoader[Any],
    gradient: Gradient,
    mini_set_size: int,
    count: int,
    seed: int,
    frozen: Mapping[str, Tensor] | None = None,
) -> list[dict[str, float]]:
    """Norm of every named parameter's g on each of ``count`` public mini-sets.

    **Formal guarantee**: weights, buffers, gradients, modes and random states are bitwise what they were,
    whether this returns or raises, and the result is a function of the weights, the public data and ``seed``.
    Proof: ``functional_call`` runs the model on copies of all parameters and buffers, so every write goes to
    a copy; flags and random streams are saved and put back.

    **Edge cases**: a mini-set with a gradient that is not finite is left out; a parameter without a gradient
    counts as 0; hooks of the user's stay and fire.

    Args:
        module: The model, in its own training mode, or evaluated (then it is measured in training mode).
        names: Parameters to measure.
        loader: Public data.
        gradient: Leaves g of a batch in ``.grad``.
        mini_set_size: Samples in a mini-set; 1 for individual clipping.
        count: Mini-sets to look at.
        seed: Chooses the mini-sets and seeds dropout and the like.
        frozen: Entries that do not count, as masks by name.
    """
    dataset: Any = loader.dataset
    found: list[dict[str, float]] = []
    with isolated_randomness(seed, loader), training_mode(module), torch.enable_grad():
        for indices in public_indices(loader, size=mini_set_size, count=count, seed=seed):
            batch = loader.collate_fn([dataset[i] for i in indices])
            copies: dict[str, Tensor] = {
                f"module.{name}": nn.Parameter(p.detach().clone())
                for name, p in module.named_parameters()
                if p.requires_grad
            }
            buffers = {f"module.{name}": b.detach().clone() for name, b in module.named_buffers()}
            functional_call(_Detour(module, gradient), copies | buffers, (batch,))
            grads = [_masked(copies[f"module.{name}"], (frozen or {}).get(name)) for name in names]
            norms = tensor_norms(grads)
            if all(math.isfinite(value) for value in norms):
                found.append(dict(zip(names, norms, strict=True)))
    return found


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
