"""The C library: sums and casts of 16-bit floats, and codes of 8 bits, in one pass over the memory (kernels.c); the
rendezvous of a node's ranks (meeting.c). communicators.c is a library of its own, see allreduce/process/start.py.

`pip install` builds the library where there is a C compiler. Without it, or with ALLREDUCE_KERNELS=0, every function
here returns False or None, and its caller does the same by NumPy and Python. Arrays are contiguous and 1-D. All
functions are local; those on arrays work outside the GIL.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SWITCH = "ALLREDUCE_KERNELS"  # 0: use NumPy
VERSION = 4  # of the library's functions; an older library beside newer code is not used

SUMMED = ("float32", "float64", "int32", "int64", "float16", "bfloat16")  # dtypes of the sums in meeting.c
FLOAT32, FLOAT16, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ARRAY_OF_ARGUMENTS = 0x80  # METH_FASTCALL of Python
_ARGUMENTS = {
    "sum": (_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, ctypes.c_double),
    "cast": (_POINTER, _POINTER, _SIZE),
    "block_magnitudes": (_POINTER, _SIZE, _SIZE, _POINTER),
    "encode_int8": (_POINTER, _SIZE, _SIZE, *[_POINTER] * 5),
    "decode_int8": (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER),
    "add_int8": (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER),
}


def status() -> str:
    """Return how arrays are computed in this process, for people: "C", or "NumPy" and the reason."""
    if os.environ.get(SWITCH) == "0":
        return f"NumPy ({SWITCH}=0)"
    if _library() is not None:
        return "C"
    if found := _files():
        return f"NumPy ({found[0].name} can't be used: it is of another version or machine; install again)"
    return 'NumPy (no C library was built: install again with a C compiler, "gcc")'


def sum_arrays(parts: Sequence[np.ndarray], outs: Sequence[np.ndarray], scale: float | None = None) -> bool:
    """Write the sum of `parts`, in their order, times `scale` to each of `outs`, which may be some of the parts.

    Two or more arrays of one 16-bit float dtype and one length, summed in float32 and rounded once. Returns False, and
    changes nothing, if there is no kernel for them.
    """
    first = outs[0]
    function = _function(f"sum_{first.dtype}") if first.dtype in (FLOAT16, BFLOAT16) and len(parts) > 1 else None
    if function is None or not _fit(*parts, *outs):
        return False
    function(_addresses(parts), len(parts), _addresses(outs), len(outs), first.size, 1.0 if scale is None else scale)
    return True


def cast(source: np.ndarray, out: np.ndarray) -> bool:
    """Write `source` to `out`, rounded to nearest, ties to even. Returns False if there is no kernel for the dtypes."""
    pair = {source.dtype, out.dtype}
    function = (
        _function(f"cast_{source.dtype}_{out.dtype}") if pair in ({FLOAT32, FLOAT16}, {FLOAT32, BFLOAT16}) else None
    )
    if function is None or not _fit(source, out):
        return False
    function(source.ctypes.data, out.ctypes.data, out.size)
    return True


def call(name: str, *arguments: Any) -> bool:
    """Call a function of kernels.c for 8-bit codes: arrays, which become their addresses, None and integers.

    Returns False if there is no library.
    """
    function = _function(name)
    if function is None:
        return False
    function(*(each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments))
    return True


class _Method(ctypes.Structure):
    """PyMethodDef, of Python's stable ABI."""

    _fields_ = (("name", ctypes.c_char_p), ("function", _POINTER), ("flags", ctypes.c_int), ("text", ctypes.c_char_p))


def method(name: str, state: np.ndarray, keep: object) -> Callable[..., Any] | None:
    """Return a function of meeting.c as a builtin function of Python, or None if there is no library.

    state: the 64-bit words of its struct. keep: the memory to which they point. A call takes 20 ns; by ctypes it would
    take 100.
    """
    definition = _definition(name)
    if definition is None:
        return None
    create = ctypes.pythonapi.PyCFunction_NewEx
    create.argtypes, create.restype = (_POINTER, ctypes.py_object, ctypes.py_object), ctypes.py_object
    # its `self` is the address of the state; its module, any object, keeps the memory
    return create(ctypes.addressof(definition), state.ctypes.data, (state, keep))


def sums(dtype: np.dtype, adds: bool) -> bool:
    """Return whether `meet_and_sum` does an operation on arrays of this dtype. adds: it is a sum or a mean."""
    return adds and dtype.name in SUMMED


def sum_address(dtype: np.dtype) -> int:
    """Return the address of the function that sums arrays of one of the dtypes SUMMED. Only with the library."""
    return ctypes.cast(getattr(_library(), f"sum_{dtype}"), _POINTER).value or 0


@functools.cache
def _definition(name: str) -> _Method | None:
    library = _loaded()
    if library is None:
        return None
    address = ctypes.cast(getattr(library, name), _POINTER).value
    return _Method(name.encode(), address, _ARRAY_OF_ARGUMENTS, None)


def _fit(*arrays: np.ndarray) -> bool:
    return all(each.flags.c_contiguous and each.flags.aligned for each in arrays)


def _addresses(arrays: Sequence[np.ndarray]) -> Any:
    return (_POINTER * len(arrays))(*[each.ctypes.data for each in arrays])


def _loaded() -> ctypes.CDLL | None:
    return None if os.environ.get(SWITCH) == "0" else _library()


@functools.cache
def _function(name: str) -> Callable[..., None] | None:
    library = _loaded()
    if library is None:
        return None
    function = getattr(library, name)
    function.argtypes, function.restype = _ARGUMENTS.get(name) or _ARGUMENTS[name.partition("_")[0]], None
    return function


def _files() -> list[Path]:
    return sorted(Path(__file__).parent.glob("library*.so"))


@functools.cache
def _library() -> ctypes.CDLL | None:
    for path in _files():
        try:
            library = ctypes.CDLL(str(path))
            if library.version() == VERSION:
                return library
        except (OSError, AttributeError):  # of another machine, or half written
            continue
    return None
