"""Native: the MPI library's own MPI_Allreduce, the baseline for the others."""

import contextlib
import ctypes
import functools
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import kernels
from allreduce.algorithm import Algorithm, Context, Work
from allreduce.arrays import casts, chunks, dtypes, gpu
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op, numpy_operation
from allreduce.call.call import Call
from allreduce.call.executor import do_nothing
from allreduce.call.rendezvous import CWork, double_word
from allreduce.transport import cost
from allreduce.transport.cost import Layout, Machine

LARGEST_COUNT = 1 << 30  # elements in one call: an MPI count is a C int in Open MPI 5
MEAN_BYTES = 1 << 20  # a mean is reduced in pieces of this size, each scaled while it is in the cache


def largest_piece(itemsize: int, op: Op) -> int:
    """Return the most elements of one MPI call: MPI's limit; for a mean, as many as fit the cache, to be scaled."""
    return LARGEST_COUNT if op.scale is None else MEAN_BYTES // itemsize


class Native(Algorithm):
    """MPI_Allreduce in place. Whether all ranks get the same bits is up to the MPI library; the standard
    recommends it, and Open MPI and MPICH do it; but in MPICH the bits of a NaN may differ.

    16-bit floats come here only from another algorithm, in calls with lossless=True. They are sent as float32.
    """

    sums_half = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        executor = context.executor
        self._by_c = executor.meets and executor.orders and kernels.status() == "C" and _all_reduce() != 0

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """The faster one of recursive doubling and Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp 2005),
        times a measured factor; see allreduce.transport.cost.library."""
        return cost.library(nbytes, layout, machine)

    def work(self, call: Call, op: Op) -> Work:
        dtype, half, by_mpi = call.dtype, dtypes.is_half(call.dtype), _operation(op, call.dtype) is op.mpi
        on_host = call.memory == GPU and (half or not by_mpi or not gpu.mpi_is_cuda_aware())
        if call.kind != "all_reduce" or on_host:
            return super().work(call, op)
        run = partial(self._reduce_here, op=op)
        one_piece = call.length <= largest_piece(dtype.itemsize, op)
        direct = call.memory != GPU and dtype != dtypes.BOOL and not half
        if not (self._by_c and direct and one_piece and by_mpi):
            return Work(run)
        return Work(do_nothing, quiet=True, in_c=lambda _: self._in_c(call, op))

    def _in_c(self, call: Call, op: Op) -> CWork:
        """Return a call of MPI_Allreduce without Python between the rendezvous and MPI. Local."""
        datatype = MPI.Datatype.fromcode(call.dtype.char)
        words = [_all_reduce(), int(MPI.IN_PLACE), call.length, call.dtype.itemsize]
        words += [datatype.handle, op.mpi.handle, self.comm.handle, double_word(op.scale), id(MPI.Exception)]
        return CWork("meet_and_reduce", words)

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        if dtypes.is_half(buffer.dtype):
            wide = casts.widened(buffer, self.workspace)
            self.reduce(wide, op)
            np.copyto(buffer, wide, casting="unsafe")
            return
        operation = _operation(op, buffer.dtype)
        buffer = dtypes.wire(buffer)
        for piece in chunks.segments(slice(0, buffer.size), largest_piece(buffer.itemsize, op)):
            self.comm.Allreduce(MPI.IN_PLACE, buffer[piece], operation)
            op.finish(buffer[piece])

    def _reduce_here(self, buffer: Any, op: Op) -> None:
        if gpu.is_gpu_array(buffer):
            gpu.synchronize()
        self.reduce(buffer, op)


@functools.cache
def _all_reduce() -> int:
    """Return the address of MPI_Allreduce, in a profiler or in mpi4py's MPI library; 0 if it is not found."""
    for name in (None, MPI.__file__):
        with contextlib.suppress(AttributeError, OSError):
            return ctypes.cast(ctypes.CDLL(name).MPI_Allreduce, ctypes.c_void_p).value or 0
    return 0


def _operation(op: Op, dtype: np.dtype) -> MPI.Op:
    """Return MPI's operation, or NumPy's if MPI's may differ from it."""
    # MPI's maximum and minimum of floats keep or lose a NaN depending on the rank that has it. Open MPI's sums of 8-bit
    # integers saturate, instead of wrapping round, if it uses vector instructions.
    saturates = dtype.itemsize == 1 and op.combine is np.add and dtype != dtypes.BOOL
    return numpy_operation(op.combine, dtype) if saturates or op.keeps_nan(dtype) else op.mpi
