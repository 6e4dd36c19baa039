"""Ranks that wait to take the place of those that are lost.

The ranks of a pool are those that work, and behind them spare ones, which wait. When a rank is lost, those that are
left of the pool (of both kinds) make it anew, and the first of them work: who worked before, in their order, and then
the spare ranks for whom there is a place now. So a job can end with as many ranks at work as it began with.

Every pool ends for all of its ranks in the same way, which they agree on by its `finished`: either all of them are
done, or a rank was lost and it is made anew.
"""

from functools import partial

import numpy as np
from mpi4py import MPI

from allreduce.errors import OptionError, RankLostError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import known
from allreduce.transport.wait import Pause, wait_until, waiting

WAIT_SECONDS = 0.005  # between two looks of a rank that waits
NEWCOMER = -1  # in `former`
DONE = 1  # a tag
NOTHING = np.empty(0, np.uint8)


class Manned(Topology):
    """The ranks of a pool that work, the first `places` of it at most. Collective over these.

    Its `survivors` has spare ranks in the place of lost ones, and its `close` lets those go that still wait.
    """

    def __init__(self, pool: Topology, comm: MPI.Intracomm, places: int) -> None:
        super().__init__(comm, None, pool.timeout, parent=pool)
        self.pool, self.places = pool, places
        self.admits = True  # whether spare ranks come in when one is lost, the same on all ranks

    def survivors(self) -> Topology:
        """The ranks that work from now on. Collective over those that are left, and over the spare ones that wait.

        Its `former` are the ranks that they had here, NEWCOMER for those that join.
        """
        self.check_open()
        self.pool.revoke()
        self.pool.finished(False)
        _, made = _man(self.pool.survivors(), self.places, self.rank, admits=self.admits)
        assert made is not None  # those who have worked come first
        self.abandon()
        return made

    def close(self) -> None:
        """Close it, let the ranks that wait go, and close the pool. Collective over the ranks that work."""
        if self.closed:
            return
        super().close()
        pool = self.pool
        while not _through(pool, done=True):
            pool, _ = _man(pool.survivors(), self.places, self.rank, ends=True)
        pool.close()


class Joining(Topology):
    """What a spare rank has when it takes a place: itself alone, and as `survivors` the ranks that it joins.

    A trainer that is made on it takes on the state of the others in its first call.
    """

    def __init__(self, joins: Topology) -> None:
        super().__init__(MPI.COMM_SELF, timeout=joins.timeout)
        self.joins = joins

    def survivors(self) -> Topology:
        """The ranks that this one joins. Local."""
        self.abandon()
        return self.joins


def man(pool: Topology, spares: int) -> Topology | None:
    """The topology of the ranks that work: all of `pool` but the last `spares`. Collective over the pool.

    When a rank is lost meanwhile, there is one spare rank less.

    On a spare rank this waits. It returns a `Joining` when the rank takes a place, and None when the others have closed
    their topology, or left, and it was not needed.

    Raises OptionError when no rank would work, UnavailableError where no rank outlives another, on all ranks;
    RankLostError on the spare ones when all others are lost.
    """
    error: Exception | None = None
    if isinstance(spares, bool) or not isinstance(spares, int | np.integer) or not 0 < spares < pool.size:
        error = OptionError(
            f"spares must be an integer >= 1 and below the number of ranks, {pool.size}, got {spares!r}"
        )
    elif not ulfm.in_force():
        error = UnavailableError(
            "spare ranks take the place of lost ones, and in this job no rank outlives another: start it with Open "
            "MPI's mpirun --with-ft ulfm"
        )
    places = pool.size - (0 if error else int(spares))
    while True:
        made, through = None, True
        try:
            pool.agree([], f"man(spares={spares!r})", error)
            made = _part(pool, places, places)
        except Exception as met:
            if pool.detector.loss_of(met) is None:
                raise
            through = False
        if pool.finished(through):
            return made if made is not None else _wait(pool, places)
        pool = pool.survivors()


def _wait(pool: Topology, places: int) -> Topology | None:
    """What a spare rank does until it has a place, or all are done."""
    while not _through(pool, done=False):
        if pool.closed:
            return None
        pool, made = _man(pool.survivors(), places, NEWCOMER)
        if made is not None:
            return Joining(made)
    pool.close()
    return None


def _man(
    pool: Topology, places: int, formerly: int, admits: bool = False, ends: bool = False
) -> tuple[Topology, Manned | None]:
    """A pool that was made anew, and the ranks of it that work; None on others, and when all are done.

    formerly: this rank among those that worked before, or NEWCOMER. Such ranks say whether spare ones come in now, and
    whether all is done. Collective over the pool.
    """
    while True:
        made, through = None, True
        try:
            states = np.empty((pool.size, 3), np.int64)
            with pool.detector.hearing(), waiting(pool.world, "hear who works"):
                pool.world.Allgather(np.array([formerly, admits, ends], np.int64), states)
            former, admitted, done = states.T
            if former.max() == NEWCOMER:
                text = "all ranks that worked were lost, and with them the state that spare ranks would go on from"
                raise known(RankLostError(text), pool.world)
            if not done.any():
                made = _part(pool, places if admitted.any() else int((former != NEWCOMER).sum()), places)
            if made is not None:
                made.former = tuple(former[: made.size].tolist())
        except Exception as error:
            if getattr(error, "ranks", None) is not None or pool.detector.loss_of(error) is None:
                raise
            through = False
        if pool.finished(through):
            return pool, made
        pool = pool.survivors()


def _part(pool: Topology, working: int, places: int) -> Manned | None:
    """Who works, the first ranks; None on the others. Collective over the pool."""
    with pool.detector.hearing(), waiting(pool.world, "come to the ranks that work"):
        comm = pool.own(pool.world.Split(pool.rank < working, pool.rank))
    try:
        return Manned(pool, comm, places) if pool.rank < working else None
    finally:
        pool.release(comm)


def _through(pool: Topology, done: bool) -> bool:
    """Whether all of the pool are done; false when a rank was lost meanwhile. Collective over the pool.

    done: this rank says so; the others wait until they hear it, or that the rest have left, when the pool is closed.
    """
    through = True
    try:
        with pool.detector.hearing():
            if done and pool.rank == 0:
                with waiting(pool.world, "tell the spare ranks that all is done"):
                    for rank in range(1, pool.size):
                        pool.world.Send(NOTHING, rank, DONE)
            if not done:
                told, detector, pause = partial(pool.world.Iprobe, 0, DONE), pool.detector, Pause(longest=WAIT_SECONDS)
                wait_until(lambda: told() or detector.messages.left, meanwhile=detector.check, pause=pause)
                if not told():  # the others have ended their programs without a word
                    pool.abandon()
                    return False
            if pool.rank:
                with waiting(pool.world, "hear that all is done"):
                    pool.world.Recv(NOTHING, 0, DONE)
    except RankLostError:
        through = False
    return pool.finished(through)
