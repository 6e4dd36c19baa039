"""SixteenBits: sends float32 and float64 arrays as 16-bit floats, a half or a quarter of the bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.algorithm import Algorithm, Context, Work
from allreduce.algorithms.compressed.compressed import Compressed
from allreduce.arrays.casts import cast
from allreduce.arrays.compression import LONG, Half
from allreduce.arrays.gpu import StreamOrder
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.parts import Part
from allreduce.call.call import Call
from allreduce.memory.allocations import Slice


class SixteenBits(Compressed):
    """Rounds arrays to 16-bit floats, reduces these by `inner`, and writes the result back in the array's dtype.

    Each rank's values are rounded once; the sum or mean is formed in float32 and rounded once more, equally on all
    ranks. "adasum" of an inner Adasum is sent so too; "max", "min" and "prod" are not. No error feedback.

    It costs two more passes over the array, and 2 bytes of memory for each element (allocated by the inner algorithm
    and reused). Calls become faster on slow networks, and slower inside a node.
    """

    def __init__(self, context: Context, *, inner: Algorithm, options: Half) -> None:
        super().__init__(context, inner=inner)
        self.options, self._dtype = options, options.sent(LONG[0])
        self._order = StreamOrder()

    def compresses(self, dtype: np.dtype, op: Op) -> bool:
        return super().compresses(dtype, op) or (self.size > 1 and dtype in LONG and not self.sums)

    def reduce_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        short = self.from_inner(buffer.size, self._dtype)
        cast(buffer, short)
        self.inner.reduce(short, op)
        cast(short, buffer)

    def work(self, call: Call, op: Op) -> Work:
        if call.kind == "all_gather" or not self.compresses(call.dtype, op):
            return super().work(call, op)
        if call.memory != GPU:
            return super().work(call, op)._replace(place=None)  # reduced in memory of this algorithm
        inner = self.inner.work(call._replace(kind="all_reduce", dtype=self._dtype), op)

        def run(buffer: Any) -> None:
            with self._order.ordered():  # after earlier calls' use of the 16-bit memory (GPU streams)
                short = self.from_inner(buffer.size, self._dtype, "cuda")
                short[...] = buffer
                inner.run(short)
                buffer[...] = short

        return Work(run)
