"""From init to shutdown: who is where, and which process sets there are."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError, OptionError
from allreduce.messages import losses
from allreduce.topology import Topology
from trainers.horovod.errors import ArgumentError, NotInitializedError, ProcessSetError
from trainers.horovod.members import Members

if TYPE_CHECKING:
    from trainers.horovod.process_sets import ProcessSet


class Registered(NamedTuple):
    """A process set in use. members: None on ranks that are not in it."""

    ranks: list[int]
    members: Members | None


class Session:
    """What lies between init and shutdown, on a topology. Creating it is collective."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.numbers = itertools.count(1)  # of process sets
        everyone = list(range(topology.size))
        self.world = Members(topology, everyone)
        self.sets = {0: Registered(everyone, self.world)}

    def close(self) -> None:
        """Close all process sets, with what is made on them. Collective."""
        for held in list(self.sets.values())[:0:-1]:
            if held.members is not None:
                held.members.close()
        self.world.close()


_session: Session | None = None


def begin(topology: Topology) -> None:
    """Use a topology. Collective over its ranks."""
    from trainers.horovod.process_sets import global_process_set

    global _session
    _session = Session(topology)
    global_process_set.ranks = list(range(topology.size))


def current() -> Session:
    """The session. Raises NotInitializedError."""
    if _session is None:
        raise NotInitializedError
    return _session


def world() -> Topology:
    """All ranks."""
    return current().topology


def known(process_set: "ProcessSet") -> Registered:
    """A process set in use. Raises ProcessSetError."""
    number = process_set.process_set_id
    held = None if number is None else current().sets.get(number)
    if held is None or (number and held.ranks != process_set.ranks):  # of an earlier session, say
        raise ProcessSetError(f"{process_set} is not in use; give it to hvd.init or hvd.add_process_set on all ranks")
    return held


def members(process_set: "ProcessSet") -> Members:
    """Those of a process set with this rank in it. Raises ProcessSetError."""
    held = known(process_set)
    if held.members is None:
        raise ProcessSetError(f"rank {rank()} is not in {process_set}; only its ranks make calls of it")
    return held.members


def init(
    comm: "Sequence[int] | MPI.Intracomm | None" = None, process_sets: "Sequence[ProcessSet] | str | None" = None
) -> None:
    """Start, on all ranks or those of `comm`. Collective over them; does nothing when it was done before.

    comm: a communicator, or ranks of the world. process_sets: sets to be used beside the global one; "dynamic" is
    accepted too, as sets can be added and removed at any time here. When one can't be added, nothing has begun.
    """
    from trainers.horovod import timeline
    from trainers.horovod.process_sets import add_process_set

    if _session is not None:
        return
    begin(_topology(comm))
    timeline.from_environment()
    try:
        for process_set in [] if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
    except (OptionError, DisagreementError):  # on all ranks
        shutdown()
        raise


def _topology(comm: "Sequence[int] | MPI.Intracomm | None") -> Topology:
    if comm is None or (isinstance(comm, Sequence) and not comm):
        return Topology.of_survivors() if losses.in_force() else Topology()
    if isinstance(comm, MPI.Intracomm):
        return Topology(comm)
    if not isinstance(comm, Sequence) or not all(isinstance(each, int) for each in comm):
        raise ArgumentError(f"hvd.init({comm!r}): give a list of ranks, or a communicator of mpi4py")
    return Topology.of_ranks(list(comm), "hvd.init")


def shutdown() -> None:
    """End what `init` has begun. Collective; does nothing before it."""
    global _session
    ending, _session = _session, None
    if ending is not None:
        ending.close()


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
    """The number of this node among those."""
    return world().cross.rank


def is_homogeneous() -> bool:
    """Whether all nodes have as many ranks."""
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
    """False, as for all that is not used here."""
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
        raise ArgumentError(f'hvd.gpu_available({ext_base_name!r}): "torch" is the one framework here')
    return bool(torch.cuda.is_available())
