"""The worker of a topology: runs the calls of all queues in the same order on all ranks.

Collectives match by their order, and the buckets of two optimizers, say, become ready in different orders on different
ranks. So every rank announces its calls, by name, to rank 0, which decides the next call (announcements.py). The names
are given (Horovod's), or are the numbers of the calls in their queue.

Without a worker thread, the thread that waits for a call does the worker's work.
"""

import atexit
import contextlib
import copy
import json
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
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import binomial
from allreduce.call.announcements import JOIN, Announcement, Announcements, Decision, PerRank, Request
from allreduce.errors import (
    AllReduceError,
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
    DisagreementError,
    OptionError,
    RankLostError,
    UnavailableError,
)
from allreduce.health import abort
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.transport.control import agree, disagreement, on_all_ranks
from allreduce.transport.wait import CHECK_SECONDS, NamedCall, Pause, WaitRecord, wait_until

EAGER_SECONDS = 1e-3  # that the program's thread polls for other ranks before its first sleep, on a core of its own
WORKER_PRIORITY = 10  # by which the worker thread's nice value is lower than that of the process
NOTHING = Request("")
JoinProxy = Callable[[Any], Callable[[PerRank], object]]


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error without its traceback, whose frames would keep buffers alive."""
    try:
        return copy.copy(error)
    except Exception:  # of a type that can't be copied
        return BrokenError(f"{type(error).__name__}: {error}")


class Future:
    """A submitted call. Its work starts after all ranks have submitted the call and earlier calls have ended.

    per_rank: every rank's `own` of the Request, set before the work runs, which gets it. limit: seconds that the work
    may take, not counting waits before it; after that the call and all waiting ones of the queue fail with the error
    `late()`. begin: time.perf_counter() at the start of its work; inf before.
    """

    def __init__(
        self,
        work: Callable[[PerRank], object] | None = None,
        queue: "Queue | None" = None,
        description: str = "",
        name: str = "",
        limit: float = math.inf,
    ) -> None:
        self.queue, self.description, self.name, self.limit = queue, description, name, limit
        self._work = work
        self.per_rank: PerRank = [None]
        self.refused: AllReduceError | None = None  # the ranks' calls differ; the same error on all ranks
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.begin = math.inf

    def run(self) -> None:
        """Do the work in the calling thread, and store its error for `wait`."""
        work, self._work = self._work, None  # drops the reference to the caller's buffer
        assert work is not None
        self.begin, error = time.perf_counter(), None
        try:
            work(self.per_rank)
        except BaseException as raised:  # `wait` raises it; the worker thread has no caller
            error = raised
        self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        """Mark the call as ended, with `error` unless it has one."""
        self.error = self.error or error
        self._done.set()

    def late(self) -> BaseException:
        """Return the error of a call that has taken longer than its limit."""
        return CollectiveTimeoutError(f"{self.description} was not done within {self.limit:g} s")

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the call to end, and raise its error. After `timeout` seconds: TimeoutError; the call continues."""
        if self.queue is not None and not self._done.is_set():
            self.queue.worker.wait_for(self._done, timeout)
        if self.error is not None:
            raise self.error


class ByProxy(Future):
    """A joined rank's part of a call. No caller waits for it, so its error fails the queue."""

    def finish(self, error: BaseException | None) -> None:
        super().finish(error)
        if self.error is not None and self.queue is not None:
            self.queue.worker.fail(self.queue, self.error)


class Queue:
    """The calls of one user. A call runs when every rank has submitted the call of its name or number, or has joined.

    alone: the topology's only queue: program order is the same on all ranks, so nothing is announced. goes_on: a call
    that differs between ranks fails alone; otherwise it also ends the queue. join_proxy: computes a joined rank's work
    from a Request's `same`. wait: the record of its calls' waits, by default a new one.
    """

    def __init__(
        self,
        worker: "Worker",
        number: int,
        name: str,
        alone: bool = False,
        goes_on: bool = False,
        join_proxy: JoinProxy | None = None,
        wait: WaitRecord | None = None,
    ) -> None:
        self.worker, self.number, self.name, self.alone, self.goes_on = worker, number, name, alone, goes_on
        self.wait = wait or worker.detector.wait_record(-((worker.number << 20) + number), raises=True)
        self.broken: BaseException | None = None  # the error after which it takes no more calls
        self.closed = False
        self._announcements = Announcements(worker.rank, worker.size)
        self._join_proxy = join_proxy
        self._submitted = 0  # calls without a given name
        self.waiting: dict[str, Future] = {}  # announced, and not decided
        self._first: Future | None = None  # the call that has waited longest
        self._named: weakref.WeakValueDictionary[str, Future] = weakref.WeakValueDictionary()  # the last call of a name

    def submit(self, work: Callable[[], object], description: str = "call", waits: bool = False) -> Future:
        """Submit a call: the worker does `work` once all ranks have submitted the call. Local.

        description: must be equal on all ranks. Otherwise the future fails with the same DisagreementError on all
        ranks. waits: if no other call is under way, do the work here and now, and return when the call has ended; else
        return at once. Do not wait for a future inside `work`.
        """
        text = f"{description} of {self.name}"
        return self.worker.submit(self, Future(lambda _: work(), self, text), Request(text), waits)

    def call(self, name: str, request: Request, work: Callable[[PerRank], object]) -> Future:
        """Submit a call with a name, as `submit`: the ranks' calls match by it. `work` gets every rank's `own`.

        Raises OptionError while an earlier call of the name has not ended.
        """
        earlier = self._named.get(name)
        if earlier is not None and not earlier.done():
            raise OptionError(f"a call named {name} has not ended yet; give calls that overlap different names")
        self._named[name] = future = Future(work, self, request.words, name)
        try:
            return self.worker.submit(self, future, request)
        except BaseException:
            self._named.pop(name, None)
            raise

    def join(self, ended: Callable[[int], object]) -> Future:
        """Announce that this rank submits no calls until all ranks have joined. Local. ended: called with the rank that
        joined last.
        """
        request = Request(None, self.worker.rank, description=f"join of {self.name}")
        return self.call(JOIN, request, lambda per_rank: ended(per_rank[-1]))

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

    def abandon(self) -> None:
        """Take no more calls, and fail the waiting ones with ClosedError. The other ranks' calls fail soon. Local."""
        if not (self.closed or self.alone):
            self.worker.detector.leave(f"it has dropped {self.name}", self.wait)
        self.drop()

    def drop(self) -> None:
        """As `abandon`, but do not tell the other ranks, because they drop the queue too. Local."""
        self.closed = True
        self.worker.drop(self)

    # Called by the worker with its lock held

    def announce(self, future: Future, request: Request) -> None:
        """Announce a submitted call to the parent, once the subtree's announcements are complete."""
        if not future.name:
            self._submitted += 1
            future.name = str(self._submitted)
        self.waiting[future.name] = future
        self._watch_first()
        self._pass_on(self._announcements.announce(future.name, request))

    def receive(self, sender: int, message: list[Any]) -> None:
        """Handle a message of the parent, which are decisions, or the announcement of a child."""
        if self.broken is not None:
            return
        if sender == self._announcements.parent:
            self._enqueue(self._announcements.learn(message))
        else:
            self._pass_on(self._announcements.hear(sender, message))

    def send_decisions(self) -> None:
        """Rank 0: send the new decisions to all ranks, and hand the calls to the worker."""
        decided = [] if self.broken is not None else self._announcements.decisions()
        if decided:
            self.worker.send(self.number, decided, self._announcements.children)
            self._enqueue(decided)

    def cancel_waiting(self) -> list[Future]:
        """Remove and return the calls that wait for other ranks."""
        cancelled = list(self.waiting.values())
        self.waiting.clear()
        self._watch_first()
        return cancelled

    def _pass_on(self, announcements: Sequence[Announcement]) -> None:
        """Send announcements to the parent."""
        for each in announcements:
            assert self._announcements.parent is not None
            self.worker.send(self.number, each, [self._announcements.parent])

    def _enqueue(self, decisions: Sequence[Decision]) -> None:
        """Hand decided calls to the worker."""
        for call in filter(None, map(self._call_of, decisions)):
            self.worker.make_ready(self, call)
        self._watch_first()

    def _call_of(self, decision: Decision) -> Future | None:
        """Return this rank's call for a decision, or its join proxy's. None if the call is refused and this rank has
        not submitted it.
        """
        call, refusal = self.waiting.pop(decision.name, None), decision.refusal
        if call is None:
            if refusal is not None or self._join_proxy is None:
                return None
            call = ByProxy(self._join_proxy(decision.same), self, decision.name)
        call.per_rank = decision.per_rank or [None] * self.worker.size
        if isinstance(refusal, list):
            call.refused = disagreement(self.worker.comm, refusal)
        elif refusal is not None:
            call.refused = on_all_ranks(DisagreementError(refusal), self.worker.comm)
        return call

    def _watch_first(self) -> None:
        """Make the wait record show the call that has waited longest."""
        first = next(iter(self.waiting.values()), None)
        if first is self._first:
            return
        self._first = first
        if first is None:
            self.wait.end()
        else:
            self.wait.begin(NamedCall(first.description))


class Worker:
    """Runs the calls of a topology's queues in the same order on all ranks; get it with `topology.service(Worker)`.

    The constructor and `queue` are collective.
    """

    def __init__(self, topology: Topology) -> None:
        self.detector, self.number = topology.detector, topology.next_number()
        self.comm, self._control = topology.private(), topology.private()  # for announcements; for agreements
        self.rank, self.size = topology.rank, topology.size
        self._parent, self._children = binomial(self.rank, 0, self.size)
        self._queues: dict[int, Queue] = {}
        self._newest = 0  # number of the last queue
        self._early: list[tuple[int, int, Any]] = []  # (sender, queue, message) of queues that come soon here
        self._ready: deque[tuple[Queue, Future]] = deque()  # decided calls
        self._crowded = topology.sharing > topology.cores  # another rank may need this rank's core
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []  # sends that have not ended
        self._lock = threading.RLock()  # held briefly, never while waiting for a rank
        self._work_lock = threading.Lock()  # held by the thread that does the worker's work
        self._thread: threading.Thread | None = None
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._running: Future | None = None
        _workers.add(self)
        self.detector.checks.add(self)

    def queue(self, name: str, threaded: bool = False, alone: bool = False, **options: Any) -> Queue:
        """Create a queue. Collective.

        threaded: start the worker thread, which then runs the calls of all queues. Raises UnavailableError on all ranks
        if MPI lacks MPI_THREAD_MULTIPLE on any. alone, options: see Queue.
        """
        text = f"queue({name!r}, {threaded=}, {alone=})"
        error = thread_error() if threaded else None
        agree(self._control, [zlib.crc32(name.encode()), threaded, alone], text, error)
        if threaded and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="allreduce worker", daemon=True)
            self._thread.start()
            self._wake.put(True)  # for calls submitted before
        queue = Queue(self, self._newest + 1, name, alone, **options)
        with self._lock:
            self._newest += 1
            self._queues[queue.number] = queue
            early, self._early = self._early, []
            for each in early:
                self._receive(*each)
        return queue

    def submit(self, queue: Queue, future: Future, request: Request = NOTHING, waits: bool = False) -> Future:
        """Announce a call, or make it ready if nothing needs announcing; see Queue.submit. waits: this thread waits for
        it now. If nothing else is to be done it does the work too: that spares two switches of threads."""
        if queue.closed:
            raise ClosedError(f"{queue.name} is closed")
        future.per_rank = [request.own]
        self.detector.check()
        try:
            with self.detector.translating_failures(), self._lock:
                if queue.broken is not None:
                    raise BrokenError(
                        f"{queue.name} is broken: an earlier call failed ({type(queue.broken).__name__}: "
                        f"{queue.broken})"
                    ) from queue.broken
                here = self._thread is None or (waits and self._is_idle())
                if queue.alone or self.size == 1:
                    self._ready.append((queue, future))
                else:
                    queue.announce(future, request)
        except RankLostError as lost:
            self.fail(queue, lost)
            raise
        if not here:
            self._wake.put(True)
        elif waits:
            try:
                self.work_until(future.done)
            except BaseException:  # a signal handler's, say
                self._wake.put(True)  # the worker thread goes on: other ranks may wait for this call
                raise
        return future

    def wait_for(self, done: threading.Event, timeout: float | None) -> None:
        """Wait until `done` is set; without a worker thread, do the worker's work meanwhile. Raises TimeoutError."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            if not done.wait(timeout):
                raise TimeoutError(f"not done within {timeout:g} s")
            return
        self.work_until(done.is_set, math.inf if timeout is None else timeout)

    def drop(self, queue: Queue) -> None:
        """Fail the queue's waiting calls with ClosedError, and remove the queue. Local."""
        self.fail(queue, ClosedError(f"{queue.name} is closed"))
        with self._lock:  # `_is_idle` may read them
            self._queues.pop(queue.number, None)
        self.detector.forget(queue.wait)

    def close(self) -> None:
        """Drop the queues, end the thread, and wait up to SEND_SECONDS for the last messages to be sent. Local; all
        ranks' calls must have ended before.
        """
        for queue in list(self._queues.values()):
            queue.drop()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.put(False)
            thread.join()
        if self.detector.lost is None:
            with contextlib.suppress(MPI.Exception):  # a receiver may have failed
                wait_until(lambda: all(request.Test() for request, _ in self._sent), SEND_SECONDS)
        _workers.discard(self)

    def free(self, topology: Topology) -> None:
        """Close a worker that is not the topology's service, and free its communicators. Collective."""
        self.close()
        topology.release(self._control)
        topology.release(self.comm)

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
                self.work_until(self._is_idle)
        except BaseException as error:  # callers wait for this thread, so they must get its error
            self._thread = None
            for queue in list(self._queues.values()):
                self.fail(queue, error)
            while self._ready:
                self._ready.popleft()[1].finish(error)

    def work_until(self, done: Callable[[], bool], limit: float = math.inf) -> None:
        """Do the worker's work until `done`, or wait while another thread does it. TimeoutError after the limit."""
        # the worker thread leaves its core to the program's thread, which may compute
        pause = Pause() if self._crowded or threading.current_thread() is self._thread else Pause(EAGER_SECONDS)
        checked = time.monotonic()

        def work() -> None:
            nonlocal checked
            if self._work_lock.acquire(blocking=False):  # otherwise another thread does it
                try:
                    if self._step():
                        pause.begin()
                        return
                finally:
                    self._work_lock.release()
            now = time.monotonic()
            if now - checked > CHECK_SECONDS or self.detector.lost is not None:
                checked = now
                self._check_waits()

        if not done():
            work()  # also if the limit is 0: a caller may poll
        if not wait_until(done, limit, work, pause):
            raise TimeoutError(f"not done within {limit:g} s")

    def _step(self) -> bool:
        """Receive announcements and decisions, and run one call if one is ready. Returns whether it ran one."""
        if self.size > 1 and not self._ready and self.detector.lost is None:
            with self.detector.translating_failures():
                self._listen()
        with self._lock:
            if not self._ready:
                return False
            queue, future = self._ready.popleft()
            self._running = future
        try:
            if queue.broken is not None:  # it has failed meanwhile
                future.finish(without_frames(queue.broken))
            elif future.refused is not None:
                if not queue.goes_on:
                    self.fail(queue, future.refused)
                future.finish(future.refused)
            else:
                future.run()
        finally:
            self._running = None
        return True

    def _is_idle(self) -> bool:
        """Return whether all calls have ended."""
        with self._lock:
            return not (self._ready or self._running or any(queue.waiting for queue in self._queues.values()))

    def _listen(self) -> None:
        """Receive all messages that have arrived, and send the decisions that they allow."""
        status = MPI.Status()
        while self.comm.Iprobe(status=status):
            text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.comm.Recv(text, status.source, status.tag)
            number, message = json.loads(text.tobytes())
            with self._lock:
                if status.source == self._parent:  # a decision; the subtree learns of it whatever becomes of it here
                    self._send(text, self._children)
                self._receive(status.source, number, message)
        if self.rank == 0:
            with self._lock:
                for queue in list(self._queues.values()):
                    queue.send_decisions()

    def _receive(self, sender: int, number: int, message: Any) -> None:
        """Handle a message of one queue. A queue that has been dropped gets none; its calls end on the other ranks."""
        if number > self._newest:
            self._early.append((sender, number, message))
        elif number in self._queues:
            self._queues[number].receive(sender, message)

    # Called by queues, which hold the lock

    def make_ready(self, queue: Queue, future: Future) -> None:
        """Let a decided call run."""
        self._ready.append((queue, future))

    def send(self, number: int, message: Sequence[Any], ranks: Sequence[int]) -> None:
        """Send a message of queue `number`, in JSON, to these ranks."""
        self._send(np.frombuffer(json.dumps([number, message]).encode(), np.uint8), ranks)

    def _send(self, text: np.ndarray, ranks: Sequence[int]) -> None:
        """Start non-blocking sends. They must not wait: the caller holds the lock."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        self._sent += [(self.comm.Isend(text, rank), text) for rank in ranks]

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
            cancelled += [future for owner, future in self._ready if owner is queue]
            self._ready = deque(each for each in self._ready if each[0] is not queue)
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
        wait_until(self._is_idle, limit)
        return self._running is None

    def end(self) -> None:
        """Close the worker at the program's exit. MPI can't be finalized while a thread is in it: if a call is still
        running after EXIT_SECONDS, end the job. Local."""
        if self._thread is not None and not MPI.Is_finalized():
            if not self.wait_idle(EXIT_SECONDS):
                abort.end_job("a collective still hangs at the end of the program; MPI_Abort ends the job\n", 1)
            self.close()


SEND_SECONDS = 1.0
EXIT_SECONDS = 10.0  # limit of the wait for running calls at the program's exit
_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def prefer_this_thread() -> None:
    """Let the operating system run this thread before the others of the process, where the process may ask for that.

    Else a worker, and with it every other rank's, waits for the time slice of a thread that computes. Values below 0
    need root, CAP_SYS_NICE or RLIMIT_NICE; otherwise nothing changes.
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
    for worker in [] if children.forked() else list(_workers):  # a child has copies, but none of their threads
        worker.end()


children.guard(Queue, "submit", "close")
