"""Packed sequences, whose order Opacus's recurrent layers and all other layers must share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opacus_bc._opacus import DPRNNBase
from opacus_bc.mechanism.names import type_name


class SortedSequences:
    """Refuses packed sequences in another order than the batch's, until it is removed.

    Opacus's recurrent layers make per-sample gradients in the packed order and all other layers in that of
    the batch: one sample's length would decide which rows are clipped together.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, DPRNNBase)]
        self._handles = [
            layer.register_forward_pre_hook(_refuse_unsorted, with_kwargs=True) for layer in layers
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _refuse_unsorted(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    orders = [getattr(given, "sorted_indices", None) for given in (*inputs, *named.values())]
    if any(o is not None and not torch.equal(o, torch.arange(len(o), device=o.device)) for o in orders):
        raise ValueError(
            f"{type_name(layer)} got sequences packed with enforce_sorted=False: their per-sample "
            "gradients come in another order than those of other layers, and would be clipped with them in "
            "the wrong pairs. Sort the batch by length, or use clipping='batch'"
        )
