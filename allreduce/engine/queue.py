"""One worker for each topology: it runs the calls of several users in one order that all ranks follow.

Collectives match by their order. Two optimizers whose buckets are ready in another order on another rank, or two
threads, would reduce one's gradients into the other's. So every rank announces its calls to rank 0, and when all
ranks have announced a call, rank 0 says that it is next. An announcement also carries what the call is, so that
ranks which disagree hear of it before they do anything. (The idea is Horovod's: A. Sergeev, M. Del Balso, 2018.)

While no user asks for a thread, whoever waits for a call does this work meanwhile.
"""

import atexit
import copy
import itertools
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from allreduce.errors import AllReduceError, BrokenError, ClosedError, RankLostError, UnavailableError
from allreduce.health import abort
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport.control import agree, raise_together
from allreduce.transport.wait import LOOK_SECONDS, NamedCall, Pause

ANNOUNCE, DECIDE = 1, 2  # tags
RUN, REFUSE = 1, 2


def without_frames(error: BaseException) -> BaseException:
    """A copy to be kept: an error that is raised keeps all that the functions held which it has passed."""
    try:
        return copy.copy(error)
    except Exception:  # of a type that can't be made again
        return BrokenError(f"{type(error).__name__}: {error}")


class Future:
    """A call that was submitted. `begin` and `end` are its times by time.perf_counter(), in seconds.

    It begins when all ranks have come to it, so the time does not hold that of others.
    """

    def __init__(
        self,
        work: Callable[[], object],
        queue: "Queue | None" = None,
        what: str = "",
        digest: int = 0,
        ended: Callable[[BaseException | None], object] | None = None,
    ) -> None:
        self.queue, self.what, self.digest = queue, what, digest
        self._ended = ended
        self._work: Callable[[], object] | None = work
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.begin = self.end = 0.0

    def run(self) -> None:
        """Do the work in the calling thread; what it raises is kept for `wait`."""
        work, self._work = self._work, None  # its buffer is the caller's again when it has ended
        assert work is not None
        self.begin = time.perf_counter()
        try:
            work()
        except BaseException as error:  # a thread has nobody else to tell
            self.error = error
        self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """Mark the call as ended."""
        self.end = time.perf_counter()
        self.error = self.error or error
        self._done.set()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self.error)

    def done(self) -> bool:
        """True when the call has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the call to end, and raise what it raised. TimeoutError after `timeout` seconds."""
        if self.queue is not None and not self._done.is_set():
            self.queue.worker.wait_for(self._done, timeout)
        if self.error is not None:
            raise self.error


class Queue:
    """The calls of one user, which run in the order in which they were submitted.

    alone: the topology has no other user, so the order of the program is enough and nothing is announced.
    """

    def __init__(self, worker: "Worker", number: int, name: str, alone: bool) -> None:
        self.worker, self.number, self.name, self.alone = worker, number, name, alone
        self.wait = worker.detector.wait_record(-((worker.number << 20) + number), raises=True)
        self.broken: BaseException | None = None  # a call has failed before all ranks had come to it
        self.closed = False
        self.submitted = 0
        self.futures: deque[Future] = deque()

    def submit(
        self,
        work: Callable[[], object],
        what: str = "",
        numbers: Sequence[int] = (),
        ended: Callable[[BaseException | None], object] | None = None,
    ) -> Future:
        """Have `work` called when all ranks have submitted the queue's next call. Local: returns at once.

        what, numbers: alike on all ranks; otherwise all of them get the same DisagreementError, and the queue is
        broken. ended: called when the call has ended or was given up, with the error if there is one, in whichever
        thread that is. Never wait for a call inside of `work`.
        """
        if self.closed:
            raise ClosedError(f"{self.name} is closed")
        text = f"{what or 'call'} of {self.name}" + (f" {list(numbers)}" if numbers else "")
        return self.worker.submit(self, Future(work, self, text, zlib.crc32(text.encode()), ended))

    def close(self) -> None:
        """No more calls. Collective, as any call of the queue; local when the queue is broken."""
        if self.closed:
            return
        try:
            if self.broken is None and not self.alone:
                self.submit(lambda: None, "closes").wait()
        finally:
            self.abandon()

    # What the worker calls, with its lock held but in `listen`

    def announce(self, future: Future) -> None:
        """Tell rank 0 that this rank has come to a call."""
        if not self.futures:
            self.wait.begin(NamedCall(future.what))
        self.futures.append(future)
        self.worker.announce(self.number, self.submitted, future.digest)

    def listen(self, lock: threading.Lock) -> None:
        """Receive what ranks have sent to this queue alone."""

    def take_back(self) -> list[Future]:
        """The calls that wait, which are given up."""
        given_up = list(self.futures)
        self.futures.clear()
        return given_up

    def abandon(self) -> None:
        """No more calls. Local."""
        self.closed = True
        self.worker.drop(self)


QueueT = TypeVar("QueueT", bound=Queue)


class Worker:
    """The queues of one topology's ranks, `topology.once(Worker)`. Creating it, `queue` and `close` are collective."""

    def __init__(self, topology: Topology) -> None:
        self.detector, self.number = topology.detector, topology.number()
        self._comm, self._control = topology.private(), topology.private()  # for announcements; for agreements
        self.size = topology.size
        self._queues: dict[int, Queue] = {}
        self._numbers = itertools.count(1)  # of queues
        self._announced: dict[tuple[int, int], dict[int, int]] = {}  # rank 0: call -> rank -> digest
        self._ready: deque[tuple[int, Queue, Future]] = deque()  # decided: run, or refuse
        self._open = 0  # calls that have not ended
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []  # messages on their way
        self._changed = threading.Lock()  # held for moments
        self._turning = threading.Lock()  # held by who does the worker's work
        self._thread: threading.Thread | None = None
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._running: Future | None = None
        running.add(self)

    def queue(self, name: str, threaded: bool = False, alone: bool = False) -> Queue:
        """A queue for a new user. Collective.

        threaded: a thread runs the calls of all queues from now on. UnavailableError on all ranks when MPI was not
        started with MPI_THREAD_MULTIPLE on all of them.
        """
        agree(
            self._control, [zlib.crc32(name.encode()), threaded, alone], f"queue({name!r}, {threaded=}, {alone=})", None
        )
        return self.add(lambda worker, number: Queue(worker, number, name, alone), threaded)

    def add(self, make: Callable[["Worker", int], QueueT], threaded: bool = False) -> QueueT:
        """The queue that `make` makes, for this worker and with this number. Collective; raises as `queue`."""
        if threaded:
            self._start()
        queue = make(self, next(self._numbers))
        self._queues[queue.number] = queue
        return queue

    def _start(self) -> None:
        if self._thread is None:
            raise_together(self._control, refused())
            self._thread = threading.Thread(target=self._work, name="allreduce worker", daemon=True)
            self._thread.start()

    def submit(self, queue: Queue, future: Future) -> Future:
        """Take a call on; see Queue.submit."""
        self.detector.check()
        try:
            with self.detector.hearing(), self._changed:
                self._take(queue, future)
        except RankLostError as lost:
            self.fail(queue, lost)
            raise
        if self._thread is not None:
            self._wake.put(True)
        return future

    def _take(self, queue: Queue, future: Future) -> None:
        if queue.broken is not None:
            raise BrokenError(
                f"{queue.name} can't go on: an earlier call has failed ({type(queue.broken).__name__}: {queue.broken})"
            ) from queue.broken
        queue.submitted += 1
        self._open += 1
        if queue.alone or self.size == 1:
            self._ready.append((RUN, queue, future))
        else:
            queue.announce(future)

    def announce(self, number: int, count: int, digest: int) -> None:
        """Tell rank 0 that this rank has come to call `count` of a queue. With the lock held."""
        if self._comm.rank == 0:
            self._note(0, number, count, digest)
        else:
            self._send(np.array([number, count, digest], np.int64), 0, ANNOUNCE)

    def wait_for(self, done: threading.Event, timeout: float | None) -> None:
        """Return when `done` is set; do the worker's work meanwhile where there is no thread for it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._thread is not None and threading.current_thread() is not self._thread:
            if not done.wait(timeout):
                raise TimeoutError(f"not done within {timeout:g} s")
            return
        self._work_until(done.is_set, deadline)

    def taken(self) -> set[int]:
        """The numbers of the queues that users have. Local."""
        return {*self._queues}

    def take_back(self, parts: set[int]) -> None:
        """Drop the queues with these numbers, whose users can't close them. Local, alike on all ranks."""
        for number in parts:
            self._queues[number].abandon()

    def drop(self, queue: Queue) -> None:
        """Forget a queue. Local."""
        self.fail(queue, ClosedError(f"{queue.name} is closed"))
        self._queues.pop(queue.number, None)
        self.detector.forget(queue.wait)

    def close(self) -> None:
        """End the thread. Collective in so far as all ranks' calls must have ended."""
        for queue in list(self._queues.values()):
            queue.abandon()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.put(False)
            thread.join()
        running.discard(self)

    def abandon(self) -> None:
        """Give all calls up. Local. A thread that is inside of MPI stays there, unless it hears of a lost rank."""
        for queue in list(self._queues.values()):
            queue.abandon()
        if self._thread is not None:
            self._wake.put(False)
            if self.detector.lost is not None and self._thread is not threading.current_thread():
                self._thread.join(EXIT_SECONDS)
        running.discard(self)

    # The work: in the thread, or in whoever waits

    def _work(self) -> None:
        try:
            while self._wake.get():
                self._work_until(lambda: self._open == 0, None)
        except BaseException as error:  # nothing may end this thread in silence: others wait for its calls
            self._thread = None
            for queue in list(self._queues.values()):
                self.fail(queue, error)
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
            if now - looked > LOOK_SECONDS or self.detector.lost is not None:
                looked = now
                self._look()
            if deadline is not None and now > deadline:
                raise TimeoutError("not done in time")

    def _turn(self) -> bool:
        """Hear what the ranks have announced or rank 0 has decided, and run one call. True when there was one."""
        if self.size > 1 and not self._ready and self.detector.lost is None:
            with self.detector.hearing():
                self._listen()
        if not self._ready:
            return False
        verb, queue, future = self._ready.popleft()
        self._running = future
        try:
            if queue.broken is not None:  # this rank has given up meanwhile
                future.finish(without_frames(queue.broken))
            elif verb == RUN:
                future.run()
            else:
                self._refuse(queue, future)
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
        for queue in list(self._queues.values()):
            queue.listen(self._changed)

    def decide(self, queue: Queue, future: Future, added: int) -> None:
        """A call is next. added: 1, less the submitted calls that it stands for. With the lock held."""
        self._open += added
        self._ready.append((RUN, queue, future))

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
        if number not in self._queues:  # this rank has given up, so nobody may begin: the others' waits end by time
            return
        verb = RUN if len(set(sides.values())) == 1 else REFUSE
        for other in range(1, self.size):
            self._send(np.array([verb, number, 0], np.int64), other, DECIDE)
        self._decided(verb, number)

    def _decided(self, verb: int, number: int) -> None:
        queue = self._queues.get(number)
        if queue is None or not queue.futures:
            return  # this rank has given up meanwhile
        self._ready.append((verb, queue, queue.futures.popleft()))
        queue.wait.end()
        if queue.futures:
            queue.wait.begin(NamedCall(queue.futures[0].what))

    def _refuse(self, queue: Queue, future: Future) -> None:
        """All ranks came, with different calls."""
        error: BaseException = BrokenError(f"the ranks disagreed about {future.what}")
        try:
            agree(self._comm, [future.digest], future.what, None)  # the control communicator is the main thread's
        except BaseException as told:
            error = told
        self.fail(queue, error)
        future.finish(error)

    def _look(self) -> None:
        """See whether what is waited for can still come."""
        for queue in list(self._queues.values()):
            try:
                self.detector.look(queue.wait)
            except AllReduceError as error:
                self.fail(queue, error)

    def fail(self, queue: Queue, error: BaseException) -> None:
        """Give a queue's calls up."""
        with self._changed:
            queue.broken = queue.broken or without_frames(error)
            queue.wait.end()
            given_up = queue.take_back()
            self._open -= len(given_up)
        for future in given_up:
            future.finish(error)

    def idle(self, limit: float) -> bool:
        """Wait for the calls that were submitted, for `limit` seconds at most. False: one still runs."""
        deadline = time.monotonic() + limit
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._running is None

    threaded = property(lambda self: self._thread is not None)


EXIT_SECONDS = 10.0  # the end of a program waits so long for calls that are under way
running: "weakref.WeakSet[Worker]" = weakref.WeakSet()


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


children.guard(Queue, "submit", "close")
