"""What a criterion does to the samples of a batch, as far as it can be seen."""

from __future__ import annotations

import warnings

from torch import nn

from opacus_bc.engine.request import Request
from opacus_bc.mechanism.warn import users_level

_IGNORED_BY_DEFAULT = -100  # torch's own ignore_index: set, or left as it was


def check_criterion(request: Request) -> None:
    """Refuse a criterion that reduces otherwise than ``loss_reduction`` says; warn of a weighted mean.

    Ghost clipping takes one loss a sample, whatever the criterion does with them.

    Raises:
        ValueError: Per-sample gradients would be multiplied or divided by the size of the batch, which one
            more sample changes for all of them.
    """
    criterion = request.criterion
    if request.mode == "ghost":
        return
    reduction = getattr(criterion, "reduction", None)
    if reduction in ("mean", "sum") and reduction != request.loss_reduction:
        raise ValueError(
            f"loss_reduction={request.loss_reduction!r}, and {type(criterion).__name__} has "
            f"reduction={reduction!r}: the gradients that are clipped would depend on the size of the batch, "
            f"so one sample would move all of them, by up to 2 C in all. Pass loss_reduction={reduction!r}"
        )
    if not isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    shown = [] if criterion.weight is None else ["weight=..."]
    if criterion.ignore_index != _IGNORED_BY_DEFAULT:
        shown.append(f"ignore_index={criterion.ignore_index}")
    if shown and criterion.reduction == "mean":
        warnings.warn(
            f"{type(criterion).__name__}({', '.join(shown)}) divides the batch's loss by the weights of the "
            "batch's labels, so one label changes the gradients of all samples, and epsilon does not hold: "
            "use reduction='none' and take the mean of what it returns",
            stacklevel=users_level(),
        )
