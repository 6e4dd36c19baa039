"""The cost of averaging: clocks that measure it, also for a trace, and the report of it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from allreduce.engine.queue import Future
from allreduce.tracing.trace import Series, Trace

ResultT = TypeVar("ResultT")


class Clock:
    """Adds up the times of a `Report`, in seconds."""

    def __init__(self) -> None:
        self.communication = self.exposed = self.waiting = 0.0

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def add(self, pending: Sequence[Future], begin: float) -> None:
        """Count reductions that are done by now. From `begin` on this rank had nothing to do but wait."""
        self.communication += sum(each.end - each.begin for each in pending)
        exposed = sum(max(0.0, each.end - max(each.begin, begin)) for each in pending)
        self.exposed += exposed
        self.waiting += max(0.0, self.now() - begin - exposed)

    def came(self, at: float) -> None:
        """The next reduction in the queue was submitted `at`. Called in the queue's thread."""

    def update(self, work: Callable[[], ResultT]) -> ResultT:
        """Update the parameters."""
        return work()

    def communicate(self, work: Callable[[], ResultT]) -> ResultT:
        """Do communication during which this rank does nothing else, and count its time."""
        begin = self.now()
        result = work()
        took = self.now() - begin
        self.communication += took
        self.exposed += took
        return result

    def wait(self, work: Callable[[], ResultT]) -> ResultT:
        """Do what only waits for the other ranks, and count its time."""
        begin = self.now()
        result = work()
        self.waiting += self.now() - begin
        return result


now = time.perf_counter_ns


class TracedClock(Clock):
    """A clock that also traces what it measures. The time between is "compute": data, forward, backward, clipping.

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

    def add(self, pending: Sequence[Future], begin: float) -> None:
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


@dataclass(frozen=True)
class Report:
    """The cost of averaging on this rank since the optimizer was made. Times are in seconds.

    communication: spent reducing gradients and gathering parameters = hidden + exposed.
    hidden: the part during which this rank went on computing (backward).
    exposed: the part during which it had nothing else to do.
    waiting: for the other ranks to begin the same call, before anything could be reduced. It is the ranks' difference
        in speed, and no part of communication.
    bytes: of gradients that were averaged.
    buckets: the size of each bucket in bytes, in the order in which they are reduced.
    """

    backend: str
    update: str
    overlap: bool
    ranks: int
    steps: int
    averages: int
    communication: float
    exposed: float
    waiting: float
    bytes: int
    buckets: tuple[int, ...]

    @property
    def hidden(self) -> float:
        return self.communication - self.exposed

    @property
    def hidden_share(self) -> float:
        """Of the communication, between 0 and 1; 1 when there was none."""
        return self.hidden / self.communication if self.communication else 1.0

    def __str__(self) -> str:
        each = 1e3 / max(self.averages, 1)
        sizes = ", ".join(f"{size / 2**20:.2f}" for size in self.buckets)
        return "\n".join(
            [
                f"{self.update} update on {self.ranks} rank{'s' * (self.ranks != 1)}, backend {self.backend}, "
                f"{'reduced during backward' if self.overlap else 'reduced after backward'}",
                f"  steps {self.steps}, averages {self.averages}, gradients averaged {self.bytes / 2**20:.1f} MiB",
                f"  ms per average: communication {self.communication * each:.2f} (hidden {self.hidden * each:.2f}, "
                f"exposed {self.exposed * each:.2f}), waiting for other ranks {self.waiting * each:.2f}",
                f"  hidden {self.hidden_share:.0%} of the communication",
                f"  {len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)} of {sizes} MiB",
            ]
        )
