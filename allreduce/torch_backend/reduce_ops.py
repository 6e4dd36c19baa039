"""What torch.distributed's ReduceOps are here: an operation of ours, or one of MPI's."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

# The dtypes that our backends reduce; all others are reduced by the MPI library itself.
OURS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_RED: Any = dist.ReduceOp.RedOpType
_NAMES = {_RED.SUM: "sum", _RED.AVG: "mean", _RED.MAX: "max", _RED.MIN: "min", _RED.PRODUCT: "prod"}
_MPI_OPS = {
    _RED.SUM: MPI.SUM,
    _RED.AVG: MPI.SUM,
    _RED.MAX: MPI.MAX,
    _RED.MIN: MPI.MIN,
    _RED.PRODUCT: MPI.PROD,
    _RED.BAND: MPI.BAND,
    _RED.BOR: MPI.BOR,
    _RED.BXOR: MPI.BXOR,
}
# On truth values, which MPI sees as bytes 0 and 1: a sum is "or" and a product is "and", as with NCCL.
_BOOL_OPS = {
    _RED.SUM: MPI.MAX,
    _RED.MAX: MPI.MAX,
    _RED.BOR: MPI.MAX,
    _RED.PRODUCT: MPI.MIN,
    _RED.MIN: MPI.MIN,
    _RED.BAND: MPI.MIN,
    _RED.BXOR: MPI.BXOR,
}
_BITWISE = (_RED.BAND, _RED.BOR, _RED.BXOR)


@dataclass(frozen=True)
class Reduction:
    """How tensors of one dtype are reduced.

    Exactly one of `name` (an operation of ours) and `mpi` is set. factor: each rank's tensor is multiplied
    by it before (PREMUL_SUM). divide: the sum of integers is divided by the ranks, towards zero (AVG).
    """

    name: str | None = None
    mpi: MPI.Op | None = None
    factor: Any = None
    divide: bool = False


def resolve(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction for a ReduceOp (or the RedOpType inside of it) on tensors of `dtype`.

    Raises TypeError, naming both, when the operation has no meaning for the dtype.
    """
    kind = getattr(op, "op", op)
    if dtype.is_complex:
        if kind not in (_RED.SUM, _RED.AVG, _RED.PREMUL_SUM):
            raise _senseless(kind, dtype)
        return resolve(op, torch.float32 if dtype == torch.complex64 else torch.float64)
    if dtype == torch.bool:
        if kind not in _BOOL_OPS:
            raise _senseless(kind, dtype)
        return Reduction(mpi=_BOOL_OPS[kind])
    if dtype.is_floating_point:
        return _of_floats(op, kind, dtype)
    if kind not in _MPI_OPS:
        raise _senseless(kind, dtype)
    if dtype in OURS and kind in _NAMES:
        return Reduction(name="sum" if kind == _RED.AVG else _NAMES[kind], divide=kind == _RED.AVG)
    return Reduction(mpi=_MPI_OPS[kind], divide=kind == _RED.AVG)


def _of_floats(op: Any, kind: Any, dtype: torch.dtype) -> Reduction:
    if dtype not in OURS:
        raise NotImplementedError(f'backend "allreduce" does not reduce {dtype}; use float16, bfloat16 or wider')
    if kind == _RED.PREMUL_SUM:
        return Reduction(name="sum", factor=op.__getstate__()[1])
    if kind in _BITWISE:
        raise _senseless(kind, dtype)
    return Reduction(name=_NAMES[kind])


def _senseless(kind: Any, dtype: torch.dtype) -> TypeError:
    return TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
