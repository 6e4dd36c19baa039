"""Whether the data and the settings of a call make sense, and what of them all ranks must have in common."""

import re
import zlib
from typing import Any

import numpy as np

from allreduce.errors import DisagreementError, RankLeftError
from trainers.errors import ArgumentError, TrainerError
from trainers.replica import Replica
from trainers.samples import Collate, Samples

NO_TARGETS = object()  # in the place of y: x is rows without y, for a prediction

Looked = tuple[tuple[Any, Any], str, Exception | None]


def look_at(
    replica: Replica, call: str, data: tuple[Any, Any], settings: dict[str, Any], collate: Collate | None = None
) -> Looked:
    """The data as arrays x and y, or as Samples and None; this rank's side of the call in words; what is wrong.

    data: arrays x and y, x and NO_TARGETS, or a data set and None. settings: the other arguments, by name.
    """
    x, y = data
    row: str = call
    error: Exception | None = None
    checked: tuple[Any, Any]
    try:
        if y is None or collate is not None:
            x, y = _samples(x, y, collate), None
            row = _described(call, [str(x)], settings)
            checked = x.first
        else:
            x, y = np.asarray(x), None if y is NO_TARGETS else np.asarray(y)
            row = _described(call, _sides(x, y), settings)
            _check_rows(x, y)
            checked = x, y
        _check_settings(settings)
        replica.check(*checked)
    except (TrainerError, ValueError, TypeError) as refused:
        error = refused if isinstance(refused, TrainerError) else ArgumentError(f"{call}: {refused}")
    except Exception as refused:  # whatever a data set or a model raises, the other ranks must not wait for this one
        error = ArgumentError(f"{call}: {type(refused).__name__}: {refused}")
    return (x, y), row, error


def tell_who_divides(error: DisagreementError, row: str, settings: dict[str, Any]) -> None:
    """Add to the table of an error, where ranks differ in their rows alone, what was most likely meant otherwise.

    row: this rank's side of the call, from `look_at`.
    """
    text = str(error)
    call, end = f": {row.partition(': ')[0]}: ", _described("", [""], settings)[2:]
    if all(call in side and side.endswith(end) for side in text.splitlines()[1:]):
        error.args = (
            f"{text}\nA trainer takes all rows, the same on every rank, and divides each batch among the ranks itself",
        )


def tell_collective(error: DisagreementError | RankLeftError, row: str) -> None:
    """Add to an error that calls are collective, where a rank has made another call, or none.

    row: this rank's side of the call in words.
    """
    text = str(error)
    if isinstance(error, RankLeftError):
        error.args = (f"{text}; {_name(row)} is collective: every rank calls it, without an `if rank == 0`",)
        return
    names = list(dict.fromkeys(_name(row) for row in re.findall(r"^  rank \d+: (.*)", text, re.MULTILINE)))
    if len(names) > 1:
        told = f"{' and '.join(names)} are collective: every rank calls them, in one order, without an `if rank == 0`"
        error.args = (f"{text}\n{told}",)


def _name(row: str) -> str:
    """The name of a call in words: "evaluate" of "evaluate: x float32[100, 64]"."""
    return re.split("[:,(]", row, maxsplit=1)[0].strip()


def _samples(x: Any, y: Any, collate: Collate | None) -> Samples:
    if y is not None:
        raise ArgumentError("collate is for data sets, whose rows are pairs: leave out collate, or y")
    return x if isinstance(x, Samples) else Samples(x, collate)


def _described(call: str, data: list[str], settings: dict[str, Any]) -> str:
    return f"{call}: {', '.join(data + [f'{name}={value}' for name, value in settings.items()])}"


def _sides(x: np.ndarray, y: np.ndarray | None) -> list[str]:
    """Arrays in words: shapes, dtypes, and a checksum of the first and the last row."""
    data = {"x": x} if y is None else {"x": x, "y": y}
    return [f"{name} {array.dtype}{list(array.shape)} {_checksum(array)}" for name, array in data.items()]


def _checksum(array: np.ndarray) -> str:
    if array.ndim == 0 or len(array) == 0 or array.dtype.hasobject:
        return "empty"
    return f"#{zlib.crc32(np.ascontiguousarray(array[[0, -1]]).tobytes()):08x}"


def _check_settings(settings: dict[str, Any]) -> None:
    for name, least in (("epochs", 0), ("batch_size", 1), ("seed", 0)):
        value = settings.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ArgumentError(f"{name} must be an integer >= {least}, got {value!r}")


def _check_rows(x: np.ndarray, y: np.ndarray | None) -> None:
    if x.ndim == 0 or (y is not None and (y.ndim == 0 or len(x) != len(y))):
        shapes = f"x has shape {x.shape}" + ("" if y is None else f" and y has shape {y.shape}")
        raise ArgumentError(f"{shapes}; they must have one row for each sample, and as many of one as of the other")
    if y is not None and len(x) == 0:
        raise ArgumentError("there are no samples: x and y are empty")
