"""Whether gradients pass through half precision on their way to the layers that are trained.

A mean loss divides by the size of the batch before half precision rounds. One sample more changes that size,
and with it how *all* gradients are rounded. Layers that are trained in float32 between others in half
precision (adapters in a bfloat16 network) get such gradients, and show nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opacus_bc.mechanism.clipping import HALF
from opacus_bc.mechanism.types import Memo, State
from opacus_bc.public.row_tests import nested_tensors


class HalfPrecisionWatch:
    """Looks in every training forward through what backward will pass, until it is removed.

    **Edge cases**: what happens to the model's outputs afterwards is not looked at, nor is the inside of
    compiled functions.

    Args:
        module: The model.

    Attributes:
        found: Whether gradients of a forward since :meth:`forget` will pass through half precision.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found = False
        self._handle = module.register_forward_hook(self._look)

    def __deepcopy__(self, memo: Memo) -> HalfPrecisionWatch:
        return self  # a copy of the model is nobody's to train

    def __getstate__(self) -> State:
        return {"found": False, "_handle": None}

    def forget(self) -> None:
        """Another batch comes."""
        self.found = False

    def remove(self) -> None:
        """Look no longer."""
        if self._handle is not None:
            self._handle.remove()

    def _look(self, module: nn.Module, _inputs: object, output: object) -> None:
        if module.training and not self.found and not torch.compiler.is_compiling():
            self.found = flows_in_half_precision(output)


def flows_in_half_precision(outputs: object) -> bool:
    """Whether gradients of these outputs will pass through half precision.

    >>> x = torch.ones(2, requires_grad=True)
    >>> flows_in_half_precision([x * 2, (x.bfloat16() * 2).float()]), flows_in_half_precision(x * 2)
    (True, False)
    """
    seen: set[Any] = set()
    left: list[Any] = [tensor.grad_fn for tensor in nested_tensors(outputs)]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for gradient in node._input_metadata:
            if gradient.dtype in HALF:
                return True
        left.extend(following for following, _ in node.next_functions)
    return False
