"""BatchNorm with statistics of a public batch, differentiated: batches by autograd, samples by Opacus.

With y = weight * (x - mean) / std + bias, the direct gradients treat mean and std as constants. They are
functions of the weights W of the layer before, though, at a public batch that everybody knows; `Upstream`
adds that term, d loss_i/d mean * d mean/dW + d loss_i/d var * d var/dW, to each sample's gradient of W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Channel c of their output depends on row c of their weight alone, groups or not.
ROW_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Upstream:
    """The layer whose output a BatchNorm normalises, and how its weight moves the public statistics."""

    layer: nn.Module  # one of ROW_LAYERS
    mean_grad: Tensor  # row c is the gradient of channel c's mean; in the shape of the layer's weight
    var_grad: Tensor  # likewise for the variance


def upstream(layer: Any, inputs: Tensor) -> Upstream:
    """How the mean and (unbiased) variance of ``layer(inputs)`` depend on its weight, channel by channel."""
    with torch.enable_grad():
        weight = layer.weight.detach().requires_grad_()
        if isinstance(layer, nn.Linear):
            output = F.linear(inputs.detach(), weight, layer.bias)
        else:
            output = layer._conv_forward(inputs.detach(), weight, layer.bias)
        var, mean = torch.var_mean(output, [d for d in range(output.dim()) if d != 1])
        (mean_grad,) = torch.autograd.grad(mean.sum(), weight, retain_graph=True)
        (var_grad,) = torch.autograd.grad(var.sum(), weight)
    return Upstream(layer, mean_grad, var_grad)


def constant_statistics_grad_sample(
    layer: Any, activations: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Per-sample gradients of ``weight * (x - mean) / std + bias``: what Opacus asks of a grad sampler."""
    grads: dict[Tensor, Tensor] = {}
    weight, bias, before = layer.weight, layer.bias, layer.upstream
    inverse = torch.rsqrt(layer.constant_var + layer.eps)
    weight_grad = bias_grad = None
    if before is not None or (weight is not None and weight.requires_grad):
        weight_grad = _weight_grads(activations[0], backprops, layer.constant_mean, inverse)
    if before is not None or (bias is not None and bias.requires_grad):
        bias_grad = positions(backprops).sum(2)
    if weight is not None and weight.requires_grad and weight_grad is not None:
        grads[weight] = weight_grad
    if bias is not None and bias.requires_grad and bias_grad is not None:
        grads[bias] = bias_grad
    if before is not None and weight_grad is not None and bias_grad is not None:
        scale = inverse if weight is None else inverse * weight.detach()
        into_mean, into_var = -scale * bias_grad, -0.5 * scale * inverse * weight_grad
        grads.update(_upstream_grads(before, into_mean, into_var))
    return grads


def _upstream_grads(before: Upstream, into_mean: Tensor, into_var: Tensor) -> dict[Tensor, Tensor]:
    """Every sample's gradient of the layer before that goes through the statistics.

    **Formal guarantee**: nothing outlives the backward. Opacus collects a parameter's rows until the last
    backward of the layer that owns it; rows that came later would wait for the next batch, so there are none.
    """
    grads: dict[Tensor, Tensor] = {}
    weight, bias = before.layer.weight, before.layer.bias
    assert isinstance(weight, Tensor)
    if weight.requires_grad and _awaits_backward(weight):
        shape = into_mean.shape + (1,) * (weight.dim() - 1)
        grads[weight] = torch.addcmul(
            into_mean.view(shape) * before.mean_grad, into_var.view(shape), before.var_grad
        )
    if isinstance(bias, Tensor) and bias.requires_grad and _awaits_backward(bias):
        grads[bias] = into_mean  # moves the mean one to one and the variance not at all
    return grads


def _awaits_backward(p: Tensor) -> bool:
    """Whether a backward of the layer that owns the parameter is still to come in this pass."""
    return int(getattr(p, "_forward_counter", 0)) > 0


def positions(x: Tensor) -> Tensor:
    """Shape (samples, channels, positions), whatever the layer's number of dimensions."""
    return x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)


# Entries of a CPU work buffer that stays in the cache; fresh pages for a temporary cost more than the sums.
_BUFFER = 2**18


def _weight_grads(x: Tensor, grad: Tensor, mean: Tensor, inverse_std: Tensor) -> Tensor:
    """Sum over positions of ``grad * (x - mean) / std`` for every sample and channel."""
    x, grad, shift = positions(x), positions(grad), mean[:, None]
    rows = max(1, _BUFFER // max(1, x[:1].numel()))
    differentiable = torch.is_grad_enabled() or not x.dtype == grad.dtype == mean.dtype
    if x.device.type != "cpu" or rows >= len(x) or differentiable:
        return (x - shift).mul_(grad).sum(2) * inverse_std
    sums, buffer = x.new_empty(x.shape[:2]), x.new_empty(rows, *x.shape[1:])
    for start in range(0, len(x), rows):
        part = x[start : start + rows]
        work = torch.sub(part, shift, out=buffer[: len(part)])
        torch.sum(work.mul_(grad[start : start + rows]), 2, out=sums[start : start + rows])
    return sums.mul_(inverse_std)


def normalise_with_constants(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: Any = None,
) -> Tensor:
    """``weight * (x - mean) / std + bias``: the only place where a training forward uses constants.

    ``layer`` is asked whether Opacus's hooks make the gradients of weight and bias.
    """
    if torch._C._are_functorch_transforms_active():  # they cannot see into the function below
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
    normalised: Tensor = NormaliseWithConstants.apply(layer, x, weight, bias, mean, var, eps)
    return normalised


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
            scale = inverse if weight is None else inverse * weight
            grad_x = (positions(grad) * scale[:, None]).reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[2] and not recorded:
            grad_weight = _weight_grads(x, grad, mean, inverse).sum(0)
        if ctx.needs_input_grad[3] and not recorded:
            grad_bias = positions(grad).sum((0, 2))
        return None, grad_x, grad_weight, grad_bias, None, None, None
