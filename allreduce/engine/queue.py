"""One worker for each topology: it runs the calls of several users in one order that all ranks follow.

Collectives match by their order. Two optimizers whose buckets are ready in another order on another rank, or two
threads, would reduce one's gradients into the other's. So every rank announces its calls to rank 0, and when all
ranks have announced a call, rank 0 says that it is next. An announcement also carries what the call is, so that
ranks which disagree hear of it before they do anything. (The idea is Horovod's: A. Sergeev, M. Del Balso, 2018.)

While no user asks for a thread, whoever waits for a call does this work meanwhile.
"""

import atexit
import itertools
import queue
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from mpi4py import MPI

from allreduce.engine.lane import Lane, Pending, without_frames
from allreduce.engine.negotiation import Named, NamedLane, StandIn
from allreduce.errors import AllReduceError, BrokenError, ClosedError, RankLostError, UnavailableError
from allreduce.health import abort
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport.control import agree, raise_together
from allreduce.transport.wait import LOOK_SECONDS, Pause, Said

ANNOUNCE, DECIDE = 1, 2  # tags
RUN, REFUSE = 1, 2


class Worker:
    """The lanes of one topology's ranks, `topology.once(Worker)`. Creating it, `lane` and `close` are collective."""

    def __init__(self, topology: Topology) -> None:
        self.watch, self.number = topology.watch, topology.number()
        self._comm, self._control = topology.private(), topology.private()  # for announcements; for agreements
        self._lanes: dict[int, Lane] = {}
        self._numbers = itertools.count(1)  # of lanes
        self._announced: dict[tuple[int, int], dict[int, int]] = {}  # rank 0: call -> rank -> digest
        self._ready: deque[tuple[int, Lane, Pending]] = deque()  # decided: run, or refuse
        self._open = 0  # calls that have not ended
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []  # messages on their way
        self._changed = threading.Lock()  # held for moments
        self._turning = threading.Lock()  # held by who does the worker's work
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._running: Pending | None = None
        running.add(self)

    @property
    def size(self) -> int:
        return self._comm.size

    def lane(self, name: str, threaded: bool = False, alone: bool = False) -> Lane:
        """A lane for a new user. Collective.

        threaded: a thread runs the calls of all lanes from now on. UnavailableError on all ranks when MPI was not
        started with MPI_THREAD_MULTIPLE on all of them.
        """
        agree(
            self._control, [zlib.crc32(name.encode()), threaded, alone], f"lane({name!r}, {threaded=}, {alone=})", None
        )
        if threaded:
            self._start()
        lane = Lane(self, next(self._numbers), name, alone)
        self._lanes[lane.number] = lane
        return lane

    def named(self, name: str, comm: MPI.Intracomm, stand_in: StandIn, fuse_bytes: int) -> NamedLane:
        """A lane whose calls are matched by their names, and run by a thread. Collective; raises as `lane`."""
        self._start()
        lane = NamedLane(self, comm, next(self._numbers), name, stand_in, fuse_bytes)
        self._lanes[lane.number] = lane
        return lane

    def _start(self) -> None:
        if self._thread is None:
            raise_together(self._control, refused())
            self._thread = threading.Thread(target=self._work, name="allreduce worker", daemon=True)
            self._thread.start()

    def submit(self, lane: Lane, pending: Pending) -> Pending:
        """Take a call on; see Lane.submit."""
        self.watch.check()
        try:
            with self.watch.hearing(), self._changed:
                self._take(lane, pending)
        except RankLostError as lost:
            self.fail(lane, lost)
            raise
        if self._thread is not None:
            self._wake.put(True)
        return pending

    def _take(self, lane: Lane, pending: Pending) -> None:
        if lane.broken is not None:
            raise BrokenError(
                f"{lane.name} can't go on: an earlier call has failed ({type(lane.broken).__name__}: {lane.broken})"
            ) from lane.broken
        lane.submitted += 1
        self._open += 1
        if lane.alone or self.size == 1:
            self._ready.append((RUN, lane, pending))
        elif isinstance(lane, NamedLane):
            assert isinstance(pending, Named)
            lane.announce(pending)
        else:
            if not lane.pending:
                lane.wait.begin(Said(pending.what))
            lane.pending.append(pending)
            if self._comm.rank == 0:
                self._note(0, lane.number, lane.submitted, pending.digest)
            else:
                message = np.array([lane.number, lane.submitted, pending.digest], np.int64)
                self._send(message, 0, ANNOUNCE)

    def wait_for(self, done: threading.Event, timeout: float | None) -> None:
        """Return when `done` is set; do the worker's work meanwhile where there is no thread for it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._thread is not None and threading.current_thread() is not self._thread:
            if not done.wait(timeout):
                raise TimeoutError(f"not done within {timeout:g} s")
            return
        self._work_until(done.is_set, deadline)

    def taken(self) -> set[int]:
        """The numbers of the lanes that users have. Local."""
        return {*self._lanes}

    def take_back(self, parts: set[int]) -> None:
        """Users who can't close these lanes have made them. Local, alike on all ranks."""
        for number in parts:
            self._lanes[number].abandon()

    def drop(self, lane: Lane) -> None:
        """Forget a lane. Local."""
        self.fail(lane, ClosedError(f"{lane.name} is closed"))
        self._lanes.pop(lane.number, None)
        self.watch.forget(lane.wait)

    def close(self) -> None:
        """End the thread. Collective in so far as all ranks' calls must have ended."""
        for lane in list(self._lanes.values()):
            lane.abandon()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.put(False)
            thread.join()
        running.discard(self)

    def abandon(self) -> None:
        """Give all calls up. Local. A thread that is inside of MPI stays there, unless it hears of a lost rank."""
        for lane in list(self._lanes.values()):
            lane.abandon()
        if self._thread is not None:
            self._wake.put(False)
            if self.watch.lost is not None and self._thread is not threading.current_thread():
                self._thread.join(EXIT_SECONDS)
        running.discard(self)

    # The work: in the thread, or in whoever waits

    def _work(self) -> None:
        try:
            while self._wake.get():
                self._work_until(lambda: self._open == 0, None)
        except BaseException as error:  # nothing may end this thread in silence: others wait for its calls
            self._thread = None
            for lane in list(self._lanes.values()):
                self.fail(lane, error)
            while self._ready:
                self._ready.popleft()[2].finish(error)

    def _work_until(self, done: Callable[[], bool], deadline: float | None) -> None:
        pause, looked = Pause(), time.monotonic()
        while not done():
            busy = False
            if self._turning.acquire(blocking=False):  # otherwise another thread does it
                try:
                    busy = self._turn()
                finally:
                    self._turning.release()
            if busy:
                pause.begin()
                continue
            now = time.monotonic()
            pause(now)
            if now - looked > LOOK_SECONDS or self.watch.lost is not None:
                looked = now
                self._look()
            if deadline is not None and now > deadline:
                raise TimeoutError("not done in time")

    def _turn(self) -> bool:
        """Hear what the ranks have announced or rank 0 has decided, and run one call. True when there was one."""
        if self.size > 1 and not self._ready and self.watch.lost is None:
            with self.watch.hearing():
                self._listen()
        if not self._ready:
            return False
        verb, lane, pending = self._ready.popleft()
        self._running = pending
        try:
            if lane.broken is not None:  # this rank has given up meanwhile
                pending.finish(without_frames(lane.broken))
            elif verb == RUN:
                pending.run()
            else:
                self._refuse(lane, pending)
        finally:
            self._running = None
            with self._changed:
                self._open -= 1
        return True

    def _listen(self) -> None:
        message = np.empty(3, np.int64)
        tag = ANNOUNCE if self._comm.rank == 0 else DECIDE
        status = MPI.Status()
        while self._comm.Iprobe(tag=tag, status=status):
            self._comm.Recv(message, status.source, tag)
            with self._changed:
                first, second, third = message.tolist()
                if tag == ANNOUNCE:
                    self._note(status.source, first, second, third)
                else:
                    self._decided(first, second)
        for lane in [lane for lane in list(self._lanes.values()) if isinstance(lane, NamedLane)]:
            for rank, told in lane.hear():
                with self._changed:
                    lane.take_in(rank, told)
            with self._changed:
                lane.tell()

    def decide(self, lane: Lane, pending: Pending, added: int) -> None:
        """A call is next. added: 1, less the submitted calls that it stands for. With the lock held."""
        self._open += added
        self._ready.append((RUN, lane, pending))

    def _send(self, message: np.ndarray, rank: int, tag: int) -> None:
        """Begin to send, and wait for nobody: other threads want the lock that is held here."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        self._sent.append((self._comm.Isend(message, rank, tag), message))

    def _note(self, rank: int, number: int, count: int, digest: int) -> None:
        """Rank 0: `rank` has come to a call; when all have, it is next."""
        sides = self._announced.setdefault((number, count), {})
        sides[rank] = digest
        if len(sides) < self.size:
            return
        del self._announced[number, count]
        if number not in self._lanes:  # this rank has given up, so nobody may begin: the others' waits end by time
            return
        verb = RUN if len(set(sides.values())) == 1 else REFUSE
        for other in range(1, self.size):
            self._send(np.array([verb, number, 0], np.int64), other, DECIDE)
        self._decided(verb, number)

    def _decided(self, verb: int, number: int) -> None:
        lane = self._lanes.get(number)
        if lane is None or not lane.pending:
            return  # this rank has given up meanwhile
        self._ready.append((verb, lane, lane.pending.popleft()))
        lane.wait.end()
        if lane.pending:
            lane.wait.begin(Said(lane.pending[0].what))

    def _refuse(self, lane: Lane, pending: Pending) -> None:
        """All ranks came, with different calls."""
        error: BaseException = BrokenError(f"the ranks disagreed about {pending.what}")
        try:
            agree(self._comm, [pending.digest], pending.what, None)  # the control communicator is the main thread's
        except BaseException as told:
            error = told
        self.fail(lane, error)
        pending.finish(error)

    def _look(self) -> None:
        """See whether what is waited for can still come."""
        for lane in list(self._lanes.values()):
            try:
                self.watch.look(lane.wait)
            except AllReduceError as error:
                self.fail(lane, error)

    def fail(self, lane: Lane, error: BaseException) -> None:
        """Give a lane's calls up."""
        with self._changed:
            lane.broken = lane.broken or without_frames(error)
            lane.wait.end()
            given_up = lane.take_back()
            self._open -= len(given_up)
        for pending in given_up:
            pending.finish(error)

    def idle(self, limit: float) -> bool:
        """Wait for the calls that were submitted, for `limit` seconds at most. False: one still runs."""
        deadline = time.monotonic() + limit
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._running is None

    threaded = property(lambda self: self._thread is not None)


EXIT_SECONDS = 10.0  # the end of a program waits so long for calls that are under way


class MpiThread(Protocol):
    """A worker, whose thread must be out of MPI when that ends."""

    @property
    def threaded(self) -> bool: ...

    def idle(self, limit: float) -> bool: ...

    def close(self) -> None: ...


running: "weakref.WeakSet[MpiThread]" = weakref.WeakSet()


def multiple() -> bool:
    """Whether several threads may communicate. Local."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def refused() -> UnavailableError | None:
    """Why there can be no thread that communicates; None when there can. Local."""
    if multiple():
        return None
    return UnavailableError(
        "a thread that communicates needs an MPI that was started with MPI_THREAD_MULTIPLE; mpi4py asks for it by "
        "itself unless mpi4py.rc.threads or mpi4py.rc.thread_level were changed, so this MPI library does not offer it"
    )


@atexit.register
def _end() -> None:
    """MPI can't be finalised while a thread is inside of it: wait a little, then end the job."""
    if children.forked():  # it has a copy of the workers, and none of their threads
        return
    for worker in list(running):
        if worker.threaded and not MPI.Is_finalized():
            if not worker.idle(EXIT_SECONDS):
                abort.end_job("a collective still hangs at the end of the program; MPI_Abort ends the job\n", 1)
            worker.close()
