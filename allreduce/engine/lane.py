"""Lanes: the calls of one user of a topology's worker, in the order in which they were submitted."""

import copy
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from allreduce.errors import BrokenError, ClosedError
from allreduce.health.stall import Watch
from allreduce.process import children


class Runs(Protocol):
    """What a lane needs of its worker."""

    watch: Watch
    number: int

    def submit(self, lane: "Lane", pending: "Pending") -> "Pending": ...

    def wait_for(self, done: threading.Event, timeout: float | None) -> None: ...

    def drop(self, lane: "Lane") -> None: ...

    def decide(self, lane: "Lane", pending: "Pending", added: int) -> None: ...

    def fail(self, lane: "Lane", error: BaseException) -> None: ...


def without_frames(error: BaseException) -> BaseException:
    """A copy to be kept: an error that is raised keeps all that the functions held which it has passed."""
    try:
        return copy.copy(error)
    except Exception:  # of a type that can't be made again
        return BrokenError(f"{type(error).__name__}: {error}")


class Pending:
    """A call that was submitted. `begin` and `end` are its times by time.perf_counter(), in seconds.

    It begins when all ranks have come to it, so the time does not hold that of others.
    """

    def __init__(
        self,
        work: Callable[[], object],
        lane: "Lane | None" = None,
        what: str = "",
        digest: int = 0,
        ended: Callable[[BaseException | None], object] | None = None,
    ) -> None:
        self.lane, self.what, self.digest = lane, what, digest
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
        if self.lane is not None and not self._done.is_set():
            self.lane.worker.wait_for(self._done, timeout)
        if self.error is not None:
            raise self.error


class Lane:
    """The calls of one user, which run in the order in which they were submitted.

    alone: the topology has no other user, so the order of the program is enough and nothing is announced.
    """

    def __init__(self, worker: Runs, number: int, name: str, alone: bool) -> None:
        self.worker, self.number, self.name, self.alone = worker, number, name, alone
        self.wait = worker.watch.place(-((worker.number << 20) + number), raises=True)
        self.broken: BaseException | None = None  # a call has failed before all ranks had come to it
        self.closed = False
        self.submitted = 0
        self.pending: deque[Pending] = deque()

    def submit(
        self,
        work: Callable[[], object],
        what: str = "",
        numbers: Sequence[int] = (),
        ended: Callable[[BaseException | None], object] | None = None,
    ) -> Pending:
        """Have `work` called when all ranks have submitted the lane's next call. Local: returns at once.

        what, numbers: alike on all ranks; otherwise all of them get the same DisagreementError, and the lane is
        broken. ended: called when the call has ended or was given up, with the error if there is one, in whichever
        thread that is. Never wait for a call inside of `work`.
        """
        if self.closed:
            raise ClosedError(f"{self.name} is closed")
        text = f"{what or 'call'} of {self.name}" + (f" {list(numbers)}" if numbers else "")
        return self.worker.submit(self, Pending(work, self, text, zlib.crc32(text.encode()), ended))

    def close(self) -> None:
        """No more calls. Collective, as any call of the lane; local when the lane is broken."""
        if self.closed:
            return
        try:
            if self.broken is None and not self.alone:
                self.submit(lambda: None, "closes").wait()
        finally:
            self.abandon()

    def take_back(self) -> list[Pending]:
        """The calls that wait, which are given up."""
        given_up = list(self.pending)
        self.pending.clear()
        return given_up

    def abandon(self) -> None:
        """No more calls. Local."""
        self.closed = True
        self.worker.drop(self)


children.guard(Lane, "submit", "close")
