"""The C library: sums and casts of 16-bit floats, and codes of 8 bits, in one pass over the memory (kernels.c); sums in
fixed point (fixed_point.c); the rendezvous of a node's ranks (meeting.c). communicators.c is a library of its own, see
allreduce/process/start.py.

`pip install` builds the library where there is a C compiler. Without it, or with ALLREDUCE_KERNELS=0, `sum_arrays`,
`cast` and `method` return False or None, also of arrays that are not contiguous or not aligned. The caller then does
the same by NumPy and Python; exact sums and codes of 8 bits have no other way, and raise RuntimeError. Arrays are 1-D;
those of another dtype or length than C would read raise TypeError. An output may be one of the inputs, and must not
overlap another array. All functions are local; those on arrays work outside the GIL.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

SWITCH = "ALLREDUCE_KERNELS"  # 0: use NumPy
VERSION = 9  # of the library's functions; an older library beside newer code is not used

SUMMED = ("float32", "float64", "int32", "int64", "float16", "bfloat16")  # dtypes of the sums in meeting.c
FLOAT32, FLOAT16, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOAT64, INT64 = np.dtype(np.float64), np.dtype(np.int64)

INT8 = np.dtype(np.int8)


class Format(NamedTuple):
    """How sums in fixed point read the elements of a dtype, and hold their sums."""

    wide: np.dtype  # the dtype in which elements are read
    not_finite: int  # the exponent bits of infinities and NaN
    bias: int  # an element with the exponent bits b is below 2^(b - bias)
    least: int  # exponent of the smallest subnormal
    exponents: np.dtype  # for a block's exponent bits
    carrier: np.dtype  # for integers
    bits: int  # of sums


_SINGLE = Format(FLOAT32, 0xFF, 126, -149, np.dtype(np.uint8), FLOAT64, 52)
_DOUBLE = Format(FLOAT64, 0x7FF, 1022, -1074, np.dtype(np.int32), INT64, 62)
FORMATS = {FLOAT32: _SINGLE, FLOAT16: _SINGLE, BFLOAT16: _SINGLE, FLOAT64: _DOUBLE}  # by dtype
MOST_TERMS = 2**24  # of a sum in fixed point; beyond, the quantum would be too coarse for float32

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ARRAY_OF_ARGUMENTS = 0x80  # METH_FASTCALL of Python


def status() -> str:
    """Return how arrays are computed in this process, for people: "C", or "NumPy" and the reason."""
    if _switched_off():
        return f"NumPy ({SWITCH}=0)"
    if _loaded() is not None:
        return "C"
    if found := _files():
        return f"NumPy ({found[0].name} can't be used: it is of another version or machine; install again)"
    return 'NumPy (no C library was built: install again with a C compiler, "gcc")'


def sum_arrays(parts: Sequence[np.ndarray], outs: Sequence[np.ndarray], scale: float | None = None) -> bool:
    """Write the sum of `parts`, in their order, times `scale` to each of `outs`, which may be some of the parts.

    Two or more arrays of one 16-bit float dtype and one length, summed in float32 and rounded once. Returns False, and
    changes nothing, if there is no kernel for them.
    """
    dtype, size = outs[0].dtype, outs[0].size
    if len(parts) < 2 or dtype not in (FLOAT16, BFLOAT16) or not _usable(*parts, *outs):
        return False
    sources, written = _pointers(parts, dtype, size), _pointers(outs, dtype, size, True)
    factor = ctypes.c_double(1.0 if scale is None else scale)
    _run(f"sum_{dtype}", sources, len(parts), written, len(outs), size, factor)
    return True


def cast(source: np.ndarray, out: np.ndarray) -> bool:
    """Write `source` to `out`, rounded to nearest, ties to even. Returns False if there is no kernel for the dtypes."""
    if {source.dtype, out.dtype} not in ({FLOAT32, FLOAT16}, {FLOAT32, BFLOAT16}) or not _usable(source, out):
        return False
    arrays = _pointer(source, source.dtype, out.size), _pointer(out, out.dtype, out.size, True)
    _run(f"cast_{source.dtype}_{out.dtype}", *arrays, out.size)
    return True


# Codes of 8 bits. Each block of `block` elements has a scale; the last block may be shorter.


def block_magnitudes(values: np.ndarray, block: int, magnitudes: np.ndarray) -> None:
    """Write the largest magnitude of each block of float32; NaN is the largest."""
    _require(values, magnitudes)
    size, blocks = values.size, -(-values.size // block)
    arrays = _pointer(values, FLOAT32, size), size, block, _pointer(magnitudes, FLOAT32, blocks, True)
    _run("block_magnitudes", *arrays)


def encode(
    values: np.ndarray,
    block: int,
    scales: np.ndarray,
    inverses: np.ndarray,
    random: np.ndarray,
    codes: np.ndarray,
    error: np.ndarray | None,
) -> None:
    """Write the codes of float32 values, and values - codes * scales to `error`. random: 0 to 1, to round them."""
    _require(values, scales, inverses, random, codes, *(() if error is None else (error,)))
    size, blocks = values.size, -(-values.size // block)
    factors = _pointer(scales, FLOAT32, blocks), _pointer(inverses, FLOAT32, blocks)
    sources = _pointer(values, FLOAT32, size), size, block, *factors, _pointer(random, FLOAT32, size)
    written = _pointer(codes, INT8, size, True), error if error is None else _pointer(error, FLOAT32, size, True)
    _run("encode", *sources, *written)


def decode(codes: np.ndarray, block: int, scales: np.ndarray, out: np.ndarray, adds: bool = False) -> None:
    """Write the values of codes, code * scale, to float32 `out`. adds: add them."""
    _require(codes, scales, out)
    size, blocks = codes.size, -(-codes.size // block)
    sources = _pointer(codes, INT8, size), size, block, _pointer(scales, FLOAT32, blocks)
    _run("add_decoded" if adds else "decode", *sources, _pointer(out, FLOAT32, size, True))


# Sums in fixed point. edges: int64: where blocks of at most 256 elements begin, and where the last one ends.


def exponents(terms: Sequence[np.ndarray], edges: np.ndarray, found: np.ndarray) -> None:
    """Write the largest exponent bits in each block of the terms."""
    form = _format(*terms, edges, found)
    size, dtype, blocks = terms[0].size, terms[0].dtype, edges.size - 1
    ends, written = _pointer(edges, INT64, blocks + 1), _pointer(found, form.exponents, blocks, True)
    _run(f"fixed_exponents_{dtype}", _pointers(terms, dtype, size), len(terms), size, ends, blocks, written)


def add_integers(
    terms: Sequence[np.ndarray],
    edges: np.ndarray,
    factors: np.ndarray,
    rests: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the sums of the terms times their block's factor and rest, each rounded to an integer."""
    form = _format(*terms, edges, factors, rests, out)
    size, dtype, blocks = terms[0].size, terms[0].dtype, edges.size - 1
    sources, ends = _pointers(terms, dtype, size), _pointer(edges, INT64, blocks + 1)
    scales = _pointer(factors, FLOAT64, blocks), _pointer(rests, FLOAT64, blocks)
    written = _pointer(out, form.carrier, size, True)
    _run(f"fixed_add_{dtype}", sources, len(terms), size, ends, blocks, *scales, written)


def finish(integers: np.ndarray, edges: np.ndarray, factors: np.ndarray, divisor: int, out: np.ndarray) -> None:
    """Write the integers of the blocks / divisor * factors to `out`; other elements stay. divisor: <= MOST_TERMS."""
    form = _format(out, integers, edges, factors)
    size, dtype, blocks = out.size, out.dtype, edges.size - 1
    arrays = _pointer(edges, INT64, blocks + 1), blocks, _pointer(factors, FLOAT64, blocks)
    given, written = _pointer(integers, form.carrier, size), _pointer(out, dtype, size, True)
    _run(f"fixed_finish_{dtype}", given, size, *arrays, divisor, written)


def sum_fixed(
    terms: Sequence[np.ndarray], outs: Sequence[np.ndarray], edges: np.ndarray, bits: int, divisor: int
) -> None:
    """Do all of it in one pass: write the sums of these blocks / divisor to `outs`, which may be some of the terms.

    bits: of the integers of one term, at most 62. divisor: <= MOST_TERMS.
    """
    _format(*terms, *outs, edges)
    size, dtype, blocks = terms[0].size, terms[0].dtype, edges.size - 1
    sources, written = _pointers(terms, dtype, size), _pointers(outs, dtype, size, True)
    arrays = sources, len(terms), written, len(outs), size, _pointer(edges, INT64, blocks + 1), blocks
    _run(f"fixed_sum_{dtype}", *arrays, bits, divisor)


def _usable(*arrays: np.ndarray) -> bool:
    """Return whether there is a library, and these arrays are laid out as it needs."""
    return _loaded() is not None and all(each.flags.c_contiguous and each.flags.aligned for each in arrays)


def _require(*arrays: np.ndarray) -> None:
    if not _usable(*arrays):
        raise RuntimeError(f"contiguous arrays and the C library are needed; arrays are computed by {status()}")


def _format(first: np.ndarray, *others: np.ndarray) -> Format:
    """Return the format of the first array. Raises TypeError if its dtype has none, and the error of `_require`."""
    _require(first, *others)
    if first.dtype not in FORMATS:
        raise TypeError(f"there are no sums of {first.dtype} in fixed point")
    return FORMATS[first.dtype]


def _pointer(array: Any, dtype: np.dtype, size: int, written: bool = False) -> ctypes.c_void_p:
    """Return a pointer to the array. Raises TypeError if it is another one than C would read or write."""
    if (array.dtype, array.shape) != (dtype, (size,)) or written > array.flags.writeable:
        use = "an output" if written else "an input"
        raise TypeError(
            f"{use} of the C library must be{' a writeable' * written} {dtype} of shape {(size,)}, not "
            f"{array.dtype} of shape {array.shape}"
        )
    return _POINTER(array.ctypes.data)


def _pointers(arrays: Sequence[np.ndarray], dtype: np.dtype, size: int, written: bool = False) -> ctypes.Array:
    return (_POINTER * len(arrays))(*(_pointer(each, dtype, size, written).value for each in arrays))


def _run(name: str, *arguments: Any) -> None:
    """Call a function of the library, which must be loaded."""
    if _function(name)(*(_SIZE(each) if isinstance(each, int) else each for each in arguments)) == 0:
        raise ValueError(f"{name}: edges that are not ascending, or not those of short blocks")


class _Method(ctypes.Structure):
    """PyMethodDef, of Python's stable ABI."""

    _fields_ = (("name", ctypes.c_char_p), ("function", _POINTER), ("flags", ctypes.c_int), ("text", ctypes.c_char_p))


def method(name: str, state: np.ndarray, keep: object) -> Callable[..., Any] | None:
    """Return a function of meeting.c as a builtin function of Python, or None if there is no library.

    state: the 64-bit words of its struct. keep: the memory to which they point. A call takes 20 ns; by ctypes it would
    take 100.
    """
    if _loaded() is None:
        return None
    definition = _definition(name)
    create = ctypes.pythonapi.PyCFunction_NewEx
    create.argtypes, create.restype = (_POINTER, ctypes.py_object, ctypes.py_object), ctypes.py_object
    # its `self` is the address of the state; its module, any object, keeps the memory
    return create(ctypes.addressof(definition), state.ctypes.data, (state, keep))


def sums(dtype: np.dtype, adds: bool) -> bool:
    """Return whether meeting.c does an operation on arrays of this dtype. adds: it is a sum or a mean."""
    return adds and dtype.name in SUMMED


def sum_address(dtype: np.dtype) -> int:
    """Return the address of the function that sums arrays of one of the dtypes SUMMED. Only with the library."""
    return ctypes.cast(getattr(_loaded(), f"sum_{dtype}"), _POINTER).value or 0


_definitions: dict[str, _Method] = {}  # for ever: Python reads them when it calls and frees functions made of them


def _definition(name: str) -> _Method:
    if name not in _definitions:
        address = ctypes.cast(getattr(_loaded(), name), _POINTER).value
        # another thread may have made one meanwhile, which stays
        _definitions.setdefault(name, _Method(name.encode(), address, _ARRAY_OF_ARGUMENTS, None))
    return _definitions[name]


@functools.cache
def _switched_off() -> bool:  # once: a later change of the environment changes nothing
    return os.environ.get(SWITCH) == "0"


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    function = getattr(_loaded(), name)
    function.restype = ctypes.c_int if name.startswith("fixed") else None
    return function


def _files() -> list[Path]:
    return sorted(Path(__file__).parent.glob("library*.so"))


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    for path in [] if _switched_off() else _files():
        try:
            library = ctypes.CDLL(str(path))
            if library.version() == VERSION:
                return library
        except (OSError, AttributeError):  # of another machine, or half written
            continue
    return None
