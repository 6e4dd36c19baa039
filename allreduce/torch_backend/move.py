"""Collectives that move tensors. They move bytes, so they take every dtype."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from allreduce.errors import DisagreementError
from allreduce.torch_backend.tensors import as_bytes, readable, writable
from allreduce.transport.chunked import broadcast
from allreduce.transport.control import raise_together
from allreduce.transport.wait import waiting

LARGEST = (1 << 31) - 1  # an MPI count or displacement is a C int in Open MPI 5


class TensorMover:
    """Moves tensors on one communicator. It sends and receives plain tensors (contiguous, on the CPU) in place.

    The caller has checked the arguments (module `checks`). All methods are collective.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` by that of rank `root`."""
        with nullcontext(readable(tensor)) if self._comm.rank == root else writable(tensor) as memory:
            broadcast(self._comm, [as_bytes(memory)], root, "broadcast of a process group")

    def all_gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Fill outputs[r] from rank r's `source`. The numbers of elements may differ between ranks."""
        source = readable(source)
        with _receive_buffer(outputs) as everything, self._waiting("all_gather"):
            self._comm.Allgatherv(mpi_buffer(as_bytes(source)), everything)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Fill the r-th of equal slices of `output` from rank r's `source`."""
        with writable(output) as memory:
            source = _without_overlap(source, memory)
            everything = mpi_parts(as_bytes(memory), [source.nbytes] * self._comm.size)
            with self._waiting("all_gather"):
                self._comm.Allgatherv(mpi_buffer(as_bytes(source)), everything)

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> None:
        """Fill outputs[r] on rank `root` from rank r's `source`."""
        source = readable(source)
        with _receive_buffer(outputs) as everything, self._waiting("gather"):
            self._comm.Gatherv(mpi_buffer(as_bytes(source)), everything if self._comm.rank == root else None, root)

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int) -> None:
        """Fill rank r's `output` from sources[r] on rank `root`."""
        with writable(output) as memory, self._waiting("scatter"):
            everything = _concatenated(sources) if self._comm.rank == root else None
            self._comm.Scatterv(everything, mpi_buffer(as_bytes(memory)), root)

    def all_to_all(self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Fill outputs[r] from rank r's sources[this rank]."""
        self._check_parts(
            "all_to_all", outputs[0].itemsize, *([each.nbytes for each in it] for it in (outputs, sources))
        )
        with _receive_buffer(outputs) as everything, self._waiting("all_to_all"):
            self._comm.Alltoallv(_concatenated(sources), everything)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: Sequence[int], source_sizes: Sequence[int]
    ) -> None:
        """Exchange slices: source_sizes[r] bytes go to rank r, output_sizes[r] come from it."""
        self._check_parts("all_to_all_single", output.itemsize, output_sizes, source_sizes)
        with writable(output) as memory:
            source = _without_overlap(source, memory)
            with self._waiting("all_to_all"):
                self._comm.Alltoallv(
                    mpi_parts(as_bytes(source), source_sizes),
                    mpi_parts(as_bytes(memory), output_sizes),
                )

    def _check_parts(self, name: str, itemsize: int, received: Sequence[int], sent: Sequence[int]) -> None:
        """Raise on all ranks if a rank sends another number of bytes than its receiver expects. Collective."""
        coming = np.empty(self._comm.size, np.int64)
        with self._waiting(name):
            self._comm.Alltoall(np.array(sent, np.int64), coming)
        error = None
        for rank in np.flatnonzero(coming != received)[:1]:
            error = DisagreementError(
                f"{name}: rank {rank} sends {coming[rank] // itemsize} elements to rank {self._comm.rank}, which "
                f"expects {received[rank] // itemsize}; give outputs (or output splits) of the sizes that peers send"
            )
        raise_together(self._comm, error)

    def _waiting(self, name: str) -> AbstractContextManager[object]:
        return waiting(self._comm, f"{name} of a process group")


def _without_overlap(source: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return `source` in plain memory apart from `memory`. MPI forbids overlap; FSDP passes a slice of the output."""
    first, second = memory.data_ptr(), source.data_ptr()
    overlap = first < second + source.nbytes and second < first + memory.nbytes
    return readable(source.clone() if overlap else source)


def _concatenated(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Concatenate the tensors; return the MPI buffer specification with one part for each."""
    plain = [readable(tensor) for tensor in tensors]  # held while their memory is read: some are copies
    memory = np.concatenate([as_bytes(tensor) for tensor in plain])
    return mpi_parts(memory, [tensor.nbytes for tensor in tensors])


@contextmanager
def _receive_buffer(outputs: Sequence[torch.Tensor]) -> Iterator[list[Any]]:
    """Context manager: an MPI receive buffer with a part for each of `outputs`, copied to them at the end."""
    sizes = [output.nbytes for output in outputs]
    memory = np.empty(sum(sizes), np.uint8)
    yield mpi_parts(memory, sizes)
    for (begin, end), output in zip(pairwise([0, *accumulate(sizes)]), outputs, strict=True):
        with writable(output) as plain:
            as_bytes(plain)[:] = memory[begin:end]


# Memory as MPI takes it: counts of bytes, or of larger units where a count of bytes would not fit into a C int


def mpi_buffer(memory: np.ndarray) -> list[Any]:
    """Return the MPI buffer specification of a byte array."""
    ((count,), _, unit) = _in_units([memory.size])
    return [memory, count, unit]


def mpi_parts(memory: np.ndarray, sizes: Sequence[int]) -> list[Any]:
    """Return the MPI buffer specification of consecutive parts of a byte array; sizes: bytes for each rank."""
    counts, displacements, unit = _in_units(sizes)
    return [memory, counts, displacements, unit]


def _in_units(sizes: Sequence[int]) -> tuple[list[int], list[int], MPI.Datatype]:
    total = sum(sizes)
    if total <= LARGEST:
        return list(sizes), [0, *accumulate(sizes)][:-1], MPI.BYTE
    size = math.gcd(*sizes)
    for prime in (2, 3, 5, 7):
        while size > LARGEST and size % prime == 0:
            size //= prime
    if size > LARGEST or total // size > LARGEST:
        raise ValueError(f"{total} bytes of tensors are more than this MPI moves in one call; split the tensors")
    counts = [each // size for each in sizes]
    return counts, [0, *accumulate(counts)][:-1], _unit(size)


@functools.cache
def _unit(size: int) -> MPI.Datatype:
    return MPI.BYTE.Create_contiguous(size).Commit()
