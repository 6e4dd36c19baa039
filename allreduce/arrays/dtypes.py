"""The table of element types: NumPy dtype -> code, NCCL type, accumulator dtype. mpi4py maps NumPy dtypes to MPI's."""

import zlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from allreduce.errors import UnsupportedDtypeError


class Type(NamedTuple):
    code: int  # this row's number, for agreements between ranks
    nccl: int  # ncclDataType_t in nccl.h
    accumulator: np.dtype  # the dtype in which sums are formed; wider for the 16-bit types


FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BOOL = np.dtype(np.bool_)
_F32, _F64, _I32, _I64 = map(np.dtype, ("float32", "float64", "int32", "int64"))
_U8, _I8, _U16 = map(np.dtype, ("uint8", "int8", "uint16"))

TYPES: dict[np.dtype, Type] = {
    _F32: Type(1, 7, _F32),
    _F64: Type(2, 8, _F64),
    _I32: Type(3, 2, _I32),
    _I64: Type(4, 4, _I64),
    FLOAT16: Type(5, 6, _F32),
    BFLOAT16: Type(6, 9, _F32),
    _U8: Type(7, 1, _U8),
    _I8: Type(8, 0, _I8),
    BOOL: Type(9, 1, BOOL),
}
_WIRE = {FLOAT16: _U16, BFLOAT16: _U16, BOOL: _U8}


def parse(dtype: DTypeLike) -> np.dtype:
    """Return the table's dtype for "float32", numpy.float32, "bfloat16", ... Raises UnsupportedDtypeError."""
    try:
        parsed = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    except TypeError:
        raise unsupported(dtype) from None
    if parsed not in TYPES:
        raise unsupported(parsed)
    return parsed


def code(dtype: np.dtype) -> int:
    """Return a number by which ranks compare dtypes: the table's code, or a hash for dtypes that are only copied."""
    known = TYPES.get(dtype)
    return known.code if known else zlib.crc32(repr(dtype).encode())


def check_no_references(dtype: np.dtype) -> None:
    """Raise UnsupportedDtypeError if elements are references to Python objects, which can't be sent."""
    if dtype.hasobject:
        raise UnsupportedDtypeError(f"dtype {dtype} holds references to objects of this process, which can't be sent")


def unsupported(dtype: object) -> UnsupportedDtypeError:
    names = ", ".join(str(known) for known in TYPES)
    order = " in this machine's byte order" if getattr(dtype, "isnative", True) is False else ""
    return UnsupportedDtypeError(f"dtype {dtype} can't be reduced; use one of {names}{order}")


def is_half(dtype: np.dtype) -> bool:
    """True for the 16-bit floats, which are summed in float32 and rounded once."""
    return dtype in (FLOAT16, BFLOAT16)


def wire(array: np.ndarray) -> np.ndarray:
    """View a contiguous 1-D array as a dtype that MPI knows: 16-bit floats as uint16, bool and unlisted as uint8."""
    kind = _WIRE.get(array.dtype, None if array.dtype in TYPES else _U8)
    return array if kind is None else array.view(kind)
