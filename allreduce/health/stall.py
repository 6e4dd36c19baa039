"""The stall detector: says which rank waits where and which has not come, and ends waits that would last for ever.

- A rank that has waited for a second tells the others where (status_messages.py). A rank that tells nothing does not
  wait. So every waiting rank knows where all ranks are, and no rank has to answer. Nothing is sent while all is well.
- Of the ranks that wait in a call, one reports it.
- A rank whose process has ended without telling MPI counts as lost where ranks may be lost, and else as one that left.
- A wait in a loop of ours (agreements, queues of the worker) ends in an error that is raised there. A wait inside of
  MPI can't be left: its error is printed, and the job ends.
- Ranks that wait in different calls, one in a backend's and one in an agreement, say, end by the time-out, and are told
  long before where all ranks are. That they wait for ever is never certain: a rank may come to a call by another
  thread, also by one that Python does not know (XLA's, autograd's); not every call needs all ranks, so a rank may be
  behind in a call that others have left; and ranks with roles (servers) call a backend unequally often, so counts
  don't tell which rank is behind.
- Where ranks may fail while others go on (transport/ulfm.py), the watchdog also listens for failures. It revokes the
  topology's communicators then, so that waits inside of MPI return, and sets `lost` for loops of ours.
"""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from mpi4py import MPI

from allreduce.errors import AllReduceError, CollectiveTimeoutError, DisagreementError, OptionError, RankLostError
from allreduce.health import abort, stacks
from allreduce.health.status import StatusRows
from allreduce.health.status_messages import StatusMessages
from allreduce.notices import log
from allreduce.transport import liveness, processes, ulfm
from allreduce.transport.liveness import Process
from allreduce.transport.wait import LOOK_SECONDS, Call, Pause, WaitRecord, default, wait_until

STALL, TIMEOUT = "ALLREDUCE_STALL_SECONDS", "ALLREDUCE_TIMEOUT_SECONDS"
TELL_SECONDS = 1.0  # after which a wait is told to the other ranks
SOON_SECONDS = 1.0  # by then MPI has told of a rank that has died
SHOWN = 8  # calls in a report
END_SECONDS = 1.0  # to wait for a thread that looks at waits while this one ends the job
LEFT_SECONDS = 2.0  # the last messages of a rank that has left may still be on their way


def seconds(variable: str, default: float) -> float:
    """A number of seconds from the environment; 0 or less means no limit. OptionError when it is no number."""
    given = os.environ.get(variable)
    try:
        value = float(given) if given else default
    except ValueError:
        value = float("nan")
    if value != value:
        raise OptionError(f"{variable} must be a number of seconds such as {default:g}, or 0 for never, got {given!r}")
    return value if value > 0 else float("inf")


class StallDetector:
    """The waits of one topology's ranks. Creating it and `close` are collective.

    comm: a communicator of its own; of this rank alone before the ranks can send each other status messages.
    timeout, stall: seconds after which a wait ends in a CollectiveTimeoutError, and after which it is reported.
    revoke: revokes the topology's communicators when a rank is lost; called in any thread.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        timeout: float,
        stall: float | None = None,
        lonely: bool = False,
        revoke: Callable[[], object] = bool,
    ) -> None:
        self.timeout, self.stall = timeout, seconds(STALL, 30.0) if stall is None else stall
        self.lost: RankLostError | None = None  # a rank has died, or another one says so
        self._lonely, self._revoke = lonely, revoke
        self.messages = StatusMessages(comm)
        self._rank, ranks = processes.here() if lonely else (comm.rank, comm.size)
        self.active = ranks > 1
        self._waits: list[WaitRecord] = []
        self._told_seconds = min(TELL_SECONDS, self.stall / 2)
        self._lock = threading.RLock()  # a rank may end the job while it looks
        self._from_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.closed = False
        if self.active and stacks.wanted():
            stacks.put_off(self.stall)
        _watchdog.add(self)

    def connect(
        self, nodes: Sequence[Sequence[int]], own: int, rows: StatusRows | None, found: Mapping[int, Process]
    ) -> None:
        """Exchange status messages with the other ranks; see StatusMessages.connect. Local; on all ranks."""
        with self._lock:
            self.messages.connect(nodes, own, rows, found)

    def wait_record(self, number: int, raises: bool = False) -> WaitRecord:
        """A new WaitRecord, which is looked at from now on."""
        wait = WaitRecord(number, raises)
        self._waits.append(wait)
        return wait

    def forget(self, wait: WaitRecord) -> None:
        """Look at a record no more."""
        if wait in self._waits:
            self._waits.remove(wait)

    def close(self) -> None:
        """Stop, and receive what others have sent, so that the communicator can be freed. Collective."""
        with self._lock:
            self.closed = True
            self._waits.clear()
        self.messages.drain(self.timeout)

    def abandon(self) -> None:
        """Stop. Local."""
        with self._lock:
            self.closed = True
            self._waits.clear()
            self.messages.release()

    def listen(self) -> None:
        """Ask MPI whether a rank was lost; then the topology's communicators are revoked. From any thread."""
        if self.closed or self.messages.size == 1:
            return
        try:
            with self._lock:
                if self.lost is None and not self.closed:
                    self.messages.comm.Iprobe()  # it raises when a rank has failed, or has revoked the communicator
                if not self.closed:
                    self.messages.exchange()
        except MPI.Exception as error:
            if ulfm.lost(error) is None:
                raise
            self.lose()
        if self.messages.ended is not None:
            self.messages.ends(self.messages.ended)  # this rank passes it on to its neighbours
            abort.follow(self.messages.ended)

    def lose(self) -> RankLostError:
        """A rank is lost: end every wait of the topology, on all ranks. Local."""
        with self._lock:
            first = self.lost is None
            lost = self.lost = self.lost or ulfm.loss(None if self.closed else self.messages.comm)
            self.messages.lost = True
        if first:
            self._revoke()
        return lost

    def loss_of(self, error: BaseException) -> RankLostError | None:
        """The RankLostError in place of `error` when that comes from a lost rank; every wait ends then. Local."""
        if not ulfm.in_force():
            return None
        told = ulfm.lost(error)
        if self._lonely:
            return told
        if told is None and ulfm.may_be(error):  # MPI may report a failed rank as its cause soon
            wait_until(lambda: self.lost is not None, SOON_SECONDS, pause=Pause(longest=ulfm.HEAR_SECONDS))
            told = self.lost
        return None if told is None else ulfm.again(self.lose())

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Turn what MPI raises inside when a rank was lost into a RankLostError, and end every wait."""
        try:
            yield
        except Exception as error:
            lost = self.loss_of(error)
            if isinstance(error, MPI.Exception) and lost is not None:
                ulfm.release_numbers()
            if lost is None or (isinstance(error, RankLostError) and error.args == lost.args):
                raise
            raise lost from (None if isinstance(error, RankLostError) else error)

    def check(self) -> None:
        """Raise RankLostError when a rank was lost. For loops that wait: it costs nothing."""
        if self.lost is not None:
            raise ulfm.again(self.lost)

    def look(self, wait: WaitRecord | None = None) -> None:
        """Exchange status messages, and judge all waits. Raises the error of `wait`. From any thread."""
        if wait is not None:
            self.check()
        if not self.closed and self.active and self._lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self._look(time.monotonic(), wait is not None or self._from_threads)
            finally:
                self._lock.release()
        if wait is not None and wait.error is not None:
            raise wait.error

    def leave(self, why: str, wait: WaitRecord | None = None) -> None:
        """Tell the others that this rank makes no further calls: of one user or, when its program ends, of any."""
        if self.closed or self.messages.size == 1 or (wait is not None and self.lost is not None):
            return
        try:
            with self._lock:
                self.messages.leaves(why, wait)
        except MPI.Exception as error:  # the others notice a lost rank by themselves
            if ulfm.lost(error) is None:
                raise

    def end(self, code: int) -> None:
        """Tell the others that this rank ends the job. From any thread, also while it looks."""
        if not self.closed and self.lost is None and self._lock.acquire(timeout=END_SECONDS):
            try:
                self.messages.ends(code)
            finally:
                self._lock.release()

    def _look(self, now: float, may_communicate: bool) -> None:
        long = []
        for wait in list(self._waits):
            call = wait.call
            if not wait.new(now) and call is not None and now - wait.since >= self._told_seconds:
                long.append((wait, call))
        self.messages.waits(long)
        if may_communicate and self.lost is None:
            self.messages.exchange()
        if long:
            liveness.declare_gone() if self._lonely else self.messages.look_for_gone_processes()
        for wait, call in long:
            self._judge(wait, call, now)
        if stacks.wanted():
            self._give_stacks()

    # Stacks

    def _ask_for_stacks(self, wait: WaitRecord) -> None:
        """Write the stacks of this rank to its file, and have all other ranks do so."""
        log.warning("the stacks of all ranks are in %s", stacks.place())
        stacks.dump(f"waits in {wait}")
        self.messages.asks_for_stacks(str(wait))

    def _give_stacks(self) -> None:
        """Write the stacks of this rank to its file, whatever it does, when another rank asks."""
        stacks.put_off(self.stall)
        for rank, text in self.messages.asked_for_stacks():
            stacks.dump(f"rank {rank} waits in {text}; here {self.status() or 'nothing is waited for'}")

    def status(self) -> str:
        """Where this rank waits, then its last calls, newest first, on lines; "" before its first call. Local."""
        now, lines = time.monotonic(), []
        used = [wait for wait in self._waits if wait.call or wait.last]
        for wait in sorted(used, key=lambda wait: (wait.call is None, -wait.since))[:SHOWN]:
            if wait.call is not None:
                lines.append(f"waits since {now - wait.since if wait.since else 0:.1f} s in {wait}")
            else:
                lines.append(f"{wait.count} calls in one place, among the last: {wait.last}")
        return "\n  ".join(lines)

    # Judgement

    def _judge(self, wait: WaitRecord, call: Call, now: float) -> None:
        waited = now - wait.since
        error: AllReduceError | None = None
        patience = min(LEFT_SECONDS, self.timeout / 2)
        left = self.messages.gone(wait, now - patience, call)
        if self.messages.disagree(wait, call):
            error = DisagreementError(
                f"the ranks disagree about this call; it must be the same on all of them:\n{self.messages.table(call)}"
            )
        elif left is not None:
            error = left
        elif waited > self.timeout:
            error = CollectiveTimeoutError(
                f"waited {waited:.0f} s for other ranks in: {wait}{self._where(call)}\n"
                f"  ({TIMEOUT} or Topology(timeout=seconds) sets how long a rank waits)"
            )
        elif waited > self.stall and not wait.warned and self._speaks(wait, call):
            wait.warned = True
            log.warning(
                "rank %d has waited %.0f s for other ranks in: %s%s", self._rank, waited, wait, self._where(call)
            )
            if stacks.wanted():
                self._ask_for_stacks(wait)
        if error is None or wait.call is not call:
            return
        self.messages.gives_up(wait, call)
        if self.messages.size > 1 and not abort.in_part():
            error.teller = self.messages.teller(wait, call)
        if wait.raises:
            wait.error = error
        else:
            abort.leave_to_teller(error)
            abort.end_job(f"{type(error).__name__}: {error}\n", abort.code_of(error))

    def _speaks(self, wait: WaitRecord, call: Call) -> bool:
        """Whether this rank reports a wait. Before ranks exchange status messages, few ranks do: 0, 1, 2, 4, 8, ..."""
        if self.messages.size > 1:
            return self.messages.speaker(wait, call, SHOWN)
        return self._rank & (self._rank - 1) == 0

    def _where(self, call: Call) -> str:
        """Where all ranks are, on lines of their own; "" where ranks exchange no status messages."""
        return f"\n{self.messages.table(call)}" if self.messages.size > 1 else ""


@functools.cache
def lonely() -> StallDetector:
    """The detector of communicators that belong to no topology yet: it knows nothing of other ranks."""
    try:
        timeout, stall = seconds(TIMEOUT, 1800.0), seconds(STALL, 30.0)
    except OptionError:  # Topology raises it
        timeout, stall = 1800.0, 30.0
    return StallDetector(MPI.COMM_SELF, timeout, stall, lonely=True)


default.append(lonely)


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
            ulfm.end_alone()
        looked = time.monotonic()
        while not self._stop.wait(ulfm.HEAR_SECONDS if listens else LOOK_SECONDS):
            due = not listens or time.monotonic() - looked > LOOK_SECONDS
            looked = time.monotonic() if due else looked
            for detector in self.detectors():
                if MPI.Is_finalized():  # the program goes on without it
                    return
                try:
                    with ulfm.alone_for_now():
                        if listens:
                            detector.listen()
                        if due:
                            detector.look()
                except Exception:  # without the watchdog hangs would go unreported
                    log.exception("the watchdog met an error, and goes on")

    def detectors(self) -> list[StallDetector]:
        with self._lock:
            return list(self._detectors)

    def _end(self, why: str) -> None:
        """The program ends, and MPI after this."""
        self._stop.set()
        stacks.stop()
        if self._thread is not None:
            self._thread.join(timeout=5)
        for detector in self.detectors():
            detector.leave(why)

    def _end_others(self, code: int) -> None:
        """With ULFM, Open MPI's MPI_Abort ends no other rank as long as none was lost; so they are told."""
        if ulfm.in_force():
            for detector in self.detectors():
                detector.end(code)


_watchdog = _Watchdog()


def status() -> str:
    """Where this rank waits and what it has called, by all detectors, for people. Local, from any thread."""
    texts = [text for detector in _watchdog.detectors() if (text := detector.status())]
    return "\n  ".join(texts) or "it has made no call that took long"
