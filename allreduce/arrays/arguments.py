"""Checks of single arguments: integers, numbers and flags.

NumPy's numbers and booleans are as good as Python's own; True and False are no numbers. trainers/arguments.py has the
same for trainers, because a replica imports no allreduce.
"""

import math
from typing import Any, TypeGuard

import numpy as np


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
