"""What a criterion does to the samples of a batch, as far as it can be seen."""

from __future__ import annotations

import warnings

from torch import nn

from opacus_bc.engine.request import Request
from opacus_bc.mechanism.warn import users_level

_IGNORED_BY_DEFAULT = -100  # torch's own ignore_index: set, or left as it was


def warn_of_weighted_mean(request: Request) -> None:
    """Say where a criterion divides by a sum over the batch; ghost clipping takes one loss a sample."""
    criterion = request.criterion
    if not isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) or request.mode == "ghost":
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
