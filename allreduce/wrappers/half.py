"""Halved: sends float32 and float64 arrays as 16-bit floats, a half or a quarter of the bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.arrays.casts import cast
from allreduce.arrays.gpu import StreamOrder, is_gpu_array
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part, Slice
from allreduce.backend import AllReduce
from allreduce.engine.call import Call
from allreduce.engine.engine import Work
from allreduce.topology import Topology
from allreduce.wrappers.compressed import Compressed
from allreduce.wrappers.options import LONG, Half


class Halved(Compressed):
    """Rounds arrays to 16-bit floats, reduces these by `inner`, and writes the result back in the array's dtype.

    Each rank's values are rounded once; the sum or mean is formed in float32 and rounded once more, equally on all
    ranks. "adasum" is sent so, too; "max", "min" and "prod" are not. No error feedback.

    It costs two more passes over the array, and 2 bytes of memory for each element (allocated by the inner backend and
    reused). Calls become faster on slow networks, and slower inside a node.
    """

    def __init__(
        self, topology: Topology, *, inner: AllReduce, options: Half, check: str = "first", owns_inner: bool = True
    ) -> None:
        self.options, self._dtype = options, options.sent(LONG[0])
        self._order = StreamOrder()
        super().__init__(topology, inner=inner, check=check, owns_inner=owns_inner)

    def sent(self, dtype: np.dtype) -> np.dtype:
        return self.options.sent(self.inner.sent(dtype)) if self.size > 1 else dtype

    def _compresses(self, dtype: np.dtype, op: str) -> bool:
        return self.size > 1 and dtype in LONG and op in ("sum", "mean", "adasum")

    def _reduce_compressed(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        short = self._rounded(buffer)
        self.inner.hooks.reduce(short, op)
        cast(short, buffer)

    def _route(self, call: Call) -> Work:
        if call.memory == GPU and call.length and self._compresses(call.dtype, call.op):
            return self._reduce_on_gpu
        return super()._route(call)

    def _scatter_work_for(self, call: Call) -> Work:
        if call.memory == GPU and call.length and self._compresses(call.dtype, call.op):
            return self._reduce_on_gpu
        return super()._scatter_work_for(call)

    def _reduce_on_gpu(self, buffer: Any, op: Op) -> None:
        with self._order.ordered():  # after earlier calls' use of the 16-bit memory (GPU streams)
            short = self._rounded(buffer)
            self.inner(short, op.name)
            buffer[...] = short

    def _rounded(self, flat: Any) -> Any:
        """Round a 1-D array into the inner backend's 16-bit memory, and return that. Collective when it grows."""
        on_gpu = is_gpu_array(flat)
        short = self._from_inner(flat.size, self._dtype, "cuda" if on_gpu else "cpu")
        if on_gpu:
            short[...] = flat
        else:
            cast(flat, short)
        return short
