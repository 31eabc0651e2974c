"""Bounds as people read them."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal


def rounded_up(value: float, digits: int = 4) -> str:
    """An upper bound in a few significant digits, never below itself.

    >>> rounded_up(7.99549), rounded_up(1.5647, 3), rounded_up(8.0), rounded_up(7317701.2)
    ('7.996', '1.57', '8', '7.318e+06')
    """
    return _rounded(value, digits, ROUND_CEILING)


def rounded_down(value: float, digits: int = 4) -> str:
    """A lower bound in a few significant digits, never above itself.

    >>> rounded_down(0.92675, 3), rounded_down(20.0)
    ('0.926', '20')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if float(f"{value:.{digits}g}") == value:
        return f"{value:.{digits}g}"  # 0.1 is 0.1, whatever its binary expansion
    exact = Decimal(value)
    place = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(place, rounding=rounding)):.{digits}g}"


def objection_to_delta(delta: float, size: int, unit: str = "sample", name: str = "delta") -> str | None:
    """What is wrong with a delta of 1/N or more, None if it is smaller or N is not known (0).

    Giving away one of N whole at random is (0, 1/N)-DP, so such a delta allows it.

    >>> objection_to_delta(1e-5, 60_000)
    >>> objection_to_delta(1e-3, 1000)[:34]
    'delta=0.001 is no less than 1/1000'
    """
    if not delta < 1 <= delta * size:  # what is no probability is refused elsewhere
        return None
    what = "a random sample" if unit == "sample" else "all samples of a random user"
    return (
        f"{name}={delta:g} is no less than 1/{size}: publishing {what} of {size} as it is would be "
        f"allowed too; take a much smaller one, e.g. {0.1 / size:.0e}"
    )
