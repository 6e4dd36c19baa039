"""Checks of single arguments: integers, numbers, flags and names. A `..._error` is a text, "" if the argument is valid.

NumPy's numbers and booleans are as good as Python's own; True and False are no numbers.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np

from trainers.errors import ArgumentError


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Whether a value is an integer from `least` to `most`, both included."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(least <= value <= most)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, which a float can hold."""
    try:
        kinds = int | float | np.integer | np.floating
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def is_flag(value: Any) -> bool:
    """Whether a value is True or False."""
    return isinstance(value, bool | np.bool_)


def integer_error(name: str, value: Any, least: int, most: int | None = None, optional: bool = False) -> str:
    """Return why `value` is no integer from `least` to `most`. optional: None is valid too."""
    if (optional and value is None) or is_integer(value, least, math.inf if most is None else most):
        return ""
    limits = f">= {least}" if most is None else f"from {least} to {most}"
    return f"{name} must be an integer {limits}{', or None' * optional}, got {value!r}"


def flag_error(name: str, value: Any, optional: bool = False) -> str:
    """Return why `value` is neither True nor False. optional: None is valid too."""
    if (optional and value is None) or is_flag(value):
        return ""
    return f"{name} must be {'True, False or None' if optional else 'True or False'}, got {value!r}"


def name_error(name: str, value: Any, names: Iterable[str], optional: bool = False) -> str:
    """Return why `value` is none of `names`. optional: None is valid too."""
    if (optional and value is None) or (isinstance(value, str) and value in names):
        return ""
    return f"{name}={value!r} is unknown; use one of {', '.join(names)}{', or None' * optional}"


def require(*errors: str) -> None:
    """Raise an ArgumentError with the first of these texts that is not empty."""
    for text in filter(None, errors):
        raise ArgumentError(text)
