"""Sizes in bytes: parsed from the command line, swept as in nccl-tests, formatted for people. Sizes of layers."""

import re

from allreduce.notices import nbytes as show

__all__ = ["layers", "parse", "show", "sweep", "whole"]

LONGEST = 20  # digits; more than any machine's bytes, and no float overflows
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse(text: str) -> int:
    """Bytes of "8", "64K", "64KiB", "1.5M" or "1G"; the units are powers of 1024, as in nccl-tests."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None or len(match[1]) > LONGEST:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with K, M or G, such as 8, 64K or 128M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def sweep(first: int, last: int, factor: float = 2, step: int | None = None) -> list[int]:
    """Return the sizes from `first` to `last`, each `factor` times the one before, or `step` bytes more."""
    found = []
    size = first
    while size <= last:
        found.append(size)
        size = size + step if step else max(int(size * factor), size + 1)
    return found


def whole(sizes: list[int], itemsize: int) -> list[int]:
    """Return the sizes rounded down to whole elements, without zeros and repetitions."""
    rounded = [size // itemsize * itemsize for size in sizes]
    return list(dict.fromkeys(size for size in rounded if size))


def layers(parameters: float, features: int, classes: int) -> list[int]:
    """Return the sizes of a network of about `parameters` with two equal hidden layers."""
    ends = features + classes
    hidden = max(1, round((-ends + (ends**2 + 4 * parameters) ** 0.5) / 2))
    return [features, hidden, hidden, classes]
