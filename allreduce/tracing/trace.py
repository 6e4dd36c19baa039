"""Trace: what this rank did when, kept in memory, and written for all ranks together as Perfetto's JSON."""

import contextlib
import json
import os
import time
from threading import get_ident
from typing import Any

from allreduce import notices
from allreduce.errors import CommunicationError, OptionError
from allreduce.files import replacing, writable
from allreduce.notices import log
from allreduce.topology import Topology
from allreduce.tracing import clocks, merging
from allreduce.tracing.merging import Call, Recorded, Span
from allreduce.transport.chunked import bytes_to_root
from allreduce.transport.control import together

MOST_SPANS = 200_000  # a rank; about 30 MB
now = time.perf_counter_ns


class Trace:
    """A file for https://ui.perfetto.dev: a row for each rank, and one more for what it does in the background.

    path: of the file, which rank 0 writes. topology: of the ranks that are traced. most: spans that a rank keeps;
        what comes later is left out, and that is said.

    Creating and `close`, which writes the file, are collective; all else is local and costs about a microsecond.
    Every rank uses the trace in the same way: the n-th call of a series on one rank is that on all.
    Raises OptionError on all ranks when the file can't be written, which is tried at once.
    """

    def __init__(self, path: str | os.PathLike[str], topology: Topology, most: int = MOST_SPANS) -> None:
        self.path, self.topology, self.most = os.path.abspath(path), topology, most  # whatever chdir does
        self.closed = False
        self._comm = topology.private(self)
        self._series: list[str] = []
        # Of this rank; spans and series write here themselves, because a call more would cost as much again.
        self.room = most  # for so many more spans and calls
        self.rows = _Rows({get_ident(): 0})
        self.spans: list[Span] = []
        self.calls: list[Call] = []
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

    def span(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """What is done inside is a span of this kind: "data", "compute", "update", ... Local."""
        return _Recording(self, kind)

    def note(self, kind: str, begin: int, end: int | None = None) -> None:
        """A span of this kind from `begin` on, until `end` or now; times of time.perf_counter_ns(). Local."""
        end = end or now()
        if self.room > 0:
            self.room -= 1
            self.spans.append(Span(self.rows[get_ident()], kind, begin, end))
        else:
            self.leave_out()

    def series(self, name: str) -> "Series":
        """Calls that ranks make together, each of which ends when all have come to it. Local."""
        self._series.append(name)
        return Series(self, len(self._series) - 1)

    def move(self, topology: Topology) -> None:
        """Go on with the ranks of another topology, those that are left of this one's. Collective over them."""
        self.topology, self._comm = topology, topology.private(self)
        self._first = clocks.compare(self._comm)

    def close(self) -> None:
        """Collect what the ranks have recorded, and write the file. Collective; closing twice does nothing.

        Raises OptionError on all ranks when the file can't be written after all.
        """
        if self.closed:
            return
        self.closed = True
        try:
            together(self._comm, lambda: None)  # nobody waits inside of MPI for a rank that comes late
            last = clocks.compare(self._comm)
            everyone = self._collect()
            together(self._comm, lambda: self._write(everyone, last) if everyone else None)
        finally:
            self.topology.release(self._comm, self)

    def abandon(self) -> None:
        """Forget everything; nothing is written. Local."""
        self.closed = True
        self.spans, self.calls = [], []

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    def leave_out(self) -> None:
        """A span or call for which no room is left is not kept."""
        if not self._left_out and self.topology.rank == 0:
            log.warning("%s: the first %d spans of each rank are kept, later ones left out", self.path, self.most)
        self._left_out += 1

    def _collect(self) -> list[Recorded]:
        """What all ranks have recorded, on rank 0. Collective."""
        mine = Recorded(self.spans, self.calls, self._left_out)
        self.spans, self.calls = [], []
        packed = bytes_to_root(self._comm, json.dumps(mine).encode(), "collect a trace")
        return [_of_rank(rank, text) for rank, text in enumerate(packed)]

    def _write(self, everyone: list[Recorded], last: list[clocks.Comparison]) -> None:
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


def _of_rank(rank: int, text: bytes) -> Recorded:
    """What a rank has recorded. Raises CommunicationError when it can't be read."""
    try:
        return merging.recorded(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        reason = notices.shown(str(error), 200)
        raise CommunicationError(f"what rank {rank} has recorded can't be read: {reason}") from error


class _Rows(dict[int, int]):
    """The rows of threads: 0 for the one that made the trace, 1, 2, ... for others as they come."""

    def __missing__(self, thread: int) -> int:
        self[thread] = row = len(self)
        return row


class _Recording:
    """A span that goes on."""

    __slots__ = ("_begin", "_kind", "_trace")

    def __init__(self, trace: Trace, kind: str) -> None:
        self._trace, self._kind = trace, kind

    def __enter__(self) -> None:
        self._begin = now()

    def __exit__(self, *_: object) -> None:
        end, trace = now(), self._trace
        if trace.room > 0:
            trace.room -= 1
            trace.spans.append(Span(trace.rows[get_ident()], self._kind, self._begin, end))
        else:
            trace.leave_out()


class Series:
    """The calls of one backend, or of something else that all ranks come to in the same order."""

    def __init__(self, trace: Trace, number: int) -> None:
        self._trace, self._number = trace, number
        self.count = 0
        self._came = 0

    def came(self, at: int) -> None:
        """The next call is one to which this rank has come at `at`, before its turn. For calls in the background."""
        self._came = at

    def note(self, name: str, begin: int, about: dict[str, Any]) -> None:
        """A call was made, from `begin` until now. about: what is shown of it, the same object for equal calls."""
        end, came, self._came = now(), self._came or begin, 0
        trace, number = self._trace, self.count
        self.count += 1
        if trace.room > 0:
            trace.room -= 1
            row = trace.rows[get_ident()]
            trace.calls.append(Call(row, self._number, number, name, came, begin, end, about))
        else:
            trace.leave_out()

    def waited(self, begin: int) -> None:
        """This rank has done nothing but wait, from `begin` until now, for the last call that was made."""
        self._trace.note(f"{merging.WAITED} {self._number} {self.count - 1}", begin)


def of(given: "str | os.PathLike[str] | Trace", topology: Topology) -> tuple[Trace, bool]:
    """The trace that an option `trace=` means, and whether it was made here, for its maker to close. Collective."""
    return (given, False) if isinstance(given, Trace) else (Trace(given, topology), True)
