"""The one table of operations: op -> NumPy ufunc, MPI op, NCCL op."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes
from allreduce.errors import UnsupportedOpError


@dataclass(frozen=True, slots=True)
class Op:
    """A reduction operation: `combine` merges two pieces; `finish` is applied once to each complete piece."""

    name: str
    code: int  # for agreements between ranks
    combine: np.ufunc
    mpi: MPI.Op
    nccl: int  # ncclRedOp_t in nccl.h
    scale: float | None = None  # mean: 1/n, applied to each finished piece while it is in the cache

    def finish(self, piece: Any) -> None:
        """Turn a complete sum into the mean, in place; nothing to do for other operations."""
        if self.scale is not None:
            np.multiply(piece, self.scale, out=piece)

    @property
    def adds(self) -> bool:
        """True for sums and means."""
        return self.name in ("sum", "mean")

    def keeps_nan(self, dtype: np.dtype) -> bool:
        """Return True for max and min of floats: a NaN on any rank makes the result NaN (MPI and NCCL may drop it)."""
        return self.name in ("max", "min") and dtype.kind not in "iub"

    def unscaled(self) -> "Op":
        """Return the operation without the mean's scaling, for all phases but the last one."""
        return replace(self, scale=None)


OPS: dict[str, Op] = {
    "sum": Op("sum", 1, np.add, MPI.SUM, 0),
    "mean": Op("mean", 2, np.add, MPI.SUM, 0),
    "max": Op("max", 3, np.maximum, MPI.MAX, 2),
    "min": Op("min", 4, np.minimum, MPI.MIN, 3),
    "prod": Op("prod", 5, np.multiply, MPI.PROD, 1),
}
ADASUM = Op("adasum", 6, np.add, MPI.OP_NULL, -1)  # of vectors, not of elements: see allreduce/algorithms/adasum.py
NAMES = {op.code: op.name for op in (*OPS.values(), ADASUM)}
ALIASES = {"average": "mean"}
BOOLEAN = {np.add: OPS["max"], np.multiply: OPS["min"]}  # "or" and "and" of the bytes 0 and 1


def resolve(name: str, dtype: np.dtype, ranks: int) -> Op:
    """Return the Op called `name` for arrays of `dtype` on `ranks` ranks.

    For bool, a sum is "logical or" and a product "logical and", as in NumPy. Integers wrap around. Raises
    UnsupportedOpError.
    """
    op = OPS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if op is None:
        hint = f'; only the backend "{ADASUM.name}" has the op "{ADASUM.name}"' if str(name) == ADASUM.name else ""
        raise UnsupportedOpError(f"op {name!r} is unknown; use one of {', '.join(OPS)}{hint}")
    if op.name == "mean":
        if dtype.kind in "iub":
            raise UnsupportedOpError(f'op "mean" is not defined for {dtype}: use "sum", or a floating dtype')
        op = replace(op, scale=1.0 / ranks)
    elif dtype == dtypes.BOOL and op.combine in BOOLEAN:
        same = BOOLEAN[op.combine]
        op = replace(op, mpi=same.mpi, nccl=same.nccl)
    return op


@functools.cache
def numpy_operation(combine: np.ufunc, dtype: np.dtype) -> MPI.Op:
    """Return an MPI operation that calls `combine` on host arrays, where the MPI library's own differs. Local."""

    def call(before: Any, after: Any, _: MPI.Datatype) -> None:
        result = np.frombuffer(after, dtype)
        with np.errstate(all="ignore"):  # MPI calls it in any thread
            combine(np.frombuffer(before, dtype), result, out=result)

    # In rank order, so that all ranks select the same one of two NaNs, or of two zeros.
    return MPI.Op.Create(call, commute=False)
