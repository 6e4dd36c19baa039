"""Traces: clocks brought to one time, the rank that came last, and the file format."""

import io
import json

import numpy as np

from allreduce.tracing import merging
from allreduce.tracing.clocks import ClockOffset, aligned, clock_offset
from allreduce.tracing.merging import RankTrace, Span, TracedCall, events
from tests.trace_schema import check_trace


def test_a_clock_is_compared_in_the_middle_of_the_round_trip() -> None:
    assert clock_offset(1000, 5_000_600, 1200) == ClockOffset(1100, 4_999_500, 100)
    assert clock_offset(1000, 1190, 1200) == ClockOffset(1100, 0, 100)  # it may as well be the same clock


def test_drift_is_interpolated() -> None:
    """A clock that is 1000 ahead at the beginning and 3000 at the end is 2000 ahead halfway."""
    first, last = ClockOffset(0, 1000, 1), ClockOffset(1_000_000, 3000, 1)
    shown = np.array([1000, 502_000, 1_003_000])
    assert aligned(shown, first, last).tolist() == [0, 500_000, 1_000_000]
    assert aligned(shown, first, first).tolist() == [0, 501_000, 1_002_000]  # compared twice at one time


def call(number: int, came: int, begin: int, end: int, row: int = 0) -> TracedCall:
    return TracedCall(row, 0, number, "all_reduce, ring", came, begin, end, {"bytes": 4000, "backend": "ring"})


def shown(ranks: list[RankTrace]) -> list[tuple[int, int, str, float, float]]:
    """Return the row, the name and the times in us of all events."""
    file = io.StringIO()
    merging.write(file, events(ranks, ["ring"]), {})
    complete = check_trace(json.loads(file.getvalue()), len(ranks))
    return [
        (each["pid"], each["tid"], each["name"], each["ts"], round(each["ts"] + each["dur"], 6)) for each in complete
    ]


def test_the_rank_that_came_last_is_named() -> None:
    """Rank 1 computes for 8 us, rank 0 for 2 us, and both reduce until 10; no rank sent a message about it."""
    fast = RankTrace([Span(0, "compute", 0, 2000)], [call(0, 2000, 2000, 10_000)])
    slow = RankTrace([Span(0, "compute", 0, 8000)], [call(0, 8000, 8000, 10_500)])
    assert shown([fast, slow]) == [
        (0, 0, "compute", 0, 2),
        (1, 0, "compute", 0, 8),
        (0, 0, "wait for rank 1", 2, 8),
        (0, 0, "all_reduce, ring", 8, 10),
        (1, 0, "all_reduce, ring", 8, 10.5),
    ]


def test_spans_that_no_rank_can_have_are_not_shown() -> None:
    """By clocks that differ, rank 0 has ended a call before rank 1 came, or a span ends before it begins."""
    early = RankTrace([Span(0, "compute", 1000, 900)], [call(0, 2000, 2000, 3000)])
    late = RankTrace([], [call(0, 5000, 5000, 6000)])
    assert [row[2:] for row in shown([early, late])] == [
        ("all_reduce, ring", 0.0, 1.0),
        ("all_reduce, ring", 3.0, 4.0),
    ]


def test_calls_of_the_background() -> None:
    """A call that waits behind another call does not wait for ranks; the wait of the main thread is shown there too."""
    waits = Span(0, f"{merging.WAITED} 0 1", 5000, 12_000)
    first = RankTrace(
        [Span(0, "compute", 0, 5000), waits], [call(0, 1000, 1100, 6000, 1), call(1, 2000, 6500, 11_000, 1)]
    )
    second = RankTrace([], [call(0, 1050, 1100, 6000, 1), call(1, 6400, 6500, 11_000, 1)])
    rows = shown([first, second])
    assert [row[2:] for row in rows if row[:2] == (0, 1)] == [
        ("wait for rank 1", 1.0, 1.05),
        ("all_reduce, ring", 1.05, 6.0),
        ("wait for rank 1", 6.0, 6.4),
        ("all_reduce, ring", 6.4, 11.0),
    ]
    assert [row[2:] for row in rows if row[:2] == (0, 0)] == [
        ("compute", 0.0, 5.0),
        ("wait for rank 1", 5.0, 6.4),
        ("not hidden", 6.4, 12.0),
    ]


def test_a_call_in_the_same_row_is_not_shown_twice() -> None:
    waits = Span(0, f"{merging.WAITED} 0 0", 900, 6100)
    alone = RankTrace([waits], [call(0, 950, 1000, 6000)])
    assert [row[2:] for row in shown([alone, alone]) if row[0] == 0] == [
        ("all_reduce, ring", 0.0, 5.05),
        ("agreement", 5.05, 5.15),  # what ranks tell each other behind it
    ]


def test_what_a_rank_had_no_room_for() -> None:
    """If one rank has left out a call, nobody knows which rank came to it last, so it is shown without a wait."""
    rows = shown([RankTrace([], [call(0, 0, 0, 9), call(1, 10, 10, 20)]), RankTrace([], [call(0, 5, 5, 9)], 1)])
    assert [row[2] for row in rows] == ["wait for rank 1"] + ["all_reduce, ring"] * 3
    assert shown([RankTrace([], []), RankTrace([], [])]) == []
