"""Checks of numbers that users pass: each says which argument it is, its value, and what would be right."""

from __future__ import annotations

import math


def check_positive(name: str, value: object, *, zero_allowed: bool = False) -> float:
    """Return ``value`` as a float, or raise a ValueError that says what would be right."""
    wanted = "a finite number >= 0" if zero_allowed else "a finite number > 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return float(value)


def check_count(name: str, value: object, *, least: int = 1, wanted: str | None = None) -> int:
    """Return ``value`` as an int, or raise a ValueError that says what would be right.

    Args:
        name: What the user calls it.
        value: What the user passed.
        least: The smallest allowed.
        wanted: What would be right, where that is more than a whole number.

    >>> check_count("epochs", 0)
    Traceback (most recent call last):
        ...
    ValueError: epochs must be a whole number >= 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be {wanted or f'a whole number >= {least}'}, got {value!r}")
    return value
