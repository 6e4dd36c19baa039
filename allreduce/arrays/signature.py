"""What the ranks must pass alike in one call, read off an array or refused by name."""

import zlib
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import dtypes, ops
from allreduce.arrays.gpu import is_gpu_array
from allreduce.arrays.ops import Op
from allreduce.errors import NotAnArrayError, NotContiguousError

FOREIGN, ALLOCATED, GPU = 0, 1, 2  # where an array's memory is; ranks must agree about it
_MEMORY = {FOREIGN: "ordinary memory", ALLOCATED: "memory from allocate()", GPU: "GPU memory"}
_CALLS = ("all_reduce", "reduce_scatter", "all_gather", "allocate", "broadcast", "collect", "sparse")
_REDUCING = ("all_reduce", "reduce_scatter", "sparse")
_FLAT = ("reduce_scatter", "all_gather")
_MOVING = ("all_gather", "broadcast", "collect", "sparse")
_BITS = (40, 5, 3, 2, 1, 4)  # of length, dtype, op, memory, layout and call in a word
NUMBER_BITS = 8
_WITHOUT_ARRAY = {0: "no call", 1: "allocate(), close(), or a call that it has not made before"}
AGREEING = 1 << NUMBER_BITS  # the word of all agreements, which find by themselves what differs
NUMBER = (1 << NUMBER_BITS) - 1


class Signature(NamedTuple):
    """What all ranks must pass alike in one call."""

    length: int
    dtype: np.dtype
    op: str
    memory: int  # FOREIGN, ALLOCATED or GPU
    layout: str = "C"  # or "F": ranks that mix them would add wrong elements
    call: str = "all_reduce"  # or a phase of it: reduce_scatter, all_gather

    def __str__(self) -> str:
        order = "" if self.layout == "C" else ", Fortran order"
        memory = _MEMORY[self.memory]
        op = f'op "{self.op}", ' if self.call in _REDUCING else ""
        return f"{self.call}: length {self.length}, dtype {self.dtype}, {op}{memory}{order}"


def inspect(buffer: Any, op: str, memory: int, call: str) -> Signature:
    """The signature of a call, or the error that says why the array can't be reduced in place."""
    if memory != GPU:
        refuse_other(buffer)
    flags = buffer.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        raise NotContiguousError(
            f"the array of shape {buffer.shape} and strides {buffer.strides} is not contiguous; "
            "reduce numpy.ascontiguousarray(array) and copy the result back"
        )
    if memory != GPU and not (flags.writeable and flags.aligned):
        raise NotAnArrayError("the array is read-only or not aligned; it is reduced in place, so pass a copy of it")
    if call in _FLAT and buffer.ndim != 1:
        raise NotAnArrayError(f"{call} takes a 1-D array, not one of shape {buffer.shape} in {_MEMORY[memory]}")
    return Signature(buffer.size, buffer.dtype, op, memory, "C" if flags.c_contiguous else "F", call)


def refuse_other(array: Any) -> None:
    """Raise NotAnArrayError for what is no array of NumPy or CuPy."""
    if not is_gpu_array(array) and (not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray)):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise NotAnArrayError(f"a NumPy or CuPy array is needed, not {kind}{_hint(array)}")


def _hint(buffer: Any) -> str:
    """What to pass in place of another library's array."""
    if hasattr(buffer, "detach"):
        return "; for a CPU tensor pass tensor.detach().numpy()"
    if hasattr(buffer, "__array__") and not isinstance(buffer, np.ndarray):  # JAX: its arrays never change
        return "; it is reduced in place, so pass numpy.array(it), a copy, and take the result from there"
    if isinstance(buffer, int | float | complex):
        return "; numbers go in an array, numpy.array([1.0, 2.0]), which is reduced in place"
    return ""


def numbers(signature: Signature | None, op: Op | None) -> list[int]:
    """A signature as the numbers that ranks compare."""
    if signature is None or op is None:
        return [0] * len(Signature._fields)
    length, dtype, _, memory, layout, call = signature
    return [length, dtypes.TYPES[dtype].code, op.code, memory, layout == "F", _CALLS.index(call)]


def word(signature: Signature, op: Op) -> int:
    """All of a signature in 63 bits, of which the lowest (NUMBER) are left for the number of the call."""
    packed = 0
    for value, bits in zip(numbers(signature, op), _BITS, strict=True):
        packed = packed << bits | value
    return packed << NUMBER_BITS


def move_word(signature: Signature, *details: int) -> int:
    """The word of a call that moves an array: which call it is, and a hash of what else has to be alike."""
    rest = zlib.crc32(repr((signature, details)).encode())
    return (rest << _BITS[-1] | _CALLS.index(signature.call)) << NUMBER_BITS


def unpacked(packed: int) -> str:
    """A word in plain words; 0 is that of a rank that has not come to any call."""
    packed >>= NUMBER_BITS
    if packed in _WITHOUT_ARRAY:
        return _WITHOUT_ARRAY[packed]
    moving = _CALLS[packed & ((1 << _BITS[-1]) - 1)]
    if moving in _MOVING:
        return f"{moving}, perhaps of another length, dtype, shape, op or root"
    values = []
    for bits in reversed(_BITS):
        values.append(packed & ((1 << bits) - 1))
        packed >>= bits
    call, fortran, memory, op, code, length = values
    dtype = next(dtype for dtype, kind in dtypes.TYPES.items() if kind.code == code)
    return str(Signature(length, dtype, ops.NAMES[op], memory, "F" if fortran else "C", _CALLS[call]))


def allocation_row(length: int, code: int, on_gpu: bool) -> list[int]:
    """The numbers that ranks compare in `allocate`, set out as those of `row`."""
    return [length, code, 0, GPU if on_gpu else FOREIGN, 0, _CALLS.index("allocate")]
