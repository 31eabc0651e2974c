"""Guards for ghost clipping, which releases autograd's own sum and trusts norms that were computed apart.

Opacus's first backward pass leaves per-sample norms on the parameters, the second one weights the samples'
losses by them. Whatever makes the two passes differ, or a sample's loss depend on others, breaks the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opacus_bc._opacus import DPLossFastGradientClipping, DPOptimizer, DPTensorFastGradientClipping
from opacus_bc.backward_guards import forget_norms

HALF = (torch.float16, torch.bfloat16)


class PerSampleLoss(DPTensorFastGradientClipping):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's ghost loss with one number a sample, and no arithmetic that would bring in other samples.

    **Formal guarantee**: the second pass multiplies the loss of sample i, and nothing else, by coefficient i.
    A term that is not per sample would get the sum of all coefficients, whatever its own gradient is.
    """

    def backward(self) -> None:
        """Both passes, for losses of shape (n,) alone: coefficients of shape (n,) would broadcast."""
        if self.loss_per_sample.dim() != 1:
            raise RuntimeError(
                f"ghost clipping got losses of shape {tuple(self.loss_per_sample.shape)}, it needs one "
                "number a sample: factors must be numbers, or tensors of shape (batch,)"
            )
        super().backward()


def _closed(name: str) -> Callable[..., PerSampleLoss]:
    """Opacus's operator on losses, refusing tensors with a gradient of their own."""
    operation = getattr(DPTensorFastGradientClipping, name)

    def checked(self: PerSampleLoss, *others: Any) -> PerSampleLoss:
        if any(isinstance(other, Tensor) and other.requires_grad for other in others):
            raise ValueError(
                "ghost clipping clips only what its own criterion computes: a term or factor with a gradient "
                "of its own would not be clipped. Put it into the criterion as a loss of each sample, or use "
                "grad_sample_mode='hooks'"
            )
        made = operation(self, *others)
        made.__class__ = PerSampleLoss
        checked_loss: PerSampleLoss = made
        return checked_loss

    return checked


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg"):
    setattr(PerSampleLoss, f"__{_name}__", _closed(f"__{_name}__"))


class GhostCriterion(DPLossFastGradientClipping):  # type: ignore[misc]  # Opacus is untyped
    """Opacus's ghost criterion, reduced to one loss a sample as torch reduces it.

    Opacus multiplies coefficients of shape (n,) with losses of shape (n, 1), say of ``nn.MSELoss`` on a
    single output, which gives an (n, n) matrix: every sample weighted by the sum of all coefficients.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> PerSampleLoss:
        """The losses of a batch.

        Raises:
            ValueError: The criterion gives one number for the batch whatever its ``reduction`` is.
        """
        made = super().__call__(*args, **kwargs)
        loss: Tensor = made.loss_per_sample
        if loss.dim() == 0:
            raise ValueError(
                f"criterion {type(self.criterion).__name__} returned one number for the whole batch, ghost "
                "clipping needs one a sample: let it obey its attribute reduction='none'"
            )
        if loss.dim() > 1:
            apart = loss.flatten(1)
            loss = apart.mean(1) if self.loss_reduction == "mean" else apart.sum(1)
        return PerSampleLoss(self.module, self.optimizer, loss, self.loss_reduction)


def guard_ghost(optimizer: DPOptimizer, wrapper: Any) -> None:
    """Accept only what ghost clipping's own backward has clipped, with norms of this very batch.

    Opacus clips inside the backward of the criterion that ``make_private`` returned: a first pass leaves
    norms on the parameters, a second one weights the samples by them. Norms that an interrupted batch or an
    extra forward left behind would clip the next batch wrongly, and other losses are not clipped at all.

    **Formal guarantee**: a gradient is accumulated only if its coefficients were computed from norms that no
    earlier coefficients used, and if no other backward has gone through the module since.
    """
    accumulate, zero_grad, coefficients = (
        optimizer.accumulate,
        optimizer.zero_grad,
        wrapper.get_clipping_coef,
    )
    clipped = False

    forget = partial(forget_norms, wrapper)

    def used_once() -> Any:
        nonlocal clipped
        if not all(hasattr(p, "_norm_sample") for p in wrapper.trainable_parameters):
            forget()
            wrapper.enable_hooks()
            raise RuntimeError(
                "per-sample norms of this batch are missing: a layer ran forward more than once for one "
                "backward, or an earlier backward was interrupted. Nothing was released; take a new batch"
            )
        if any(p._norm_sample.dtype in HALF for p in wrapper.trainable_parameters):
            forget()
            wrapper.enable_hooks()
            raise RuntimeError(
                "ghost clipping under autocast: its norms are in half precision and off by up to a per cent, "
                "and so would be the clip bound. Use float32, grad_sample_mode='hooks' or clipping='batch'"
            )
        if any(hasattr(p, "_current_grad_sample") for p in wrapper.trainable_parameters):
            for p in wrapper.trainable_parameters:
                p.__dict__.pop("_current_grad_sample", None)
            forget()
            wrapper.enable_hooks()
            raise RuntimeError(
                "ghost clipping has norms of only a part of a parameter's uses: two layers share it. Use "
                "grad_sample_mode='hooks'"
            )
        found = coefficients()
        forget()
        clipped = True
        return found

    def cleared(*args: Any, **kwargs: Any) -> None:
        nonlocal clipped
        clipped = False
        zero_grad(*args, **kwargs)

    def checked() -> None:
        nonlocal clipped
        whole = clipped and not any(hasattr(p, "_norm_sample") for p in wrapper.trainable_parameters)
        finite = all(bool(p.grad.isfinite().all()) for p in optimizer.params if p.grad is not None)
        clipped = False
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in optimizer.params)
        if hooked or not (whole and finite):
            forget()
            for p in optimizer.params:
                p.grad = None
            raise RuntimeError(_HOOKED if hooked else _NOT_FINITE if whole else _NOT_CLIPPED)
        accumulate()

    wrapper.get_clipping_coef = used_once
    optimizer.zero_grad = cleared
    optimizer.accumulate = checked


_NOT_FINITE = (
    "a gradient of this batch is not finite, and ghost clipping cannot tell whose: clean the data, or use "
    "grad_sample_mode='hooks', where such a sample counts as zero"
)
_NOT_CLIPPED = (
    "this gradient was not clipped: with grad_sample_mode='ghost' the loss comes from the criterion that "
    "make_private returned, and loss.backward() is called once a batch, after optimizer.zero_grad()"
)
_HOOKED = (
    "a parameter has a gradient hook, which ghost clipping's norms do not know of: remove it, or use "
    "grad_sample_mode='hooks'"
)
