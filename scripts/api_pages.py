"""Writes the pages of the site: python scripts/api_pages.py FOLDER (scripts/docs.sh installs pdoc).

pdoc writes the API reference from the docstrings, as Markdown, in which a line "name: description" becomes an item of
a list. The guides (README.md and those in the packages) become pages too: the front page is index.html, and pdoc's list
of modules modules.html.
"""

import inspect
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras' default may not be installed

import keras  # noqa: F401 - its import starts a process, which pdoc does not allow
import markdown2
import pdoc
import pdoc.docstrings
import pdoc.render_helpers

import allreduce
import trainers

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("allreduce", "trainers", "benchmarks")
PAGE = """
{% extends "frame.html.jinja2" %}
{% block title %}{{ title }}{% endblock %}
{% block style %}{{ super() | safe }}<style>main.pdoc, main.pdoc section { max-width: 70rem; }</style>{% endblock %}
{% block nav %}
    <h2>Guides</h2>
    <ul>{% for name, link in guides %}<li><a href="{{ link }}">{{ name }}</a></li>{% endfor %}</ul>
    <h2>Reference</h2>
    <ul><li><a href="{{ modules }}">All modules</a></li></ul>
    <footer>{{ footer_text }}</footer>
{% endblock %}
{% block content %}
    <main class="pdoc"><section class="module-info"><div class="docstring">{{ html | safe }}</div></section></main>
{% endblock %}
"""
LINK = re.compile(r'(href|src)="(?!\w+:|#)([^"#]*)(#[^"]*)?"')
ITEM = re.compile(r"[\w.`*\[\]]+(, [\w.`*\[\]]+)*: \S")


def modules() -> Iterator[str]:
    """Yield every module of the packages except __main__."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.endswith("__main__"):
                yield name


def guides() -> list[Path]:
    """Return README.md, those of the packages, CONTRIBUTING.md and CHANGELOG.md, relative to the checkout."""
    folders = (*PACKAGES, "scripts", "tests")
    beside = [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("README.md"))]
    return [Path("README.md"), *beside, Path("CONTRIBUTING.md"), Path("CHANGELOG.md")]


def as_markdown(docstring: str) -> str:
    """Return a docstring of this project as Markdown: its arguments as a list."""
    lines: list[str] = []
    in_item = False
    for line in docstring.splitlines():
        if ITEM.match(line):
            name, text = line.split(": ", 1)
            if not in_item:
                lines.append("")
            line, in_item = f"- **{name}**: {text}", True
        elif not line:
            in_item = False
        lines.append(line)
    return "\n".join(lines)


def page_of(path: Path) -> Path:
    """Return the page of a guide or module, and any other path unchanged; all paths are relative to their roots."""
    if path == Path("README.md"):
        return Path("index.html")
    return path.with_suffix(".html") if path.suffix in (".md", ".py") else path


def write_guides(root: Path, paths: list[Path], folder: Path) -> None:
    """Write the pages of the guides. paths: of the guides, relative to root. folder: contains the pages of pdoc."""
    (folder / "index.html").rename(folder / "modules.html")
    titles = {path: (root / path).read_text().partition("\n")[0].lstrip("# ") for path in paths}
    template = pdoc.render.env.from_string(PAGE)
    extras = {**pdoc.render_helpers.markdown_extensions, "toc": None}
    extras.pop("link-patterns")  # links are written as links
    for path in paths:
        up = "../" * len(path.parent.parts)
        html = markdown2.markdown((root / path).read_text(), extras=extras)
        html = LINK.sub(lambda link, path=path: _linked(root, path, folder, link), html)
        guides = [(title, up + page_of(other).as_posix()) for other, title in titles.items()]
        page = folder / page_of(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(template.render(title=titles[path], guides=guides, modules=f"{up}modules.html", html=html))


def _linked(root: Path, path: Path, folder: Path, link: "re.Match[str]") -> str:
    """Return the link to the page of a file; a file without a page (a picture, the licence) is copied."""
    target = (root / path.parent / link[2]).resolve().relative_to(root)
    page = page_of(target)
    if page == target:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / target, folder / target)
    up = "../" * len(path.parent.parts)
    return f'{link[1]}="{up}{page.as_posix()}{link[3] or ""}"'


def main(folder: str) -> None:
    for name in trainers.__all__:  # they are imported on first use, which pdoc does not trigger
        setattr(trainers, name, getattr(trainers, name))
    call = allreduce.backend.AllReduce.__call__
    call.__doc__ = f"{inspect.getdoc(call)}\n@public"  # pdoc leaves methods with underscores out
    warnings.filterwarnings("ignore", "The module specification", UserWarning)  # packages list their modules too
    convert = pdoc.docstrings.convert
    pdoc.docstrings.convert = lambda text, style, source: convert(as_markdown(text), style, source)
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"allreduce {allreduce.__version__}")
    pdoc.pdoc(*modules(), output_directory=Path(folder))
    write_guides(ROOT, guides(), Path(folder))
    print(f"{folder}/index.html")


if __name__ == "__main__":
    main(sys.argv[1])
