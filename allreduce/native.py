"""Native: the MPI library's own MPI_Allreduce, the yardstick for the others."""

from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import chunks, dtypes, gpu
from allreduce.base import AllReduce
from allreduce.ops import Op

LARGEST_COUNT = 1 << 30  # elements in one call: an MPI count is a C int in Open MPI 5
MEAN_BYTES = 1 << 20  # a mean is reduced in pieces of this size, each scaled while it is in the cache


def pieces(length: int, itemsize: int, op: Op) -> list[slice]:
    """The calls that a buffer takes: as few as MPI's counts allow, or cache-sized ones when it is scaled."""
    step = LARGEST_COUNT if op.scale is None else MEAN_BYTES // itemsize
    return list(chunks.segments(slice(0, length), step))


class Native(AllReduce):
    """MPI_Allreduce in place. Whether all ranks get the same bits is up to the MPI library; the standard
    recommends it, and Open MPI and MPICH do it."""

    sums_half = False

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        datatype = dtypes.TYPES[buffer.dtype].mpi
        for piece in pieces(buffer.size, buffer.itemsize, op):
            part = buffer[piece]
            self._comm.Allreduce(MPI.IN_PLACE, [part, part.size, datatype], op.mpi)
            op.finish(part)

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        if not gpu.mpi_is_cuda_aware():
            super()._reduce_gpu(buffer, op)
            return
        gpu.synchronize()
        self._reduce(buffer, op)
