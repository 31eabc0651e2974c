"""Running a model without a trace: its input out of a batch, its modes and its buffers as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def batch_input(batch: object) -> object:
    """What a model reads of a batch: the first element of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def forward(module: nn.Module, batch: object) -> Any:
    """Call ``module`` on a batch's input; see :func:`run_on`."""
    return run_on(module, batch_input(batch))


def run_on(module: nn.Module, inputs: object) -> Any:
    """Call ``module`` on inputs (a mapping: as keywords), moved to its device and floating dtype."""
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    moved = inputs if like is None else _to(inputs, like)
    return module(**moved) if isinstance(moved, Mapping) else module(moved)


def called(inputs: object) -> str:
    """How :func:`run_on` calls a model on such inputs, in words; nothing of what is in them.

    >>> called({"ids": torch.zeros(3, 2), "mask": torch.ones(3, 2)}), called([torch.zeros(1), torch.zeros(2)])
    ("model(**batch) with the keys 'ids', 'mask'", 'model(batch) with a list of 2 tensors')
    """
    if isinstance(inputs, Mapping):
        return f"model(**batch) with the keys {', '.join(map(repr, inputs))}"
    if isinstance(inputs, Tensor):
        return f"model(x) with x of shape {tuple(inputs.shape)}"
    return f"model(batch) with a list of {len(tensors(inputs))} tensors"


def _to(value: object, like: Tensor) -> object:
    if isinstance(value, Mapping):
        return {key: _to(entry, like) for key, entry in value.items()}
    if isinstance(value, list):
        return [_to(entry, like) for entry in value]
    if not isinstance(value, Tensor):
        return value
    return value.to(like) if value.is_floating_point() else value.to(like.device)


def tensors(inputs: object) -> list[Tensor]:
    """The tensors of a model's input.

    >>> [t.shape[0] for t in tensors({"ids": torch.zeros(3, 2), "name": "a", "mask": torch.ones(3)})]
    [3, 3]
    """
    entries = inputs if isinstance(inputs, list) else [inputs]
    if isinstance(inputs, Mapping):
        entries = list(inputs.values())
    return [entry for entry in entries if isinstance(entry, Tensor)]


def samples(inputs: object) -> int:
    """How many samples a model's input has: the rows of its first tensor.

    A list has none: nobody can say which rows of a layer are whose.
    """
    found = [] if isinstance(inputs, list) else tensors(inputs)
    return len(found[0]) if found and found[0].dim() else 0


def zeros(inputs: object) -> object:
    """Inputs of the same shape that know nothing of the samples."""
    if isinstance(inputs, Mapping):
        return {key: zeros(value) for key, value in inputs.items()}
    return torch.zeros_like(inputs) if isinstance(inputs, Tensor) else inputs


@contextmanager
def evaluation_mode(root: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, whatever its ``train`` method does; afterwards as before."""
    modes = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in modes:
            module.__dict__["training"] = False  # Module.__setattr__ would take as long as a small layer
        yield
    finally:
        for module, mode in modes:
            module.__dict__["training"] = mode


@contextmanager
def training_mode(root: nn.Module) -> Iterator[None]:
    """Put a module that is evaluated as a whole into training mode; put every flag back afterwards."""
    modes = [(module, module.training) for module in root.modules()]
    try:
        if not root.training:
            root.train()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def untouched_buffers(root: nn.Module) -> Iterator[None]:
    """Put every buffer back afterwards, also one that a forward has replaced by another tensor.

    One that nothing has changed is not written: a graph that waits for its backward may hold it.
    """
    before = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in root.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in before:
                owner._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
