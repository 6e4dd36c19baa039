"""Rules for files in the Trace Event Format (Google's document of that name), and for ours."""

import math
from typing import Any

EPSILON = 1e-3  # a nanosecond, in the format's microseconds
KINDS = {"data", "compute", "wait", "reduce", "update", "communication", "exposed", "agree", "epoch"}


def check_trace(trace: Any, ranks: int) -> list[dict[str, Any]]:
    """Return the complete events of a trace in the JSON Object Format, after checking its rules."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    complete, named = [], {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ph"] in ("X", "M")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            named[event["name"], event["pid"], event["tid"]] = event["args"]
            continue
        assert event["cat"] in KINDS
        for field in ("ts", "dur"):
            assert isinstance(event[field], float)
            assert math.isfinite(event[field])
            assert event[field] >= 0
        assert isinstance(event.get("args", {}), dict)
        complete.append(event)
    for rank in range(ranks):
        assert named["process_name", rank, 0] == {"name": f"rank {rank}"}
        assert named["process_sort_index", rank, 0] == {"sort_index": rank}
    rows = {(event["pid"], event["tid"]) for event in complete}
    assert {rank for rank, _ in rows} <= set(range(ranks))
    assert all(("thread_name", *row) in named for row in rows)
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    for row in rows:
        _check_row([event for event in complete if (event["pid"], event["tid"]) == row])
    return complete


def _check_row(events: list[dict[str, Any]]) -> None:
    """Check that slices of one row follow each other or are nested, but never overlap."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"] + EPSILON:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + EPSILON, f"{event} overlaps"
        open_until.append(end)
