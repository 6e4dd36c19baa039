"""Processes that are started to take the places of lost ranks, by MPI_Comm_spawn.

Such a newcomer runs the job's program from its beginning. When it comes to where the others are, it says so, and waits;
the others go on meanwhile, and take it in when it suits them. Whoever dies on the way is done without.

Each has a job of its own for the launcher, which may end all processes of such a one when one dies. Communicators with
newcomers are never disconnected: the launcher tells of lost ranks only those that are connected.
"""

import atexit
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import children, ending
from allreduce.errors import RankLostError, UnavailableError
from allreduce.messages import losses, watchdog
from allreduce.messages.agreement import combine, raise_together, root_value, waiting
from allreduce.messages.kept import keep
from allreduce.program import Program, program
from allreduce.spares import NEWCOMER, WAIT_SECONDS, Joining
from allreduce.topology import Topology

HELLO, READY, LEFT, WORD, ENDED = range(1, 6)  # tags
NOTHING = np.empty(0, np.int64)
START = "start a process in the place of a lost rank"
ROOM = ("PMIX_MAPBY", "slot:OVERSUBSCRIBE")  # the launcher does not take a lost rank's slot for free
LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_")  # variables that tell a process who it is
# Beginnings of names: what a newcomer gets of rank 0's environment, which Python and libraries of numbers read. The
# rest of it (tokens, passwords) has no business in a message.
HANDED = (
    *(
        "ALLREDUCE_",
        "HOROVOD_",
        "PYTHON",
        "VIRTUAL_ENV",
        "CONDA_",
        "PATH",
        "LD_",
        "HOME",
        "TMPDIR",
        "TZ",
        "LANG",
        "LC_",
    ),
    *("OMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "GOMP_", "KMP_", "MALLOC_", "MPI4PY_", "UCX_", "FI_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "CUPY_", "ROCR_", "HIP_", "TORCH", "PYTORCH_", "JAX_", "XLA_", "TF_", "KERAS_"),
)
MORE = "ALLREDUCE_NEW_RANKS_ENVIRONMENT"  # names more: "WANDB_API_KEY,HF_*"
BEGIN = "import sys; sys.path.append({folder!r}); from allreduce import newcomers; newcomers.begin()"

_arrived: list["_Others"] = []  # in a newcomer
_met: list["_End"] = []


class Newcomers:
    """Processes that were started, until they join. Creating is collective over `topology`, and takes a second each.

    told: what they hear from rank 0 in the beginning, something that JSON can hold.
    Raises UnavailableError when they can't be started, on all ranks; RankLostError.
    """

    def __init__(self, topology: Topology, number: int, told: Any = None) -> None:
        self._old = topology.size
        atexit.register(losses.end_without_later_ones)
        with topology.watch.hearing(), waiting(topology.world, START):
            self._comm = _grow(topology, number, told)
        self._new = range(self._old, self._comm.size)
        ending.on_leaving(lambda why: self.let_go())
        ending.on_ending(lambda code: self.let_go())

    def ready(self, topology: Topology) -> bool:
        """Whether all of them that live wait to join. Collective over `topology`, those of the old ranks that are left.

        Raises UnavailableError on all ranks when none of them lives.
        """
        states = [self._ready(rank) for rank in self._new]
        found = np.array([[state is not False, state is True] for state in states], np.int64)
        settled, alive = combine(topology.world, found, "see whether ranks that were started come", MPI.MIN).T
        if settled.all() and not alive.any():
            raise UnavailableError("those that were started in the place of lost ranks ended before they could join")
        return bool(settled.all())

    def _ready(self, rank: int) -> bool | None:
        """None for one that has died, or ended its program."""
        try:
            return None if self._comm.Iprobe(rank, LEFT) else self._comm.Iprobe(rank, READY)
        except MPI.Exception:
            return None

    def join(self, topology: Topology) -> Topology:
        """The ranks of `topology` that are left, and behind them those that were started. Collective over both.

        Its `former` are the ranks that they had in `topology`, NEWCOMER for those that join. May be without them.
        """
        places = losses.places(topology.world, self._comm)
        self._tell(np.array(places, np.int64))
        topology.revoke()
        made = _joined(self._comm, places, topology.timeout)
        topology.abandon()
        return made

    def let_go(self) -> None:
        """They are not needed any more. Local; alike on all ranks."""
        self._tell(NOTHING)

    def _tell(self, word: np.ndarray) -> None:
        new, self._new = self._new, range(0)
        for rank in new:
            with suppress(MPI.Exception):  # it has died
                keep((self._comm.Isend(word, rank, WORD), word))


class Arriving(Joining):
    """What a newcomer has until it joins: itself alone, and as `survivors` the ranks that it joins.

    told: what those have given Newcomers for it.
    """

    def __init__(self, others: "_Others") -> None:
        Topology.__init__(self, MPI.COMM_SELF)
        self._others, self.told = others, others.told

    def survivors(self) -> Topology:  # type: ignore[override]
        """Wait until the others take this one in. Ends the program, with code 0, when they have no need of it."""
        word = self._others.word()
        if not word:
            raise SystemExit(0)
        self.abandon()
        return _joined(self._others.comm, word, self.timeout)


class _Others:
    """Those that have started this process: the first ranks of `comm`. told: what they had to say."""

    def __init__(self, comm: MPI.Intracomm, number: int, told: Any) -> None:
        self.comm, self._left, self.told = comm, list(range(number)), told
        self.taken = self.joined = False

    def word(self) -> tuple[int, ...]:
        """Say that this rank is ready, and wait: who of them is left, or nothing when they let it go."""
        self._tell(READY)
        while self._left:
            for rank in list(self._left):
                try:
                    if self.comm.Iprobe(rank, WORD):
                        return self._receive(rank)
                except (MPI.Exception, RankLostError):
                    self._left.remove(rank)
            time.sleep(WAIT_SECONDS)
        return ()

    def leave(self) -> None:
        """This rank's program ends; say so when it has not joined."""
        if not self.joined:
            self._tell(LEFT)

    def _tell(self, tag: int) -> None:
        for rank in list(self._left):
            try:
                keep(self.comm.Isend(NOTHING, rank, tag))
            except MPI.Exception:  # it is lost
                self._left.remove(rank)

    def _receive(self, rank: int) -> tuple[int, ...]:
        word = np.empty(self.comm.size, np.int64)
        status = MPI.Status()
        with waiting(self.comm, "hear whether the others take this rank in"):
            self.comm.Recv(word, rank, WORD, status)
        self.joined = True
        return tuple(word[: status.Get_count(MPI.INT64_T)].tolist())


class _End:
    """Has all ranks of `comm` end when one of them ends the job, also when all their topologies are closed.

    MPI_Abort ends the processes of one job of the launcher, and newcomers have jobs of their own. When processes of two
    jobs call it, mpirun (PRRTE 3.0.12) may wait for a lock that it holds itself, for ever. So the rank that calls it
    tells the others before, and they end without it.
    """

    active = True  # for the watchdog, which calls all of this

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        watchdog.add(self)

    def listen(self) -> None:
        """End this process when another one has ended the job. Local."""
        status, code = MPI.Status(), np.empty(1, np.int64)
        with suppress(MPI.Exception):  # a rank of them was lost just now; the next call looks again
            self._comm.Ack_failed()
            if self._comm.Iprobe(MPI.ANY_SOURCE, ENDED, status):
                with waiting(self._comm, "hear the exit code of a job that ends"):
                    self._comm.Recv(code, status.source, ENDED)
                ending.follow(int(code[0]))

    def end(self, code: int) -> None:
        """This process ends the job: tell the others. Local."""
        told = np.array([code], np.int64)
        for rank in range(self._comm.size):
            with suppress(MPI.Exception):  # it is lost
                if rank != self._comm.rank:
                    keep((self._comm.Isend(told, rank, ENDED), told))

    def look(self) -> None:
        """Nothing: nobody waits on this communicator for long."""

    def leave(self, why: str) -> None:
        """Nothing: a process that ends well does not end the job."""

    def standing(self) -> str:
        return ""


def started() -> bool:
    """Whether this process was started in the place of a lost rank, and has not joined the others yet. Local."""
    return any(not others.joined for others in _arrived)


def arriving() -> Arriving | None:
    """What a process that was `started` has instead of a topology of all ranks, once; else None. Local."""
    if not started() or _arrived[0].taken:
        return None
    _arrived[0].taken = True
    return Arriving(_arrived[0])


def begin() -> None:
    """The whole program of a newcomer: meet those that have started it, and then run theirs."""
    old, later = int(sys.argv[1]), int(sys.argv[2])
    what = Program.parse(sys.argv[3:])
    sys.orig_argv[1:] = what.command
    atexit.register(losses.end_without_later_ones)
    try:
        comm = _merged(MPI.Comm.Get_parent(), high=True)
        for _ in range(later):
            with waiting(comm, START):
                comm = _merged(comm.Spawn("", [], 1), high=False)
        told = _meet(comm, old)
    except (MPI.Exception, RankLostError) as error:
        sys.exit(f"a process that was started in the place of a lost rank could not meet the others: {error}")
    others = _Others(comm, old, told)
    _arrived.append(others)
    try:
        what.run()
    finally:
        others.leave()


def _grow(topology: Topology, number: int, told: Any) -> MPI.Intracomm:
    """A communicator of all ranks, and behind them so many new processes. Collective."""
    comm, error = topology.world, None
    try:
        for later in reversed(range(number)):
            comm = _spawned(topology, comm, later)
    except (MPI.Exception, UnavailableError) as met:
        if losses.lost(met) is not None:
            raise
        error = UnavailableError(f"no process could be started in the place of a lost rank: {met}")
    raise_together(topology.world, error)
    with topology.ending_with(comm):
        _meet(comm, topology.size, told)
    return comm


def _spawned(topology: Topology, comm: MPI.Intracomm, later: int) -> MPI.Intracomm:
    """The ranks of `comm` and one that is new; so many come later. Collective."""
    what, info = program(), MPI.Info.Create()
    info.Set(*ROOM)
    folder = str(Path(__file__).resolve().parent.parent)
    first = [*what.flags, "-c", BEGIN.format(folder=folder), str(topology.size), str(later)]
    with waiting(comm, START), topology.ending_with(comm):
        inter = comm.Spawn(sys.executable, [*first, *what.command], 1, info)
        with topology.ending_with(inter):
            return _merged(inter, high=False)


def _merged(inter: MPI.Intercomm, high: bool) -> MPI.Intracomm:
    """Of both sides. Collective over them."""
    inter.Set_errhandler(MPI.ERRORS_RETURN)
    comm = inter.Merge(high)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def _meet(comm: MPI.Intracomm, old: int, told: Any = None) -> Any:
    """Hear the numbers of all; those that are new get a part of rank 0's environment. Collective.

    old: how many ranks there were before.

    Returns what the first one has `told`.
    """
    new, (number, known) = comm.rank >= old, ending.here()
    environment, told = root_value(comm, [handed(os.environ), told], START)
    if new:
        os.environ.update(environment)
        children.mark()
    everyone = np.empty((comm.size, 2), np.int64)
    with waiting(comm, START):
        comm.Allgather(np.array([-1 if new else number, 0 if new else known], np.int64), everyone)
    numbers, first = everyone[:old, 0].tolist(), int(everyone[:, 1].max())
    numbers += range(first, first + comm.size - old)
    if new:
        ending.become(numbers[comm.rank])
    ending.know(comm, numbers, first + comm.size - old)
    for rank in range(old) if new else range(old, comm.size):  # so that a last word finds its way when the others end
        with waiting(comm, START):
            if new:
                comm.Send(NOTHING, rank, HELLO)
            else:
                comm.Recv(np.empty(0, np.int64), rank, HELLO)
    _met.append(_End(comm))
    return told


def handed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that new processes get: those that begin as HANDED says, and those that MORE names. Local.

    Never those that tell a process who it is.
    """
    more = [name.strip() for name in environment.get(MORE, "").split(",") if name.strip()]
    beginnings = (*HANDED, *(name[:-1] for name in more if name.endswith("*")))
    return {
        name: value
        for name, value in environment.items()
        if (name in more or name.startswith(beginnings)) and not name.startswith(LAUNCHERS)
    }


def _joined(comm: MPI.Intracomm, old: Sequence[int], timeout: float) -> Topology:
    """Those of `comm` that live. Collective. old: the ranks there that had a topology before, in its order."""
    made = Topology.of_survivors(comm, None, timeout)
    places = losses.places(made.world, comm)
    made.former = tuple(old.index(rank) if rank in old else NEWCOMER for rank in places)
    return made
