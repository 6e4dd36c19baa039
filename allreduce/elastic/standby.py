"""Standby ranks, which replace failed ranks.

An elastic world has working ranks and, after them, standby ranks. The topology `everyone` contains both. When a rank
fails, the surviving ranks form a new `everyone`. Its first ranks work: those that worked before, in their order, then
standby ranks in the free places. So a job can end with as many working ranks as it began with.

The ranks of an `everyone` agree by its `finished` why it ends: the work is done, or a rank has failed and they form the
next `everyone`.
"""

from functools import partial

import numpy as np
from mpi4py import MPI

from allreduce.arrays.arguments import is_integer
from allreduce.elastic.retry import attempt, retry
from allreduce.errors import OptionError, RankLostError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import on_all_ranks
from allreduce.transport.wait import Pause, wait_until, waiting

POLL_SECONDS = 0.005  # between two polls of a rank that waits
JOINED = -1  # in `previous_ranks`: this rank has joined
DONE = 1  # a tag
NOTHING = np.empty(0, np.uint8)


class ElasticWorld(Topology):
    """The topology of the working ranks: the first ranks of `everyone`, at most `places`. Collective over these.

    `survivors` replaces failed ranks by standby ranks, and `close` releases the standby ranks that still wait.
    """

    def __init__(self, everyone: Topology, comm: MPI.Intracomm, places: int) -> None:
        super().__init__(comm, None, everyone.timeout, parent=everyone)
        self.everyone, self.places = everyone, places

    def survivors(self, admit: bool = True) -> Topology:
        """Return the topology of the next working ranks. Collective over surviving working and standby ranks.

        Its `previous_ranks` holds, by new rank, the rank in this topology, or JOINED if the rank joins.
        """
        self.check_open()
        self.everyone.revoke()
        self.everyone.finished(False)
        _, made = _next_world(self.everyone, self.places, self.rank, admit=admit)
        assert made is not None  # the ranks that worked before come first
        self.abandon()
        return made

    def close(self) -> None:
        """Close this topology, release the standby ranks, and close `everyone`. Collective over the working ranks."""
        if self.closed:
            return
        super().close()
        everyone = self.everyone
        while not _all_done(everyone, done=True):
            everyone, _ = _next_world(everyone, self.places, self.rank, done=True)
        everyone.close()


class JoiningRank(Topology):
    """The topology of a standby rank that replaces a failed one: this rank alone, until it joins by `survivors`.

    A trainer created on it loads the other ranks' state in its first call.
    """

    def __init__(self, joins: Topology) -> None:
        super().__init__(MPI.COMM_SELF, timeout=joins.timeout)
        self.joins = joins

    def survivors(self, admit: bool = True) -> Topology:
        """Return the topology of the ranks that this one joins. Local."""
        self.abandon()
        return self.joins


def elastic_world(topology: Topology, spares: int) -> Topology | None:
    """Make the last `spares` ranks standby ranks, and return the topology of the working ranks. Collective.

    On a standby rank the call blocks. It returns a `JoiningRank` when the rank replaces a failed one, and None when the
    working ranks have closed their topology or ended. If a rank fails during the call, there is one standby rank fewer.

    Raises OptionError when no rank would work, and UnavailableError when the job ends with a failed rank, on all ranks;
    RankLostError on the standby ranks when all others have failed.
    """
    error: Exception | None = None
    if not is_integer(spares, 1, topology.size - 1):
        error = OptionError(
            f"spares must be an integer >= 1 and below the number of ranks, {topology.size}, got {spares!r}"
        )
    elif not ulfm.in_force():
        error = UnavailableError(
            "standby ranks need a job that continues after a rank fails: start it with Open MPI's mpirun --with-ft ulfm"
        )
    places = topology.size - (0 if error else int(spares))

    def form(everyone: Topology) -> tuple[Topology, ElasticWorld | None]:
        with everyone.detector.translating_failures():
            everyone.agree([], f"elastic_world(spares={spares!r})", error)
        return everyone, _working(everyone, places, places)

    everyone, made = retry(topology, form)
    return made if made is not None else _stand_by(everyone, places)


def _stand_by(everyone: Topology, places: int) -> Topology | None:
    """Wait on a standby rank until it joins the working ranks, or until the work is done."""
    while not _all_done(everyone, done=False):
        if everyone.closed:
            return None
        everyone, made = _next_world(everyone, places, JOINED)
        if made is not None:
            return JoiningRank(made)
    everyone.close()
    return None


def _next_world(
    everyone: Topology, places: int, previous: int, admit: bool = False, done: bool = False
) -> tuple[Topology, ElasticWorld | None]:
    """Form the next `everyone` and its elastic world; None on standby ranks, and if the work is done. Collective.

    previous: this rank's rank in the previous elastic world, or JOINED. admit, done: whether standby ranks may
        join, and whether the work is done; only ranks that worked before pass True.
    """

    def form(everyone: Topology) -> tuple[Topology, ElasticWorld | None]:
        states = np.empty((everyone.size, 3), np.int64)
        with everyone.detector.translating_failures(), waiting(everyone.world, "learn which ranks work"):
            everyone.world.Allgather(np.array([previous, admit, done], np.int64), states)
        ranks, admitted, ended = states.T
        if ranks.max() == JOINED:
            text = "all working ranks have failed, so the state that standby ranks would take over is gone"
            raise on_all_ranks(RankLostError(text), everyone.world)
        if ended.any():
            return everyone, None
        made = _working(everyone, places if admitted.any() else int((ranks != JOINED).sum()), places)
        if made is not None:
            made.previous_ranks = tuple(ranks[: made.size].tolist())
        return everyone, made

    return retry(everyone.survivors(), form)


def _working(everyone: Topology, working: int, places: int) -> ElasticWorld | None:
    """Return the elastic world of the first `working` ranks; None on the others. Collective over `everyone`."""
    works = everyone.rank < working
    with everyone.detector.translating_failures():
        comm = everyone.private(colour=int(works))
        try:
            return ElasticWorld(everyone, comm, places) if works else None
        finally:
            everyone.release(comm)


def _all_done(everyone: Topology, done: bool) -> bool:
    """Return whether the work is done on all ranks; False if a rank has failed meanwhile. Collective over `everyone`.

    done: True on working ranks. Standby ranks (False) wait until rank 0 announces the end. If the working ranks have
        ended their programs instead, `everyone` is abandoned.
    """
    outcome = attempt(everyone, partial(_end, everyone, done))
    if everyone.closed or not everyone.finished(outcome.failure is None):
        return False
    outcome.result()
    return True


def _end(everyone: Topology, done: bool) -> None:
    world, detector = everyone.world, everyone.detector
    with detector.translating_failures():
        if not done:
            ended = partial(world.Iprobe, 0, DONE)
            pause = Pause(longest=POLL_SECONDS)
            wait_until(lambda: ended() or detector.messages.left, meanwhile=detector.check, pause=pause)
            if not ended():  # the working ranks have ended their programs without announcing it
                everyone.abandon()
                return
        with waiting(world, "learn that the work is done"):
            for rank in range(1, everyone.size) if everyone.rank == 0 else ():
                world.Send(NOTHING, rank, DONE)
            if everyone.rank:
                world.Recv(NOTHING, 0, DONE)
