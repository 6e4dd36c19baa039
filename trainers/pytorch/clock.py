"""Records in a trace what a rank does between the calls of the backend."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns as now

from allreduce.tracing.recorder import Recorder


class Clock:
    """Notes spans of a MirroredOptimizer in its trace; without a trace it does nothing.

    All time outside of spans is "compute": data, forward, backward, clipping.
    recorder: records the calls of the backend that reduces the buckets; None without a trace.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self._since = now()  # the end of the last span
        self._thread = threading.get_ident()
        self._first: int | None = None  # when this thread submitted the first bucket that it reduces itself

    def submitted(self, at: int) -> None:
        """Record when the queue's next reduction was submitted. Called by the thread that runs the queue."""
        if self._recorder is not None:
            self._recorder.came(at)
            if self._first is None and threading.get_ident() == self._thread:
                self._first = at

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Note the time in the block, if it ends without an error.

        kind: "update"; "wait" for other ranks; or "reduce": this rank only waits for the calls of the backend.
        """
        begin = now()
        yield
        if self._recorder is None:
            return
        computed = begin if self._first is None else self._first
        if computed > self._since:
            self._recorder.trace.note("compute", self._since, computed)
        if kind == "reduce":
            self._recorder.waited(begin)
        else:
            self._recorder.trace.note(kind, begin)
        self._since, self._first = now(), None
