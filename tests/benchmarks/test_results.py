"""Results of benchmarks: files and how they compare, sentences, tables, pictures, pages, and summaries of traces."""

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce.tracing import merging
from allreduce.tracing.merging import RankTrace
from benchmarks import compare, timeline
from benchmarks import report as command
from benchmarks.lib import outputs, plot, report, sizes, table
from benchmarks.lib.advice import Choice, Range, advice, choices, competing, ranges, times_of, wrong_results
from benchmarks.lib.limits import Limit, limit_of
from benchmarks.lib.results import MEMORIES, FileError, Run, from_json, summarize, to_json
from benchmarks.timeline import load, summary
from tests.benchmarks.made_runs import CURVES, made_run
from tests.docs.browser import browse

Compared = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compared:
    """`compared(run, ...)`: the exit code and the output of a comparison of made_run(), in a.json, with b.json."""

    def compare_with(after: Run, *options: str) -> tuple[int, str, str]:
        paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
        for path, run in zip(paths, (made_run(), after), strict=True):
            Path(path).write_text(to_json(run, "said"))
        return compare.main([*paths, *options]), *capsys.readouterr()

    return compare_with


def test_json_and_back() -> None:
    run = made_run()
    run.compress = "bfloat16"
    text = to_json(run, "an advice")
    assert from_json(text) == run
    assert json.loads(text)["advice"] == "an advice"
    earlier = from_json(text.replace(',\n "compress": "bfloat16"', ""))  # a file of an earlier version
    assert (earlier, earlier.compress) == (made_run(), None)


def test_compare_finds_a_regression(compared: Compared) -> None:
    code, told, _ = compared(made_run())
    assert (code, "no regression beyond 10%" in told) == (0, True)
    code, told, _ = compared(made_run(slower=1.3))
    assert code == 1
    assert "ring, foreign arrays, all sizes: 1.30x the time on average" in told
    assert "native" not in told[told.index("regressions beyond") :]
    assert compared(made_run(slower=1.3), "--threshold", "35%")[0] == 0
    assert compared(made_run(slower=0.7))[0] == 0


def test_compare_forgives_noise_that_left_the_minimum_alone() -> None:
    before, after = made_run(), made_run()
    after.results[0] = replace(after.results[0], time_us=after.results[0].time_us * 1.5)
    assert [each.slower(0.1) for each in compare.ratios(before, after)].count(True) == 0
    after.results[0] = replace(after.results[0], min_us=after.results[0].min_us * 1.5)
    assert [each.slower(0.1) for each in compare.ratios(before, after)].count(True) == 1


def test_compare_tells_of_other_conditions_and_of_what_is_gone_or_wrong(compared: Compared) -> None:
    run = made_run(ranks=2)
    run.machine["cpu"] = "another"
    warnings = compared(run)[2]
    assert "cpu: Made Up CPU <1> before, another after" in warnings
    assert "4 ranks on 1 node before, 2 ranks on 1 node after" in warnings
    run = made_run()
    run.results = [each for each in run.results if each.backend != "gloo"]
    run.results[0] = replace(run.results[0], wrong=5)
    code, told, warnings = compared(run)
    assert code == 1
    assert warnings.count("only in") == 1
    assert "a.json: gloo, foreign arrays, 13 sizes" in warnings
    assert "# 1 regression beyond 10%:\n#   ring, arrays from allocate(), 8 B: 5 wrong elements" in told


def test_compare_refuses_what_it_cannot_compare(
    compared: Compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in ({"dtype": "float64"}, {"op": "max"}, {"compress": "int8"}):
        code, _, told = compared(replace(made_run(), **other))
        assert (code, "float32 sum, compress=None can't be compared with " in told) == (2, True)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "text.txt").write_text("words")
    for name, reason in {
        "none.json": " can't be read (No such file or directory)",
        "": " can't be read (Is a directory)",
        "picture.png": ": it is not text",
        "text.txt": ": it is not JSON (Expecting value: line 1 column 1 (char 0))",
    }.items():
        assert compare.main([str(tmp_path / "a.json"), str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        wanted = "give a file that python -m benchmarks.bandwidth --json FILE wrote"
        assert told == f"benchmarks.compare: error: {tmp_path / name}{reason}; {wanted}\n"
    with pytest.raises(SystemExit, match="2"):
        compare.main(["a", "b", "--threshold", "much"])


def test_write_replaces_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    outputs.write(path, "old")
    outputs.write(path, b"new")
    assert path.read_text() == "new"
    with pytest.raises(TypeError):
        outputs.write(path, 7)  # type: ignore[arg-type]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_dash_is_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert outputs.unwritable("-") is None
    outputs.write("-", "content\n")
    outputs.Screen(True, "-", "a command").write_record({"a": 1})
    assert capsys.readouterr().out == 'content\n{\n "a": 1\n}\n'
    assert not list(tmp_path.iterdir())


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """`--json /dev/null` as root must not make /dev/null a file."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (link, pipe):
            assert outputs.unwritable(str(path)) is None
            outputs.write(path, "content")
        assert os.read(reader, 99) == b"content"
    finally:
        os.close(reader)
    assert link.is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "content"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


# Advice and tables


def test_sizes_are_read_as_nccl_tests_does() -> None:
    given = {"8": 8, "64K": 65536, "128M": 1 << 27, "1.5KiB": 1536, "1g": 1 << 30}
    assert {text: sizes.parse(text) for text in given} == given
    for text in ("", "K", "12Q", "-8", "8 9"):
        with pytest.raises(ValueError, match="is not a size"):
            sizes.parse(text)


def test_busbw_is_that_of_nccl_tests() -> None:
    result = summarize("ring", "foreign", 250, 4, 4, np.array([3e-6, 1e-6, 2e-6]), 0)
    assert (result.size, result.iterations) == (1000, 3)
    assert result.time_us == pytest.approx(2)
    assert result.min_us == pytest.approx(1)
    assert result.p99_us == pytest.approx(2.98)
    assert result.algbw == pytest.approx(0.5)
    assert result.busbw == pytest.approx(0.5 * 2 * 3 / 4)


def test_wrong_results_are_told() -> None:
    run = made_run()
    run.results.append(summarize("ring", "foreign", 4, 4, 4, np.array([1e-6]), 3))
    assert wrong_results(run) == ["WRONG RESULTS: ring, foreign arrays, 16 B: 3 elements"]
    assert "ring" not in {name for found in times_of(run, "foreign").values() for name in found}


def test_table_has_nccl_tests_columns() -> None:
    run = made_run(sizes=[1 << 20])
    head = table.header(run).splitlines()
    columns = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong backend min p99 min p99"
    assert head[-2].lstrip("#").split() == columns.split()
    lines = {backend: table.row(run, [r for r in run.results if r.backend == backend]) for backend in run.backends()}
    row = lines["shared"].split()
    assert row[:9] == ["1048576", "262144", "float", "sum", "-1", "316.6", "3.31", "4.97", "0"]  # foreign arrays
    assert lines["gloo"].split()[9:13] == ["N/A"] * 4
    assert len({len(line) for line in lines.values()}) == 1
    assert table.footer(run).startswith("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : ")


def with_times(times: dict[str, list[float]], spread: float = 1.0) -> Run:
    """A run of two ranks, the same with both kinds of memory: backend -> microseconds at 64 KiB, 128 KiB, ..."""
    run = Run({"cores": 2}, [2], False, "float32", "sum", "2026", "made up")
    for memory in MEMORIES:
        for backend, each in times.items():
            for index, us in enumerate(each):
                seconds = np.array([us, us, us * spread]) * 1e-6
                run.results.append(summarize(backend, memory, 16384 << index, 4, 2, seconds, 0))
    return run


ADVICE = [
    ({"auto": [100, 200], "ring": [110, 195], "native": [300, 100_000]}, 'Use "auto": no backend is'),
    ({"auto": [5.0, 6.0], "native": [2.0, 3.0]}, 'Use "auto": no backend is more than'),  # nobody sees that it is
    (
        {"auto": [100, 200, 300], "ring": [110, 100, 150], "native": [300, 300, 300]},
        'Use "auto", but "ring" for arrays from allocate() of 128 KiB to 256 KiB, where it is 2.00 times as fast and '
        '"ring" for foreign arrays of 128 KiB to 256 KiB, where it is 2.00 times as fast.',
    ),
    (
        {"auto": [100, 200, 300], "ring": [50, 210, 50], "native": [300, 300, 300]},
        'Let "auto" decide by measurements of this machine (mpirun -n 2 python -m benchmarks.tune): now it misses '
        '"ring" for arrays from allocate() of 256 KiB, where it is 6.00 times as fast.',
    ),
    ({"ring": [10, 20], "native": [11, 40]}, 'Use "ring": it is the fastest at every size, or within'),
    ({"ring": [10, 20, 20], "native": [5, 40, 40]}, 'Use "native" up to 64 KiB, "ring" from 128 KiB on.'),
    ({"ring": [10, 20, 10], "native": [20, 10, 20]}, 'Use "auto", which was not measured: the fastest'),
    ({"ring": [10, 20]}, "Only ring took part: leave out --backends to compare all."),
]


@pytest.mark.parametrize(("times", "expected"), ADVICE)
def test_advice_is_one_sentence(times: dict[str, list[float]], expected: str) -> None:
    told = advice(with_times(times))
    assert told.startswith(expected)
    assert told.endswith(".")
    assert "\n" not in told


def test_advice_names_a_backend_only_where_it_is_faster() -> None:
    """Two backends, each fast at sizes where the other is slow, give two pieces of advice."""
    run = with_times({"auto": [100, 100, 100], "ring": [20, 900, 50], "native": [900, 10, 60]})
    told = [choice._replace(gain=0) for choice in choices(run, "allocated", {"ring", "native"})]
    sizes = sorted({each.size for each in run.results})
    assert told == [
        Choice("allocated", sizes[0], sizes[0], "ring", 0),
        Choice("allocated", sizes[1], sizes[2], "native", 0),
    ]


def test_a_lead_of_the_median_alone_or_of_other_software_is_no_advice() -> None:
    """A backend whose minimum is no better was lucky."""
    run = with_times({"auto": [100], "ring": [50], "native": [300]})
    run.results = [replace(each, min_us=40) for each in run.results]
    run.results.append(summarize("gloo", "foreign", 16384, 4, 2, np.array([1e-6]), 0))
    assert advice(run).startswith('Use "auto": no backend')


def test_advice_of_noise_of_wrong_results_and_of_one_rank() -> None:
    times = {"auto": [100.0, 200.0], "ring": [50.0, 300.0]}
    noisy = with_times(times, spread=103)
    noise = "Too noisy: in a quarter of the results p99 is at least 101 times the median"
    assert advice(noisy) == f"{noise}; run again when the machine is quiet."
    noisy.machine["cores"] = 1
    assert advice(noisy).endswith("is quiet, with at most 1 rank on a node, one for each core.")
    wrong = with_times(times)
    wrong.results[0] = replace(wrong.results[0], wrong=1)
    assert advice(wrong) == 'Do not use "auto" here: there are wrong results, so times were not compared.'
    assert advice(made_run(ranks=1)) == "Start at least 2 ranks (mpirun -n 2): one rank has nothing to reduce."


def test_the_short_table_has_a_line_for_each_size() -> None:
    run = made_run(sizes=[1 << 20])
    run.machine.update(memory_gbs=80.0, adding_gbs=66.0)
    head = table.short_header(run, run.backends()).splitlines()
    assert "memory" in head[2]
    assert head[-1].lstrip("#").split() == ["size", *["fastest", "us", "GB/s", "limit", "auto", "native"] * 2]
    row = table.short_row(run, run.results).split()
    assert row[:8] == ["1", "MiB", "shared", "98.38", "15.99", "107%", "98.33", "351.5"]
    assert len(row) == 14
    run.results[0] = replace(run.results[0], wrong=1)
    assert table.short_row(run, run.results).endswith("  WRONG: ring")


def test_ranges_merge_neighbours_and_forgive_ties() -> None:
    times = {1: {"a": 1.0, "b": 2.0}, 2: {"a": 1.02, "b": 1.0}, 4: {"a": 2.0, "b": 1.0}, 8: {"b": 1.0}}
    assert ranges(times) == [Range(1, 2, "a"), Range(4, 8, "b")]
    assert ranges(times, tie=1.0) == [Range(1, 1, "a"), Range(2, 8, "b")]


# Pictures and pages


@pytest.mark.expensive
def test_page_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "report.html").write_text(report.page(made_run()))
    seen = browse((tmp_path / "report.html").as_uri())
    dom = seen.stdout
    assert dom.count("<svg") == 1
    assert len(re.findall(r'<g id="axes_\d+"', dom)) == 4  # busbw and time, of allocated and foreign arrays
    for text in ("Bus bandwidth and time", "median us", "32 KiB", "gloo"):
        assert text in dom, f"{text!r} is not on the page"
    errors = [line for line in seen.stderr.splitlines() if "CONSOLE" in line and "source: chrome:" not in line]
    assert not errors


def cells(page: str) -> list[list[tuple[int, str]]]:
    """Of each row of the maps: (width, backend) of each cell."""
    rows = re.findall(r"<tr><th class=name>[^<]*</th>(.*?)</tr>", page)
    return [[(int(a), b) for a, b in re.findall(r"colspan=(\d+)[^>]*title='(\w+): ", row)] for row in rows]


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without pictures, which take seconds."""
    monkeypatch.setattr(report, "draw", lambda *_: b"<svg/>")


@pytest.mark.usefixtures("no_pictures")
def test_the_map_has_the_fastest_backend_of_each_size_and_number_of_ranks() -> None:
    """native is the fastest up to 32 KiB; then shared, where arrays are allocated, and else ring from 32 MiB on."""
    few, many = made_run(2), made_run(4, slower=0.1)
    page = report.page(few, many, made_run(1))
    found = cells(page)
    assert len(found) == 4  # two runs of several ranks, two kinds of memory
    for row, (run, memory) in zip(
        found, [(few, "allocated"), (many, "allocated"), (few, "foreign"), (many, "foreign")], strict=True
    ):
        spans = [[name] * width for width, name in row]
        times = competing(times_of(run, memory))
        fastest = [min(here, key=lambda name, here=here: here[name]) for here in times.values()]
        assert [name for span in spans for name in span] == fastest
    assert [row[0][1] for row in found] == ["native", "ring", "native", "ring"]
    assert not re.search(r"<script|<(img|iframe)[^>]*\ssrc=|<link[^>]*href=.http|@import", page), "from the network"
    assert "Made Up CPU &lt;1&gt;" in page
    for place in ("2 ranks on 1 node", "4 ranks on 1 node", "1 rank on 1 node"):
        assert f"<h1>{place}</h1>" in page


@pytest.mark.parametrize(
    ("sizes", "facts", "expected"),
    [
        ([2], {"memory_gbs": 40.0}, Limit(10.0, "memory")),
        ([4], {"memory_gbs": 40.0}, Limit(7.5, "memory")),
        ([2, 2], {"memory_gbs": 40.0, "network_gbs": 0.125}, Limit(0.1875, "network")),
        ([1], {"memory_gbs": 40.0}, None),
        ([2], {}, None),
        ([2], {"memory_gbs": "fast"}, None),
        ([2], {"memory_gbs": 10**400}, None),
        ([2], {"memory_gbs": True}, None),
        ([2, 2], {"network_gbs": 1.7e308}, None),
    ],
)
def test_the_limit_of_memory_and_network(sizes: list[int], facts: dict[str, float], expected: Limit | None) -> None:
    run = replace(made_run(), node_sizes=sizes, machine=facts)
    assert limit_of(run) == expected


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_picture_has_a_line_of_every_backend_and_of_the_limit(ranks: int) -> None:
    """One rank has no bus bandwidth, and so half of the axes and no limit."""
    pytest.importorskip("matplotlib")
    run = made_run(ranks)
    run.machine["memory_gbs"] = 40.0
    times = [list(CURVES[memory]) for memory in ("allocated", "foreign")]
    bandwidths = [[*names, "limit of the memory"] for names in times * (ranks > 1)]
    figure = plot.figure_of(run)
    assert [axis.get_legend_handles_labels()[1] for axis in figure.axes] == bandwidths + times
    assert plot.content(figure, "png").startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_pictures")
def test_a_page_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"{ranks}.json" for ranks in (4, 2)]
    for path, ranks in zip(paths, (4, 2), strict=True):
        path.write_text(to_json(made_run(ranks)))
    page = tmp_path / "page.html"
    assert command.main([*map(str, paths), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert command.main([*map(str, paths), "--html", "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<!DOCTYPE html>")
    assert out.endswith("</body></html>\n")
    assert re.findall(r"<h1>(\d) ranks on 1 node", page.read_text()) == ["2", "4"]
    other = tmp_path / "other.json"
    for run, kinds in (
        (replace(made_run(2), op="max"), "float32 max, compress=None; float32 sum, compress=None"),
        (replace(made_run(2), compress="int8"), "float32 sum, compress=None; float32 sum, compress=int8"),
    ):
        other.write_text(to_json(run))
        assert command.main([str(paths[0]), str(other), "--html", str(page)]) == 2
        assert f"measured different calls: {kinds}" in capsys.readouterr().err


# Traces


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
    overlapping = event(), event(cat="update", ts=8, dur=30), event(cat="data", ts=9, dur=2), event(ts=50, dur=1)
    assert own_times(write(file, *overlapping)) == {"compute": 9, "update": 28, "data": 2, "other": 12}
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
