"""What the ranks must pass alike in one call, read off an array or refused by name."""

from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import dtypes
from allreduce.arrays.ops import Op
from allreduce.errors import NotAnArrayError, NotContiguousError

FOREIGN, ALLOCATED, GPU = 0, 1, 2  # where an array's memory is; ranks must agree about it
_MEMORY = {FOREIGN: "ordinary memory", ALLOCATED: "memory from allocate()", GPU: "GPU memory"}
_CALLS = ("all_reduce", "reduce_scatter", "all_gather", "allocate")


class Signature(NamedTuple):
    """What all ranks must pass alike in one call."""

    length: int
    dtype: np.dtype
    op: str
    memory: int  # FOREIGN, ALLOCATED or GPU
    layout: str = "C"  # or "F": ranks that mix them would add wrong elements
    call: str = "all_reduce"  # or a phase of it: reduce_scatter, all_gather


def inspect(buffer: Any, op: str, memory: int, call: str) -> Signature:
    """The signature of a call, or the error that says why the array can't be reduced in place."""
    if memory != GPU and (not isinstance(buffer, np.ndarray) or isinstance(buffer, np.ma.MaskedArray)):
        kind = f"{type(buffer).__module__}.{type(buffer).__qualname__}"
        raise NotAnArrayError(f"a NumPy or CuPy array is needed, not {kind}{_hint(buffer)}")
    flags = buffer.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        raise NotContiguousError(
            f"the array of shape {buffer.shape} and strides {buffer.strides} is not contiguous; "
            "reduce numpy.ascontiguousarray(array) and copy the result back"
        )
    if memory != GPU and not (flags.writeable and flags.aligned):
        raise NotAnArrayError("the array is read-only or not aligned; it is reduced in place, so pass a copy of it")
    if call != "all_reduce" and (memory == GPU or buffer.ndim != 1):
        raise NotAnArrayError(f"{call} takes a 1-D NumPy array, not one of shape {buffer.shape} in {_MEMORY[memory]}")
    return Signature(buffer.size, buffer.dtype, op, memory, "C" if flags.c_contiguous else "F", call)


def _hint(buffer: Any) -> str:
    """What to pass in place of another library's array."""
    if hasattr(buffer, "detach"):
        return "; for a CPU tensor pass tensor.detach().numpy()"
    if hasattr(buffer, "__array__") and not isinstance(buffer, np.ndarray):  # JAX: its arrays never change
        return "; it is reduced in place, so pass numpy.array(it), a copy, and take the result from there"
    return ""


def row(signature: Signature | None, op: Op | None) -> tuple[list[int], str]:
    """A signature as the numbers that ranks compare, and as a line for people."""
    if signature is None or op is None:
        return [0] * len(Signature._fields), "an array or an operation that can't be reduced"
    length, dtype, name, memory, layout, call = signature
    order = "" if layout == "C" else ", Fortran order"
    text = f'{call}: length {length}, dtype {dtype}, op "{name}", {_MEMORY[memory]}{order}'
    return [length, dtypes.TYPES[dtype].code, op.code, memory, layout == "F", _CALLS.index(call)], text


def allocation_row(length: int, code: int, on_gpu: bool) -> list[int]:
    """The numbers that ranks compare in `allocate`, set out as those of `row`."""
    return [length, code, 0, GPU if on_gpu else FOREIGN, 0, _CALLS.index("allocate")]
