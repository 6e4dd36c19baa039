"""Watches the waits of a rank: says who waits where and who has not come, and ends what would wait for ever.

A rank that has waited for a second tells where it is (notes.py); a rank that tells nothing is not waiting. So every
rank that waits knows where all of them are, without any of them having to answer. That costs nothing while all is
well, because nobody waits for a second. One rank of those that wait in a call reports it.

A rank whose process has ended without a word counts as lost where ranks may be lost, and else as one that has left.

Waits in loops of ours (agreements, lanes of the worker) end in an error that is raised there. A wait inside of
MPI can't be left: its error is printed, and the job ends.

Ranks that wait in different places, one in a backend's call and one in an agreement, say, end by the time-out, and are
told long before where all of them are. That they wait for ever is never certain: a rank may come to a call by another
thread than the one that waits, also by one that Python does not know (XLA's, autograd's). Not every call needs all
ranks, so a rank may be behind in one that others have left, for a message that a bad link holds back. And where ranks
have roles (servers) they come to a place unequally often, so that counts don't tell who is behind.

Where ranks may die while others go on (messages/losses.py) it also listens for that, in `losses.HEAR_SECONDS`: what
a topology communicates with is revoked then, so that waits inside of MPI come out, and `lost` tells our own loops.
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
NOTE_SECONDS = 1.0  # a wait as long as this is told to the other ranks
SOON_SECONDS = 1.0  # by then MPI has told of a rank that has died
SHOWN = 8  # places in a report
END_SECONDS = 1.0  # for another thread that looks while this one ends the job
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

    comm: a communicator of its own; of this rank alone where the waits are for ranks that can't be told of them yet.
    timeout, stall: seconds after which a wait ends in a CollectiveTimeoutError, and after which it is first told.
    revoke: ends all that the topology communicates with, when a rank is lost; called in any thread.
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
        self._told_seconds = min(NOTE_SECONDS, self.stall / 2)
        self._lock = threading.RLock()  # a rank may end the job while it looks
        self._from_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.closed = False
        if self.active and stacks.wanted():
            stacks.put_off(self.stall)
        _watchdog.add(self)

    def connect(
        self, nodes: Sequence[Sequence[int]], own: int, rows: StatusRows | None, found: Mapping[int, Process]
    ) -> None:
        """See what other ranks tell, as StatusMessages.connect. Local; on all ranks."""
        with self._lock:
            self.messages.connect(nodes, own, rows, found)

    def wait_record(self, number: int, raises: bool = False) -> WaitRecord:
        """A new WaitRecord, looked at from now on."""
        wait = WaitRecord(number, raises)
        self._waits.append(wait)
        return wait

    def forget(self, wait: WaitRecord) -> None:
        """Look at it no more."""
        if wait in self._waits:
            self._waits.remove(wait)

    def close(self) -> None:
        """Stop watching, and take what others have sent, so that the communicator can be freed. Collective."""
        with self._lock:
            self.closed = True
            self._waits.clear()
        self.messages.drain(self.timeout)

    def abandon(self) -> None:
        """Stop watching. Local."""
        with self._lock:
            self.closed = True
            self._waits.clear()
            self.messages.release()

    def listen(self) -> None:
        """Hear whether a rank was lost; then nothing of the topology's communicates any more. From any thread."""
        if self.closed or self.messages.size == 1:
            return
        try:
            with self._lock:
                if self.lost is None and not self.closed:
                    self.messages.comm.Iprobe()  # it raises when a rank has died, or when another one says so
                if not self.closed:
                    self.messages.exchange()
        except MPI.Exception as error:
            if ulfm.lost(error) is None:
                raise
            self.lose()
        if self.messages.ended is not None:
            self.messages.ends(self.messages.ended)  # its neighbours hear of it from this rank
            abort.follow(self.messages.ended)

    def lose(self) -> RankLostError:
        """A rank is lost: every wait of the topology ends, on all ranks. Local."""
        with self._lock:
            first = self.lost is None
            lost = self.lost = self.lost or ulfm.loss(None if self.closed else self.messages.comm)
            self.messages.lost = True
        if first:
            self._revoke()
        return lost

    def loss_of(self, error: BaseException) -> RankLostError | None:
        """The error to raise instead when `error` comes from a lost rank; every wait ends then. Local."""
        if not ulfm.in_force():
            return None
        told = ulfm.lost(error)
        if self._lonely:
            return told
        if told is None and ulfm.may_be(error):  # MPI may tell soon that it comes from a rank that has died
            wait_until(lambda: self.lost is not None, SOON_SECONDS, pause=Pause(longest=ulfm.HEAR_SECONDS))
            told = self.lost
        return None if told is None else ulfm.again(self.lose())

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """What MPI raises inside when a rank was lost becomes a RankLostError, and every wait ends."""
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
        """Raise RankLostError when a rank was lost. Costs nothing; for loops that wait."""
        if self.lost is not None:
            raise ulfm.again(self.lost)

    def look(self, wait: WaitRecord | None = None) -> None:
        """Look at all waits, tell and hear, and judge them. Raises the error of `wait`. From any thread."""
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
        """Tell the others that this rank comes to nothing any more, of one place or, when its program ends, of any."""
        if self.closed or self.messages.size == 1 or (wait is not None and self.lost is not None):
            return
        try:
            with self._lock:
                self.messages.leaves(why, wait)
        except MPI.Exception as error:  # the others hear of a lost rank by themselves
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
        """Write this rank's down, and have all others do so."""
        log.warning("the stacks of all ranks are in %s", stacks.place())
        stacks.dump(f"waits in {wait}")
        self.messages.asks_for_stacks(str(wait))

    def _give_stacks(self) -> None:
        """Write this rank's down, whatever it does, when another one asks."""
        stacks.put_off(self.stall)
        for rank, text in self.messages.asked_for_stacks():
            stacks.dump(f"rank {rank} waits in {text}; here {self.status() or 'nothing is waited for'}")

    def status(self) -> str:
        """Where this rank waits, then what it has called, newest first, on lines; "" before its first call. Local."""
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
        """Whether this rank reports a wait. Where ranks can't hear each other, few do: 0, 1, 2, 4, 8, ..."""
        if self.messages.size > 1:
            return self.messages.speaker(wait, call, SHOWN)
        return self._rank & (self._rank - 1) == 0

    def _where(self, call: Call) -> str:
        """Where all ranks are, on lines of their own, if anybody tells."""
        return f"\n{self.messages.table(call)}" if self.messages.size > 1 else ""


@functools.cache
def lonely() -> StallDetector:
    """Watches the waits on communicators of no topology, the first of a topology's too: of others nothing is known."""
    try:
        timeout, stall = seconds(TIMEOUT, 1800.0), seconds(STALL, 30.0)
    except OptionError:  # Topology tells it
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
                except Exception:  # a watchdog that dies would leave hangs without a word
                    log.exception("the watchdog met an error, and goes on")

    def detectors(self) -> list[StallDetector]:
        with self._lock:
            return list(self._detectors)

    def _end(self, why: str) -> None:
        """MPI ends after this."""
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
