"""The picture and the HTML page of a report; the page is opened in a real browser without a network."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report as command
from benchmarks.lib import plot, report
from benchmarks.lib.advice import competing, times_of
from benchmarks.lib.limits import Limit, limit_of
from benchmarks.lib.results import to_json
from tests.benchmarks.made_runs import CURVES, made_run
from tests.docs.browser import browse


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    run = made_run()
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.page(run))
    return path


def test_page_needs_no_network(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"<script|<(img|iframe)[^>]*\ssrc=|<link[^>]*href=.http|@import", text)
    assert "Made Up CPU &lt;1&gt;" in text


@pytest.mark.expensive
def test_page_in_a_browser(page: Path) -> None:
    seen = browse(page.as_uri())
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
