"""What a MirroredOptimizer records in a trace: compute, waits and updates; a Traced backend records the buckets."""

import threading
import time
from collections.abc import Callable, Sequence

from allreduce.messages.worker import Pending
from allreduce.tracing.trace import Series, Trace
from trainers.pytorch.report import Clock, ResultT

now = time.perf_counter_ns


class TracedClock(Clock):
    """A clock that records what it measures. What lies between is "compute": data, forward, backward, clipping.

    calls: of the backend that reduces the buckets.
    """

    def __init__(self, trace: Trace, calls: Series) -> None:
        super().__init__()
        self._trace, self._calls = trace, calls
        self._since = now()  # neither a wait nor an update since then
        self._thread = threading.get_ident()
        self._first: int | None = None  # when this thread submitted the first bucket that it reduces itself

    def came(self, at: float) -> None:
        self._calls.came(int(at * 1e9))
        if self._first is None and threading.get_ident() == self._thread:
            self._first = int(at * 1e9)

    def add(self, pending: Sequence[Pending], begin: float) -> None:
        super().add(pending, begin)
        waits = int(begin * 1e9)
        self._computed(waits if self._first is None else self._first)
        self._calls.waited(waits)
        self._since, self._first = now(), None

    def update(self, work: Callable[[], ResultT]) -> ResultT:
        begin = now()
        self._computed(begin)
        result = work()
        self._trace.note("update", begin)
        self._since = now()
        return result

    def communicate(self, work: Callable[[], ResultT]) -> ResultT:
        begin = now()
        result = super().communicate(work)
        self._calls.waited(begin)
        return result

    def wait(self, work: Callable[[], ResultT]) -> ResultT:
        begin = now()
        result = super().wait(work)
        self._trace.note("wait", begin)
        return result

    def _computed(self, until: int) -> None:
        if until > self._since:
            self._trace.note("compute", self._since, until)
