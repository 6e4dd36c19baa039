"""Merges the spans of all ranks into a list of events, in the Trace Event Format of Perfetto and chrome://tracing.

In the file a process is a rank, and a thread is one of its rows. Which rank reached a call last, and how long the
others waited for it, is computed here, after all times are on rank 0's clock.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TextIO

import numpy as np

from allreduce import notices
from allreduce.errors import CommunicationError
from allreduce.tracing.clocks import ClockOffset, aligned

Event = dict[str, Any]

WAITED = "waited"  # a span of this kind names the series and the number of the call that was waited for
WAIT, REDUCE = "wait", "reduce"  # categories, as are the kinds of spans
MOST = 1 << 62  # largest number accepted from another rank
ROWS = ("training", "in the background")


class Span(NamedTuple):
    """A piece of work of one rank. row: of the thread that did it."""

    row: int
    kind: str
    begin: int
    end: int


class TracedCall(NamedTuple):
    """One rank's part of a collective call. number: sequence number in its series. arrived: when this rank reached it.
    details: shown in the file.
    """

    row: int
    series: int
    number: int
    name: str
    arrived: int
    begin: int
    end: int
    details: dict[str, Any]


class RankTrace(NamedTuple):
    """What one rank has recorded; times in nanoseconds."""

    spans: list[Span]
    calls: list[TracedCall]
    left_out: int = 0


def parse_record(rank: int, text: bytes) -> RankTrace:
    """Parse the record of a rank, in JSON. Raises CommunicationError if it is malformed."""
    try:
        spans, calls, left_out = json.loads(text)
        return RankTrace(
            [Span(_number(row), str(kind), _number(begin), _number(end)) for row, kind, begin, end in spans],
            [_call(*call) for call in calls],
            _number(left_out),
        )
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        reason = notices.shown(str(error), 200)
        raise CommunicationError(f"the trace record of rank {rank} can't be read: {reason}") from error


def _call(
    row: Any, series: Any, number: Any, name: Any, arrived: Any, begin: Any, end: Any, details: Any
) -> TracedCall:
    times = _number(arrived), _number(begin), _number(end)
    return TracedCall(_number(row), _number(series), _number(number), str(name), *times, dict(details))


def _number(value: Any) -> int:
    if type(value) is not int or not -MOST <= value <= MOST:
        raise ValueError(f"{value!r} is not a number that is accepted")
    return value


def on_one_clock(recorded: RankTrace, first: ClockOffset, last: ClockOffset) -> RankTrace:
    """Convert all times to rank 0's clock."""
    spans, calls = recorded.spans, recorded.calls
    times = [time for span in spans for time in (span.begin, span.end)]
    times += [time for call in calls for time in (call.arrived, call.begin, call.end)]
    clock = iter(aligned(np.array(times, np.int64), first, last).tolist())
    return RankTrace(
        [span._replace(begin=next(clock), end=next(clock)) for span in spans],
        [call._replace(arrived=next(clock), begin=next(clock), end=next(clock)) for call in calls],
        recorded.left_out,
    )


def events(ranks: list[RankTrace], series: list[str]) -> list[Event]:
    """All events, sorted by time; the earliest is at 0."""
    last = _last_arrivals(ranks)
    found = [event for rank, recorded in enumerate(ranks) for event in _of_rank(rank, recorded, last, series)]
    begin = min((event["ts"] for event in found), default=0)
    for event in found:
        event["ts"], event["dur"] = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
    rows = sorted({(event["pid"], event["tid"]) for event in found})
    return [*_names(len(ranks), rows), *sorted(found, key=lambda event: event["ts"])]


def write(file: TextIO, made: Iterable[Event], about: dict[str, Any]) -> None:
    """Write the events as JSON, one event a line."""
    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [')
    for number, event in enumerate(made):
        file.write(("," if number else "") + "\n" + json.dumps(event, allow_nan=False))
    file.write("\n]}\n")


def _last_arrivals(ranks: list[RankTrace]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (series, number) -> time and rank of the last arrival, for calls that all ranks have recorded."""
    arrived: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, recorded in enumerate(ranks):
        for call in recorded.calls:
            arrived.setdefault((call.series, call.number), []).append((call.arrived, rank))
    return {
        call: max(arrivals, key=lambda arrival: arrival[0])
        for call, arrivals in arrived.items()
        if len(arrivals) == len(ranks) > 1
    }


def _of_rank(
    rank: int, recorded: RankTrace, last: dict[tuple[int, int], tuple[int, int]], series: list[str]
) -> Iterator[Event]:
    calls = {(call.series, call.number): call for call in recorded.calls}
    for row, kind, begin, end in recorded.spans:
        if end < begin:  # no valid span
            continue
        if not kind.startswith(WAITED):
            yield _event(rank, row, kind, kind, begin, end, {})
            continue
        number, turn = map(int, kind.split()[1:])
        waited = calls.get((number, turn))
        if waited is not None and waited.row != row:
            yield from _divided(rank, row, last.get((number, turn)), begin, end, "not hidden", {})
        elif waited is not None and end > waited.end:  # the row shows the call; only the rest of the wait is added
            yield _event(rank, row, "agreement", REDUCE, max(begin, waited.end), end, {})
    ends: dict[int, int] = {}
    for call in recorded.calls:
        # A call in the background first waits for earlier calls of its row; the rest is a wait for other ranks.
        start = max(call.arrived, ends.get(call.row, call.arrived)) if call.arrived < call.begin else call.begin
        ends[call.row] = call.end
        details = {**call.details, "series": series[call.series], "call": call.number}
        yield from _divided(rank, call.row, last.get((call.series, call.number)), start, call.end, call.name, details)


def _divided(
    rank: int, row: int, last: tuple[int, int] | None, begin: int, end: int, name: str, about: dict[str, Any]
) -> Iterator[Event]:
    """Yield a call's events: the wait for the last rank, then the work. last: its time and rank.

    No rank ends a call before the last one has reached it. If the times contradict that, the clocks' error is larger
    than estimated, and no wait is shown.
    """
    turn = begin
    if last is not None and last[0] <= end:
        time, late = last
        about = {**about, "last": late}
        if late != rank and time > begin:
            turn = time
            yield _event(rank, row, f"wait for rank {late}", WAIT, begin, turn, about)
    yield _event(rank, row, name, REDUCE, turn, end, about)


def _event(rank: int, row: int, name: str, kind: str, begin: int, end: int, about: dict[str, Any]) -> Event:
    event = {"name": name, "cat": kind, "ph": "X", "ts": begin, "dur": max(end - begin, 0), "pid": rank, "tid": row}
    return {**event, "args": about} if about else event


def _names(ranks: int, rows: list[tuple[int, int]]) -> Iterator[Event]:
    for rank in range(ranks):
        yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for rank, row in rows:
        name = ROWS[row] if row < len(ROWS) else f"thread {row}"
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
