"""Compressed: sends float32 and float64 arrays as 16-bit floats, a half or a quarter of the bytes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, trees
from allreduce.arrays.gpu import StreamOrder, is_gpu_array
from allreduce.arrays.memory_kinds import GPU, UNREGISTERED
from allreduce.backend import AllReduce, TwoPhase
from allreduce.engine import call as records
from allreduce.errors import AllReduceError, OptionError
from allreduce.topology import Topology
from allreduce.transport.deferred_free import free_later
from allreduce.wrappers.wrapper import Wrapper

SHORT = ("float16", "bfloat16")
LONG = (np.dtype(np.float32), np.dtype(np.float64))


def parse(compress: object, sums_half: bool, name: str) -> np.dtype:
    """Return the dtype that `compress` names. Raises OptionError, also if the backend `name` sums no 16-bit floats."""
    if not isinstance(compress, str) or compress not in SHORT:
        raise OptionError(f'compress={compress!r} is unknown; use "float16", "bfloat16" or None')
    if not sums_half:
        raise OptionError(
            f'compress={compress!r}: {name!r} sums no 16-bit floats; use "auto", "ring" or another backend that does'
        )
    return dtypes.parse(compress)


class Compressed(Wrapper):
    """Rounds arrays to 16-bit floats, reduces these, and writes the result back in the array's dtype.

    compress: "bfloat16", with the range of float32 and 8 binary digits, or "float16", with 11 binary digits; values or
    sums above 65504 become infinity.

    Only float32 and float64 arrays are compressed, and only in calls and `reduce_scatter`. Other dtypes, and
    `broadcast`, `stack`, `all_gather` and `sparse`, are passed on unchanged. Each rank's values are rounded once; the
    sum or mean is formed in float32 and rounded once more, equally on all ranks. With one rank nothing is rounded. Use
    `exact`, the inner backend, for values that must not be rounded.

    It costs two more passes over the array, and 2 bytes of memory for each element (allocated by the inner
    backend and reused). Calls become faster on slow networks, and slower inside a node.
    """

    def __init__(self, topology: Topology, *, inner: AllReduce, compress: str, owns_inner: bool = False) -> None:
        self.compress = parse(compress, inner.sums_half, inner.name)
        super().__init__(topology, inner=inner, owns_inner=owns_inner)
        self._shorts: dict[bool, Any] = {}  # the memory for 16-bit floats; True: on the GPU
        self._order = StreamOrder()

    def __repr__(self) -> str:
        return f"Compressed({self.inner!r}, {self.compress})"

    @property
    def exact(self) -> AllReduce:
        return self.inner.exact

    def sent(self, dtype: np.dtype) -> np.dtype:
        return self.compress if self.size > 1 and dtype in LONG else self.inner.sent(dtype)

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        if self._closed:
            self.check_open()
        if isinstance(buffer, trees.KINDS):
            self.reduce_tree(buffer, op)
        elif self._compresses(buffer, op, "all_reduce"):
            array = np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer  # not a subclass of ndarray
            flat = array.reshape(-1, order="A")
            with self._exclusive(flat):
                short = self._rounded(flat)
                with _ignoring_overflow():
                    self.inner(short.reshape(array.shape, order="C" if array.flags.c_contiguous else "F"), op)
                    flat[...] = short
        else:
            self.inner(buffer, op)

    def bind(self, array: Any, op: str = "mean", kind: str = "all_reduce") -> Callable[[], None]:
        if kind not in ("all_reduce", "reduce_scatter") or not self._compresses(array, op, kind):
            return super().bind(array, op, kind)
        call: Any = self if kind == "all_reduce" else self.reduce_scatter
        return partial(call, array, op)

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        """As of AllReduce, but elements outside the returned view are unchanged if compressed. Collective."""
        if not self._compresses(buffer, op, "reduce_scatter"):
            return super().reduce_scatter(buffer, op)
        mine = buffer[self.owned(buffer.size)]
        with self._exclusive(buffer):
            short = self._rounded(buffer)
            with _ignoring_overflow():
                mine[...] = super().reduce_scatter(short, op)
        return mine

    def _exclusive(self, flat: Any) -> AbstractContextManager[None]:
        """Context manager: orders this call's use of the 16-bit memory after earlier calls' (GPU streams)."""
        return self._order.ordered() if is_gpu_array(flat) else nullcontext()

    def _compresses(self, buffer: Any, op: str, kind: str) -> bool:
        """Return whether the array is sent as 16-bit floats; if so, the ranks have agreed on the call. Collective.

        For invalid arguments it returns False, and the inner backend raises the error.
        """
        dtype = getattr(buffer, "dtype", None)
        if self.size == 1 or not isinstance(dtype, np.dtype) or dtype not in LONG or not buffer.size:  # None == float64
            return False
        if kind == "reduce_scatter" and not isinstance(self, TwoPhase):
            return False
        self.check_open()
        try:
            memory = GPU if is_gpu_array(buffer) else UNREGISTERED
            record = records.array_call(kind, buffer, op, memory)
            resolved = self._resolve(op, record.dtype)
        except AllReduceError:
            return False
        text = f"{record}, sent as {self.compress}"
        values = [*records.agreement_values(record, resolved.code), dtypes.TYPES[self.compress].code]
        self._engine.agree_once(text, text, values, None)
        return True

    def _rounded(self, flat: Any) -> Any:
        """Round a 1-D array into the inner backend's 16-bit memory, and return that. Collective when it grows."""
        on_gpu = is_gpu_array(flat)
        held = self._shorts.get(on_gpu)
        if held is None or held.size < flat.size:
            device = "cuda" if on_gpu else "cpu"
            held = self._shorts[on_gpu] = self.inner.allocate(flat.size, self.compress, device)
        short = held[: flat.size]
        with _ignoring_overflow():
            short[...] = flat
        return short

    def _close(self) -> None:
        self._shorts.clear()

    def abandon(self) -> None:
        free_later(self._shorts)  # late ranks may still write there
        self._shorts = {}
        super().abandon()


def _ignoring_overflow() -> np.errstate:
    """Ignore floating-point errors: values that are too large become infinity, maybe on one rank only."""
    return np.errstate(all="ignore")
