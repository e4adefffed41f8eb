"""What the objectives of this room ask of their settings."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from ecnn.errors import InputError


def check_number(name: str, value: Any, *, highest: float = math.inf) -> None:
    """Raises InputError unless the value is a finite number from 0 to `highest`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= highest or not math.isfinite(value):
        limit = "up" if highest == math.inf else f"to {highest:g}"
        raise InputError(f"{name} must be a number from 0 {limit}, not {value!r}.")


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raises InputError unless the value is a whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number from {least} up, not {value!r}.")


def parse_length(name: str, value: float | str) -> float:
    """A length on the [0, 1] scale as a number; `"8/255"` is accepted as people write it."""
    try:
        length = float(Fraction(value)) if isinstance(value, str) else value
    except (ValueError, ZeroDivisionError):
        raise InputError(f'{name} must be a number or a fraction such as "8/255", not {value!r}.') from None
    check_number(name, length)
    return length
