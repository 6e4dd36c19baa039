"""The stall detector: reports which ranks wait where and which are missing; ends waits that would last for ever.

- A rank that has waited for a second sends a status message that says where (status_messages.py). So every waiting rank
  knows where all ranks are. Of the ranks that wait in a call, one reports it.
- A rank whose process has ended without telling MPI counts as failed under ULFM, and otherwise as one that has left.
- A wait in a loop of ours (agreements, queues of the worker) ends in an error that is raised there. A wait inside MPI
  can't be interrupted: its error is printed, and the job ends.
- Ranks that wait in different calls end in a time-out, not sooner: a rank may still reach the call in another thread,
  and ranks with roles (servers) call a backend unequally often.
- Under ULFM (transport/ulfm.py) the watchdog also asks MPI for failed ranks. After a failure it revokes the topology's
  communicators, so that waits inside MPI return, and sets `lost` for loops of ours.
"""

import copy
import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from allreduce.errors import AllReduceError, CollectiveTimeoutError, OptionError, RankLostError
from allreduce.health import abort, dump
from allreduce.health.status_messages import StatusMessages
from allreduce.notices import log
from allreduce.process import variables
from allreduce.transport import liveness, processes, ulfm
from allreduce.transport.control import different_calls
from allreduce.transport.tables import spans
from allreduce.transport.wait import CHECK_SECONDS, DescribedCall, Pause, WaitRecord, default, wait_until

STALL, TIMEOUT = "ALLREDUCE_STALL_SECONDS", "ALLREDUCE_TIMEOUT_SECONDS"
DEFAULTS = {STALL: 30.0, TIMEOUT: 1800.0}  # seconds, where the variable is not set
ANNOUNCE_SECONDS = 1.0  # length of a wait after which this rank announces it to the others
SOON_SECONDS = 1.0  # how long MPI may take to report a failed rank
MOST_REPORTED = 8  # calls of other ranks, beyond which a rank reports no wait
END_SECONDS = 1.0  # to wait for another thread's check of the waits before this rank ends the job
LEFT_SECONDS = 2.0  # how long the last messages of a rank that has left may take to arrive

_topologies: Counter[str] = Counter()  # created so far, by their ranks


def seconds(variable: str) -> float:
    """Return the seconds that STALL or TIMEOUT sets; inf for no limit. Local. Raises OptionError."""
    return variables.seconds(variable, DEFAULTS[variable])


class StallDetector:
    """Reports long waits of a topology's ranks, and ends waits that can't succeed. Constructor and `close`: collective.

    comm: for status messages. isolated: for communicators outside any topology; comm is
        then MPI.COMM_SELF, and no status messages are sent.
    timeout, stall: seconds after which a wait ends in a CollectiveTimeoutError, and after which it is reported.
    revoke: revokes the topology's communicators after a failure; called in any thread.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        timeout: float,
        stall: float | None = None,
        isolated: bool = False,
        revoke: Callable[[], object] = bool,
    ) -> None:
        self.timeout, self.stall = timeout, seconds(STALL) if stall is None else stall
        self.lost: RankLostError | None = None  # a rank has failed, or another rank has revoked the topology
        self._isolated, self._revoke = isolated, revoke
        self.messages = StatusMessages(comm)
        self._rank, ranks = processes.here() if isolated else (comm.rank, comm.size)
        self._ranks = "" if isolated else spans(processes.world_ranks(comm))
        _topologies[self._ranks] += 1
        self._ranks += f"#{_topologies[self._ranks]}"  # several topologies may have the same ranks
        self.active = ranks > 1
        # workers, whose `check_deadline` ends calls that take too long without a wait for other ranks; in any thread
        self.checks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waits: list[WaitRecord] = []
        self._announce_seconds = min(ANNOUNCE_SECONDS, self.stall / 2)
        self._lock = threading.RLock()  # a rank may end the job during a check
        self._from_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.closed = False
        _watchdog.add(self)

    def wait_record(self, number: int, raises: bool = False) -> WaitRecord:
        """Create a WaitRecord, which is checked from now on. Local."""
        wait = WaitRecord(number, raises, self._ranks)
        self._waits.append(wait)
        return wait

    def waits(self) -> list[WaitRecord]:
        """Return the records that are checked. Local, from any thread."""
        return list(self._waits)

    def forget(self, wait: WaitRecord) -> None:
        """Stop checking a record. Local."""
        if wait in self._waits:
            self._waits.remove(wait)

    def close(self) -> None:
        """Stop, and receive all pending messages, so that the communicator can be freed. Collective."""
        self.abandon()
        self.messages.drain(self.timeout)

    def abandon(self) -> None:
        """Stop. Local."""
        with self._lock:
            self.closed = True
            self._waits.clear()

    def poll_failures(self) -> None:
        """Ask MPI for failed ranks; after a failure, revoke the topology's communicators. From any thread.

        Also ends this process if another rank has announced that it ends the job.
        """
        if self.closed or self.messages.size == 1:
            return
        try:
            with self._lock:
                if self.lost is None and not self.closed:
                    self.messages.comm.Iprobe()  # raises if a rank has failed or has revoked it
                if not self.closed:
                    self.messages.exchange()
        except MPI.Exception as error:
            if ulfm.lost(error) is None:
                raise
            self.handle_failure()
        if self.messages.ended is not None:
            dump.write("another rank ends the job", last=True)
            if self._lock.acquire(timeout=END_SECONDS):  # else another thread ends this process
                try:
                    self.messages.announce_end(self.messages.ended)  # forwards it to this rank's neighbours
                finally:
                    self._lock.release()
            abort.exit_quietly(self.messages.ended)

    def handle_failure(self) -> RankLostError:
        """Record that a rank has failed, and revoke the topology, which ends all ranks' waits. Local."""
        with self._lock:
            first = self.lost is None
            lost = self.lost = self.lost or ulfm.loss(None if self.closed else self.messages.comm)
            self.messages.lost = True
        if first:
            self._revoke()
        return lost

    def failure_behind(self, error: BaseException) -> RankLostError | None:
        """Return the RankLostError to raise instead of `error` if a failed rank caused it, else None. Local.

        The topology is then revoked.
        """
        if not ulfm.in_force():
            return None
        failure = ulfm.lost(error)
        if self._isolated:
            return failure
        if failure is None and ulfm.may_be_failure(error):  # MPI may soon report the failed rank that caused it
            wait_until(lambda: self.lost is not None, SOON_SECONDS, pause=Pause(longest=ulfm.POLL_SECONDS))
            failure = self.lost
        return None if failure is None else ulfm.again(self.handle_failure())

    def translating_failures(self) -> "StallDetector":
        """Context manager: if an error in the body is caused by a failed rank, revoke the topology and raise
        RankLostError instead.
        """
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lost = self.failure_behind(error) if isinstance(error, Exception) else None
        if isinstance(error, MPI.Exception) and lost is not None:
            ulfm.unblock_comm_creation()
        if lost is not None and not (isinstance(error, RankLostError) and error.args == lost.args):
            raise lost from (None if isinstance(error, RankLostError) else error)

    def check(self) -> None:
        """Raise RankLostError if a rank has failed. Cheap enough for every turn of a loop that waits. Local."""
        if self.lost is not None:
            raise ulfm.again(self.lost)

    def check_waits(self, wait: WaitRecord | None = None) -> None:
        """Exchange status messages, report long waits and end hopeless ones. From any thread.

        Raises `wait.final` or `wait.error`.
        """
        if wait is not None:
            self.check()
        if not self.closed and self.active and self._lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self._check_waits(time.monotonic(), wait is not None or self._from_threads)
            finally:
                self._lock.release()
        error = None if wait is None else copy.copy(wait.final) or wait.error  # a traceback would keep buffers alive
        if error is not None:
            raise error

    def leave(self, why: str, wait: WaitRecord | None = None) -> None:
        """Tell the others that this rank makes no further calls of one user or, without `wait`, of any."""
        if self.closed or self.messages.size == 1 or (wait is not None and self.lost is not None):
            return
        try:
            with self._lock:
                self.messages.announce_leaving(why, wait)
        except MPI.Exception as error:  # the others learn of the failed rank from MPI
            if ulfm.lost(error) is None:
                raise

    def tell(self, announce: Callable[[StatusMessages], object]) -> None:
        """Send a status message while this rank ends the job. From any thread, also during a check."""
        if not self.closed and self.messages.size > 1 and self.lost is None and self._lock.acquire(timeout=END_SECONDS):
            try:
                announce(self.messages)
                if self._from_threads:
                    self.messages.exchange()
            finally:
                self._lock.release()

    def _check_waits(self, now: float, may_communicate: bool) -> None:
        for each in list(self.checks):
            each.check_deadline()
        long = []
        for wait in list(self._waits):
            call = wait.call
            if not wait.new(now) and call is not None and now - wait.since >= self._announce_seconds:
                long.append((wait, call))
        self.messages.set_waits(long)
        if may_communicate and self.lost is None:
            self.messages.exchange()
        if long:
            liveness.look() if self._isolated else self.messages.look_for_gone_processes()
        for wait, call in long:
            if wait.error is None:  # else it ends the call, which may still tell the other ranks
                self._judge(wait, call, now)
        while self.messages.dump_requests:
            rank, text = self.messages.dump_requests.pop(0)
            dump.write(f"rank {rank} {text}")

    def _ask_for_dumps(self, why: str) -> None:
        """Write a dump of this rank, and request those of all other ranks."""
        if dump.enabled():
            dump.write(why)
            self.messages.request_dumps(why)

    # Judgement

    def _judge(self, wait: WaitRecord, call: DescribedCall, now: float) -> None:
        waited = now - wait.since
        error: AllReduceError | None = None
        patience = min(LEFT_SECONDS, self.timeout / 2)
        left = self.messages.left_error(wait, now - patience, call)
        if self.messages.disagree(wait, call):
            error = different_calls(self.messages.table(call))
        elif left is not None:
            error = left
        elif waited > self.timeout:
            error = CollectiveTimeoutError(
                f"waited {waited:.0f} s for other ranks in: {wait}{self._where(call)}\n"
                f"  ({TIMEOUT} or Topology(timeout=seconds) sets how long a rank waits)"
            )
        elif waited > self.stall and not wait.warned and self._reports(wait, call):
            wait.warned = True
            log.warning(
                "rank %d has waited %.0f s for other ranks in: %s%s", self._rank, waited, wait, self._where(call)
            )
            if dump.enabled():
                log.warning("the stacks and last calls of all ranks are in %s", dump.files())
            self._ask_for_dumps(f"waits in {wait}")
        if error is None or wait.call is not call:
            return
        self._ask_for_dumps(f"gives up {wait}")
        self.messages.note_given_up(wait, call)
        if self.messages.size > 1 and not abort.in_part():
            error.reporter = self.messages.reporter(wait, call)
        if wait.raises:
            wait.error = error
            if wait.call is not call:  # the call has ended meanwhile
                wait.error = None
        else:
            abort.wait_for_reporter(error)
            abort.end_job(f"{type(error).__name__}: {error}\n", abort.exit_code_of(error))

    def _reports(self, wait: WaitRecord, call: DescribedCall) -> bool:
        """Return whether this rank reports a wait. Without status messages only ranks 0, 1, 2, 4, 8, ... do."""
        if self.messages.size > 1:
            return self.messages.is_reporter(wait, call, MOST_REPORTED)
        return self._rank & (self._rank - 1) == 0

    def _where(self, call: DescribedCall) -> str:
        """Return the table of where all ranks are, on new lines; "" without status messages."""
        return f"\n{self.messages.table(call)}" if self.messages.size > 1 else ""


@functools.cache
def default_detector() -> StallDetector:
    """Return the detector for communicators outside any topology: it knows nothing of other ranks. Local."""
    try:
        timeout, stall = seconds(TIMEOUT), seconds(STALL)
    except OptionError:  # Topology raises it
        timeout, stall = DEFAULTS[TIMEOUT], DEFAULTS[STALL]
    return StallDetector(MPI.COMM_SELF, timeout, stall, isolated=True)


default.append(default_detector)


class _Watchdog:
    def __init__(self) -> None:
        self._detectors: weakref.WeakSet[StallDetector] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, detector: StallDetector) -> None:
        with self._lock:
            self._detectors.add(detector)
        if self._thread is None and detector.active:
            self._thread = threading.Thread(target=self._run, name="allreduce watchdog", daemon=True)
            self._thread.start()
            abort.on_leaving(self._end)
            abort.on_ending(self._end_others)

    def _run(self) -> None:
        listens = ulfm.in_force()
        if listens:
            ulfm.finalize_without_barrier()
        checked = time.monotonic()
        while not self._stop.wait(ulfm.POLL_SECONDS if listens else CHECK_SECONDS):
            due = not listens or time.monotonic() - checked > CHECK_SECONDS
            checked = time.monotonic() if due else checked
            for detector in self.detectors():
                if MPI.Is_finalized():  # the program continues after MPI_Finalize
                    return
                try:
                    with ulfm.alone_for_now():
                        if listens:
                            detector.poll_failures()
                        if due:
                            detector.check_waits()
                except Exception:  # without the watchdog hangs would go unreported
                    log.exception("the watchdog met an error, and continues")

    def waits(self) -> list[WaitRecord]:
        return [wait for detector in self.detectors() for wait in detector.waits()]

    def detectors(self) -> list[StallDetector]:
        with self._lock:
            return list(self._detectors)

    def _end(self, why: str) -> None:
        """At exit, before MPI_Finalize: stop the thread, and tell the other ranks that this one leaves."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        for detector in self.detectors():
            detector.leave(why)

    def _end_others(self, code: int, why: str) -> None:
        """Write the dump of this rank, and give the other ranks time to write theirs.

        Under ULFM, also tell them to end: Open MPI's MPI_Abort ends none of them if no rank has failed.
        """
        if dump.enabled():
            dump.write(why, last=True)
            for detector in self.detectors():
                detector.tell(lambda messages: messages.request_dumps(dump.error_line(why)))
            time.sleep(dump.WRITE_SECONDS)
        if ulfm.in_force():
            for detector in self.detectors():
                detector.tell(lambda messages: messages.announce_end(code))


_watchdog = _Watchdog()
dump.sources.append(_watchdog.waits)
