"""BatchNorm with statistics of a public batch, differentiated: batches by autograd, samples by Opacus.

With y = weight * (x - mean) / std + bias, the direct gradients treat mean and std as constants. They are
functions of the weights W of the layers before, though, at a public batch that everybody knows; `Upstream`
adds that term, d loss_i/d mean * d mean/dW + d loss_i/d var * d var/dW, to each sample's gradient of W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A layer that feeds a BatchNorm channel by channel, and how it moves the public statistics.

    Attributes:
        layer: A linear or convolution layer; row k of its weight and bias makes row k of its output.
        weight_mean: Row k is the gradient of the mean of BatchNorm's channel that row k feeds; in the shape
            of the weight.
        weight_var: The same for the (unbiased) variance.
        bias_mean: The same for the mean and the bias; None without a bias.
        bias_var: The same for the variance and the bias; None without a bias.
        channels: The channel of BatchNorm that each row feeds; None if row k feeds channel k.
    """

    layer: nn.Module
    weight_mean: Tensor
    weight_var: Tensor
    bias_mean: Tensor | None = None
    bias_var: Tensor | None = None
    channels: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by attribute."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def applied(self, fn: Callable[[Tensor], Tensor]) -> Upstream:
        """The same with ``fn`` of every tensor; one row that is expanded stays one row."""

        def of(value: Tensor) -> Tensor:
            expanded = len(value) > 1 and value.stride(0) == 0
            return fn(value[:1]).expand(value.shape) if expanded else fn(value)

        changed: dict[str, Any] = {name: of(value) for name, value in self.tensors().items()}
        return replace(self, **changed)

    def of_rows(self, into: Tensor) -> Tensor:
        """Values of BatchNorm's channels, (samples, channels), as (samples, rows of the layer)."""
        return into if self.channels is None else into[:, self.channels]


def into_statistics(layer: Any, x: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """Every sample's gradient of its loss with respect to the constants: d loss_i/d mean and d loss_i/d var.

    Args:
        layer: A BatchNorm with ``constant_mean`` and ``constant_var``.
        x: What it normalised.
        backprops: The gradients of the samples' losses with respect to its output.

    Returns:
        Two tensors of shape (samples, channels).
    """
    inverse = torch.rsqrt(layer.constant_var + layer.eps)
    return statistics_gradients(layer, inverse, *affine_gradients(x, backprops, layer.constant_mean, inverse))


def statistics_gradients(
    layer: Any, inverse: Tensor, weight_grad: Tensor, bias_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`into_statistics` from the samples' gradients of scale and shift; ``inverse`` is 1 / std."""
    scale = inverse if layer.weight is None else inverse * layer.weight.detach()
    return -scale * bias_grad, -0.5 * scale * inverse * weight_grad


def upstream_gradients(entry: Upstream, into_mean: Tensor, into_var: Tensor) -> dict[Tensor, Tensor]:
    """Every sample's gradient of the layer before that goes through the statistics, by trained parameter.

    **Formal guarantee**: row i of every result is a function of row i of ``into_mean`` and ``into_var`` (what
    :func:`into_statistics` gives) and of ``entry``, which knows public data and the weights only.
    """
    into_mean, into_var = entry.of_rows(into_mean), entry.of_rows(into_var)
    grads: dict[Tensor, Tensor] = {}
    for p, mean_grad, var_grad in (
        (entry.layer.weight, entry.weight_mean, entry.weight_var),
        (entry.layer.bias, entry.bias_mean, entry.bias_var),
    ):
        if isinstance(p, Tensor) and p.requires_grad and mean_grad is not None and var_grad is not None:
            shape = into_mean.shape + (1,) * (p.dim() - 1)
            grads[p] = torch.addcmul(into_mean.view(shape) * mean_grad, into_var.view(shape), var_grad)
    return grads


def constant_statistics_grad_sample(
    layer: Any, activations: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Per-sample gradients of ``weight * (x - mean) / std + bias``: what Opacus asks of a grad sampler.

    **Formal guarantee**: nothing outlives the backward. Opacus collects a parameter's rows until the last
    backward of the layer that owns it; rows that came later would wait for the next batch, so there are none.
    """
    grads: dict[Tensor, Tensor] = {}
    weight, bias, before = layer.weight, layer.bias, layer.upstream
    inverse = torch.rsqrt(layer.constant_var + layer.eps)
    weight_grad = bias_grad = None
    if before or (weight is not None and weight.requires_grad):
        weight_grad, bias_grad = affine_gradients(activations[0], backprops, layer.constant_mean, inverse)
    elif bias is not None and bias.requires_grad:
        bias_grad = positions(backprops).sum(2)
    if weight is not None and weight.requires_grad and weight_grad is not None:
        grads[weight] = weight_grad
    if bias is not None and bias.requires_grad and bias_grad is not None:
        grads[bias] = bias_grad
    if before and weight_grad is not None and bias_grad is not None:
        into = statistics_gradients(layer, inverse, weight_grad, bias_grad)
        for entry in before:
            for p, rows in upstream_gradients(entry, *into).items():
                if _awaits_backward(p):
                    grads[p] = grads[p] + rows if p in grads else rows
    return grads


def _awaits_backward(p: Tensor) -> bool:
    """Whether a backward of the layer that owns the parameter is still to come in this pass."""
    return int(getattr(p, "_forward_counter", 0)) > 0


def positions(x: Tensor) -> Tensor:
    """Shape (samples, channels, positions), whatever the layer's number of dimensions."""
    return x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)


# Positions that torch's kernel adds in float32: 4096 equal ones are off by 3e-6 (products) and 5e-6 (sums).
_POSITIONS = 4096


def affine_gradients(x: Tensor, grad: Tensor, mean: Tensor, inverse_std: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over positions of ``grad * (x - mean) / std`` and of ``grad``, for every sample and channel.

    On the CPU both come from one pass over the memory: in torch's backward of GroupNorm, which adds over
    samples, every sample's channel is made a channel of its own.
    """
    x, grad = positions(x), positions(grad)
    rows, channels, places = x.shape
    differentiable = torch.is_grad_enabled() or not x.dtype == grad.dtype == mean.dtype
    pieces = _pieces(places)
    if x.device.type != "cpu" or differentiable or pieces is None or not rows:
        return (x - mean[:, None]).mul_(grad).sum(2) * inverse_std, grad.sum(2)
    count = rows * channels * pieces
    _, *found = torch.ops.aten.native_group_norm_backward(
        grad.reshape(1, count, -1),
        x.reshape(1, count, -1),
        *(_for_all(each, rows, pieces) for each in (mean, inverse_std)),
        None,
        1,
        count,
        places // pieces,
        count,
        [False, True, True],
    )
    into_weight, into_bias = (each.view(rows, channels, pieces) for each in found)
    if pieces == 1:
        return into_weight.squeeze(2), into_bias.squeeze(2)
    return into_weight.sum(2), into_bias.sum(2)


def _for_all(constants: Tensor, rows: int, pieces: int) -> Tensor:
    """Every channel's constant for each piece of it, row after row."""
    if pieces > 1:
        constants = constants.repeat_interleave(pieces)
    return constants.expand(rows, -1).reshape(1, -1)


def _pieces(places: int) -> int | None:
    """Into how many equal pieces the positions are cut so that none is too long; None if that does not go."""
    fewest = -(-places // _POSITIONS)
    return next((n for n in range(fewest, 16 * fewest) if places % n == 0 and places > n), None)


def constant_batch_norm(
    layer: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> Tensor:
    """``F.batch_norm`` with constants for statistics; a function of torch's kind, which modes can watch.

    ``layer`` is asked whether Opacus's hooks make the gradients of weight and bias.
    """
    given = tuple(t for t in (x, weight, bias) if t is not None)
    if has_torch_function(given):
        watched: Tensor = handle_torch_function(
            constant_batch_norm, given, layer, x, weight, bias, mean, var, eps
        )
        return watched
    if torch._C._are_functorch_transforms_active():  # they cannot see into the function below
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
    result: Tensor = NormaliseWithConstants.apply(layer, x, weight, bias, mean, var, eps)
    return result


def input_gradient(grad: Tensor, weight: Tensor | None, inverse_std: Tensor) -> Tensor:
    """The gradient of what is normalised with constants, from that of the output."""
    scale = inverse_std if weight is None else inverse_std * weight
    return (positions(grad) * scale[:, None]).reshape(grad.shape)


class NormaliseWithConstants(torch.autograd.Function):
    """``F.batch_norm`` in evaluation mode; torch's own backward of it takes four times as long on the CPU.

    **Edge cases**: where Opacus has recorded this forward, its hook makes the gradients of weight and bias,
    sample by sample, and the optimizer releases nothing else: their sum is not computed a second time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.layer, ctx.eps = layer, eps
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        inverse = torch.rsqrt(var + ctx.eps)
        grad_x = grad_weight = grad_bias = None
        recorded = bool(getattr(ctx.layer, "activations", None))  # Opacus takes them away in its own hook
        if ctx.needs_input_grad[1]:
            grad_x = input_gradient(grad, weight, inverse).to(x.dtype)
        if ctx.needs_input_grad[2] and not recorded:
            grad_weight, into_bias = (rows.sum(0) for rows in affine_gradients(x, grad, mean, inverse))
            grad_bias = into_bias if ctx.needs_input_grad[3] else None
        elif ctx.needs_input_grad[3] and not recorded:
            grad_bias = positions(grad).sum((0, 2))
        return None, grad_x, grad_weight, grad_bias, None, None, None
