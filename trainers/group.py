"""RankGroup: the ranks of one trainer; they agree on their calls, and send each other arrays."""

import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.arrays.dtypes import BFLOAT16
from allreduce.errors import CommunicationError, DisagreementError, RankLeftError
from allreduce.topology import Closeable, Topology
from allreduce.transport import ulfm
from allreduce.transport.chunked import broadcast
from allreduce.transport.control import agree, all_values, everywhere, on_all_ranks, root_value, together
from allreduce.transport.wait import waiting

OwnerT = TypeVar("OwnerT", bound="GroupOwner")


class GroupOwner:
    """The base of the objects that own a group, and that a `with` block closes."""

    group: "RankGroup"

    @property
    def topology(self) -> Topology:
        """The topology of the ranks that train; a new one after a failure."""
        return self.group.topology

    @property
    def rank(self) -> int:
        """This rank among those that train; -1 while it joins a fit."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of ranks that train."""
        return self.group.size

    @abstractmethod
    def close(self) -> None:
        """Free what the owner created. Collective."""

    def __enter__(self: OwnerT) -> OwnerT:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None or self.group.all_raise(error):  # otherwise other ranks may not call the collective close
            self.close()


class RankGroup:
    """The ranks that train together. It stays the same object when ranks fail or join.

    topology: the topology of these ranks. comm: a communicator for this group's own messages. rank: this rank in it; -1
    while it waits to join a fit. size: the number of ranks.
    """

    def __init__(self, topology: Topology, owner: Closeable) -> None:
        """Create the group on the ranks of `topology`, which closes or abandons `owner` with itself. Collective."""
        self._owner = owner
        self.replace(topology)

    def replace(self, topology: Topology) -> None:
        """Use the ranks of `topology` from now on. Collective over these ranks."""
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size
        self.comm: MPI.Intracomm = topology.private(self._owner)

    def close_owner_first(self) -> None:
        """Make the topology close the owner before the objects that use the topology now, such as the owner's backend.
        Local."""
        self.topology.unregister(self._owner)
        self.topology.register(self._owner)

    def abandon(self) -> None:
        """Detach the owner from the topology, because ranks have failed. Local."""
        self.topology.unregister(self._owner)

    def release(self) -> None:
        """Give the communicator back to the topology. Collective."""
        self.topology.release(self.comm, self._owner)

    @property
    def previous(self) -> tuple[int, ...]:
        """The rank that each rank had before the last failure; JOINED for ranks that have joined since."""
        return self.topology.previous_ranks

    # Agreement

    def agree(self, row: str, error: Exception | None = None) -> None:
        """Check that all ranks make the same call without an error; otherwise raise the same error on all ranks.
        Collective.

        row: the call and its arguments on this rank, as text.
        """
        try:
            agree(self.comm, [zlib.crc32(row.encode())], row, error)
        except DisagreementError as differ:
            explain_collective(differ, row)
            raise

    def enter(self, row: str, error: Exception | None = None) -> None:
        """As `agree`, at the beginning of a public call; explains in the error if another rank left without making the
        call."""
        try:
            self.agree(row, error)
        except RankLeftError as left:
            explain_collective(left, row)
            raise

    def values(self, value: Any, row: str) -> list[Any]:
        """Return every rank's `value`, by rank. Collective. If another rank raises an error, all ranks raise it.

        value: JSON-serializable; tuples become lists. row: the caller's name, the same on all ranks.
        """
        self.enter(row)
        return all_values(self.comm, value, row)

    def on_one(self, action: Callable[[], None], root: int = 0) -> None:
        """Call `action` on rank `root`; an error in it is raised on all ranks. Collective."""
        together(self.comm, lambda: action() if self.rank == root else None)

    def all_raise(self, error: BaseException) -> bool:
        """Whether all ranks raise this error and none has failed: collective calls are still possible. Local."""
        return isinstance(error, Exception) and everywhere(error, self.comm) and ulfm.lost(error) is None

    def knows(self, error: BaseException) -> bool:
        """Whether all ranks know of this error: all raise it, or it reports a failed rank. Local."""
        return everywhere(error, self.comm) or ulfm.lost(error) is not None


def explain_collective(error: DisagreementError | RankLeftError, row: str) -> None:
    """Append to an error that the call is collective, if a rank has made another call or none. Changes `error`.

    row: the call and its arguments on this rank, as text.
    """
    text = str(error)
    if isinstance(error, RankLeftError):
        error.args = (f"{text}; {_name(row)} is collective: every rank calls it, without an `if rank == 0`",)
        return
    names = list(dict.fromkeys(_name(row) for row in re.findall(r"^  ranks? [^:]*: (.*)", text, re.MULTILINE)))
    if len(names) > 1:
        advice = f"{' and '.join(names)} are collective: every rank calls them, in one order, without an `if rank == 0`"
        error.args = (f"{text}\n{advice}",)


def _name(row: str) -> str:
    """Return the name in the text of a call: "evaluate" of "evaluate: x float32[100, 64]"."""
    return re.split("[:,(]", row, maxsplit=1)[0].strip()


NAMED = {"bfloat16": BFLOAT16}  # by `dtype.name`: `dtype.str` does not identify these


def gather_rows(comm: MPI.Intracomm, rows: np.ndarray) -> None:
    """Gather rows in place: every rank has filled its chunk of `rows`, and receives the others. Collective."""
    spans = [chunk(len(rows), comm.size, rank) for rank in range(comm.size)]
    counts, starts = [span.stop - span.start for span in spans], [span.start for span in spans]
    width = rows.itemsize * int(np.prod(rows.shape[1:]))
    row = MPI.BYTE.Create_contiguous(width).Commit()  # counts of rows fit a C int where counts of bytes may not
    with waiting(comm, "gather the rows of a result"):
        comm.Allgatherv(MPI.IN_PLACE, [rows.reshape(-1).view(np.uint8), counts, starts, row])
        ulfm.check(comm)
    row.Free()


def broadcast_arrays(
    comm: MPI.Intracomm, state: Mapping[str, np.ndarray], root: int, what: str
) -> dict[str, np.ndarray]:
    """Broadcast the root's arrays and return them on all ranks; `state` of other ranks is ignored. Collective.

    Raises CommunicationError on all ranks if an array has Python objects. what: names the call in stall reports.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in state.items()} if comm.rank == root else {}
    shapes = root_value(comm, layout(arrays), what, root)
    if wrong := [name for name, dtype, _ in shapes if dtype_of(dtype).hasobject]:
        raise on_all_ranks(CommunicationError(f"{what}: {wrong[0]} of rank {root} has Python objects"), comm)
    made = together(comm, lambda: arrays or {name: np.empty(shape, dtype_of(dtype)) for name, dtype, shape in shapes})
    broadcast(comm, made.values(), root, what)
    return made


def layout(arrays: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """Return [name, dtype, shape] of each array."""
    return [[name, dtype_name(array.dtype), [*array.shape]] for name, array in arrays.items()]


def dtype_name(dtype: np.dtype) -> str:
    """Return the name of a dtype, which `dtype_of` takes."""
    return dtype.name if dtype.name in NAMED else dtype.str


def dtype_of(name: str) -> np.dtype:
    """The dtype of this `dtype_name`."""
    return np.dtype(NAMED.get(name, name))
