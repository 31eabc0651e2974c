"""Per-sample gradients of layers that Opacus has no rule for: their own forward again, row by row.

Opacus differentiates a copy that it takes when training begins. A block that holds parameters of its own next
to other layers would go on with that copy's BatchNorm constants; here the layer itself runs, as it is now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from opacus_bc.mechanism.names import type_name


class RowByRow:
    """Opacus calls it as a layer's ``ft_compute_sample_grad``.

    **Formal guarantee**: row i of the result is the gradient of ``sum(backprops[i] * layer(x[i : i + 1]))``,
    a function of row i, the parameters and what the layer holds.

    **Edge cases**: a layer that draws random numbers raises, since its rows would draw others than the batch
    has.
    """

    def __init__(self, layer: nn.Module, wrapper: Any) -> None:
        self._layer, self._wrapper = layer, wrapper
        self._names = [name for name, _ in layer.named_parameters()]

    def __call__(self, parameters: Sequence[Tensor], inputs: Tensor, backprops: Tensor) -> tuple[Tensor, ...]:
        """The rows of every parameter's gradient, in the parameters' order."""
        held = self._wrapper.hooks_enabled
        self._wrapper.hooks_enabled = False  # the rows' forwards are nobody's activations
        try:
            rows: tuple[Tensor, ...] = vmap(grad(self._loss), in_dims=(None, 0, 0))(
                tuple(parameters), inputs, backprops
            )
        except RuntimeError as error:
            if "random" not in str(error):
                raise
            raise RuntimeError(
                f"a {type_name(self._layer)} draws random numbers (dropout, stochastic depth) beside "
                "parameters of its own, and its per-sample gradients would belong to other numbers: set the "
                "rate to 0, or use clipping='batch'"
            ) from error
        finally:
            self._wrapper.hooks_enabled = held
        return rows

    def _loss(self, parameters: tuple[Tensor, ...], row: Tensor, backprop: Tensor) -> Tensor:
        dimension = 0 if self._wrapper.batch_first else 1
        precision: AbstractContextManager[Any] = nullcontext()
        if row.is_floating_point() and row.dtype != parameters[0].dtype:
            precision = torch.amp.autocast(device_type=row.device.type, dtype=row.dtype)
        with precision:
            named = dict(zip(self._names, parameters, strict=True))
            output: Tensor = functional_call(self._layer, named, (row.unsqueeze(dimension),))
            return (output * backprop.unsqueeze(dimension)).sum()


def run_live(wrapper: Any) -> None:
    """Let the layers without a rule run themselves instead of Opacus's copies of them."""
    for layer in wrapper.iterate_submodules(wrapper._module):
        if type(layer) not in wrapper.GRAD_SAMPLERS and hasattr(layer, "ft_compute_sample_grad"):
            layer.ft_compute_sample_grad = RowByRow(layer, wrapper)


@contextmanager
def buffers_aside(root: nn.Module) -> Iterator[None]:
    """While it is open the model has no buffers: Opacus's hooks refuse layers that have some.

    They would not find theirs in Opacus's copy; :class:`RowByRow` runs the layer itself, with its buffers.
    TorchScript's modules keep theirs to themselves, and Opacus sees them.
    """
    plain = [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
    held = [(module._buffers, dict(module._buffers)) for module in plain]
    try:
        for buffers, _ in held:
            buffers.clear()
        yield
    finally:
        for buffers, values in held:
            buffers.update(values)
