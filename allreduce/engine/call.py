"""A collective call as a record: what all ranks must pass alike. Its only validation, and its fingerprint."""

import hashlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import dtypes
from allreduce.arrays.gpu import is_gpu_array
from allreduce.arrays.memory_kinds import ALLOCATED, FOREIGN, GPU
from allreduce.errors import NotAnArrayError, NotContiguousError, OptionError

_MEMORY = {FOREIGN: "ordinary memory", ALLOCATED: "memory from allocate()", GPU: "GPU memory"}
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "allocate", "broadcast", "stack", "sparse")
REDUCING = ("all_reduce", "reduce_scatter", "sparse")
_FLAT = ("reduce_scatter", "all_gather")
PLACED = ("all_reduce", "reduce_scatter", "all_gather")  # in which it matters whose memory the array is
LARGEST = 2**40 - 1  # elements; no machine has the memory
NUMBER_BITS, HASH_BITS = 2, 61  # of a fingerprint: the sequence number of the call, and the hash of its record
AGREEING = 1 << NUMBER_BITS  # the fingerprint of all agreements by message, which find what differs themselves
NUMBER = (1 << NUMBER_BITS) - 1


class Call(NamedTuple):
    """What all ranks must pass alike in one call."""

    kind: str  # one of KINDS
    length: int
    dtype: np.dtype
    op: str = "sum"
    memory: int = FOREIGN  # or ALLOCATED, or GPU
    layout: str = "C"  # or "F": ranks that mix them would add wrong elements
    shape: tuple[int, ...] | None = None
    root: int | None = None  # of a broadcast

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, and not only moved."""
        return self.kind in REDUCING

    def __str__(self) -> str:
        order = "" if self.layout == "C" else ", Fortran order"
        shape = "" if self.shape is None or len(self.shape) == 1 else f" of shape {self.shape}"
        root = "" if self.root is None else f", root {self.root}"
        op = f'op "{self.op}", ' if self.reduces else ""
        memory = _MEMORY[self.memory]
        return f"{self.kind}: length {self.length}{shape}, dtype {self.dtype}, {op}{memory}{order}{root}"


def row(call: Call | None, op_code: int) -> list[int]:
    """A call as the numbers that the ranks compare in an agreement; zeros for arguments that were refused."""
    if call is None:
        return [0] * 7
    rest = zlib.crc32(repr((call.shape, call.root)).encode())
    code = dtypes.code(call.dtype)
    return [call.length, code, op_code, call.memory, call.layout == "F", KINDS.index(call.kind), rest]


def fingerprint(call: Call) -> int:
    """A hash of a call, whose lowest bits (NUMBER) are left for its sequence number.

    It is the same on all ranks, which Python's own hashes are not.
    """
    digest = hashlib.blake2b(repr(call).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - HASH_BITS) << NUMBER_BITS


# Validation: each function returns what was asked for, or raises the error that says what is wrong


def of_array(kind: str, array: Any, op: str, memory: int, root: int | None = None) -> Call:
    """The call of this kind with an array that is changed in place."""
    if memory != GPU:
        refuse_other(array)
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        raise NotContiguousError(
            f"the array of shape {array.shape} and strides {array.strides} is not contiguous; "
            "reduce numpy.ascontiguousarray(array) and copy the result back"
        )
    if memory != GPU and not (flags.writeable and flags.aligned):
        raise NotAnArrayError("the array is read-only or not aligned; it is reduced in place, so pass a copy of it")
    if kind in _FLAT and array.ndim != 1:
        raise NotAnArrayError(f"{kind} takes a 1-D array, not one of shape {array.shape} in {_MEMORY[memory]}")
    if kind not in REDUCING:
        dtypes.refuse_references(array.dtype)
    if memory == ALLOCATED and kind not in PLACED:
        memory = FOREIGN
    layout = "C" if flags.c_contiguous else "F"
    return Call(kind, array.size, array.dtype, op, memory, layout, tuple(array.shape), root)


def of_allocation(length: Any, dtype: Any, device: str | None) -> Call:
    """The call that allocates an array."""
    parsed = dtypes.parse(dtype)
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or not 0 <= length <= LARGEST:
        raise OptionError(f"length must be an integer from 0 to {LARGEST}, got {length!r}")
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f'device={device!r} is unknown; use "cpu", "cuda" or None')
    return Call("allocate", int(length), parsed, memory=GPU if device == "cuda" else FOREIGN)


def check_root(root: Any, size: int) -> int:
    """The rank that `root` names, of a topology of `size` ranks."""
    if isinstance(root, bool) or not isinstance(root, int | np.integer) or not 0 <= root < size:
        raise OptionError(f"root must be a rank of this topology, 0 to {size - 1}, got {root!r}")
    return int(root)


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
