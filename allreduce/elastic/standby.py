"""Standby ranks wait until they take the places of failed ranks.

An elastic world has working ranks and, behind them, standby ranks. A topology of its own (`everyone`) has both kinds.
When a rank fails, the ranks that are left form `everyone` anew, and its first ranks work: those that worked before, in
their order, then as many standby ranks as there are free places. So a job can end with as many working ranks as it
began with.

Every `everyone` ends for all its ranks in the same way, on which they agree by its `finished`: the work is done, or a
rank has failed and they form the next one.
"""

from functools import partial

import numpy as np
from mpi4py import MPI

from allreduce.elastic.retry import attempt, retry
from allreduce.errors import OptionError, RankLostError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import known
from allreduce.transport.wait import Pause, wait_until, waiting

POLL_SECONDS = 0.005  # between two polls of a rank that waits
JOINED = -1  # in `previous_ranks`: this rank has joined
DONE = 1  # a tag
NOTHING = np.empty(0, np.uint8)


class ElasticWorld(Topology):
    """The working ranks: the first ranks of `everyone`, `places` at most. Collective over the working ranks.

    Its `survivors` has standby ranks in the places of failed ones, and its `close` releases the ranks that still wait.
    """

    def __init__(self, everyone: Topology, comm: MPI.Intracomm, places: int) -> None:
        super().__init__(comm, None, everyone.timeout, parent=everyone)
        self.everyone, self.places = everyone, places

    def survivors(self, admit: bool = True) -> Topology:
        """The next working ranks. Collective over the working ranks that are left and the standby ranks.

        Its `previous_ranks` are the ranks that they had here, JOINED for those that join.
        """
        self.check_open()
        self.everyone.revoke()
        self.everyone.finished(False)
        _, made = _next_world(self.everyone, self.places, self.rank, admit=admit)
        assert made is not None  # the ranks that worked before come first
        self.abandon()
        return made

    def close(self) -> None:
        """Close it, release the ranks that wait, and close `everyone`. Collective over the working ranks."""
        if self.closed:
            return
        super().close()
        everyone = self.everyone
        while not _all_done(everyone, done=True):
            everyone, _ = _next_world(everyone, self.places, self.rank, done=True)
        everyone.close()


class JoiningRank(Topology):
    """A standby rank that takes a place: this rank alone, and as its `survivors` the ranks that it joins.

    A trainer that is made on it takes on the state of the others in its first call.
    """

    def __init__(self, joins: Topology) -> None:
        super().__init__(MPI.COMM_SELF, timeout=joins.timeout)
        self.joins = joins

    def survivors(self, admit: bool = True) -> Topology:
        """The ranks that this one joins. Local."""
        self.abandon()
        return self.joins


def man(topology: Topology, spares: int) -> Topology | None:
    """The topology of the working ranks: all of `topology` but the last `spares`. Collective over `topology`.

    When a rank fails meanwhile, there is one standby rank less.

    On a standby rank this waits. It returns a `JoiningRank` when the rank takes a place, and None when the others have
    closed their topology, or ended, and the rank was not needed.

    Raises OptionError when no rank would work, UnavailableError where no rank outlives another, on all ranks;
    RankLostError on the standby ranks when all others have failed.
    """
    error: Exception | None = None
    if isinstance(spares, bool) or not isinstance(spares, int | np.integer) or not 0 < spares < topology.size:
        error = OptionError(
            f"spares must be an integer >= 1 and below the number of ranks, {topology.size}, got {spares!r}"
        )
    elif not ulfm.in_force():
        error = UnavailableError(
            "spare ranks take the place of lost ones, and in this job no rank outlives another: start it with Open "
            "MPI's mpirun --with-ft ulfm"
        )
    places = topology.size - (0 if error else int(spares))

    def form(everyone: Topology) -> tuple[Topology, ElasticWorld | None]:
        with everyone.detector.hearing():
            everyone.agree([], f"man(spares={spares!r})", error)
        return everyone, _working(everyone, places, places)

    everyone, made = retry(topology, form)
    return made if made is not None else _stand_by(everyone, places)


def _stand_by(everyone: Topology, places: int) -> Topology | None:
    """Wait on a standby rank until it has a place, or until the work is done."""
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
    """Form the next `everyone` and its working ranks; None on other ranks, and when the work is done. Collective.

    previous: this rank's number among the ranks that worked before, or JOINED. Ranks that worked say whether standby
    ranks are admitted now, and whether the work is done.
    """

    def form(everyone: Topology) -> tuple[Topology, ElasticWorld | None]:
        states = np.empty((everyone.size, 3), np.int64)
        with everyone.detector.hearing(), waiting(everyone.world, "learn which ranks work"):
            everyone.world.Allgather(np.array([previous, admit, done], np.int64), states)
        ranks, admitted, ended = states.T
        if ranks.max() == JOINED:
            text = "all working ranks have failed, and with them the state from which standby ranks would go on"
            raise known(RankLostError(text), everyone.world)
        if ended.any():
            return everyone, None
        made = _working(everyone, places if admitted.any() else int((ranks != JOINED).sum()), places)
        if made is not None:
            made.previous_ranks = tuple(ranks[: made.size].tolist())
        return everyone, made

    return retry(everyone.survivors(), form)


def _working(everyone: Topology, working: int, places: int) -> ElasticWorld | None:
    """The elastic world of the first `working` ranks; None on the others. Collective over `everyone`."""
    with everyone.detector.hearing():
        with waiting(everyone.world, "divide working and standby ranks"):
            comm = everyone.own(everyone.world.Split(everyone.rank < working, everyone.rank))
        try:
            return ElasticWorld(everyone, comm, places) if everyone.rank < working else None
        finally:
            everyone.release(comm)


def _all_done(everyone: Topology, done: bool) -> bool:
    """Whether the work is done on all ranks; false when a rank failed meanwhile. Collective over `everyone`.

    done: this rank has done its work. The others wait until they hear that, or that the working ranks have ended their
    programs, when `everyone` is closed.
    """
    outcome = attempt(everyone, partial(_tell_done if done else _hear_done, everyone))
    if everyone.closed or not everyone.finished(outcome.failure is None):
        return False
    outcome.result()
    return True


def _tell_done(everyone: Topology) -> None:
    with everyone.detector.hearing():
        if everyone.rank == 0:
            with waiting(everyone.world, "tell the standby ranks that the work is done"):
                for rank in range(1, everyone.size):
                    everyone.world.Send(NOTHING, rank, DONE)
        else:
            _receive_done(everyone)


def _hear_done(everyone: Topology) -> None:
    detector, told = everyone.detector, partial(everyone.world.Iprobe, 0, DONE)
    with detector.hearing():
        wait_until(
            lambda: told() or detector.messages.left, meanwhile=detector.check, pause=Pause(longest=POLL_SECONDS)
        )
        if told():
            _receive_done(everyone)
        else:  # the working ranks have ended their programs without a word
            everyone.abandon()


def _receive_done(everyone: Topology) -> None:
    with waiting(everyone.world, "hear that the work is done"):
        everyone.world.Recv(NOTHING, 0, DONE)
