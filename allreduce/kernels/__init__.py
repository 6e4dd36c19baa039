"""The C library: sums and casts of 16-bit floats, and codes of 8 bits, in one pass over the memory (kernels.c); sums in
fixed point (fixed_point.c); the rendezvous of a node's ranks (meeting.c). communicators.c is a library of its own, see
allreduce/process/start.py.

`pip install` builds the library where there is a C compiler. Without it, or with ALLREDUCE_KERNELS=0, every function
here returns False or None. Its caller does the same by NumPy and Python, or has refused to work without the library.
Arrays are contiguous, aligned and 1-D; an output may be one of the inputs, and overlaps no other array. With the
library, other arguments raise TypeError or ValueError. All functions are local; the functions on arrays work outside
the GIL.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

SWITCH = "ALLREDUCE_KERNELS"  # 0: use NumPy
VERSION = 9  # of the library's functions; an older library beside newer code is not used

SUMMED = ("float32", "float64", "int32", "int64", "float16", "bfloat16")  # dtypes of the sums in meeting.c
FLOAT32, FLOAT16, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

# dtypes of the terms of sums in fixed point -> dtypes of the exponents, and of the integers
FIXED: dict[np.dtype, tuple[np.dtype, np.dtype]] = {
    **dict.fromkeys((FLOAT32, FLOAT16, BFLOAT16), (np.dtype(np.uint8), np.dtype(np.float64))),
    np.dtype(np.float64): (np.dtype(np.int32), np.dtype(np.int64)),
}
INT8 = np.dtype(np.int8)
MOST_BITS, MOST_TERMS = 62, 2**24  # of integers; of a sum in fixed point

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ARRAY_OF_ARGUMENTS = 0x80  # METH_FASTCALL of Python
_FLOAT64, _INT64 = np.dtype(np.float64), np.dtype(np.int64)


class _Memory(NamedTuple):
    """The addresses of an array that was checked."""

    start: int
    stop: int
    written: bool


def status() -> str:
    """Return how arrays are computed in this process, for people: "C", or "NumPy" and the reason."""
    if _switched_off():
        return f"NumPy ({SWITCH}=0)"
    if _loaded() is not None:
        return "C"
    if found := _files():
        return f"NumPy ({found[0].name} can't be used: it is of another version or machine; install again)"
    return 'NumPy (no C library was built: install again with a C compiler, "gcc")'


def require(done: bool) -> None:
    """Raise RuntimeError if a function has returned False, for a caller that has no other way."""
    if not done:
        raise RuntimeError(f"contiguous arrays and the C library are needed; arrays are computed by {status()}")


def sum_arrays(parts: Sequence[np.ndarray], outs: Sequence[np.ndarray], scale: float | None = None) -> bool:
    """Write the sum of `parts`, in their order, times `scale` to each of `outs`, which may be some of the parts.

    Two or more arrays of one 16-bit float dtype and one length, summed in float32 and rounded once. Returns False, and
    changes nothing, if there is no kernel for them.
    """
    if not _loaded():
        return False
    first = outs[0] if outs else None
    if not _fit(*parts, *outs) or len(parts) < 2 or first is None or first.dtype not in (FLOAT16, BFLOAT16):
        return False
    sources = [_given(each, first.dtype, first.size) for each in parts]
    written = [_given(each, first.dtype, first.size, True) for each in outs]
    factor = ctypes.c_double(1.0 if scale is None else scale)
    return _run(f"sum_{first.dtype}", sources, len(sources), written, len(written), first.size, factor)


def cast(source: np.ndarray, out: np.ndarray) -> bool:
    """Write `source` to `out`, rounded to nearest, ties to even. Returns False if there is no kernel for the dtypes."""
    if not _loaded():
        return False
    if not _fit(source, out) or {source.dtype, out.dtype} not in ({FLOAT32, FLOAT16}, {FLOAT32, BFLOAT16}):
        return False
    arrays = _given(source, source.dtype, out.size), _given(out, out.dtype, out.size, True)
    return _run(f"cast_{source.dtype}_{out.dtype}", *arrays, out.size)


# Codes of 8 bits. Each block of `block` elements has a scale; the last block may be shorter.


def block_magnitudes(values: np.ndarray, block: int, magnitudes: np.ndarray) -> bool:
    """Write the largest magnitude of each block of float32; NaN is the largest."""
    if not _loaded():
        return False
    size, blocks = _blocks(values, block)
    arrays = _given(values, FLOAT32, size), size, block, _given(magnitudes, FLOAT32, blocks, True)
    return _run("block_magnitudes", *arrays)


def encode(
    values: np.ndarray,
    block: int,
    scales: np.ndarray,
    inverses: np.ndarray,
    random: np.ndarray,
    codes: np.ndarray,
    error: np.ndarray | None,
) -> bool:
    """Write the codes of float32 values, and values - codes * scales to `error`. random: 0 to 1, to round them."""
    if not _loaded():
        return False
    size, blocks = _blocks(values, block)
    factors = _given(scales, FLOAT32, blocks), _given(inverses, FLOAT32, blocks)
    sources = _given(values, FLOAT32, size), size, block, *factors, _given(random, FLOAT32, size)
    written = _given(codes, INT8, size, True), error if error is None else _given(error, FLOAT32, size, True)
    return _run("encode", *sources, *written)


def decode(codes: np.ndarray, block: int, scales: np.ndarray, out: np.ndarray, adds: bool = False) -> bool:
    """Write the values of codes, code * scale, to float32 `out`. adds: add them."""
    if not _loaded():
        return False
    size, blocks = _blocks(codes, block)
    sources = _given(codes, INT8, size), size, block, _given(scales, FLOAT32, blocks)
    return _run("add_decoded" if adds else "decode", *sources, _given(out, FLOAT32, size, True))


# Sums in fixed point. edges: int64: where blocks of at most 256 elements begin, and where the last one ends.


def exponents(terms: Sequence[np.ndarray], edges: np.ndarray, found: np.ndarray) -> bool:
    """Write the largest exponent bits in each block of the terms."""
    _check_edges(edges)
    if not (sources := _terms(terms)):
        return False
    size, dtype = terms[0].size, terms[0].dtype
    ends = _given(edges, _INT64, edges.size)
    written = _given(found, FIXED[dtype][0], edges.size - 1, True)
    return _run(f"fixed_exponents_{dtype}", sources, len(sources), size, ends, edges.size - 1, written)


def add_integers(
    terms: Sequence[np.ndarray],
    edges: np.ndarray,
    factors: np.ndarray,
    rests: np.ndarray,
    out: np.ndarray,
) -> bool:
    """Write the sums of the terms times their block's factor and rest, each rounded to an integer."""
    _check_edges(edges)
    if not (sources := _terms(terms)):
        return False
    size, dtype, blocks = terms[0].size, terms[0].dtype, edges.size - 1
    ends, written = _given(edges, _INT64, blocks + 1), _given(out, FIXED[dtype][1], size, True)
    scales = _given(factors, _FLOAT64, blocks), _given(rests, _FLOAT64, blocks)
    return _run(f"fixed_add_{dtype}", sources, len(sources), size, ends, blocks, *scales, written)


def finish(integers: np.ndarray, edges: np.ndarray, factors: np.ndarray, divisor: int, out: np.ndarray) -> bool:
    """Write the integers of the blocks / divisor * factors to `out`; other elements stay."""
    _check_edges(edges)
    if not (written := _terms([out], True)):
        return False
    _check(isinstance(divisor, int) and 0 < divisor <= MOST_TERMS, f"{divisor=}")
    given, blocks = _given(integers, FIXED[out.dtype][1], out.size), edges.size - 1
    arrays = _given(edges, _INT64, blocks + 1), blocks, _given(factors, _FLOAT64, blocks)
    return _run(f"fixed_finish_{out.dtype}", given, out.size, *arrays, divisor, *written)


def sum_fixed(
    terms: Sequence[np.ndarray], outs: Sequence[np.ndarray], edges: np.ndarray, bits: int, divisor: int
) -> bool:
    """Do all of it in one pass: write the sums of these blocks / divisor to `outs`, which may be some of the terms.

    bits: of the integers of one term.
    """
    _check_edges(edges)
    sources, written = _terms(terms), _terms(outs, True)
    if not sources or not written:
        return False
    size, dtype, blocks = terms[0].size, terms[0].dtype, edges.size - 1
    _check(isinstance(divisor, int) and 0 < divisor <= MOST_TERMS and 0 < bits <= MOST_BITS, f"{divisor=}, {bits=}")
    _check((outs[0].dtype, outs[0].size) == (dtype, size), "outputs of another dtype or length than the terms")
    arrays = sources, len(sources), written, len(written), size, _given(edges, _INT64, blocks + 1), blocks
    return _run(f"fixed_sum_{dtype}", *arrays, bits, divisor)


def _terms(arrays: Sequence[np.ndarray], written: bool = False) -> list[_Memory]:
    """Return the checked terms of a sum in fixed point, or none if there is no kernel for them."""
    if not _loaded() or not len(arrays) or not _fit(*arrays) or arrays[0].dtype not in FIXED:
        return []
    return [_given(each, arrays[0].dtype, arrays[0].size, written) for each in arrays]


def _check_edges(edges: np.ndarray) -> None:
    _check(_fit(edges) and edges.size > 0, "edges of another layout, or none")


def _blocks(array: np.ndarray, block: int) -> tuple[int, int]:
    """Return the size of an array, and the number of its blocks."""
    _fit(array)
    _check(isinstance(block, int) and block > 0, f"blocks of {block!r}")
    return array.size, -(-array.size // block)


def _given(array: Any, dtype: np.dtype, size: int, written: bool = False) -> _Memory:
    fits = isinstance(array, np.ndarray) and (array.dtype, array.shape) == (dtype, (size,)) and _fit(array)
    if not fits or (written and not array.flags.writeable):
        given = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        use = "an output" if written else "an input"
        raise TypeError(
            f"{use} of the C library must be a contiguous, aligned{', writeable' * written} array of {size} elements "
            f"of {dtype}, not {given} (strides {getattr(array, 'strides', None)})"
        )
    # MPI's function takes a tenth of the time of array.ctypes.data, and aborts the process before and after MPI
    runs = MPI.Is_initialized() and not MPI.Is_finalized()
    start = MPI.Get_address(array) if runs else array.ctypes.data
    return _Memory(start, start + array.nbytes, written)


def _check(right: bool, given: str) -> None:
    if not right:
        raise ValueError(f"the C library does not take {given}")


def _run(name: str, *arguments: Any) -> bool:
    """Call a function of C with arrays, lists of arrays, and numbers. Returns False if there is no library."""
    arrays = [each for argument in arguments for each in (argument if isinstance(argument, list) else [argument])]
    memories = [each for each in arrays if isinstance(each, _Memory) and each.start < each.stop]
    _check(not _overlap(memories), f"arrays that overlap an output ({name})")
    function = _function(name)
    if function is None:
        return False
    _check(function(*map(_converted, arguments)) != 0, "edges that are not ascending, or not those of short blocks")
    return True


def _overlap(memories: Sequence[_Memory]) -> bool:
    """Return whether one of the arrays that are written shares a part of its memory with another one."""
    spans = {(each.start, each.stop): each.written for each in sorted(memories)}  # outputs come after equal inputs
    end = end_of_outputs = 0
    for (start, stop), written in spans.items():
        if start < (end if written else end_of_outputs):
            return True
        end = max(end, stop)
        end_of_outputs = max(end_of_outputs, stop) if written else end_of_outputs
    return False


def _converted(argument: Any) -> Any:
    if isinstance(argument, list):
        return (_POINTER * len(argument))(*[each.start for each in argument])
    if isinstance(argument, _Memory):
        return _POINTER(argument.start)
    return argument if isinstance(argument, ctypes.c_double) or argument is None else _SIZE(argument)


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


@functools.cache  # for ever: Python reads it when it frees a function that was made of it
def _definition(name: str) -> _Method:
    address = ctypes.cast(getattr(_loaded(), name), _POINTER).value
    return _Method(name.encode(), address, _ARRAY_OF_ARGUMENTS, None)


def _fit(*arrays: np.ndarray) -> bool:
    for each in arrays:
        if not isinstance(each, np.ndarray):
            raise TypeError(f"the C library takes arrays of NumPy, not {type(each).__name__}")
    return all(each.flags.c_contiguous and each.flags.aligned for each in arrays)


@functools.cache
def _switched_off() -> bool:  # once: a later change of the environment changes nothing
    return os.environ.get(SWITCH) == "0"


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    library = _loaded()
    if library is None:
        return None
    function = getattr(library, name)
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
