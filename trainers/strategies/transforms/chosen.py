"""The transforms of this package, which the command line has too, and the check of those that a fit gets."""

from collections.abc import Iterable
from typing import Any

from trainers.errors import ArgumentError
from trainers.strategies.transforms.accumulate import Accumulate
from trainers.strategies.transforms.clip import ClipNorm
from trainers.strategies.transforms.ema import EMA
from trainers.strategies.transforms.schedule import Schedule
from trainers.strategies.transforms.skip import SkipNotFinite
from trainers.strategies.transforms.transform import Transform

TRANSFORMS: tuple[type[Transform], ...] = (Accumulate, ClipNorm, EMA, SkipNotFinite, Schedule)


def chosen(transforms: Any) -> list[Transform]:
    """Return the transforms of a step as a list. Raises ArgumentError unless each is a transform, given once."""
    names = ", ".join(each.__name__ for each in TRANSFORMS)
    found: dict[type, Transform] = {}
    if not isinstance(transforms, Iterable):
        raise ArgumentError(f"transforms must be a list of {names}, got {transforms!r}")
    for each in transforms:
        if not isinstance(each, Transform):
            new = " is a class; make an object of one of" if isinstance(each, type) else " is no transform; use"
            raise ArgumentError(f"transforms: {getattr(each, '__name__', repr(each))}{new} {names}")
        if type(each) in found:
            raise ArgumentError(f"transforms has two {type(each).__name__}; give one")
        found[type(each)] = each
    return list(found.values())
