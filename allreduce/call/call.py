"""The record of a collective call: the arguments that must be equal on all ranks; validation; fingerprint."""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import dtypes
from allreduce.arrays.arguments import is_integer
from allreduce.arrays.gpu import is_gpu_array
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.errors import NotAnArrayError, NotContiguousError, OptionError

_MEMORY = {UNREGISTERED: "ordinary memory", ALLOCATED: "memory from allocate()", GPU: "GPU memory"}
REDUCING = ("all_reduce", "reduce_scatter", "sparse", "sum_terms")
KINDS = (*REDUCING, "all_gather", "allocate", "broadcast", "stack")
_FLAT = ("reduce_scatter", "all_gather")
USES_ALLOCATED = ("all_reduce", "reduce_scatter", "all_gather")  # kinds that treat memory from `allocate` differently
LARGEST = 2**40 - 1  # elements; more than the memory of any machine
# bits of a fingerprint: the low ones for the call's sequence number, the others for a hash of its record
SEQUENCE_BITS, HASH_BITS = 2, 61
AGREEING = 1 << SEQUENCE_BITS  # fingerprint of every agreement by message; the message compares the values
MEETING = 2 << SEQUENCE_BITS  # of ranks that meet inside of a call
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1


class Call(NamedTuple):
    """The arguments of a call that must be equal on all ranks."""

    kind: str  # one of KINDS
    length: int
    dtype: np.dtype
    op: str = "sum"
    memory: int = UNREGISTERED  # or ALLOCATED, or GPU
    layout: str = "C"  # or "F": ranks that mix them would add wrong elements
    shape: tuple[int, ...] | None = None
    root: int | None = None  # of a broadcast

    @property
    def reduces(self) -> bool:
        """True if the call combines elements of the ranks, False if it only copies them."""
        return self.kind in REDUCING

    def __str__(self) -> str:
        order = "" if self.layout == "C" else ", Fortran order"
        shape = "" if self.shape is None or len(self.shape) == 1 else f" of shape {self.shape}"
        root = "" if self.root is None else f", root {self.root}"
        op = f'op "{self.op}", ' if self.reduces else ""
        memory = _MEMORY[self.memory]
        return f"{self.kind}: length {self.length}{shape}, dtype {self.dtype}, {op}{memory}{order}{root}"


def fingerprint(call: Call | str, tree: str = "") -> int:
    """Hash a call or its text, and the tree whose arrays its buffer holds. The lowest SEQUENCE_BITS bits are 0, for
    the sequence number.

    Equal calls have equal fingerprints on all ranks (Python's `hash` differs between processes).
    """
    digest = hashlib.blake2b(f"{call!r}{tree}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - HASH_BITS) << SEQUENCE_BITS


# Validation: each function returns a valid value or raises a named error. Local.


def array_call(kind: str, array: Any, op: str, memory: int) -> Call:
    """Check an array for a call of this kind, and return the Call. Raises NotAnArrayError, NotContiguousError or
    UnsupportedDtypeError.
    """
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    if memory != GPU:
        check_array(array)
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        raise NotContiguousError(
            f"the array of shape {array.shape} and strides {array.strides} is not contiguous; "
            "reduce numpy.ascontiguousarray(array) and copy the result back"
        )
    if memory != GPU and not (flags.writeable and flags.aligned):
        raise NotAnArrayError("the array is read-only or not aligned, but is changed in place; pass a copy")
    if kind in _FLAT and array.ndim != 1:
        raise NotAnArrayError(f"{kind} takes a 1-D array, not one of shape {array.shape} in {_MEMORY[memory]}")
    if kind not in REDUCING:
        dtypes.check_no_references(array.dtype)
    if memory == ALLOCATED and kind not in USES_ALLOCATED:
        memory = UNREGISTERED
    layout = "C" if flags.c_contiguous else "F"
    op = op if kind in REDUCING else "sum"
    return Call(kind, array.size, array.dtype, op, memory, layout, tuple(array.shape))


def allocation_call(length: Any, dtype: Any, device: str | None) -> Call:
    """Check the arguments of `allocate`, and return the Call. Raises OptionError or UnsupportedDtypeError."""
    parsed = dtypes.parse(dtype)
    if not is_integer(length, 0, LARGEST):
        raise OptionError(f"length must be an integer from 0 to {LARGEST}, got {length!r}")
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f'device={device!r} is unknown; use "cpu", "cuda" or None')
    return Call("allocate", int(length), parsed, memory=GPU if device == "cuda" else UNREGISTERED)


def check_root(root: Any, size: int) -> int:
    """Return `root` as an int; raise OptionError unless 0 <= root < size."""
    if not is_integer(root, 0, size - 1):
        raise OptionError(f"root must be a rank of this topology, 0 to {size - 1}, got {root!r}")
    return int(root)


def check_array(array: Any) -> None:
    """Raise NotAnArrayError unless `array` is a NumPy or CuPy array. Masked arrays are refused."""
    if not is_gpu_array(array) and (not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray)):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise NotAnArrayError(f"a NumPy or CuPy array is needed, not {kind}{_hint(array)}")


def _hint(buffer: Any) -> str:
    """Return a hint for the error: what to pass instead of this object."""
    if hasattr(buffer, "detach"):
        return "; pass tensor.detach().numpy(): it shares a CPU tensor's memory, so the tensor gets the result"
    if hasattr(buffer, "__array__") and not isinstance(buffer, np.ndarray):  # JAX arrays are immutable
        return "; it can't be changed in place: pass a copy, numpy.array(x), and read the result from the copy"
    if isinstance(buffer, int | float | complex):
        return "; put numbers in an array, numpy.array([1.0, 2.0])"
    return ""
