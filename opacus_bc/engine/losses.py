"""What a criterion does to the samples of a batch, as far as it can be seen."""

from __future__ import annotations

import warnings

from torch import nn

from opacus_bc.engine.request import Request
from opacus_bc.mechanism.warn import users_level


def warn_of_weighted_mean(request: Request) -> None:
    """Say where a criterion divides by a sum over the batch; ghost clipping takes one loss a sample."""
    criterion = request.criterion
    weighted = isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) and criterion.weight is not None
    if weighted and criterion.reduction == "mean" and request.mode != "ghost":
        warnings.warn(
            f"{type(criterion).__name__}(weight=...) divides the batch's loss by the sum of its weights, so "
            "one label changes the gradients of all samples, and epsilon does not hold: use reduction='none' "
            "and take the mean of what it returns",
            stacklevel=users_level(),
        )
