"""The clip bounds of individual clipping, checked."""

from __future__ import annotations

import math

from opacus_bc.engine.request import Request
from opacus_bc.mechanism.clipping import HALF
from opacus_bc.mechanism.numbers import check_positive


def clip_bounds(request: Request) -> tuple[tuple[float, ...] | None, float]:
    """The bounds of ``"per_layer"`` (None otherwise), and C, their root sum of squares.

    Bounds and parameters that Opacus would take without a word, or fail on much later, are refused.

    Opacus computes norms in the gradients' own precision: those of half-precision parameters are off by up to
    a per cent, and so is the clip bound. Our own arithmetic computes them in float32.
    """
    half = [name for name, p in request.module.named_parameters() if p.requires_grad and p.dtype in HALF]
    if half and not request.own_arithmetic:
        raise ValueError(
            f"{half[0]} is in half precision, in which Opacus's own arithmetic computes norms that let a "
            "clipped gradient out of its ball: keep parameters in float32 (autocast may stay), leave "
            "noise_generator= out, or use clipping='batch'"
        )
    bounds = request.max_grad_norm
    if request.clipping != "per_layer":
        if isinstance(bounds, (list, tuple)):
            raise ValueError(
                f"max_grad_norm has {len(bounds)} bounds, and clipping={request.clipping!r} takes one "
                "number; clipping='per_layer' takes a bound for each trainable parameter"
            )
        return None, check_positive("max_grad_norm", bounds)
    if not isinstance(bounds, (list, tuple)):
        raise ValueError(
            "clipping='per_layer' needs max_grad_norm as a list with a bound for each trainable parameter, "
            f"got {bounds!r}"
        )
    trainable = sum(p.requires_grad for p in request.module.parameters())
    if trainable and len(bounds) != trainable:
        raise ValueError(f"max_grad_norm has {len(bounds)} bounds for {trainable} trainable parameters")
    for place, bound in enumerate(bounds):
        check_positive(f"max_grad_norm[{place}]", bound)
    return tuple(float(bound) for bound in bounds), math.hypot(*bounds)
