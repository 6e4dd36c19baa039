"""What the results of calls must be: near NumPy's in float64, with nothing lost, and alike on all ranks.

The results are near the sums that NumPy computes of all ranks' values. Of a compression, the result and all errors
together are the sum and the errors before: nothing is lost; a result of PowerSGD is a projection of the sum. Exact sums
have the bits that "ring" gives when other ranks bring the values.
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

import allreduce
from tests.random_calls import OPS
from tests.sequences.calls import Calls

WIDE = ("float32", "float64")
FLOATS = (*WIDE, "float16", "bfloat16")
# how far a sum may be from NumPy's: of the sum of the magnitudes; of codes of 8 bits, of the largest element
NEAR = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "int8": 0.1}


class Options(NamedTuple):
    """How both backends are made, and how the second one differs. per_node: see Topology."""

    name: str
    compress: Any = None
    exact: bool = False
    way: str = "traced"
    per_node: Any = None
    check: bool = True


class Memory(NamedTuple):
    """What both backends reduce. blocks: blocks of exact sums begin at its start. whole: both backends' arrays in which
    it lies; None: arrays that are not from `allocate`, or without error feedback."""

    kind: str
    blocks: bool
    one: np.ndarray
    two: np.ndarray
    whole: tuple[np.ndarray, np.ndarray] | None = None


class Judge(Calls):
    """Makes calls on all ranks and judges their results. options: of the backends. plain: the backend that makes plain
    calls. reference: "ring" on one node, for exact sums; else None. Collective."""

    options: Options
    plain: Any
    reference: Any = None

    def equal(self, what: str, plain: Any, other: Any, everywhere: bool = True) -> None:
        """Check that two arrays have the same bits. everywhere: also on all ranks."""
        one, two = (np.ascontiguousarray(array) for array in (plain, other))
        same = (one.shape, one.dtype, one.tobytes()) == (two.shape, two.dtype, two.tobytes())
        self.check(
            same,
            lambda: f"{what}: plain {one.dtype}{one.shape} {one.ravel()[:6]}, {self.options.way} {two.ravel()[:6]}",
            hash_of(one) if everywhere else 0,
        )

    def near(self, what: str, found: Any, rows: np.ndarray, op: str, lossy: bool = True) -> None:
        """Check a reduction of all ranks' arrays against NumPy's in float64. lossy: whether it may be compressed."""
        near = self._is_near(np.asarray(found), rows, op, lossy)
        self.check(near, lambda: f"{what} of {rows.dtype}: {np.ravel(found)[:6]}")

    def _is_near(self, found: np.ndarray, rows: np.ndarray, op: str, lossy: bool) -> bool:
        if not rows.size:
            return True
        if rows.dtype.kind in "iub":
            return np.array_equal(found, integers(rows, op))
        wide, compress = rows.astype("float64"), self.options.compress
        right, short = OPS[op](wide), rows.dtype.itemsize == 2
        if op in ("max", "min"):
            return np.array_equal(found.astype("float64"), right)
        share = np.abs(right) if op == "prod" else np.abs(wide).sum(0) / (self.size if op == "mean" else 1)
        unit = epsilon(rows.dtype)
        allowed = 2 * self.size * unit * share + 1e-7 * (unit > 1e-10)
        if self.options.exact:  # the elements of a block share an exponent
            allowed = allowed + 2 * self.size * unit * np.abs(wide).max()
        if lossy and compress is not None and op in ("sum", "mean") and not short and self.size > 1:
            name = "int8" if isinstance(compress, allreduce.Quantized) else str(compress)
            if name not in NEAR:
                return True  # by low rank: a sum may be far off; see `kept`
            of_block = name == "int8"
            allowed = allowed + NEAR[name] * ((1 + self.size) * np.abs(wide).max() if of_block else share)
        return bool((np.abs(found.astype("float64") - right) <= allowed).all())

    # What a compression has not sent

    def unsent(self, memory: Memory, op: str) -> np.ndarray | None:
        """Return the sum of all ranks' errors of earlier calls, of the array in which the memory lies, in float64. None
        if such a call is not compressed. Collective."""
        if self.options.compress is None or memory.one.dtype not in WIDE or op not in ("sum", "mean"):
            return None
        whole = memory.one if memory.whole is None else memory.whole[0]
        found = np.zeros(whole.size)
        if memory.whole is not None:
            found += self.plain.state(whole).get("0/residual", 0)
        self.comm.Allreduce(MPI.IN_PLACE, found)
        return found

    def kept(self, what: str, found: Any, rows: np.ndarray, op: str, memory: Memory, before: np.ndarray | None) -> None:
        """Check that the result and the errors after a call are, together, the sum and the errors before it. Of
        PowerSGD, that the result is a projection of them. found: this rank's elements `own` of the result."""
        if before is None or str(self.options.compress) in ("bfloat16", "float16"):
            return
        after = self.unsent(memory, op)
        assert after is not None
        wide, size = rows.astype("float64"), memory.one.size
        if memory.whole is not None:
            begin = (memory.one.ctypes.data - memory.whole[0].ctypes.data) // memory.one.itemsize if size else 0
            part = slice(begin, begin + size)
            beside = np.delete(before, part), np.delete(after, part)
            self.check(np.array_equal(*beside), lambda: f"{what}: errors beside {part} changed")
            before, after = before[part], after[part]
        own = self.plain.owned(size) if np.size(found) < size else slice(None)
        before, after = before[own], after[own]
        given = wide.sum(0).reshape(-1)[own] + before
        sent = np.asarray(found, "float64").reshape(-1) * (self.size if op == "mean" else 1)
        if memory.whole is not None and getattr(self.options.compress, "error_feedback", True):
            most = 1e-5 * (1 + self.size) * (np.abs(wide).sum(0).max(initial=0) + np.abs(before).max(initial=0))
            lost = np.abs(sent + after - given).max(initial=0)
            self.check(bool(lost <= most), lambda: f"{what}: {lost} was lost, more than {most}")
        if "powersgd" in str(self.options.compress).lower():
            rounded = before != after if memory.whole is not None else sent == sent
            given, sent = given[rounded], sent[rounded]
            along, whole = abs(float(sent @ (given - sent))), float(given @ given)
            right = along <= 1e-4 * whole and (whole == 0 or bool(sent.any()))
            self.check(right, lambda: f"{what}: no projection, {along} of {whole}")

    def alone(self, what: str, found: Any, mine: np.ndarray, op: str) -> None:
        """Check that an exact sum has the bits of a call on one node to which other ranks bring the arrays. mine: what
        this rank brings there."""
        if self.reference is None or mine.dtype.name not in FLOATS or op not in ("sum", "mean") or self.size == 1:
            return
        right = np.array(mine)
        self.well("the reference", lambda: self.reference(right, op))
        self.equal(f"{what}, beside the ring", right, found)


def dtype_of(name: Any) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name) if name in ("bfloat16", "float8_e4m3fn") else name)


def epsilon(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def hash_of(array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


def integers(rows: np.ndarray, op: str) -> np.ndarray:
    """Return a reduction of integers or flags; sums and products wrap around."""
    if rows.dtype == bool:
        return rows.any(0) if op in ("sum", "max") else rows.all(0)
    reduce: dict[str, Callable[..., Any]] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    with np.errstate(over="ignore"):
        return reduce[op].reduce(rows, axis=0, dtype=rows.dtype)  # type: ignore[attr-defined, no-any-return]


def flat(tree: Any) -> list[np.ndarray]:
    """Return the arrays of a tree, in order of the keys."""
    if isinstance(tree, dict):
        return [array for key in sorted(tree) for array in flat(tree[key])]
    if isinstance(tree, list | tuple):
        return [array for part in tree for array in flat(part)]
    return [] if tree is None else [np.asarray(tree)]
