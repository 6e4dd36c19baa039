"""Native: the MPI library's own MPI_Allreduce, the baseline for the others."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.algorithm import Algorithm, Work
from allreduce.arrays import chunks, dtypes, gpu
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op, numpy_operation
from allreduce.call.call import Call
from allreduce.transport import cost
from allreduce.transport.cost import Layout, Machine

LARGEST_COUNT = 1 << 30  # elements in one call: an MPI count is a C int in Open MPI 5
MEAN_BYTES = 1 << 20  # a mean is reduced in pieces of this size, each scaled while it is in the cache


def largest_piece(itemsize: int, op: Op) -> int:
    """Return the most elements of one MPI call: MPI's limit; for a mean, as many as fit the cache, to be scaled."""
    return LARGEST_COUNT if op.scale is None else MEAN_BYTES // itemsize


class Native(Algorithm):
    """MPI_Allreduce in place. Whether all ranks get the same bits is up to the MPI library; the standard
    recommends it, and Open MPI and MPICH do it.

    16-bit floats come here only from another algorithm, in calls with lossless=True. They are sent as float32.
    """

    sums_half = False

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """The faster one of recursive doubling and Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005),
        times a measured factor; see allreduce.transport.cost.library."""
        return cost.library(nbytes, layout, machine)

    def work(self, call: Call, op: Op) -> Work:
        dtype = call.dtype
        if call.kind != "all_reduce" or (call.memory == GPU and not self._takes_gpu(op, dtype)):
            return super().work(call, op)
        one_piece = call.length <= largest_piece(dtype.itemsize, op)
        direct = call.memory != GPU and dtype != dtypes.BOOL and not dtypes.is_half(dtype)
        if not direct or not one_piece or _operation(op, dtype) is not op.mpi:
            return Work(lambda buffer: self._reduce_here(buffer, op))
        return self._plain(op.mpi) if op.scale is None else self._mean_of_one_piece(op.scale, dtype)

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        if dtypes.is_half(buffer.dtype):
            wide = self.workspace.array("wide", buffer.size, dtypes.TYPES[buffer.dtype].accumulator)
            np.copyto(wide, buffer)
            self.reduce(wide, op)
            np.copyto(buffer, wide, casting="unsafe")
            return
        operation = _operation(op, buffer.dtype)
        buffer = dtypes.wire(buffer)
        for piece in chunks.segments(slice(0, buffer.size), largest_piece(buffer.itemsize, op)):
            self.comm.Allreduce(MPI.IN_PLACE, buffer[piece], operation)
            op.finish(buffer[piece])

    def _takes_gpu(self, op: Op, dtype: np.dtype) -> bool:
        """Return whether MPI reduces arrays on the GPU. NumPy's operations run on the host."""
        return gpu.mpi_is_cuda_aware() and not dtypes.is_half(dtype) and _operation(op, dtype) is op.mpi

    def _reduce_here(self, buffer: Any, op: Op) -> None:
        if gpu.is_gpu_array(buffer):
            gpu.synchronize()
        self.reduce(buffer, op)

    def _plain(self, operation: MPI.Op) -> Work:
        """Return work that calls MPI_Allreduce directly, with nothing to decide in each call."""
        # a sum is mpi4py's default, and two arguments cost less than three
        named = {} if operation == MPI.SUM else {"op": operation}
        run = partial(self.comm.Allreduce, MPI.IN_PLACE, **named)
        return Work(run, bind=lambda buffer: (run, _specification(buffer)), quiet=True)

    def _mean_of_one_piece(self, scale: float, dtype: np.dtype) -> Work:
        """As `_plain`, for a mean."""
        all_reduce, in_place = self.comm.Allreduce, MPI.IN_PLACE
        factor = np.full((), scale, dtype)  # NumPy would convert a Python number in each call
        scaled = self.context.executor.quiet(np.multiply)

        def mean(buffer: np.ndarray) -> None:
            all_reduce(in_place, buffer)
            scaled(buffer, factor, buffer)

        def bind(buffer: np.ndarray) -> tuple[Callable[[Any], None], list[Any]]:
            def run(specification: list[Any]) -> None:
                all_reduce(in_place, specification)
                scaled(buffer, factor, buffer)

            return run, _specification(buffer)

        return Work(mean, bind, quiet=True)


def _specification(buffer: np.ndarray) -> list[Any]:
    """Return the buffer specification that costs mpi4py the least: it asks a memoryview, not NumPy, for the address."""
    return [buffer.data, buffer.size, MPI.Datatype.fromcode(buffer.dtype.char)]


def _operation(op: Op, dtype: np.dtype) -> MPI.Op:
    """Return MPI's operation, or NumPy's if MPI's may differ from it."""
    # MPI's maximum and minimum of floats keep or lose a NaN depending on the rank that has it. Open MPI's sums of 8-bit
    # integers saturate, instead of wrapping round, if it uses vector instructions.
    saturates = dtype.itemsize == 1 and op.combine is np.add and dtype != dtypes.BOOL
    return numpy_operation(op.combine, dtype) if saturates or op.keeps_nan(dtype) else op.mpi
