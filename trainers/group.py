"""RankGroup: the ranks of one trainer; they agree on their calls, and send each other arrays."""

import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.arrays.dtypes import BFLOAT16
from allreduce.errors import CommunicationError, DisagreementError, RankLeftError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.chunked import LARGEST, broadcast
from allreduce.transport.control import agree, everywhere, known, root_value, together
from allreduce.transport.wait import waiting


class Owner(Protocol):
    """What a group belongs to: its topology closes or abandons it, when that is closed or abandoned itself."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class RankGroup:
    """The ranks that train together. It stays the same object when ranks fail or join.

    topology: of these ranks. comm: a communicator for this group's own messages. rank: this rank there; -1 while it
    waits to join a fit. size: how many ranks there are.
    """

    def __init__(self, topology: Topology, owner: Owner) -> None:
        """Collective."""
        self._owner = owner
        self.replace(topology)

    def replace(self, topology: Topology) -> None:
        """Go on with other ranks, after `abandon` or at the beginning. Collective over the new ranks."""
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self.comm: MPI.Intracomm = topology.private(self._owner)

    def close_owner_first(self) -> None:
        """The topology closes the owner before everything that uses the topology now, as its backend does. Local."""
        self.topology.let_go(self._owner)
        self.topology.use(self._owner)

    def abandon(self) -> None:
        """The topology no longer closes the owner: some of these ranks have failed. Local."""
        self.topology.let_go(self._owner)

    def release(self) -> None:
        """Give the communicator back to the topology. Collective."""
        self.topology.release(self.comm, self._owner)

    @property
    def previous(self) -> tuple[int, ...]:
        """The rank that each rank had before the last failure; JOINED for those that have joined since."""
        return self.topology.previous_ranks

    # Agreement

    def agree(self, row: str, error: Exception | None = None) -> None:
        """Raise on all ranks an error of any of them, or that their rows differ. Collective.

        row: this rank's side of a call in words.
        """
        try:
            agree(self.comm, [zlib.crc32(row.encode())], row, error)
        except DisagreementError as differ:
            tell_collective(differ, row)
            raise

    def enter(self, row: str, error: Exception | None = None) -> None:
        """As `agree`, at the beginning of a call to which some ranks may never come."""
        try:
            self.agree(row, error)
        except RankLeftError as left:
            tell_collective(left, row)
            raise

    def on_one(self, action: Callable[[], None], root: int = 0) -> None:
        """Do something on rank `root`; its error, whatever it is, is raised on all ranks. Collective."""
        together(self.comm, lambda: action() if self.rank == root else None)

    def in_step(self, error: BaseException) -> bool:
        """Whether all ranks leave a block by this error, so that they can go on together. Local."""
        return isinstance(error, Exception) and everywhere(error, self.comm) and ulfm.lost(error) is None

    def knows(self, error: BaseException) -> bool:
        """Whether all ranks raise this error, or all hear of it since it tells of a failed rank. Local."""
        return everywhere(error, self.comm) or ulfm.lost(error) is not None


def tell_collective(error: DisagreementError | RankLeftError, row: str) -> None:
    """Add to an error that calls are collective, where a rank has made another call, or none.

    row: this rank's side of the call in words.
    """
    text = str(error)
    if isinstance(error, RankLeftError):
        error.args = (f"{text}; {_name(row)} is collective: every rank calls it, without an `if rank == 0`",)
        return
    names = list(dict.fromkeys(_name(row) for row in re.findall(r"^  rank \d+: (.*)", text, re.MULTILINE)))
    if len(names) > 1:
        told = f"{' and '.join(names)} are collective: every rank calls them, in one order, without an `if rank == 0`"
        error.args = (f"{text}\n{told}",)


def _name(row: str) -> str:
    """The name of a call in words: "evaluate" of "evaluate: x float32[100, 64]"."""
    return re.split("[:,(]", row, maxsplit=1)[0].strip()


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


def broadcast_arrays(
    comm: MPI.Intracomm, state: Mapping[str, np.ndarray], root: int, what: str
) -> dict[str, np.ndarray]:
    """The root's arrays, on all ranks; what the others bring is not looked at. Collective.

    CommunicationError on all ranks when these are told to be what no state has.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in state.items()} if comm.rank == root else {}
    own = [[name, dtype_name(array.dtype), array.shape] for name, array in arrays.items()]
    shapes = root_value(comm, own, what, root)
    if not described(shapes):
        raise known(CommunicationError(f"{what}: rank {root} has told of arrays that no state has"), comm)
    if comm.rank != root:
        arrays = {name: np.empty(shape, dtype_of(dtype)) for name, dtype, shape in shapes}
    broadcast(comm, arrays.values(), root, what)
    return arrays


def dtype_name(dtype: np.dtype) -> str:
    """The text that `dtype_of` takes."""
    return dtype.name if dtype.name in NAMED else dtype.str


def dtype_of(name: str) -> np.dtype:
    """The dtype of this `dtype_name`."""
    return np.dtype(NAMED.get(name, name))


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
