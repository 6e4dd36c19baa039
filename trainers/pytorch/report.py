"""Clocks that measure the cost of averaging (also into a trace), and Report, their result."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from allreduce.call.queue import Future
from allreduce.tracing.recorder import Recorder

ResultT = TypeVar("ResultT")


class Clock:
    """Adds up the times of a `Report`, in seconds, and records what it measures in a trace, if there is one.

    In a trace all other time is "compute": data, forward, backward, clipping.
    recorder: records the calls of the backend that reduces the buckets.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.communication = self.exposed = self.waiting = 0.0
        self._recorder = recorder
        self._since = self.now()  # the end of the last wait or update
        self._thread = threading.get_ident()
        self._first: float | None = None  # when this thread submitted the first bucket that it reduces itself

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def submitted(self, at: float) -> None:
        """Record when the queue's next reduction was submitted. Called by the thread that runs the queue."""
        if self._recorder is not None:
            self._recorder.came(_ns(at))
            if self._first is None and threading.get_ident() == self._thread:
                self._first = at

    def add(self, pending: Sequence[Future], begin: float) -> None:
        """Count reductions that have finished. begin: the time from which this rank only waited for them."""
        self.communication += sum(each.end - each.begin for each in pending)
        exposed = sum(max(0.0, each.end - max(each.begin, begin)) for each in pending)
        self.exposed += exposed
        self.waiting += max(0.0, self.now() - begin - exposed)
        if self._recorder is not None:
            self._computed(begin if self._first is None else self._first)
            self._recorder.waited(_ns(begin))
            self._since, self._first = self.now(), None

    def update(self, work: Callable[[], ResultT]) -> ResultT:
        """Call `work`, which updates the parameters."""
        begin = self.now()
        self._computed(begin)
        result = work()
        self._note("update", begin)
        self._since = self.now()
        return result

    def communicate(self, work: Callable[[], ResultT]) -> ResultT:
        """Call `work`, communication that overlaps with nothing, and count its time."""
        begin = self.now()
        self._computed(begin)
        result = work()
        took = self.now() - begin
        self.communication += took
        self.exposed += took
        if self._recorder is not None:
            self._recorder.waited(_ns(begin))
        self._since = self.now()
        return result

    def wait(self, work: Callable[[], ResultT]) -> ResultT:
        """Call `work`, which only waits for other ranks, and count its time."""
        begin = self.now()
        self._computed(begin)
        result = work()
        self.waiting += self.now() - begin
        self._note("wait", begin)
        self._since = self.now()
        return result

    def _computed(self, until: float) -> None:
        if self._recorder is not None and until > self._since:
            self._recorder.trace.note("compute", _ns(self._since), _ns(until))

    def _note(self, name: str, begin: float) -> None:
        if self._recorder is not None:
            self._recorder.trace.note(name, _ns(begin))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@dataclass(frozen=True)
class Report:
    """The cost of averaging on this rank since the optimizer was made. Times are in seconds.

    communication: spent reducing gradients and gathering parameters = hidden + exposed.
    exposed: the part during which this rank only waited.
    waiting: the time until the other ranks began the same call. It comes from the ranks' different speeds, and is not
        counted in `communication`.
    bytes: the total size of the dense gradients that were averaged; with LocalSGD, of the parameters' changes.
    buckets: the size of each bucket of dense gradients (with LocalSGD, of each fragment) in bytes, in the order in
        which they are reduced.
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
        """The part of the communication during which this rank continued to compute (backward)."""
        return self.communication - self.exposed

    @property
    def hidden_share(self) -> float:
        """The hidden part of the communication, from 0 to 1; 1 if there was no communication."""
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
