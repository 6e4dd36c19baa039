"""Native: the MPI library's own MPI_Allreduce, the yardstick for the others."""

from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import chunks, gpu
from allreduce.arrays.ops import Op
from allreduce.base import AllReduce

LARGEST_COUNT = 1 << 30  # elements in one call: an MPI count is a C int in Open MPI 5
MEAN_BYTES = 1 << 20  # a mean is reduced in pieces of this size, each scaled while it is in the cache


def largest_piece(itemsize: int, op: Op) -> int:
    """Elements in one call: as many as MPI's counts allow, or as fit the cache when they are scaled after it."""
    return LARGEST_COUNT if op.scale is None else MEAN_BYTES // itemsize


class Native(AllReduce):
    """MPI_Allreduce in place. Whether all ranks get the same bits is up to the MPI library; the standard
    recommends it, and Open MPI and MPICH do it."""

    sums_half = False

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        step = largest_piece(buffer.itemsize, op)
        if buffer.size <= step:
            self._reduce_piece(buffer, op)
        else:
            for piece in chunks.segments(slice(0, buffer.size), step):
                self._reduce_piece(buffer[piece], op)

    def _reduce_piece(self, piece: np.ndarray, op: Op) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, piece, op.mpi)
        op.finish(piece)

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        if not gpu.mpi_is_cuda_aware():
            super()._reduce_gpu(buffer, op)
            return
        gpu.synchronize()
        self._reduce(buffer, op)
