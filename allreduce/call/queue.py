"""The worker of a topology: runs the calls of all queues in the same order on all ranks.

Collectives match by their order. If the buckets of two optimizers (or the calls of two threads) become ready in
different orders on different ranks, gradients of one would be added to gradients of the other. So every rank announces
its calls to rank 0. When all ranks have announced a call, rank 0 sends them the decision to run it next. An
announcement carries a digest of the call, so a disagreement is found before any data moves. (The idea is Horovod's:
A. Sergeev, M. Del Balso, 2018.)

Without a worker thread, the thread that waits for a call does the worker's work.
"""

import atexit
import contextlib
import copy
import itertools
import math
import os
import sys
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

from allreduce.errors import (
    AllReduceError,
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
    RankLostError,
    UnavailableError,
)
from allreduce.health import abort
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport.control import agree, all_values, disagreement, raise_together
from allreduce.transport.wait import CHECK_SECONDS, NamedCall, Pause

ANNOUNCE, DECIDE = 1, 2  # tags
RUN, REFUSE = 1, 2
WORKER_PRIORITY = 10  # by which the worker thread's nice value is lower than that of the process


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error without its traceback, whose frames would keep buffers alive."""
    try:
        return copy.copy(error)
    except Exception:  # of a type that can't be copied
        return BrokenError(f"{type(error).__name__}: {error}")


class Future:
    """A submitted call. `begin`, `end`: time.perf_counter() at the start and the end of its work.

    The work starts after all ranks have submitted the call and earlier calls have ended, so waiting for them is not
    counted. A call that fails before its work starts takes no time.
    """

    def __init__(
        self,
        work: Callable[[], object],
        queue: "Queue | None" = None,
        description: str = "",
        digest: int = 0,
        ended: Callable[[BaseException | None], object] | None = None,
        limit: float = math.inf,
        late: Callable[[], BaseException] | None = None,
    ) -> None:
        self.queue, self.description, self.digest = queue, description, digest
        self.limit, self._late = limit, late
        self._ended = ended
        self._work: Callable[[], object] | None = work
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.begin, self.end = math.inf, 0.0  # no limit applies to a call that has not begun

    def run(self) -> None:
        """Do the work in the calling thread, and store its error for `wait`."""
        work, self._work = self._work, None  # drop the reference to the caller's buffer
        assert work is not None
        self.begin = time.perf_counter()
        try:
            work()
        except BaseException as error:  # `wait` raises it; the worker thread has no caller
            self.error = error
        self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """Mark the call as ended, with `error` unless it has one, and call `ended`."""
        self.end = time.perf_counter()
        self.begin = min(self.begin, self.end)  # it may have failed before it began
        self.error = self.error or error
        self._done.set()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self.error)

    def late(self) -> BaseException:
        """Return the error of a call that has taken longer than its limit."""
        text = f"{self.description} was not done within {self.limit:g} s"
        return CollectiveTimeoutError(text) if self._late is None else self._late()

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the call to end, and raise its error. After `timeout` seconds: TimeoutError; the call continues."""
        if self.queue is not None and not self._done.is_set():
            self.queue.worker.wait_for(self._done, timeout)
        if self.error is not None:
            raise self.error


class Queue:
    """The calls of one user, which run in the order in which they were submitted.

    alone: the topology's only queue: program order is the same on all ranks, so nothing is announced.
    """

    def __init__(self, worker: "Worker", number: int, name: str, alone: bool) -> None:
        self.worker, self.number, self.name, self.alone = worker, number, name, alone
        self.wait = worker.detector.wait_record(-((worker.number << 20) + number), raises=True)
        self.broken: BaseException | None = None  # the error after which it takes no more calls
        self.closed = False
        self.submitted = 0
        self.futures: deque[Future] = deque()

    def submit(
        self,
        work: Callable[[], object],
        description: str = "",
        numbers: Sequence[int] = (),
        ended: Callable[[BaseException | None], object] | None = None,
        limit: float = math.inf,
        late: Callable[[], BaseException] | None = None,
    ) -> Future:
        """Submit a call: the worker does `work` once all ranks have submitted the call. Local; returns at once.

        description, numbers: describe the call, and must be equal on all ranks. Otherwise the future fails with the
        same DisagreementError on all ranks, and the queue takes no more calls. ended: called with the error or None
        when the call has ended or was cancelled, in any thread. limit: seconds that `work` may take; after that the
        call and all waiting ones fail with the error that `late` returns. Do not wait for a future inside `work`.
        """
        if self.closed:
            raise ClosedError(f"{self.name} is closed")
        text = f"{description or 'call'} of {self.name}" + (f" {list(numbers)}" if numbers else "")
        return self.worker.submit(self, Future(work, self, text, zlib.crc32(text.encode()), ended, limit, late))

    def close(self) -> None:
        """Wait for the submitted calls, and take no more. Collective. If the queue is broken or `alone`: local, without
        a wait; calls that have not begun fail with ClosedError."""
        if self.closed:
            return
        try:
            if self.broken is None and not self.alone:
                self.submit(lambda: None, "close").wait()
        finally:
            self.drop()

    # Called by the worker with its lock held, except `poll`

    def announce(self, future: Future) -> None:
        """Announce a submitted call to rank 0."""
        if not self.futures:
            self.wait.begin(NamedCall(future.description))
        self.futures.append(future)
        self.worker.announce(self.number, self.submitted, future.digest)

    def poll(self, lock: threading.Lock) -> None:
        """Receive the messages of a queue that has its own communicator. Called without the lock."""

    def cancel_waiting(self) -> list[Future]:
        """Remove and return the calls that wait for other ranks."""
        cancelled = list(self.futures)
        self.futures.clear()
        return cancelled

    def abandon(self) -> None:
        """Take no more calls, and fail the waiting ones with ClosedError. The other ranks' calls fail soon. Local."""
        if not (self.closed or self.alone):
            self.worker.detector.leave(f"it has dropped {self.name}", self.wait)
        self.drop()

    def drop(self) -> None:
        """As `abandon`, but do not tell the other ranks, because they drop the queue too. Local."""
        self.closed = True
        self.worker.drop(self)


QueueT = TypeVar("QueueT", bound=Queue)


class Worker:
    """Runs the calls of a topology's queues in the same order on all ranks; get it with `topology.service(Worker)`.

    The constructor and `queue` are collective.
    """

    def __init__(self, topology: Topology) -> None:
        self.detector, self.number = topology.detector, topology.next_number()
        self._comm, self._control = topology.private(), topology.private()  # for announcements; for agreements
        self.size = topology.size
        self._queues: dict[int, Queue] = {}
        self._numbers = itertools.count(1)  # of queues
        self._announced: dict[tuple[int, int], dict[int, int]] = {}  # rank 0: call -> rank -> digest
        self._ready: deque[tuple[int, Queue, Future]] = deque()  # decided calls: RUN or REFUSE
        self._open = 0  # calls that have not ended
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []  # sends that have not ended
        self._lock = threading.Lock()  # held briefly, never while waiting for a rank
        self._work_lock = threading.Lock()  # held by the thread that does the worker's work
        self._thread: threading.Thread | None = None
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._running: Future | None = None
        _workers.add(self)
        self.detector.checks.add(self)

    def queue(self, name: str, threaded: bool = False, alone: bool = False) -> Queue:
        """Create a queue. Collective.

        threaded: start the worker thread, which then runs the calls of all queues. Raises UnavailableError on all ranks
        if MPI lacks MPI_THREAD_MULTIPLE on any.
        """
        agree(
            self._control, [zlib.crc32(name.encode()), threaded, alone], f"queue({name!r}, {threaded=}, {alone=})", None
        )
        return self.add(lambda worker, number: Queue(worker, number, name, alone), threaded)

    def add(self, make: Callable[["Worker", int], QueueT], threaded: bool = False) -> QueueT:
        """Create a queue by `make(worker, number)`, and add it. Collective; raises as `queue`."""
        if threaded:
            self._start()
        queue = make(self, next(self._numbers))
        self._queues[queue.number] = queue
        return queue

    def _start(self) -> None:
        if self._thread is None:
            raise_together(self._control, thread_error())
            self._thread = threading.Thread(target=self._work, name="allreduce worker", daemon=True)
            self._thread.start()

    def submit(self, queue: Queue, future: Future) -> Future:
        """Announce a call to rank 0, or make it ready if nothing needs announcing; see Queue.submit."""
        self.detector.check()
        try:
            with self.detector.translating_failures(), self._lock:
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
                f"{queue.name} is broken: an earlier call failed ({type(queue.broken).__name__}: {queue.broken})"
            ) from queue.broken
        queue.submitted += 1
        self._open += 1
        if queue.alone or self.size == 1:
            self._ready.append((RUN, queue, future))
        else:
            queue.announce(future)

    def announce(self, number: int, count: int, digest: int) -> None:
        """Announce call `count` of queue `number` to rank 0. The caller holds the lock."""
        if self._comm.rank == 0:
            self._record(0, number, count, digest)
        else:
            self._send(np.array([number, count, digest], np.int64), 0, ANNOUNCE)

    def wait_for(self, done: threading.Event, timeout: float | None) -> None:
        """Wait until `done` is set; without a worker thread, do the worker's work meanwhile. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._thread is not None and threading.current_thread() is not self._thread:
            if not done.wait(timeout):
                raise TimeoutError(f"not done within {timeout:g} s")
            return
        self._work_until(done.is_set, deadline)

    def drop(self, queue: Queue) -> None:
        """Fail the queue's waiting calls with ClosedError, and remove the queue. Local."""
        self.fail(queue, ClosedError(f"{queue.name} is closed"))
        self._queues.pop(queue.number, None)
        self.detector.forget(queue.wait)

    def close(self) -> None:
        """Drop the queues and end the thread. Local; all ranks' calls must have ended before."""
        for queue in list(self._queues.values()):
            queue.drop()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.put(False)
            thread.join()
        _workers.discard(self)

    def abandon(self) -> None:
        """Drop the queues. Local. A worker thread inside an MPI call stays there, unless a rank has failed: then
        wait up to EXIT_SECONDS for it.
        """
        for queue in list(self._queues.values()):
            queue.drop()
        if self._thread is not None:
            self._wake.put(False)
            if self.detector.lost is not None and self._thread is not threading.current_thread():
                self._thread.join(EXIT_SECONDS)
        _workers.discard(self)

    # The work, done by the worker thread or by a thread that waits for a call

    def _work(self) -> None:
        prefer_this_thread()
        try:
            while self._wake.get():
                self._work_until(lambda: self._open == 0, None)
        except BaseException as error:  # callers wait for this thread, so they must get its error
            self._thread = None
            for queue in list(self._queues.values()):
                self.fail(queue, error)
            while self._ready:
                self._ready.popleft()[2].finish(error)

    def _work_until(self, done: Callable[[], bool], deadline: float | None) -> None:
        pause, checked = Pause(), time.monotonic()
        while not done():
            busy = False
            if self._work_lock.acquire(blocking=False):  # otherwise another thread does it
                try:
                    busy = self._step()
                finally:
                    self._work_lock.release()
            if busy:
                pause.begin()
                continue
            now = time.monotonic()
            pause(now)
            if now - checked > CHECK_SECONDS or self.detector.lost is not None:
                checked = now
                self._check_waits()
            if deadline is not None and now > deadline:
                raise TimeoutError("not done in time")

    def _step(self) -> bool:
        """Receive announcements and decisions, and run one call if one is ready. Returns whether it ran one."""
        if self.size > 1 and not self._ready and self.detector.lost is None:
            with self.detector.translating_failures():
                self._listen()
        with self._lock:
            if not self._ready:
                return False
            verb, queue, future = self._ready.popleft()
            self._running = future
        try:
            if queue.broken is not None:  # it has failed meanwhile
                future.finish(without_frames(queue.broken))
            elif verb == RUN:
                future.run()
            else:
                self._refuse(queue, future)
        finally:
            self._running = None
            with self._lock:
                self._open -= 1
        return True

    def _listen(self) -> None:
        message = np.empty(3, np.int64)
        tag = ANNOUNCE if self._comm.rank == 0 else DECIDE
        status = MPI.Status()
        while self._comm.Iprobe(tag=tag, status=status):
            self._comm.Recv(message, status.source, tag)
            with self._lock:
                first, second, third = message.tolist()
                if tag == ANNOUNCE:
                    self._record(status.source, first, second, third)
                else:
                    self._decided(first, second)
        for queue in list(self._queues.values()):
            queue.poll(self._lock)

    def decide(self, queue: Queue, future: Future, added: int) -> None:
        """Make a decided call ready to run. added: the change in the number of open calls: 1 minus the number of
        submitted calls that it stands for. The caller holds the lock.
        """
        self._open += added
        self._ready.append((RUN, queue, future))

    def _send(self, message: np.ndarray, rank: int, tag: int) -> None:
        """Start a non-blocking send. It must not wait: the caller holds the lock."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        self._sent.append((self._comm.Isend(message, rank, tag), message))

    def _record(self, rank: int, number: int, count: int, digest: int) -> None:
        """Rank 0: record `rank`'s announcement; when all ranks have announced the call, send the decision to all."""
        digests = self._announced.setdefault((number, count), {})
        digests[rank] = digest
        if len(digests) < self.size:
            return
        del self._announced[number, count]
        # this rank has dropped the queue, so no rank may run the call; the calls of the others fail
        if number not in self._queues:
            return
        verb = RUN if len(set(digests.values())) == 1 else REFUSE
        for other in range(1, self.size):
            self._send(np.array([verb, number, 0], np.int64), other, DECIDE)
        self._decided(verb, number)

    def _decided(self, verb: int, number: int) -> None:
        queue = self._queues.get(number)
        if queue is None or not queue.futures:
            return  # the queue was closed, or has failed meanwhile
        self._ready.append((verb, queue, queue.futures.popleft()))
        queue.wait.end()
        if queue.futures:
            queue.wait.begin(NamedCall(queue.futures[0].description))

    def _refuse(self, queue: Queue, future: Future) -> None:
        """Fail a call that differs between the ranks, with the same DisagreementError on all. Collective."""
        error: BaseException
        try:  # on the communicator of announcements: the control communicator is the main thread's
            error = disagreement(self._comm, all_values(self._comm, future.description, future.description))
        except BaseException as raised:
            error = raised
        self.fail(queue, error)
        future.finish(error)

    def _check_waits(self) -> None:
        """Have the stall detector check every queue's wait, and fail the queues whose wait ended in an error."""
        for queue in [each for each in self._queues.values() if each.broken is None]:
            try:
                self.detector.check_waits(queue.wait)
            except AllReduceError as error:
                self.fail(queue, error)

    def fail(self, queue: Queue, error: BaseException) -> None:
        """Fail the waiting calls of a queue, and refuse further ones. Local.

        The last call ends first: users may wait for it when the others end.
        """
        with self._lock:
            queue.broken = queue.broken or without_frames(error)
            queue.wait.end()
            cancelled = queue.cancel_waiting()
            cancelled += [future for _, owner, future in self._ready if owner is queue]
            self._ready = deque(each for each in self._ready if each[1] is not queue)
            self._open -= len(cancelled)
        for future in reversed(cancelled):
            future.finish(error)

    def give_up(self, queue: Queue, error: BaseException) -> None:
        """Fail all calls of a queue, also the running one, whose thread may never return from it. Local."""
        self.fail(queue, error)
        queue.wait.final = queue.broken  # the running call may wait with this record, now or later
        future = self._running
        if future is not None and future.queue is queue:
            future.finish(error)

    def check_deadline(self) -> None:
        """Fail a queue whose running call exceeds its limit; in another thread, because it runs users' callbacks."""
        future = self._running
        if future is None or future.queue is None or future.queue.broken is not None:
            return
        if time.perf_counter() - future.begin > future.limit:
            threading.Thread(target=self.give_up, args=(future.queue, future.late()), daemon=True).start()

    def wait_idle(self, limit: float) -> bool:
        """Wait up to `limit` seconds for the submitted calls. Returns False if one is still running."""
        deadline = time.monotonic() + limit
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._running is None

    threaded = property(lambda self: self._thread is not None)


EXIT_SECONDS = 10.0  # limit of the wait for running calls at the program's exit
_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def prefer_this_thread() -> None:
    """Let the operating system run this thread before the others of the process, where the process may ask for that.

    A worker thread needs a core for a few microseconds at each step of an algorithm, and shares it with a thread that
    computes. Without priority, the worker, and with it every other rank's worker, waits until that thread's time slice
    ends. Lower values than 0 need root, CAP_SYS_NICE or RLIMIT_NICE; otherwise nothing changes.
    """
    if sys.platform == "linux":  # elsewhere the priority is that of the whole process
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) - WORKER_PRIORITY)


def thread_error() -> UnavailableError | None:
    """Return the error to raise if a second thread may not call MPI; None if it may. Local."""
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        return None
    return UnavailableError(
        "a worker thread needs MPI_THREAD_MULTIPLE. mpi4py requests it unless mpi4py.rc.threads or "
        "mpi4py.rc.thread_level was changed; if neither was, this MPI library does not support it"
    )


@atexit.register
def _end() -> None:
    """Close the workers at exit. MPI can't be finalized while a thread is in it: if a call is still running after
    EXIT_SECONDS, end the job.
    """
    if children.forked():  # the child has copies of the workers, but none of their threads
        return
    for worker in list(_workers):
        if worker.threaded and not MPI.Is_finalized():
            if not worker.wait_idle(EXIT_SECONDS):
                abort.end_job("a collective still hangs at the end of the program; MPI_Abort ends the job\n", 1)
            worker.close()


children.guard(Queue, "submit", "close")
