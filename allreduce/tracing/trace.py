"""Trace: records this rank's work in memory, and writes the records of all ranks to one JSON file for Perfetto."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from threading import get_ident
from typing import Any

from allreduce.errors import OptionError
from allreduce.files import replacing, writable
from allreduce.notices import log
from allreduce.topology import Topology
from allreduce.tracing import clocks, merging
from allreduce.tracing.merging import RankTrace, Span, TracedCall
from allreduce.transport.chunked import bytes_to_root
from allreduce.transport.control import together

MOST_SPANS = 200_000  # a rank; about 30 MB
now = time.perf_counter_ns


class Trace:
    """Records spans and calls on every rank, and writes them to one file for https://ui.perfetto.dev.

    path: of the file, which rank 0 writes. topology: of the ranks that are traced. most: the number of spans and calls
    that a rank keeps; later ones are dropped, with a warning.

    The constructor, `move` and `close`, which writes the file, are collective; the other methods are local and take
    about a microsecond. The n-th call of a series must be the same collective call on all ranks. The constructor raises
    OptionError on all ranks if the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str], topology: Topology, most: int = MOST_SPANS) -> None:
        self.path, self.topology, self.most = os.path.abspath(path), topology, most  # not changed by chdir
        self.closed = False
        self._comm = topology.private(self)
        self._series: list[str] = []
        self._rows = {get_ident(): 0}  # thread -> row in the file, in the order of their first records
        self._spans: list[Span] = []
        self._calls: list[TracedCall] = []
        self._left_out = 0
        try:
            together(self._comm, self._check_path)
        except Exception:
            self.closed = True
            topology.release(self._comm, self)
            raise
        self._first = clocks.compare(self._comm)

    def _check_path(self) -> None:
        if self.topology.rank == 0 and not writable(self.path):
            raise OptionError(f"the trace can't be written to {self.path}: give a file in a folder that exists")

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Context manager: record its body as a span of this kind, such as "compute". Local."""
        begin = now()
        try:
            yield
        finally:
            self.note(kind, begin)

    def note(self, kind: str, begin: int, end: int | None = None) -> None:
        """Record a span from `begin` to `end` (default: now), in nanoseconds of time.perf_counter_ns(). Local."""
        end = end or now()
        if self._admit():
            self._spans.append(Span(self._row(), kind, begin, end))

    def add_call(self, series: int, number: int, name: str, times: tuple[int, int, int], about: dict[str, Any]) -> None:
        """Record call `number` of a series. times: when this rank reached it, its begin and its end. Local."""
        if self._admit():
            self._calls.append(TracedCall(self._row(), series, number, name, *times, about))

    def _row(self) -> int:
        return self._rows.setdefault(get_ident(), len(self._rows))

    def _admit(self) -> bool:
        """Return whether another span or call fits; count one that does not. Rank 0 warns once."""
        if len(self._spans) + len(self._calls) < self.most:
            return True
        if not self._left_out and self.topology.rank == 0:
            log.warning("%s: the first %d spans of each rank are kept, later ones are dropped", self.path, self.most)
        self._left_out += 1
        return False

    def add_series(self, name: str) -> int:
        """Return the number of a new series of collective calls, which all ranks make in the same order, such as those
        of one backend. Local; all ranks add their series in the same order."""
        self._series.append(name)
        return len(self._series) - 1

    def move(self, topology: Topology) -> None:
        """Continue on another topology: that of the surviving ranks after a failure. Collective over it."""
        self.topology, self._comm = topology, topology.private(self)
        self._first = clocks.compare(self._comm)

    def close(self) -> None:
        """Collect the records of all ranks, and write the file. Collective; closing twice does nothing.

        Raises OptionError on all ranks if the file can't be written.
        """
        if self.closed:
            return
        self.closed = True
        try:
            together(self._comm, lambda: None)  # wait for late ranks here, where the wait can end in an error
            last = clocks.compare(self._comm)
            everyone = self._collect()
            together(self._comm, lambda: self._write(everyone, last) if everyone else None)
        finally:
            self.topology.release(self._comm, self)

    def abandon(self) -> None:
        """Forget everything; nothing is written. Local."""
        self.closed = True
        self._spans, self._calls = [], []

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not reach a collective close
            self.close()

    def _collect(self) -> list[RankTrace]:
        """Return the records of all ranks, on rank 0; [] on other ranks. Collective."""
        mine = RankTrace(self._spans, self._calls, self._left_out)
        self._spans, self._calls = [], []
        packed = bytes_to_root(self._comm, json.dumps(mine).encode(), "collect a trace")
        return [merging.parse_record(rank, text) for rank, text in enumerate(packed)]

    def _write(self, everyone: list[RankTrace], last: list[clocks.ClockOffset]) -> None:
        ranks = [
            merging.on_one_clock(recorded, *ends) for recorded, *ends in zip(everyone, self._first, last, strict=True)
        ]
        events = merging.events(ranks, self._series)
        errors = [max(ends).error / 1e3 for ends in zip(self._first, last, strict=True)]
        about = {
            "ranks": len(ranks),
            "topology": str(self.topology),
            "clock_error_us": errors,
            "left_out": [recorded.left_out for recorded in everyone],
        }
        with replacing(self.path, "the trace") as file:
            merging.write(file, events, about)


def of(given: "str | os.PathLike[str] | Trace", topology: Topology) -> tuple[Trace, bool]:
    """Return the Trace for an option `trace=` (a Trace or a path), and whether it was created here. Collective if so.

    A Trace that was created here is closed by the caller.
    """
    return (given, False) if isinstance(given, Trace) else (Trace(given, topology), True)
