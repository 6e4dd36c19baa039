"""The picture and the HTML page of a report; the page is opened in a real browser without a network."""

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib import plot, report
from benchmarks.lib.plot import COLOURS, colour
from benchmarks.lib.results import MEMORIES, Run
from tests.benchmarks.made_runs import CURVES, made_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1300,1500 --virtual-time-budget=10000"
)


def pixels(png: bytes) -> np.ndarray:
    """A picture as (height, width, 3) bytes."""
    image = pytest.importorskip("matplotlib.image")
    return (image.imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)


def count(image: np.ndarray, wanted: str) -> int:
    """Return the number of pixels of a colour, written #rrggbb."""
    rgb = [int(wanted[start : start + 2], 16) for start in (1, 3, 5)]
    return int((abs(image - rgb).max(axis=2) <= 2).sum())


@pytest.mark.parametrize("ranks", [1, 4])
def test_picture_shows_every_backend(ranks: int) -> None:
    pytest.importorskip("matplotlib")
    image = pixels(plot.draw(made_run(ranks)))
    assert image.shape[1] > 1000
    for backend in CURVES["foreign"]:
        assert count(image, colour(backend)) > 200, f"{backend} is not to be seen"
    assert count(image, COLOURS["reduce_to_one"]) == 0  # was not measured


def test_picture_of_other_kinds() -> None:
    pytest.importorskip("matplotlib")
    assert b"<svg" in plot.draw(made_run(), "svg")
    assert plot.missing("a.png") is None
    assert ".png" in str(plot.missing("picture.txt"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("plotly")
    run = made_run()
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.page(run))
    return path


def browse(page: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no browser: install Debian's package chromium")
    profile = page.parent / "profile"
    command = [str(browser), *FLAGS.split(), f"--user-data-dir={profile}", "--enable-logging=stderr", *options]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)


def test_page_needs_no_network(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=|<link[^>]*href=.http|@import", text)
    assert "Made Up CPU &lt;1&gt;" in text


def test_page_in_a_browser(page: Path) -> None:
    seen = browse(page, "--dump-dom")
    dom = seen.stdout
    drawn = len(re.findall(r'<g class="trace scatter ', dom))
    assert drawn == 2 * sum(len(curves) for curves in CURVES.values())  # busbw and time
    for text in ("bus bandwidth (GB/s)", "time (us)", "32 KiB", "native → shared", "gloo"):
        assert text in dom, f"{text!r} is not on the page"
    errors = [line for line in seen.stderr.splitlines() if "CONSOLE" in line and "source: chrome:" not in line]
    assert not errors


def test_screenshot_of_the_page(page: Path) -> None:
    shot = page.with_name("shot.png")
    browse(page, f"--screenshot={shot}")
    image = pixels(shot.read_bytes())
    for backend in CURVES["foreign"]:
        assert count(image, colour(backend)) > 200, f"{backend} is not to be seen"


def test_chart_data_is_the_run(page: Path) -> None:
    """The page contains the numbers of the run."""
    found = re.findall(r'"x":\s*(\[[\d,.\s]+\]),\s*"y"', page.read_text())
    assert found
    assert json.loads(found[0]) == [result.size for result in plot.points(made_run(), "allocated", "ring")]


def crossing_run() -> Run:
    """native and shared take turns at being the fastest: many crossovers, close to each other."""
    run = made_run()
    for index, each in enumerate(run.results):
        if each.backend == "native" and each.size > 1024:
            factor = 0.2 if int(np.log2(each.size)) % 4 == 1 else 9.0
            run.results[index] = replace(each, time_us=each.time_us * factor, busbw=each.busbw / factor)
    return run


def test_no_label_of_the_picture_lies_on_a_panel() -> None:
    pytest.importorskip("matplotlib")
    run = crossing_run()
    figure = plot.figure_of(run)
    figure.canvas.draw()
    numbers = 0
    for axis in figure.axes:
        panel = axis.get_window_extent()
        for text in axis.texts:
            assert text.get_window_extent().y0 >= panel.y1, text
            numbers += 1
    crossings = [len(plot.numbered(run, memory, 0.02)) for memory in MEMORIES]
    assert numbers == 2 * sum(crossings)
    assert min(crossings) >= 6
    lines = plot.crossings_in_words(run, "allocated", 90)
    assert max(map(len, lines)) <= 95
    assert lines[0].startswith("1: native → shared at ")
    title = figure.axes[0].title.get_window_extent()
    first_row = [text.get_window_extent() for text in figure.axes[0].texts]
    assert title.y0 >= max(extent.y1 for extent in first_row)


def test_numbers_of_close_lines_stand_side_by_side() -> None:
    run = crossing_run()
    for width in (0.001, 0.2):
        places = [place for place, _ in plot.numbered(run, "foreign", width)]
        assert np.diff(np.log(places)).min() >= width * np.log((128 << 20) / 8) * 0.999


def test_no_label_of_the_page_lies_on_a_panel() -> None:
    pytest.importorskip("plotly")
    run = crossing_run()
    page = report.page(run)
    labels = re.findall(r'"annotations":\s*(\[.*?\])\s*,\s*"', page.rpartition("</script></head>")[2])
    assert len(labels) == 2
    for found in map(json.loads, labels):
        assert len(found) > 12
        assert {(each["y"], each["yref"].split()[-1], each["yanchor"]) for each in found} == {(1, "domain", "bottom")}


def test_the_pages_header_says_where_it_was_measured(page: Path) -> None:
    head = page.read_text().partition("</script></head>")[2].partition("<h2>")[0]
    for fact in ("4 ranks on 1 node", "Made Up CPU &lt;1&gt;", "2 cores", "Open MPI v0", "2026-01-02"):
        assert fact in head
    assert "Use &quot;auto&quot;" in head


SENDER = """<script>
addEventListener("load", () => setTimeout(() => {
    const page = document.documentElement;
    parent.postMessage("width " + page.clientWidth + " scrolls " + (page.scrollWidth - page.clientWidth), "*");
}, 2000));
</script></body>"""


@pytest.mark.parametrize("width", [400, 1200])
def test_page_does_not_scroll_sideways(page: Path, width: int) -> None:
    """In a frame, because a browser's own window is never as narrow as a telephone."""
    narrow, frame = page.with_name(f"narrow{width}.html"), page.with_name(f"frame{width}.html")
    narrow.write_text(page.read_text().replace("</body>", SENDER))
    frame.write_text(
        f"<iframe src={narrow.name} width={width} height=900></iframe><p>"
        "<script>onmessage = event => document.querySelector('p').textContent = event.data</script>"
    )
    said = re.search(r"<p>width (\d+) scrolls (-?\d+)", browse(frame, "--dump-dom").stdout)
    assert said, "the page never came"
    assert width - 20 <= int(said[1]) <= width
    assert int(said[2]) == 0
