"""Seam 1, for algorithms that are a reduce_scatter followed by an all_gather."""

from abc import abstractmethod
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, gpu
from allreduce.arrays.ops import Op
from allreduce.backend import AllReduce
from allreduce.engine.engine import Call, Reduction
from allreduce.moves import nothing_to_do


class TwoPhase(AllReduce):
    """Algorithms that are a reduce_scatter followed by an all_gather. Both can be called on their own.

    Between the phases each rank owns one slice of the buffer, `owned(length)`, and holds its result.
    """

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        """Reduce `buffer`, leaving each rank only its own slice of the result, which is returned. Collective.

        buffer: a contiguous 1-D array, as for a call; what is outside of the returned view is undefined afterwards.
        16-bit floats are summed in float32 and rounded once.
        """
        scatter = self._scatter_gpu if gpu.is_gpu_array(buffer) else self._scatter_rounded
        call = self._admit(buffer, op, "reduce_scatter")
        self._phase(call, self._same_data.first(call, self._calls.quiet(scatter)), buffer)
        return buffer[self.owned(buffer.size)]

    def all_gather(self, buffer: np.ndarray) -> None:
        """Fill `buffer` on every rank from the slices that the ranks own, in place. Collective.

        buffer: as for `reduce_scatter`, of any dtype; what is outside of this rank's own slice is overwritten.
        """
        gather = self._gather_gpu if gpu.is_gpu_array(buffer) else self._all_gather
        call = self._admit_move(buffer, "all_gather", placed=True)
        if buffer.size and self.size > 1:
            self._say_copies(call.signature)
        self._phase(call, lambda flat, _: gather(flat), buffer)

    def _phase(self, call: Call, reduction: Reduction, buffer: np.ndarray) -> None:
        self._calls.run(call, reduction if buffer.size and self.size > 1 else nothing_to_do, buffer)

    @abstractmethod
    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        """Finish `owned` of a 1-D array of 32 or 64-bit elements in place; the rest may be spoilt."""

    @abstractmethod
    def _all_gather(self, buffer: np.ndarray) -> None:
        """Copy every rank's `owned` slice to all ranks; any dtype."""

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._scatter_rounded(buffer, op)
        self._all_gather(buffer)

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        """reduce_scatter of any dtype: 16-bit floats travel as float32 sums and are rounded by their owner."""
        accumulator = dtypes.TYPES[buffer.dtype].accumulator
        if accumulator == buffer.dtype:
            self._reduce_scatter(buffer, op)
            return
        wide = self.workspace.array("wide", buffer.size, accumulator)
        np.copyto(wide, buffer)
        self._reduce_scatter(wide, op)
        mine = self.owned(buffer.size)
        np.copyto(buffer[mine], wide[mine], casting="unsafe")

    # Of CuPy arrays: by way of pinned host memory, for algorithms of the CPU

    def _scatter_gpu(self, buffer: Any, op: Op) -> None:
        host, mine = self._pinned.like(buffer), self.owned(buffer.size)
        buffer.get(out=host)  # waits for the current stream, so the GPU has finished writing
        self._scatter_rounded(host, op)
        self._to_gpu(host, buffer, mine)

    def _gather_gpu(self, buffer: Any) -> None:
        host, mine = self._pinned.like(buffer), self.owned(buffer.size)
        buffer[mine].get(out=host[mine])
        self._all_gather(host)
        self._to_gpu(host, buffer, slice(None))

    @staticmethod
    def _to_gpu(host: np.ndarray, buffer: Any, part: slice) -> None:
        buffer[part].set(host[part])
        gpu.synchronize()  # the host memory is used again in the next call
