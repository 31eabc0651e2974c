"""Bounds as people read them."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal


def rounded_up(value: float, digits: int = 4) -> str:
    """An upper bound in a few significant digits, never below itself.

    >>> rounded_up(7.99549), rounded_up(1.5647, 3), rounded_up(8.0), rounded_up(7317701.2)
    ('7.996', '1.57', '8', '7.318e+06')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exact = Decimal(value)
    place = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(place, rounding=ROUND_CEILING)):.{digits}g}"
