"""Checks of single arguments: integers, numbers, flags and names. A `..._error` is a text, "" if the argument is valid.

NumPy's numbers and booleans are as good as Python's own; True and False are no numbers.

`Checked` is the base of option objects, whose fields have checks.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
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
    return isinstance(value, bool | np.bool_)


def name_error(name: str, value: Any, names: Iterable[str], optional: bool = False) -> str:
    """Return why `value` is none of `names`. optional: None is valid too."""
    if (optional and value is None) or (isinstance(value, str) and value in names):
        return ""
    return f"{name}={value!r} is unknown; use one of {', '.join(names)}{', or None' * optional}"


def require(*errors: str) -> None:
    """Raise an ArgumentError with the first of these texts that is not empty."""
    for text in filter(None, errors):
        raise ArgumentError(text)


# Options with checks


@dataclass(frozen=True)
class Check:
    """What a value must be. text: "an integer >= 1". holds: whether a value is valid. read: makes it from a text."""

    text: str
    holds: Callable[[Any], bool] = lambda value: True
    read: Callable[[str], Any] = str

    def error(self, name: str, value: Any) -> str:
        """Return why `value` is invalid, as text; "" if it is valid."""
        return "" if self.holds(value) else f"{name} must be {self.text}, got {value!r}"

    def or_none(self) -> "Check":
        """Return the check that takes None too."""
        return Check(f"{self.text}, or None", lambda value: value is None or self.holds(value), self.read)

    def __call__(self, text: str) -> Any:
        """Return the value that a text of the command line stands for. Raises argparse.ArgumentTypeError."""
        error = argparse.ArgumentTypeError(f"must be {self.text}, got {text!r}")
        try:
            value = self.read(text)
        except ValueError:
            raise error from None
        if not self.holds(value):
            raise error
        return value


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ValueError(text)
    return int(text)


def integer(least: int, most: float = math.inf) -> Check:
    """Return the check of an integer from `least` to `most`."""
    limits = f">= {least}" if most == math.inf else f"from {least} to {most}"
    return Check(f"an integer {limits}", lambda value: is_integer(value, least, most), _decimal)


def number(text: str, holds: Callable[[float], bool]) -> Check:
    """Return the check of a finite number. text: "a number > 0", say."""
    return Check(text, lambda value: is_number(value) and bool(holds(value)), float)


def name(*names: str) -> Check:
    return Check(" or ".join(f'"{each}"' for each in names), lambda value: isinstance(value, str) and value in names)


POSITIVE = number("a number > 0", lambda value: value > 0)
BELOW_ONE = number("a number >= 0 and < 1", lambda value: 0 <= value < 1)
FLAG = Check("True or False", is_flag)


@dataclass(frozen=True)
class Flag:
    """The option of the command line that gives a field of an option object.

    name: "clip_norm" for --clip-norm. metavar: stands for the value in --help. help: what the option does.
    default: the default in --help, if it is not that of the field. choices: the allowed values, if there are few.
    """

    name: str
    metavar: str
    help: str
    default: str = ""
    choices: tuple[str, ...] = ()


class Checked:
    """Base of frozen dataclasses whose fields are `Annotated` with a Check, and with a Flag if the command line has
    them. Raises ArgumentError when one is made."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            for check in getattr(each.type, "__metadata__", ())[:1]:
                require(check.error(f"{type(self).__name__}: {each.name}", getattr(self, each.name)))
