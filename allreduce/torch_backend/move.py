"""Collectives that move tensors. They move bytes, so they take every dtype."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
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
        """Fill outputs[r] from rank r's `source`, or equal slices of a single output.

        Of several outputs the numbers of elements may differ.
        """
        sizes = [output.nbytes for output in outputs] if len(outputs) > 1 else [source.nbytes] * self._comm.size
        with _receiving(outputs) as memory:
            sent = _in_a_row([source], memory)
            with self._waiting("all_gather"):
                self._comm.Allgatherv(mpi_buffer(as_bytes(sent)), mpi_parts(memory, sizes))

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> None:
        """Fill outputs[r] on rank `root` from rank r's `source`."""
        with _receiving(outputs) as memory:
            sent, received = _in_a_row([source], memory), mpi_parts(memory, [output.nbytes for output in outputs])
            with self._waiting("gather"):
                self._comm.Gatherv(mpi_buffer(as_bytes(sent)), received if self._comm.rank == root else None, root)

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int) -> None:
        """Fill rank r's `output` from sources[r] on rank `root`."""
        with _receiving([output]) as memory:
            sent, parts = _in_a_row(sources, memory), [source.nbytes for source in sources]
            with self._waiting("scatter"):
                everything = mpi_parts(as_bytes(sent), parts) if self._comm.rank == root else None
                self._comm.Scatterv(everything, mpi_buffer(memory), root)

    def all_to_all(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        """Exchange the tensors, as if they were one: sent[r] bytes go to rank r, received[r] come from it.

        name: of the call, for errors.
        """
        self._check_parts(name, outputs[0].itemsize, received, sent)
        with _receiving(outputs) as memory:
            row = _in_a_row(sources, memory)
            with self._waiting("all_to_all"):
                self._comm.Alltoallv(mpi_parts(as_bytes(row), sent), mpi_parts(memory, received))

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


def _in_a_row(tensors: Sequence[torch.Tensor], received: np.ndarray) -> torch.Tensor:
    """Return the bytes of the tensors in plain memory apart from `received`.

    MPI forbids overlap; FSDP passes a slice of the output.
    """
    parts = [readable(tensor).reshape(-1).view(torch.uint8) for tensor in tensors]
    row = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return row.clone() if np.may_share_memory(as_bytes(row), received) else row


@contextmanager
def _receiving(outputs: Sequence[torch.Tensor]) -> Iterator[np.ndarray]:
    """Context manager: bytes for the content of the outputs, in a row: of a single plain tensor its own."""
    if len(outputs) == 1:
        with writable(outputs[0]) as plain:
            yield as_bytes(plain)
        return
    sizes = [output.nbytes for output in outputs]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    yield as_bytes(memory)
    for part, output in zip(memory.split(sizes), outputs, strict=True):
        with writable(output) as plain:
            as_bytes(plain)[:] = as_bytes(part)


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
