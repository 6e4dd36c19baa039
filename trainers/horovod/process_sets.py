"""Process sets: some of the ranks, which make calls of their own. Given to init, or added and removed later."""

import zlib
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from allreduce.topology import Topology
from trainers.horovod import session
from trainers.horovod.errors import ProcessSetError
from trainers.horovod.members import Members


class ProcessSet:
    """Some ranks, of which this may be one.

    ranks_or_comm: their numbers, or a communicator of them. It can be used when it was given to `hvd.init`, or to
    `hvd.add_process_set`. Raises ProcessSetError.
    """

    def __init__(self, ranks_or_comm: "Sequence[int] | MPI.Comm") -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: MPI.Comm | None = None
        if isinstance(ranks_or_comm, MPI.Comm):
            self.mpi_comm = ranks_or_comm
            return
        try:
            self.ranks = sorted(ranks_or_comm)
        except TypeError:
            self.ranks = None
        if self.ranks is None or not all(isinstance(rank, int) for rank in self.ranks):
            raise ProcessSetError(f"ProcessSet({ranks_or_comm!r}): give a list of ranks, or a communicator of mpi4py")

    def size(self) -> int | None:
        """How many ranks it has; None when it is not in use."""
        return None if self.process_set_id is None else len(session.known(self).ranks)

    def rank(self) -> int | None:
        """This rank's number in it; None when it is not in use. Raises ProcessSetError on other ranks."""
        return None if self.process_set_id is None else session.members(self).rank

    def included(self) -> bool | None:
        """Whether this rank is in it; None for one that is not in use, of a communicator."""
        return None if self.ranks is None else session.world().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: "ProcessSet | Sequence[int]") -> ProcessSet:
    """Make a set of ranks ready for use. Collective over all ranks; returns the set.

    Raises ProcessSetError, on all of them, when there is one of these ranks already, or they are none.
    """
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    here = session.current()
    ranks = _ranks_of(here.topology, given)
    number = next(here.numbers)
    here.sets[number] = session.Registered(ranks, _make(here.topology, ranks))
    given.process_set_id, given.ranks = number, ranks
    return given


def _ranks_of(topology: Topology, given: ProcessSet) -> list[int]:
    """The set's ranks, when all ranks mean the same and there is no such set yet. Collective."""
    ranks, error = given.ranks, None
    if given.mpi_comm is not None and ranks is None:
        mine = given.mpi_comm.Get_group() if given.mpi_comm != MPI.COMM_NULL else None
        everyone = topology.world.Get_group()
        ranks = [] if mine is None else sorted(MPI.Group.Translate_ranks(mine, list(range(mine.size)), everyone))
    assert ranks is not None
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(topology.size)):
        error = ProcessSetError(f"{given}: give some of the ranks 0 to {topology.size - 1}, each of them once")
    elif ranks in [each.ranks for each in session.current().sets.values()]:
        error = ProcessSetError(f"{given}: there is a process set of the ranks {ranks} already")
    topology.agree([zlib.crc32(repr(ranks).encode())], f"add_process_set of the ranks {ranks}", error)
    return ranks


def _make(topology: Topology, ranks: list[int]) -> Members | None:
    """Its members; None on other ranks. Collective over all of them."""
    part = topology.split(int(topology.rank in ranks))
    if topology.rank in ranks:
        return Members(part, ranks)
    part.close()
    return None


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set. Collective over all ranks. False for the global one, and one that is not in use."""
    here = session.current()
    number: Any = process_set.process_set_id
    here.topology.agree([-1 if number is None else number], f"remove_process_set({process_set})")
    if not number:
        return False
    held = here.sets.pop(number)
    process_set.process_set_id = None
    if held.members is not None:
        held.members.close()
    return True
