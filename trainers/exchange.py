"""What trainers hand from rank to rank besides gradients: rows of a result, and states of any size."""

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.messages.agreement import all_values, root_value, waiting
from allreduce.messages.parcels import broadcast, pieces


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
    """The root's contiguous arrays, on all ranks; what the others bring is not looked at. Collective."""
    shapes = root_value(comm, [[name, array.dtype.str, array.shape] for name, array in state.items()], what, root)
    if comm.rank != root:
        state = {name: np.empty(shape, dtype) for name, dtype, shape in shapes}
    broadcast(comm, state.values(), root, what)
    return state


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
