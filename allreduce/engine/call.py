"""What the ranks must pass alike in one call, read off an array or refused by name."""

import hashlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import dtypes
from allreduce.arrays.gpu import is_gpu_array
from allreduce.arrays.memory_kinds import ALLOCATED, FOREIGN, GPU
from allreduce.arrays.ops import Op
from allreduce.errors import NotAnArrayError, NotContiguousError

_MEMORY = {FOREIGN: "ordinary memory", ALLOCATED: "memory from allocate()", GPU: "GPU memory"}
_CALLS = ("all_reduce", "reduce_scatter", "all_gather", "allocate", "broadcast", "collect", "sparse")
_REDUCING = ("all_reduce", "reduce_scatter", "sparse")
_FLAT = ("reduce_scatter", "all_gather")
NUMBER_BITS, WORD_BITS = 8, 55  # of the number of a call, and of the hash of the call itself: 63 bits together
AGREEING = 1 << NUMBER_BITS  # the word of all agreements, which find by themselves what differs
NUMBER = (1 << NUMBER_BITS) - 1


class Signature(NamedTuple):
    """What all ranks must pass alike in one call."""

    length: int
    dtype: np.dtype
    op: str
    memory: int  # FOREIGN, ALLOCATED or GPU
    layout: str = "C"  # or "F": ranks that mix them would add wrong elements
    call: str = "all_reduce"  # or another of _CALLS
    shape: tuple[int, ...] | None = None  # of the array; None: it does not matter here
    root: int | None = None  # of a broadcast

    def key(self) -> tuple:
        """By which a backend looks up calls that it knows."""
        return self.shape, self.dtype, self.op, self.memory

    def __str__(self) -> str:
        order = "" if self.layout == "C" else ", Fortran order"
        shape = "" if self.shape is None or len(self.shape) == 1 else f" of shape {self.shape}"
        memory = _MEMORY[self.memory]
        root = "" if self.root is None else f", root {self.root}"
        op = f'op "{self.op}", ' if self.call in _REDUCING else ""
        return f"{self.call}: length {self.length}{shape}, dtype {self.dtype}, {op}{memory}{order}{root}"


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
    layout = "C" if flags.c_contiguous else "F"
    return Signature(buffer.size, buffer.dtype, op, memory, layout, call, tuple(buffer.shape))


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
        return [0] * 7
    length, dtype, _, memory, layout, call, *shape_and_root = signature
    rest = zlib.crc32(repr(shape_and_root).encode())
    return [length, dtypes.code(dtype), op.code, memory, layout == "F", _CALLS.index(call), rest]


def word(signature: Signature) -> int:
    """A hash of a signature, whose lowest bits (NUMBER) are left for the number of the call.

    It is the same on all ranks, which Python's own hashes are not.
    """
    digest = hashlib.blake2b(repr(signature).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - WORD_BITS) << NUMBER_BITS


def allocation_row(length: int, code: int, on_gpu: bool) -> list[int]:
    """The numbers that ranks compare in `allocate`, set out as those of `row`."""
    return [length, code, 0, GPU if on_gpu else FOREIGN, 0, _CALLS.index("allocate")]
