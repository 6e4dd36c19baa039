"""Chunked transfers: arrays of any size from one rank to all or from all to all, and bytes to rank 0 or from rank 0."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import segments
from allreduce.errors import CommunicationError
from allreduce.transport import ulfm
from allreduce.transport.control import all_values, on_all_ranks, root_value
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import wait_for, waiting

LARGEST = 1 << 38  # bytes of a rank: more than any state that fits in its memory
SHOWN = 200  # characters of wrong sizes in an error
SCRATCH_BYTES = 1 << 26
PIECE = 1 << 30  # bytes in a message: an MPI count is a C int in Open MPI 5


def broadcast(comm: MPI.Intracomm, arrays: Iterable[np.ndarray], root: int, what: str) -> None:
    """Overwrite contiguous arrays with those of rank `root`, of the same lengths and dtypes. Collective."""
    with waiting(comm, what):
        for array in arrays:
            overwrite(comm, array, root)


def overwrite(comm: MPI.Intracomm, array: np.ndarray, root: int) -> None:
    """Broadcast one contiguous array from `root`, in place. Collective; call it inside `waiting`."""
    for piece in pieces(array):
        comm.Bcast(piece, root)


def spread(comm: MPI.Intracomm, array: np.ndarray, slices: Sequence[slice]) -> None:
    """Copy each rank's slice of a contiguous 1-D array to all ranks. slices: by rank. Collective, inside `waiting`.

    It takes one MPI call, or a few for more than PIECE bytes, with O(log ranks) messages or messages to neighbours.
    """
    if not array.nbytes:
        return
    memory = array.view(np.uint8)
    begins = [part.start * array.itemsize for part in slices]
    counts = [(part.stop - part.start) * array.itemsize for part in slices]
    if memory.size <= PIECE:
        comm.Allgatherv(MPI.IN_PLACE, [memory, counts, begins, MPI.BYTE])
        ulfm.check(comm)
        return
    longest, most = max(counts), max(1, SCRATCH_BYTES // comm.size)
    scratch = np.empty((comm.size, min(longest, most)), np.uint8)
    for done in range(0, longest, most):
        table = scratch.reshape(-1)[: comm.size * min(most, longest - done)].reshape(comm.size, -1)
        spans = [
            slice(begin + done, begin + min(count, done + most)) for begin, count in zip(begins, counts, strict=True)
        ]
        mine = memory[spans[comm.rank]]
        table[comm.rank, : mine.size] = mine
        comm.Allgather(MPI.IN_PLACE, table)
        for rank, span in enumerate(spans):
            part = memory[span]
            part[:] = table[rank, : part.size]


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a contiguous array's memory as byte arrays of at most PIECE bytes. Local."""
    memory = array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)  # the itemsize may be 0
    for span in segments(slice(0, memory.size), PIECE):
        yield memory[span]


def exchange(
    comm: MPI.Intracomm,
    sent: Iterable[tuple[int, np.ndarray]],
    received: Iterable[tuple[int, np.ndarray]],
    tag: int,
    what: str,
) -> None:
    """Send contiguous arrays to ranks, and overwrite contiguous arrays with those that ranks send. Collective.

    sent, received: (rank, array) each; a pair of ranks names its arrays in the same order, of the same sizes. tag: of
    the messages, which no other message of `comm` has.
    """
    requests = [comm.Irecv(piece, rank, tag) for rank, array in received for piece in pieces(array)]
    requests += [comm.Isend(piece, rank, tag) for rank, array in sent for piece in pieces(array)]
    try:
        for request in requests:
            wait_for(comm, request, what)
    except BaseException:
        for request in requests:
            free_later(request)
        raise


def counts(comm: MPI.Intracomm, mine: int) -> np.ndarray:
    """Return every rank's `mine`, by rank, int64. Collective; call it inside `waiting`."""
    everyone = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([mine], np.int64), everyone)
    return everyone


def gather(comm: MPI.Intracomm, mine: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return all ranks' arrays, concatenated, on every rank. Collective; call it inside `waiting`.

    mine: a contiguous array of any dtype. lengths: the first dimension of each rank's array; the others are equal.
    """
    everyone = np.empty((int(lengths.sum()), *mine.shape[1:]), mine.dtype)
    ends = np.cumsum(lengths)
    everyone[ends[comm.rank] - len(mine) : ends[comm.rank]] = mine
    row = everyone[:1].size  # elements
    spread(
        comm,
        everyone.reshape(-1),
        [slice(row * (end - length), row * end) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)],
    )
    return everyone


def bytes_to_root(comm: MPI.Intracomm, mine: bytes, what: str) -> list[bytes]:
    """Gather every rank's bytes on rank 0: a list by rank; [] on other ranks. Collective."""
    sizes = _checked(comm, all_values(comm, len(mine), what), what)
    if comm.rank:
        exchange(comm, [(0, np.frombuffer(mine, np.uint8))], [], 0, what)
        return []
    return [mine, *(_receive(comm, size, rank, what) for rank, size in enumerate(sizes[1:], 1))]


def bytes_of_root(comm: MPI.Intracomm, everyone: list[bytes], what: str) -> bytes:
    """Scatter a list of bytes, one entry for each rank, from rank 0; others pass []. Return this rank's. Collective."""
    sizes = _checked(comm, root_value(comm, [len(each) for each in everyone], what), what)
    if comm.rank:
        return _receive(comm, sizes[comm.rank], 0, what)
    sent = [(rank, np.frombuffer(message, np.uint8)) for rank, message in enumerate(everyone)]
    exchange(comm, sent[1:], [], 0, what)
    return everyone[0]


def _checked(comm: MPI.Intracomm, sizes: list[int], what: str) -> list[int]:
    """Check the sizes that ranks have sent before memory is allocated for them. All ranks see the same sizes."""
    if len(sizes) != comm.size or not all(type(size) is int and 0 <= size <= LARGEST for size in sizes):
        text = f"{what}: invalid message sizes {str(sizes)[:SHOWN]}; the limit is {LARGEST} bytes"
        raise on_all_ranks(CommunicationError(text), comm)
    return sizes


def _receive(comm: MPI.Intracomm, size: int, rank: int, what: str) -> bytes:
    memory = np.empty(size, np.uint8)
    exchange(comm, [], [(rank, memory)], 0, what)
    return memory.tobytes()
