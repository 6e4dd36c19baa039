"""What torch.distributed's ReduceOps are here: an operation of ours, or one of MPI's."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

# The dtypes that our backends reduce; all others are reduced by the MPI library itself.
OURS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
MPI_TYPES = {
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_RED: Any = dist.ReduceOp.RedOpType
_NAMES = {_RED.SUM: "sum", _RED.AVG: "mean", _RED.MAX: "max", _RED.MIN: "min", _RED.PRODUCT: "prod"}
_MPI_OPS = {
    _RED.SUM: "SUM",
    _RED.AVG: "SUM",
    _RED.MAX: "MAX",
    _RED.MIN: "MIN",
    _RED.PRODUCT: "PROD",
    _RED.BAND: "BAND",
    _RED.BOR: "BOR",
    _RED.BXOR: "BXOR",
}
# On truth values, which MPI sees as bytes 0 and 1: a sum is "or" and a product is "and", as with NCCL.
_BOOL_OPS = {
    _RED.SUM: "MAX",
    _RED.MAX: "MAX",
    _RED.BOR: "MAX",
    _RED.PRODUCT: "MIN",
    _RED.MIN: "MIN",
    _RED.BAND: "MIN",
    _RED.BXOR: "BXOR",
}
_BITWISE = (_RED.BAND, _RED.BOR, _RED.BXOR)


@dataclass(frozen=True)
class Reduction:
    """How tensors of one dtype are reduced.

    Exactly one of `name` (an operation of ours) and `mpi` (one of MPI's) is set. factor: each rank's tensor is
    multiplied by it before (PREMUL_SUM). divide: the sum of integers is divided by the ranks, towards zero (AVG).
    """

    name: str | None = None
    mpi: str | None = None
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
        if dtype not in _REAL:
            raise _unknown(dtype)
        return resolve(op, _REAL[dtype])
    if dtype == torch.bool:
        if kind not in _BOOL_OPS:
            raise _senseless(kind, dtype)
        return Reduction(mpi=_BOOL_OPS[kind])
    if dtype.is_floating_point:
        return _of_floats(op, kind, dtype)
    if dtype not in MPI_TYPES:
        raise _unknown(dtype)
    if kind not in _MPI_OPS:
        raise _senseless(kind, dtype)
    if dtype in OURS and kind in _NAMES:
        return Reduction(name="sum" if kind == _RED.AVG else _NAMES[kind], divide=kind == _RED.AVG)
    return Reduction(mpi=_MPI_OPS[kind], divide=kind == _RED.AVG)


def _of_floats(op: Any, kind: Any, dtype: torch.dtype) -> Reduction:
    if dtype not in OURS:
        raise _unknown(dtype)
    if kind == _RED.PREMUL_SUM:
        return Reduction(name="sum", factor=op.__getstate__()[1])
    if kind in _BITWISE:
        raise _senseless(kind, dtype)
    return Reduction(name=_NAMES[kind])


def _unknown(dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f'backend "allreduce" does not reduce {dtype}; convert to a wider dtype first')


def _senseless(kind: Any, dtype: torch.dtype) -> TypeError:
    return TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
