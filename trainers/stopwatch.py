"""The time spent in communication, on the host's clock or, for arrays on a GPU, on its stream."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from allreduce.arrays import gpu
from allreduce.tracing.trace import Trace

COMMUNICATION = "communication"  # the kind of these spans


class Stopwatch:
    """Adds up the time between `start` and `stop`; `read` returns the seconds and resets the sum. Uses the host's
    clock.

    trace: if set, `span` records in it, by the host's clock. recorded: whether each start-stop interval is a span too.
    """

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.recorded = True
        self._total = self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._total += time.perf_counter() - self._began
        if self.trace is not None and self.recorded:
            self.trace.note(COMMUNICATION, int(self._began * 1e9))

    def span(self, kind: str) -> AbstractContextManager[None]:
        """Context manager: record the block as a span of this kind ("data", "compute", "update", ...) if a trace is
        set. Local."""
        return nullcontext() if self.trace is None else self.trace.span(kind)

    def read(self) -> float:
        total, self._total = self._total, 0.0
        return total


class StreamStopwatch(Stopwatch):
    """A Stopwatch that uses events on the current CUDA stream; only `read` waits for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._cuda = gpu.cupy().cuda
        self._laps: list[tuple[Any, Any]] = []  # pairs of events, used again after `read`
        self._used = 0

    def start(self) -> None:
        if self._used == len(self._laps):
            self._laps.append((self._cuda.Event(), self._cuda.Event()))
        self._laps[self._used][0].record()
        super().start()

    def stop(self) -> None:
        self._laps[self._used][1].record()
        self._used += 1
        super().stop()

    def read(self) -> float:
        total = 0.0
        for begin, end in self._laps[: self._used]:
            end.synchronize()
            total += self._cuda.get_elapsed_time(begin, end) / 1000
        self._used = 0
        return total


def make(device: str) -> Stopwatch:
    """The stopwatch for arrays on `device`, "cpu" or "cuda"."""
    return StreamStopwatch() if device == "cuda" else Stopwatch()
