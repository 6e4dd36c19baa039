"""A fingerprint of data, by which other data are noticed: shapes, dtypes and checksums of a few rows. No MPI."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainers.samples import Samples

OF_ARRAYS, OF_SAMPLES = 64, 16  # rows that are read, spread over all; a data set may take long for each
SHOWN = 5  # rows that a message names

Fingerprint = dict[str, dict[str, Any]]  # "x" and "y": "kind", dtype and shape of a row; "rows", the sampled ones' sums


def take(x: Any, y: Any) -> Fingerprint:
    """The fingerprint of arrays x and y, or of Samples and None; something that JSON can hold. Raises DataError.

    Rows of arrays are read once. Rows of a data set are read twice, since it may augment them at random: x, or y, gets
    no checksums when the two readings differ. The caller restores the global random generators that a data set used.
    """
    rows = _sampled(len(x), OF_SAMPLES if isinstance(x, Samples) else OF_ARRAYS)
    if not isinstance(x, Samples):
        return {name: _described(side, [side[row] for row in rows]) for name, side in (("x", x), ("y", y))}
    first, again = ([_described(side, side) for side in x.take(rows)] for _ in range(2))
    for side, other in zip(first, again, strict=True):
        if side != other:
            side["rows"] = []
    return dict(zip("xy", first, strict=True))


def difference(before: Any, now: Fingerprint, count: int) -> str:
    """What differs between the data of a checkpoint and the data of now, in words; "" for nothing.

    before: the fingerprint in the checkpoint, not validated yet. count: the number of rows of now.
    """
    for name, here in now.items():
        there = before.get(name) if isinstance(before, dict) else None
        if not isinstance(there, dict) or not isinstance(there.get("rows"), list):
            continue  # it was not written by this version
        if there.get("kind") != here["kind"]:
            return f"a row of {name} was {there.get('kind')}, and is {here['kind']}"
        sampled = _sampled(count, len(here["rows"])) if here["rows"] else ()
        if len(there["rows"]) != len(sampled):
            continue
        pairs = zip(sampled, there["rows"], here["rows"], strict=True)
        differ = [str(row) for row, old, new in pairs if old != new]
        if differ:
            shown = ", ".join(differ[:SHOWN]) + (", ..." if len(differ) > SHOWN else "")
            return f"{len(differ)} of {len(sampled)} sampled rows of {name} differ ({shown})"
    return ""


def _sampled(count: int, most: int) -> np.ndarray:
    """Row numbers spread over `count` rows: at most so many, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _described(side: np.ndarray, rows: Iterable[Any]) -> dict[str, Any]:
    sums = [] if side.dtype.hasobject else [zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in rows]
    return {"kind": f"{side.dtype}{list(side.shape[1:])}", "rows": sums}
