"""Native: the MPI library's own MPI_Allreduce, the baseline for the others."""

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import chunks, dtypes, gpu, ops
from allreduce.arrays.ops import Op, numpy_operation
from allreduce.backend import AllReduce
from allreduce.engine.call import Call
from allreduce.engine.engine import BoundWork, DirectWork, Work
from allreduce.transport import cost
from allreduce.transport.cost import Layout, Machine

LARGEST_COUNT = 1 << 30  # elements in one call: an MPI count is a C int in Open MPI 5
MEAN_BYTES = 1 << 20  # a mean is reduced in pieces of this size, each scaled while it is in the cache


def largest_piece(itemsize: int, op: Op) -> int:
    """Return the most elements of one MPI call: MPI's limit; for a mean, as many as fit the cache, to be scaled."""
    return LARGEST_COUNT if op.scale is None else MEAN_BYTES // itemsize


class Native(AllReduce):
    """MPI_Allreduce in place. Whether all ranks get the same bits is up to the MPI library; the standard
    recommends it, and Open MPI and MPICH do it."""

    sums_half = False

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """The faster one of recursive doubling and Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005),
        times a measured factor; see allreduce.transport.cost.library."""
        return cost.library(nbytes, layout, machine)

    def _route(self, call: Call) -> Work:
        route, dtype = super()._route(call), call.dtype
        op = ops.resolve(call.op, dtype, self.size)
        one_piece = call.length <= largest_piece(dtype.itemsize, op)
        if route == self._reduce and one_piece and dtype != dtypes.BOOL and _operation(op, dtype) is op.mpi:
            return self._plain(op.mpi) if op.scale is None else self._mean_of_one_piece(op.scale, dtype)
        return route

    def _plain(self, operation: MPI.Op) -> DirectWork:
        """Return work that calls MPI_Allreduce directly, with nothing to decide in each call."""
        all_reduce, in_place = self._comm.Allreduce, MPI.IN_PLACE
        run = partial(all_reduce, in_place)

        def bind(buffer: np.ndarray) -> BoundWork:
            specification = _specification(buffer)
            # a sum is mpi4py's default, and two arguments cost less than three
            return (all_reduce, in_place, specification) if operation == MPI.SUM else (run, specification, operation)

        return DirectWork(run, operation, bind)

    def _mean_of_one_piece(self, scale: float, dtype: np.dtype) -> DirectWork:
        """As `_plain`, for a mean."""
        all_reduce, in_place, total = self._comm.Allreduce, MPI.IN_PLACE, MPI.SUM
        factor = np.full((), scale, dtype)  # NumPy would convert a Python number in each call
        scaled = self._engine.quiet(np.multiply)

        def mean(specification: Any, buffer: np.ndarray) -> None:
            all_reduce(in_place, specification, total)
            scaled(buffer, factor, buffer)

        return DirectWork(
            lambda buffer, _: mean(buffer, buffer), bind=lambda buffer: (mean, _specification(buffer), buffer)
        )

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        operation = _operation(op, buffer.dtype)
        buffer = dtypes.wire(buffer)
        for piece in chunks.segments(slice(0, buffer.size), largest_piece(buffer.itemsize, op)):
            self._comm.Allreduce(MPI.IN_PLACE, buffer[piece], operation)
            op.finish(buffer[piece])

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        # NumPy's operations run on the host.
        if not gpu.mpi_is_cuda_aware() or _operation(op, buffer.dtype) is not op.mpi:
            super()._reduce_gpu(buffer, op)
            return
        gpu.synchronize()
        self._reduce(buffer, op)


def _specification(buffer: np.ndarray) -> list[Any]:
    """Return the buffer specification that costs mpi4py the least: it asks a memoryview, not NumPy, for the address."""
    return [buffer.data, buffer.size, MPI.Datatype.fromcode(buffer.dtype.char)]


def _operation(op: Op, dtype: np.dtype) -> MPI.Op:
    """Return MPI's operation, or NumPy's if MPI's may differ from it."""
    # MPI's maximum and minimum of floats keep or lose a NaN depending on the rank that has it. Open MPI's sums of 8-bit
    # integers saturate, instead of wrapping round, if it uses vector instructions.
    saturates = dtype.itemsize == 1 and op.combine is np.add and dtype != dtypes.BOOL
    return numpy_operation(op.combine, dtype) if saturates or op.keeps_nan(dtype) else op.mpi
