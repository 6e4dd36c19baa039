"""python -m benchmarks.timeline: its output for a trace, and its errors for other files."""

import json
from pathlib import Path
from typing import Any

import pytest

from allreduce.tracing import merging
from allreduce.tracing.merging import RankTrace
from benchmarks import timeline
from benchmarks.lib.results import FileError
from benchmarks.timeline import load, summary


def trace(path: Path) -> Path:
    """Two steps of 10 ms on three ranks; rank 1 computes for 6 ms, the others for 2 and 3."""
    ranks = []
    for compute in (2, 6, 3):
        spans: list[merging.Span] = []
        calls: list[merging.TracedCall] = []
        for step in (0, 1):
            at = step * 10_000_000
            begin = at + compute * 1_000_000
            spans += [merging.Span(0, "compute", at, begin), merging.Span(0, "update", at + 9_000_000, at + 10_000_000)]
            calls.append(merging.TracedCall(0, 0, step, "all_reduce, ring", begin, begin, at + 9_000_000, {"bytes": 4}))
        ranks.append(RankTrace(spans, calls))
    with path.open("w") as file:
        merging.write(file, merging.events(ranks, ["ring"]), {})
    return path


def test_who_waits_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([str(trace(tmp_path / "t.json"))]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "# 3 ranks, 0.020 s; share of the time:",
        "# compute wait reduce update",
        "rank 0 20.0% 40.0% 30.0% 10.0%",
        "rank 1 60.0% 0.0% 30.0% 10.0%",
        "rank 2 30.0% 30.0% 30.0% 10.0%",
        "# which rank waited for the last rank of a call, and how long:",
        "rank 0 waited 0.008 s for rank 1",
        "rank 2 waited 0.006 s for rank 1",
        "# rank 1 came last most often, to 2 of 2 calls; the others waited 0.014 s for it, 35.0% of their time",
    ]


def event(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "cat": "compute", "ph": "X", "ts": 0, "dur": 10, "pid": 0, "tid": 0} | changes


def write(path: Path, *events: Any) -> str:
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return str(path)


def own_times(file: str) -> dict[str, float]:
    """The microseconds of each kind on rank 0, without kinds that have none."""
    return {kind: round(1e6 * time, 3) for kind, time in summary(load(file)).shares[0, 0].items() if time > 1e-9}


def test_each_moment_counts_for_the_slice_that_began_last(tmp_path: Path) -> None:
    """Other programs write overlapping slices and unknown kinds, and the file may be a plain list of events."""
    file = tmp_path / "t.json"
    inner = event(cat="update", ts=2, dur=3)
    file.write_text(json.dumps([event(), inner, event(cat="\x1b[2J", ts=12, dur=8), {"ph": "i"}]))
    assert own_times(str(file)) == {"compute": 7, "update": 3, "other": 10}
    overlapping = event(), event(cat="update", ts=8, dur=30), event(cat="data", ts=9, dur=2)
    assert own_times(write(file, *overlapping)) == {"compute": 8, "update": 28, "data": 2}
    # The sum of the first one's two floats is slightly more than the begin of the second one.
    wait = event(cat="wait", ts=2036685.218, dur=495.057, args={"last": 1})
    reduce = event(cat="reduce", ts=2037180.275, dur=50812.65)
    assert wait["ts"] + wait["dur"] > reduce["ts"]
    assert own_times(write(file, wait, reduce)) == {"wait": 495.057, "reduce": 50812.65}


def test_much_time_outside_of_all_spans_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([write(tmp_path / "t.json", event(), event(ts=30))]) == 0
    assert "# other: outside of all spans" in capsys.readouterr().out


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.timeline.MOST_BYTES", 100)
    with pytest.raises(FileError, match="at most 100 are read"):
        load(str(trace(tmp_path / "t.json")))


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = str(trace(tmp_path / "t.json"))
    assert timeline.main([file, "--plot", str(tmp_path / "t.svg")]) == 0
    picture = (tmp_path / "t.svg").read_text()
    assert "<svg" in picture
    assert picture.count("<path") > 10
    assert timeline.main([file, "--plot", str(tmp_path / "t.txt")]) == 2
    assert ".png, .svg or .pdf" in capsys.readouterr().err
