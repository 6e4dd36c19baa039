"""The documentation site: it builds without warnings, links lead somewhere, and pages are short, in a menu and fit a
phone."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import launch
from tests.benchmarks.test_report import BROWSERS, FLAGS
from tests.conftest import lacking

DOCS = launch.ROOT / "docs"
NEEDED = ("sphinx", "myst_parser", "pydata_sphinx_theme", "sphinx_design", "sphinx_copybutton")
MOST_LINES = 180  # of a page's source, three screens; pages of docs/api are as long as what they document
PHONE = 400  # pixels
MADE_BY_SPHINX = {"search.html", "py-modindex.html"}  # in no menu
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}


class Page(HTMLParser):
    """The ids, links and loaded files of a page. menu: the links inside of its navigation bars."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.menu: list[str] = []
        self._inside = 0  # so many <nav>
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self._inside += tag == "nav"
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
            if self._inside:
                self.menu.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag == "nav"


def pages(folder: Path) -> dict[str, Page]:
    """Return the pages of a site by their paths in `folder`."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.html"))}
    return {name: Page(path.read_text()) for name, path in found.items() if not name.startswith("_static/")}


def target(folder: Path, name: str, link: str) -> str | None:
    """Return the path in `folder` to which a link on page `name` leads; None if it leaves the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    if not parts.path:
        return name
    path = ((folder / name).parent / unquote(parts.path)).resolve()
    if not path.is_relative_to(folder.resolve()):
        return f"{link} (outside)"
    return path.relative_to(folder.resolve()).as_posix()


def broken(folder: Path) -> list[str]:
    """Return "page: link" for each link, picture and script that leads to no file, or to no place in it."""
    site = pages(folder)
    found = []
    for name, page in site.items():
        for link in dict.fromkeys([*page.links, *page.loaded]):
            to = target(folder, name, link)
            place = unquote(urlsplit(link).fragment)
            if to is None:
                continue
            if not (folder / to).is_file() or (place and to in site and place not in site[to].ids):
                found.append(f"{name}: {link}")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the pages."""
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        lacking(f"{', '.join(missing)} not installed; pip install --group docs")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-W", "--keep-going", "-d", folder / "doctrees"]
    done = subprocess.run([*build, DOCS, folder / "html"], capture_output=True, text=True, timeout=900, cwd=launch.ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "html"


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "index.html").write_text(
        '<p id="top"><a href="#top"></a><a href="start/why.html#speed"></a><a href="start/why.html#cost"></a>'
        '<a href="start/gone.html"></a><a href="../outside.html"></a><a href="https://example.org"></a></p>'
    )
    (tmp_path / "start" / "why.html").write_text('<p id="speed"><img src="../gone.svg"><a href="../index.html"></a>')
    assert broken(tmp_path) == [
        "index.html: start/why.html#cost",
        "index.html: start/gone.html",
        "index.html: ../outside.html",
        "start/why.html: ../gone.svg",
    ]


def test_links_and_pictures_lead_somewhere(site: Path) -> None:
    assert broken(site) == []


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for name, page in pages(site).items():
        assert [link for link in page.loaded if urlsplit(link).netloc] == [], name
    for path in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", path.read_text()), path.name


def test_every_page_is_in_a_menu(site: Path) -> None:
    known = pages(site)
    reached, new = {"index.html"}, ["index.html"]
    while new:
        name = new.pop()
        for link in known[name].menu:
            to = target(site, name, link)
            if to in known and to not in reached:
                reached.add(to)
                new.append(to)
    assert set(known) - reached - MADE_BY_SPHINX == set()


def sources() -> list[Path]:
    return sorted(path for path in DOCS.rglob("*.md") if "programs" not in path.parts)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_page_is_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert path.is_relative_to(DOCS / "api") or len(lines) <= MOST_LINES, f"{len(lines)} lines"


def browse(page: Path, *options: str) -> str:
    """Return the document in a browser, after its scripts have run."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no browser: install Debian's package chromium")
    profile = page.parent.parent / "profile"
    command = [browser, *FLAGS.split(), f"--user-data-dir={profile}", *options, "--dump-dom"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.expensive
def test_search_works_without_a_server(site: Path) -> None:
    text = browse(site / "search.html", f"{(site / 'search.html').as_uri()}?q=ring")
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
        text = browse(page, "--allow-file-access-from-files", "--virtual-time-budget=60000", page.as_uri())
    finally:
        page.unlink()
    result = re.search(r'<pre id="result">(.*?)</pre>', text, re.DOTALL)
    assert result, text[-3000:]
    leaving = json.loads(html.unescape(result[1]))
    assert set(leaving) == set(names)
    assert {name: parts[:3] for name, parts in leaving.items() if parts} == {}
