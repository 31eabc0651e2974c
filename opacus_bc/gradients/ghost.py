"""Guards for ghost clipping, which releases autograd's own sum and trusts norms that were computed apart.

Opacus's first backward pass leaves per-sample norms on the parameters, the second one weights the samples'
losses by them. Whatever makes the two passes differ, or a sample's loss depend on others, breaks the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from opacus_bc._opacus import DPLossFastGradientClipping, DPTensorFastGradientClipping
from opacus_bc.mechanism.clipping import HALF
from opacus_bc.mechanism.names import type_name


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
        self.module.expect_rows(len(self.loss_per_sample))
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
        return PerSampleLoss(made.module, made.optimizer, made.loss_per_sample, made.loss_reduction)

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


class GhostNorms:
    """Guards for the norms that ghost clipping's first backward leaves on the parameters.

    **Formal guarantee**: coefficients are made once from norms of every trainable parameter, and from no norm
    that an interrupted batch or an extra forward left behind.
    """

    trainable_parameters: list[Any]
    clipped_rows = 0  # how many coefficients there were
    _losses: int | None = None  # of how many samples the criterion has losses
    _clipped = False  # whether a gradient waits that these coefficients have weighted

    def expect_rows(self, losses: int) -> None:
        """The next coefficients are for so many losses."""
        self._losses = losses

    def rearrange_grad_samples(self, *, module: Any, **kwargs: Any) -> Any:
        """Opacus's first move in a layer's backward hook.

        Raises:
            RuntimeError: There are norms of this layer already.
        """
        if any(hasattr(p, "_norm_sample") for p in module.parameters(recurse=False)):
            self.forget_norms()
            raise RuntimeError(
                f"ghost clipping has norms of a {type_name(module)} already: it was used twice (inside "
                "and outside of a checkpoint, for instance), or an earlier backward was interrupted. Nothing "
                "was released; take a new batch, or use grad_sample_mode='hooks'"
            )
        return super().rearrange_grad_samples(module=module, **kwargs)  # type: ignore[misc]  # Opacus's

    def get_clipping_coef(self) -> Tensor:
        """Every sample's coefficient; the norms are used up.

        Raises:
            RuntimeError: The norms are not those of this whole batch, or not precise enough.
        """
        reason = self._why_no_coefficients()
        if reason is not None:
            self.forget_norms()
            self.enable_hooks()  # type: ignore[attr-defined]  # Opacus's
            raise RuntimeError(reason)
        found: Tensor = super().get_clipping_coef()  # type: ignore[misc]  # Opacus's
        self._per_sample_gradient_norms = None  # Opacus keeps them for whoever pickles the wrapper
        self.forget_norms()
        self._clipped, self.clipped_rows, self._losses = True, len(found), None
        return found

    def _why_no_coefficients(self) -> str | None:
        params = self.trainable_parameters
        if not all(hasattr(p, "_norm_sample") for p in params):
            return _MISSING
        if any(p._norm_sample.dtype in HALF for p in params):
            return HALF_PRECISION
        if any(hasattr(p, "_current_grad_sample") for p in params):
            for p in params:
                p.__dict__.pop("_current_grad_sample", None)
            return _SHARED
        rows = sorted({len(p._norm_sample) for p in params})
        if len(rows) > 1 or (rows and self._losses is not None and rows != [self._losses]):
            return _ROWS.format(", ".join(map(str, rows)), self._losses)
        return None

    def why_not_clipped(self, params: list[Any]) -> str | None:
        """Why the gradients at hand are not what :meth:`get_clipping_coef` has clipped; None if they are.

        They count once: the next ones need a backward of their own.
        """
        whole = self._clipped and not any(hasattr(p, "_norm_sample") for p in self.trainable_parameters)
        self._clipped = False
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
            return _HOOKED
        known = {id(p) for p in self.trainable_parameters}
        if any(id(p) not in known for p in params):
            return _THAWED
        if not whole:
            return _NOT_CLIPPED
        finite = all(bool(p.grad.isfinite().all()) for p in params if p.grad is not None)
        return None if finite else _NOT_FINITE

    def forget_clipped(self) -> None:
        """The gradients are cleared."""
        self._clipped = False

    def forget_norms(self) -> None:
        """Take away the norms that the first backward has left on the parameters."""
        for p in self.trainable_parameters:
            p.__dict__.pop("_norm_sample", None)


_MISSING = (
    "per-sample norms of this batch are missing: a layer ran forward more than once for one backward, or an "
    "earlier backward was interrupted. Nothing was released; take a new batch"
)
_ROWS = (
    "ghost clipping has norms of {} rows for {} losses: one row must be one sample in every layer (a "
    "position embedding that runs once for the whole batch, frames or tokens folded into the batch). "
    "Nothing was released; clipping='batch' does not need that"
)
HALF_PRECISION = (
    "ghost clipping in half precision (autocast, or frozen layers): its norms are off by up to a per cent, "
    "and so would be the clip bound. Use float32, grad_sample_mode='hooks' or clipping='batch'"
)
_THAWED = (
    "a parameter was frozen when make_private was called, so ghost clipping has no norms of it: call "
    "make_private again"
)
_SHARED = (
    "ghost clipping has norms of only a part of a parameter's uses: two layers share it. Use "
    "grad_sample_mode='hooks'"
)
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
