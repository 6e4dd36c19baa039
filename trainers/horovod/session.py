"""init and shutdown, process sets, and the queries about ranks and the build."""

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError, OptionError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from trainers.horovod import timeline
from trainers.horovod.calls import Members

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
__all__ += ["init", "is_initialized", "shutdown", "start_timeline", "stop_timeline"]
__all__ += ["cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size"]
__all__ += ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"]
__all__ += ["gloo_enabled", "gpu_available", "mpi_enabled", "mpi_threads_supported"]


class ProcessSet:
    """A set of ranks that make calls together.

    ranks_or_comm: rank numbers, or an mpi4py communicator. Pass the set to `hvd.init` or `hvd.add_process_set` before
    use. Raises OptionError.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | MPI.Comm) -> None:
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
            raise OptionError(f"ProcessSet({ranks_or_comm!r}): give a list of ranks, or a communicator of mpi4py")

    def size(self) -> int | None:
        """The number of its ranks; None if the set is not in use."""
        return None if self.process_set_id is None else len(registered(self).ranks)

    def rank(self) -> int | None:
        """This rank's number in the set; None if the set is not in use. Raises OptionError on ranks outside it."""
        return None if self.process_set_id is None else members(self).rank

    def included(self) -> bool | None:
        """Whether this rank is in the set; None for a set made from a communicator that was not added yet."""
        return None if self.ranks is None else world().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


class Registered(NamedTuple):
    """A process set in use. members: None on ranks that are not in it."""

    ranks: list[int]
    members: Members | None


class Session:
    """The process sets in use between init and shutdown. Creating it is collective."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.numbers = itertools.count(1)  # of process sets
        everyone = list(range(topology.size))
        self.world = Members(topology, everyone)
        self.sets = {0: Registered(everyone, self.world)}

    def close(self) -> None:
        """Close all process sets. Collective."""
        for entry in list(self.sets.values())[:0:-1]:
            if entry.members is not None:
                entry.members.close()
        self.world.close()


_session: Session | None = None


def begin(topology: Topology) -> None:
    """Start a session on a topology. Collective over its ranks."""
    global _session
    _session = Session(topology)
    global_process_set.ranks = list(range(topology.size))


def current() -> Session:
    """The current session. Raises OptionError if there is none."""
    if _session is None:
        raise OptionError("call hvd.init() first: this function of Horovod's API needs it")
    return _session


def world() -> Topology:
    """The topology of all ranks."""
    return current().topology


def registered(process_set: ProcessSet) -> Registered:
    """The record of a process set. Raises OptionError if it is not in use."""
    number = process_set.process_set_id
    entry = None if number is None else current().sets.get(number)
    if entry is None or (number and entry.ranks != process_set.ranks):  # of an earlier session, say
        raise OptionError(f"{process_set} is not in use; pass it to hvd.init or hvd.add_process_set on all ranks")
    return entry


def members(process_set: ProcessSet) -> Members:
    """The members of a process set that has this rank in it. Raises OptionError."""
    entry = registered(process_set)
    if entry.members is None:
        raise OptionError(f"rank {rank()} is not in {process_set}; only ranks of the set may make calls on it")
    return entry.members


def init(
    comm: Sequence[int] | MPI.Intracomm | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Start a session on all ranks, or on those of `comm`. Collective over them; a second call does nothing.

    comm: a communicator, or ranks of the world. process_sets: sets to add to the global one. "dynamic" is accepted and
    ignored: sets can always be added and removed. If a set can't be added, init is undone.
    """
    if _session is not None:
        return
    begin(_topology(comm))
    timeline.from_environment(rank())
    try:
        for process_set in [] if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
    except (OptionError, DisagreementError):  # on all ranks
        shutdown()
        raise


def _topology(comm: Sequence[int] | MPI.Intracomm | None) -> Topology:
    if comm is None or (isinstance(comm, Sequence) and not comm):
        return Topology.of_survivors() if ulfm.in_force() else Topology()
    if isinstance(comm, MPI.Intracomm):
        return Topology(comm)
    if not isinstance(comm, Sequence) or not all(isinstance(each, int) for each in comm):
        raise OptionError(f"hvd.init({comm!r}): give a list of ranks, or a communicator of mpi4py")
    return Topology.of_ranks(list(comm), "hvd.init")


def shutdown() -> None:
    """End the session that `init` has started. Collective; does nothing if there is none."""
    global _session
    ending, _session = _session, None
    if ending is not None:
        ending.close()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks; returns the set.

    Raises OptionError on all ranks if the ranks are invalid, or a set of these ranks exists.
    """
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    here = current()
    ranks = _ranks_of(here.topology, given)
    number = next(here.numbers)
    here.sets[number] = Registered(ranks, _make(here.topology, ranks))
    given.process_set_id, given.ranks = number, ranks
    return given


def _ranks_of(topology: Topology, given: ProcessSet) -> list[int]:
    """Return the set's ranks; raises unless all ranks pass the same ones and there is no such set yet. Collective."""
    ranks, error = given.ranks, None
    if given.mpi_comm is not None and ranks is None:
        mine = given.mpi_comm.Get_group() if given.mpi_comm != MPI.COMM_NULL else None
        everyone = topology.world.Get_group()
        ranks = [] if mine is None else sorted(MPI.Group.Translate_ranks(mine, list(range(mine.size)), everyone))
    assert ranks is not None
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(topology.size)):
        error = OptionError(f"{given}: give some of the ranks 0 to {topology.size - 1}, each of them once")
    elif ranks in [each.ranks for each in current().sets.values()]:
        error = OptionError(f"{given}: there is a process set of the ranks {ranks} already")
    topology.agree([zlib.crc32(repr(ranks).encode())], f"add_process_set of the ranks {ranks}", error)
    return ranks


def _make(topology: Topology, ranks: list[int]) -> Members | None:
    """The members of a set of these ranks; None on other ranks. Collective over all ranks of the topology."""
    part = topology.split(int(topology.rank in ranks))
    if topology.rank in ranks:
        return Members(part, ranks)
    part.close()
    return None


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set. Returns False for the global set and one not in use. Collective over all ranks."""
    here = current()
    number: Any = process_set.process_set_id
    here.topology.agree([-1 if number is None else number], f"remove_process_set({process_set})")
    if not number:
        return False
    entry = here.sets.pop(number)
    process_set.process_set_id = None
    if entry.members is not None:
        entry.members.close()
    return True


def is_initialized() -> bool:
    """Whether there is a session."""
    return _session is not None


def size() -> int:
    """The number of ranks."""
    return world().size


def rank() -> int:
    """This rank's number."""
    return world().rank


def local_size() -> int:
    """The number of ranks on this node."""
    return world().node_size


def local_rank() -> int:
    """This rank's number on its node."""
    return world().node_rank


def cross_size() -> int:
    """The number of nodes that have a rank of this local rank."""
    return world().cross.size


def cross_rank() -> int:
    """The index of this node among the nodes that have a rank of this local rank."""
    return world().cross.rank


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of ranks."""
    return not world().leaders_only


def mpi_threads_supported() -> bool:
    """Whether several threads may use MPI."""
    current()
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def mpi_enabled() -> bool:
    """True: everything goes over MPI."""
    return True


mpi_built = mpi_enabled


def gloo_enabled() -> bool:
    """False: gloo, DDL, CCL and ROCm are not used here."""
    return False


gloo_built = ddl_built = ccl_built = rocm_built = gloo_enabled


def nccl_built() -> int:
    """NCCL's version where the backend "nccl" can be used, else 0."""
    if "nccl" not in allreduce.available():
        return 0
    from cupy.cuda import nccl

    return int(nccl.get_version())


def cuda_built() -> bool:
    """Whether PyTorch was built with CUDA."""
    import torch

    return bool(torch.backends.cuda.is_built())


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether PyTorch sees a GPU. ext_base_name: "torch", the one framework here. verbose: has no effect."""
    import torch

    if ext_base_name != "torch":
        raise OptionError(f'hvd.gpu_available({ext_base_name!r}): "torch" is the one framework here')
    return bool(torch.cuda.is_available())


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the calls from now on; rank 0 writes them to a file in `stop_timeline`. Local.

    A second call starts a new recording. mark_cycles: has no effect. Raises OptionError when the file can't be
    written.
    """
    timeline.start(file_path, rank())


def stop_timeline() -> None:
    """Write the file, if there is a recording. Local."""
    current()
    timeline.stop()
