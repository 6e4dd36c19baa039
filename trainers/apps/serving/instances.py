"""The JSON of requests and answers: the body {"instances": ...} as rows of a model, outputs as {"predictions": ...}.

The body comes from anybody. orjson refuses what is no JSON and 1024 nested lists; the kinds of the values are checked
before anything is made of them.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.apps.serving.models import Model
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError

INSTANCES, PREDICTIONS = "instances", "predictions"
KEYS = {INSTANCES, "signature_name"}
SHOWN = 8  # names in a message


def requested(body: bytes, model: Model, most: int) -> np.ndarray:
    """Return the rows of a request's body, which the model can predict. Raises a TrainerError that says what was given
    and what is expected.

    most: rows that are accepted.
    """
    given = _parsed(body)
    instances = given[INSTANCES]
    if not isinstance(instances, list):
        raise ArgumentError(f'"instances" must be a list of rows, not {_kind(instances)}')
    if not instances:
        raise ArgumentError('"instances" is an empty list; give at least one row')
    if len(instances) > most:
        raise ArgumentError(f'"instances" has {len(instances)} rows; the most are {most}: send several requests')
    if model.columns is not None:
        rows = model.rows_of([_cells(number, row, model.columns) for number, row in enumerate(instances)])
    else:
        rows = _numbers(instances, model.dtype)
    model.check(rows)
    return rows


def _parsed(body: bytes) -> dict[str, Any]:
    """Return the object of a body."""
    import orjson

    try:
        given = orjson.loads(body)
    except ValueError as error:  # also NaN, a text that is not UTF-8, and a number that is too large for a double
        raise ArgumentError(f'the body must be JSON such as {{"instances": [[1.5, 2.0]]}}: {error}') from error
    if not isinstance(given, dict) or INSTANCES not in given:
        raise ArgumentError('the body must be an object {"instances": [row, ...]}, and it has no "instances"')
    if more := given.keys() - KEYS:
        raise ArgumentError(f'the body has {_listed(sorted(more))}; expected is {{"instances": [row, ...]}}')
    if given.get("signature_name", "serving_default") != "serving_default":
        raise ArgumentError('the only signature_name is "serving_default"')
    return given


def _numbers(instances: list[Any], dtype: np.dtype) -> np.ndarray:
    """Return rows of numbers as an array of `dtype`, without loss of range."""
    if not _has_only_numbers(instances):  # numpy would give every element the memory of the longest text
        raise ArgumentError('"instances" must be rows of numbers; these have texts or objects, true, false or null')
    try:
        given = np.array(instances)
        if given.dtype.kind == "O":  # integers of more than 64 bits, if nothing else
            given = np.array(instances, np.float64)
    except (ValueError, TypeError, OverflowError):
        raise ArgumentError(
            '"instances" must be rows of numbers of equal lengths; these are ragged, or a number is too large'
        ) from None
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if given.dtype.kind == "f" or (given > limits.max).any() or (given < limits.min).any():
            raise ArgumentError(f'"instances" must be integers from {limits.min} to {limits.max}, as {dtype} has them')
        return given.astype(dtype)
    with np.errstate(over="ignore"):
        rows = given.astype(dtype)
    if not np.isfinite(rows).all():
        raise ArgumentError(f'"instances" has a number that is too large for {dtype}')
    return rows


def _has_only_numbers(instances: list[Any]) -> bool:
    """Whether nested lists have nothing but numbers."""
    lists = [instances]
    while lists:
        given = lists.pop()
        kinds = set(map(type, given))
        if not kinds <= {int, float, list}:
            return False
        if list in kinds:
            lists.extend(each for each in given if type(each) is list)
    return True


def _cells(number: int, row: Any, columns: Columns) -> list[str]:
    """Return the cells of a row of a table as text: a list in the order of the columns, or an object by their names."""
    names = [column.name for column in columns.columns]
    if isinstance(row, dict):
        row = _in_order(f"row {number}", row, names, columns)
    if not isinstance(row, list) or len(row) != len(names):
        given = f"a list of {len(row)}" if isinstance(row, list) else _kind(row)
        raise ArgumentError(f"row {number} is {given}; expected is a list or an object of {_listed(names)}")
    return [_cell(number, name, each) for name, each in zip(names, row, strict=True)]


def _in_order(where: str, given: dict[str, Any], names: list[str], columns: Columns) -> list[Any]:
    """Return the values of an object in the order of the columns."""
    known = {*names, columns.label, *columns.ignored}
    lacking, more = [name for name in names if name not in given], [name for name in given if name not in known]
    if lacking or more:
        found = f"lacks {_listed(lacking)}" if lacking else f"has {_listed(more)}"
        raise ArgumentError(f"{where} {found}; the columns are {_listed(names)}")
    return [given[name] for name in names]


def _cell(number: int, name: str, given: Any) -> str:
    if given is None:
        return ""
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ArgumentError(f"row {number}, column {name!r}: {_kind(given)} is neither a number nor a text nor null")
    if isinstance(given, float) and not math.isfinite(given):
        raise ArgumentError(f"row {number}, column {name!r}: the number is too large")
    return str(given)


def _kind(given: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(given), "a number")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name[:80]) for name in names[:SHOWN]) + more


def answer_of(outputs: np.ndarray) -> bytes:
    """Return the body of an answer, a list for each row. Numbers that are not finite become null."""
    import orjson

    return orjson.dumps({PREDICTIONS: np.ascontiguousarray(outputs)}, option=orjson.OPT_SERIALIZE_NUMPY)
