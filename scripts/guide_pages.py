"""The guides (README.md and those beside the code) as pages among those of the API reference; api_pages.py calls it.

The front page becomes index.html, and pdoc's list of modules modules.html.
"""

import re
import shutil
from pathlib import Path

import markdown2
import pdoc.render
import pdoc.render_helpers

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


def page_of(path: Path) -> Path:
    """The page that a file of the checkout becomes, both relative to their roots: itself, where it becomes none."""
    if path == Path("README.md"):
        return Path("index.html")
    return path.with_suffix(".html") if path.suffix in (".md", ".py") else path


def write(root: Path, paths: list[Path], folder: Path) -> None:
    """paths: the guides, relative to root. folder: where pdoc has written its pages."""
    (folder / "index.html").rename(folder / "modules.html")
    titles = {path: (root / path).read_text().partition("\n")[0].lstrip("# ") for path in paths}
    template = pdoc.render.env.from_string(PAGE)
    extras = {**pdoc.render_helpers.markdown_extensions, "toc": None}
    extras.pop("link-patterns")  # what is to be a link is written as one
    for path in paths:
        up = "../" * len(path.parent.parts)
        html = markdown2.markdown((root / path).read_text(), extras=extras)
        html = LINK.sub(lambda link, path=path: _linked(root, path, folder, link), html)
        guides = [(title, up + page_of(other).as_posix()) for other, title in titles.items()]
        page = folder / page_of(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(template.render(title=titles[path], guides=guides, modules=f"{up}modules.html", html=html))


def _linked(root: Path, path: Path, folder: Path, link: "re.Match[str]") -> str:
    """A link to a page instead of to a guide; what is no page, a picture or the licence, is copied beside it."""
    target = (root / path.parent / link[2]).resolve().relative_to(root)
    page = page_of(target)
    if page == target:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / target, folder / target)
    up = "../" * len(path.parent.parts)
    return f'{link[1]}="{up}{page.as_posix()}{link[3] or ""}"'
