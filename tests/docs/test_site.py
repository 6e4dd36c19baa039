"""The documentation site: it builds without warnings (of links and pictures that lead nowhere, of pages in no menu),
loads nothing from the network, and its pages are short and fit a phone."""

import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import launch
from tests.conftest import lacking
from tests.docs.browser import browse

DOCS = launch.ROOT / "docs"
NEEDED = ("sphinx", "myst_parser", "pydata_sphinx_theme", "sphinx_design", "sphinx_copybutton")
MOST_LINES = 180  # of a page's source, three screens; pages of docs/api are as long as what they document
PHONE = 400  # pixels
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}


class Page(HTMLParser):
    """The files that a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name == LOADED.get(tag)]


def pages(folder: Path) -> dict[str, Path]:
    """Return the pages of a site by their paths in `folder`."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.html"))}
    return {name: path for name, path in found.items() if not name.startswith("_static/")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the builders keep what they have read."""
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        lacking(f"{', '.join(missing)} not installed; pip install --group docs")
    return tmp_path_factory.mktemp("site")


def build(builder: str, folder: Path) -> Path:
    """Build the site without a warning; return the folder with its pages."""
    command = [sys.executable, "-m", "sphinx", "-q", "-b", builder, "-W", "--keep-going", "-d", folder / "doctrees"]
    done = subprocess.run(
        [*command, DOCS, folder / builder], capture_output=True, text=True, timeout=900, cwd=launch.ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / builder


def test_the_site_builds_without_a_warning(folder: Path) -> None:
    """Writing its pages takes most of the time, and finds little."""
    build("dummy", folder)


@pytest.fixture(scope="module")
def site(folder: Path) -> Path:
    """The folder with the pages."""
    return build("html", folder)


@pytest.mark.expensive
def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for name, path in pages(site).items():
        loaded = Page(path.read_text()).loaded
        assert loaded, name
        assert [link for link in loaded if urlsplit(link).netloc] == [], name
    for path in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", path.read_text()), path.name


def test_pages_are_short() -> None:
    sources = [path for path in DOCS.rglob("*.md") if not {"programs", "api"} & {*path.relative_to(DOCS).parts}]
    lengths = {path.relative_to(DOCS).as_posix(): len(path.read_text().splitlines()) for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.expensive
def test_search_works_without_a_server(site: Path) -> None:
    text = browse(f"{(site / 'search.html').as_uri()}?q=ring").stdout
    found = re.search(r"found (one|\d+) pages? matching", text)
    assert found, text[-3000:]


# Opens each page in a frame as wide as a phone, and writes what leaves it and stands in no box that scrolls.
WIDTHS = """<!doctype html><title>widths</title><pre id="result"></pre><script>
const names = NAMES, found = {};
function scrolls(element) {
  for (; element; element = element.parentElement)
    if (/auto|scroll/.test(getComputedStyle(element).overflowX)) {
      const box = element.getBoundingClientRect();
      const page = "html, body, main, article, .bd-content, .bd-article-container";
      if (box.right <= PHONE && !element.matches(page)) return true;
    }
  return false;
}
function next(index) {
  if (index == names.length) {
    document.getElementById("result").textContent = JSON.stringify(found);
    return;
  }
  const frame = document.createElement("iframe");
  frame.style = "width: PHONEpx; height: 900px; border: 0";
  frame.onload = () => {
    const parts = [...frame.contentDocument.querySelectorAll("article *, h1")];
    found[names[index]] = parts.filter(part => part.getBoundingClientRect().right > PHONE + 1 && !scrolls(part))
      .map(part => part.outerHTML.slice(0, 80));
    frame.remove();
    next(index + 1);
  };
  frame.src = names[index];
  document.body.append(frame);
}
next(0);
</script>"""


@pytest.mark.expensive
def test_pages_fit_a_phone(site: Path) -> None:
    names = sorted(pages(site))
    page = site / "widths.html"
    page.write_text(WIDTHS.replace("NAMES", json.dumps(names)).replace("PHONE", str(PHONE)))
    try:
        text = browse(page.as_uri(), "--allow-file-access-from-files", "--virtual-time-budget=60000").stdout
    finally:
        page.unlink()
    result = re.search(r'<pre id="result">(.*?)</pre>', text, re.DOTALL)
    assert result, text[-3000:]
    leaving = json.loads(html.unescape(result[1]))
    assert set(leaving) == set(names)
    assert {name: parts[:3] for name, parts in leaving.items() if parts} == {}


PICTURES = launch.ROOT / "docs" / "pictures"


def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    env = {**os.environ, "ALLREDUCE_ALONE": "1"}
    subprocess.run([sys.executable, PICTURES, tmp_path], check=True, env=env, timeout=60)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(drawn) > 10
    there = {name: (PICTURES / name).read_text() for name in drawn if (PICTURES / name).exists()}
    assert there == drawn, "python docs/pictures draws them again"
