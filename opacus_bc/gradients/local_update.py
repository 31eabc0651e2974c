"""Local updates: g(w; S) as the weight change of a few steps of any optimizer on one mini-set."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus_bc.parallel.shards import fully_sharded
from opacus_bc.public.running import untouched_buffers


def local_update(
    module: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    losses: Iterable[Callable[[], Tensor]],
) -> None:
    """Leave in ``.grad`` how far a few local steps on the delivered mini-set move the weights.

    Afterwards ``p.grad == w - w_after`` for every trainable parameter, so the usual ``optimizer.step()``
    clips, noises and applies it; with an outer learning rate of 1 the weights move to the noised average of
    the local models.

    **Formal guarantee**: the result is a function of the current weights, the mini-set and fresh optimizer
    state only; weights, buffers and torch's random state are put back, so nothing computed from this mini-set
    reaches the next one, and the sensitivity of the clipped vector is that of any g(w; S).

    Args:
        module: The model that the losses use.
        make_optimizer: Builds the local optimizer; called once for each mini-set, so momentum starts fresh.
        losses: One callable for each local step, each returning the loss of its part of the mini-set.

    Raises:
        ValueError: ``losses`` is empty: no gradient would be left.
        NotImplementedError: The module is in shards (FSDP2).

    Example:
        >>> model = nn.Linear(3, 1)
        >>> x = torch.ones(4, 3)
        >>> local_update(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        ...              [lambda: model(x).mean()] * 2)
        >>> [round(v, 3) for v in model.bias.grad.tolist()]  # 0.1 * 1 + 0.1 * (0.9 + 1)
        [0.29]
    """
    if fully_sharded(module):
        raise NotImplementedError("local_update of a fully_shard model has not been shown to be private")
    steps = list(losses)
    if not steps:
        raise ValueError("losses is empty: give one callable for each local step")
    params = [p for p in module.parameters() if p.requires_grad]
    weights = [p.detach().clone() for p in params]
    devices = {p.device.index or 0 for p in params if p.device.type == "cuda"}
    try:
        with untouched_buffers(module), torch.random.fork_rng(devices=sorted(devices)):
            local = make_optimizer(params)
            for loss in steps:
                local.zero_grad(set_to_none=True)
                loss().backward()  # type: ignore[no-untyped-call]  # torch's
                local.step()
        moved = [w - p.detach() for w, p in zip(weights, params, strict=True)]
    finally:
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.copy_(w)
                p.grad = None
    for p, change in zip(params, moved, strict=True):
        p.grad = change
