"""Checks of single values, with errors that name the field, the value and the limit."""

from __future__ import annotations

import math
import operator
from typing import Any


def check_int(field: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """`value` as a plain int (NumPy integers pass, bools and floats don't), within the limits."""
    if isinstance(value, bool):
        raise TypeError(f"{field} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{field} must be an integer, got {value!r} ({type(value).__name__})") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{field}={number} is too small: it must be at least {minimum}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{field}={number} is too large: it must be at most {maximum}")
    return number


def check_number(field: str, value: Any, allowed: str, is_allowed) -> float:
    """`value` as a finite float for which `is_allowed(value)` holds; `allowed` says it in words."""
    if isinstance(value, (bool, str)):
        raise TypeError(f"{field} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{field} must be a number, got {value!r} ({type(value).__name__})") from None
    if not math.isfinite(number) or not is_allowed(number):
        raise ValueError(f"{field}={number} is not allowed: it must be {allowed}")
    return number


class Checked:
    """Base of a frozen dataclass whose `__post_init__` checks fields and writes back the normalised value."""

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _check_int(self, field: str, minimum: int | None = None, optional: bool = False) -> None:
        value = getattr(self, field)
        if not (optional and value is None):
            self._set(field, check_int(field, value, minimum))

    def _tuple(self, field: str, what: str) -> tuple:
        value = getattr(self, field)
        try:
            return () if value is None else tuple(value)
        except TypeError:
            raise TypeError(f"{field} must be a list of {what}, got {value!r}") from None
