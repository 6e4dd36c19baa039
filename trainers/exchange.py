"""What trainers hand from rank to rank besides gradients: rows of a result, and states of any size."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.arrays.dtypes import BFLOAT16
from allreduce.errors import CommunicationError
from allreduce.transport.chunked import LARGEST, broadcast, pieces
from allreduce.transport.control import all_values, known, root_value, waiting
from trainers.rescue import Arrays, Piece

# What `dtype.str` says of arrays of numbers, behind the order of bytes, and of texts, not of objects.
DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "V1", "V2"}
TEXTS = re.compile(r"[<>|=][SU]\d{1,7}")
MOST_AXES = 32
NAMED = {"bfloat16": BFLOAT16}  # by `dtype.name`: what `dtype.str` says of these is true of any two bytes


def gather_rows(comm: MPI.Intracomm, rows: np.ndarray) -> None:
    """Complete an array of which every rank has filled its chunk of rows, in place. Collective."""
    spans = [chunk(len(rows), comm.size, rank) for rank in range(comm.size)]
    counts, starts = [span.stop - span.start for span in spans], [span.start for span in spans]
    width = rows.itemsize * int(np.prod(rows.shape[1:]))
    row = MPI.BYTE.Create_contiguous(width).Commit()  # so that counts are rows, which keeps them small
    with waiting(comm, "gather the rows of a result"):
        comm.Allgatherv(MPI.IN_PLACE, [rows.reshape(-1).view(np.uint8), counts, starts, row])
    row.Free()


def sent(comm: MPI.Intracomm, state: dict[str, np.ndarray], root: int, what: str) -> dict[str, np.ndarray]:
    """The root's contiguous arrays, on all ranks; what the others bring is not looked at. Collective.

    CommunicationError on all ranks when these are told to be what no state has.
    """
    shapes = root_value(comm, [[name, _told(array.dtype), array.shape] for name, array in state.items()], what, root)
    if not described(shapes):
        raise known(CommunicationError(f"{what}: rank {root} has told of arrays that no state has"), comm)
    if comm.rank != root:
        state = {name: np.empty(shape, NAMED.get(dtype, dtype)) for name, dtype, shape in shapes}
    broadcast(comm, state.values(), root, what)
    return state


def pieces_sent(
    comm: MPI.Intracomm, own: Sequence[Piece], chosen: Sequence[tuple[int, int]], what: str
) -> list[tuple[Arrays, Arrays]]:
    """What has slices, and the rest, of pieces that ranks have, on all ranks. Collective.

    own: this rank's. chosen: of each the rank that has it, and its number there.
    """
    found = []
    for rank, number in chosen:
        sliced, rest = own[number][4:] if comm.rank == rank else ({}, {})
        parts = sent(comm, _contiguous(sliced), rank, what), sent(comm, _contiguous(rest), rank, what)
        found.append(parts)
    return found


def _contiguous(arrays: Arrays) -> Arrays:
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _told(dtype: np.dtype) -> str:
    return dtype.name if dtype.name in NAMED else dtype.str


def described(shapes: Any, most: int = LARGEST) -> bool:
    """Whether this, a JSON value, is [name, dtype, shape] of arrays of numbers or texts, of `most` bytes in all."""
    nbytes = 0
    for entry in shapes if isinstance(shapes, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 3 or not all(isinstance(word, str) for word in entry[:2]):
            return False
        shape = entry[2]
        dtype = NAMED.get(entry[1], entry[1])
        if entry[1] not in NAMED and entry[1][1:] not in DTYPES and not TEXTS.fullmatch(entry[1]):
            return False
        if not isinstance(shape, list) or len(shape) > MOST_AXES:
            return False
        if not all(type(length) is int and 0 <= length <= most for length in shape):
            return False
        nbytes += math.prod(max(1, length) for length in shape) * np.dtype(dtype).itemsize  # NumPy counts so too
    return nbytes <= most


def to_root(comm: MPI.Intracomm, own: np.ndarray, start: int, whole: np.ndarray | None) -> None:
    """Fill rank 0's `whole` with the parts that the ranks own, each from its `start` on; the others give None."""
    what = "collect a state on rank 0"
    parts = all_values(comm, [start, own.size], what)
    with waiting(comm, what):
        if whole is None:
            for piece in pieces(own):
                comm.Send(piece, 0)
            return
        whole[start : start + own.size] = own
        for rank, (first, size) in enumerate(parts[1:], 1):
            for piece in pieces(whole[first : first + size]):
                comm.Recv(piece, rank)
