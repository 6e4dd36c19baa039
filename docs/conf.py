"""Sphinx's settings for the documentation site. bash scripts/docs.sh builds it."""

import importlib.abc
import importlib.machinery
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

# The site is built without the frameworks, so without gigabytes of PyTorch.
FRAMEWORKS = {
    "accelerate",
    "cupy",
    "jax",
    "keras",
    "lightning",
    "optax",
    "prometheus_client",
    "tensorboardX",
    "tensorflow",
    "torch",
}


class StandIn(type):
    """The type of what stands for the names in a framework's module: classes, so annotations may join them by `|`."""

    def __getattr__(cls, name: str) -> Any:
        return stand_in(name, cls.__module__)

    def __mro_entries__(cls, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (cls,)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __setitem__(cls, _: Any, value: Any) -> None:
        """Registers nothing."""

    def __iter__(cls) -> Any:
        return iter((cls(),))


def stand_in(name: str, module: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)

    def decorate(_self: Any, function: Any = None, *_: Any, **__: Any) -> Any:
        return stand_in("result", module) if function is None else function

    methods = {
        "__init__": lambda *_, **__: None,
        "__call__": decorate,
        "__getattr__": lambda _, each: stand_in(each, module),
    }
    return StandIn(name, (), {"__module__": module, **methods})


class Framework(types.ModuleType):
    """A module of a framework that is not installed."""

    __path__ = ()
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        return stand_in(name, self.__name__)


class Frameworks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a `Framework` for each import from one of FRAMEWORKS, installed or not."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        found = name.partition(".")[0] in FRAMEWORKS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Framework(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: names appear when they are asked for."""


sys.meta_path.insert(0, Frameworks())

from docutils import nodes  # noqa: E402
from sphinx import addnodes  # noqa: E402

import allreduce  # noqa: E402

project = "allreduce"
copyright = "the allreduce authors"
version = release = allreduce.__version__

extensions = [
    "backends",
    "before_after",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
]
smartquotes = False
source_suffix = {".md": "markdown"}
exclude_patterns = ["programs"]
default_role = "code"  # docstrings write `name` as Markdown does

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

html_theme = "pydata_sphinx_theme"
html_title = "allreduce"
html_static_path = ["_static"]
html_css_files = ["site.css", "diff.css"]
html_copy_source = False
html_show_sourcelink = False
html_use_index = False
html_sidebars = {"index": [], "search": []}
html_permalinks_icon = "#"
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": True,
    "show_toc_level": 2,
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "footer_start": ["copyright"],
    "footer_end": [],
    "search_bar_text": "Search these pages",
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_selector = "div[class*='highlight-']:not(.highlight-diff) > div.highlight > pre"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

toc_object_entries_show_parents = "hide"  # the table of contents says step(), not MirroredOptimizer.step()
autodoc_member_order = "bysource"
autoclass_content = "both"  # the docstring of the class, then that of its constructor
autodoc_typehints = "none"  # the descriptions of arguments give the types that a reader needs
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100  # longer ones get a line for each argument
intersphinx_mapping: dict[str, Any] = {}  # nothing is loaded from the network while the site is built

RESULTS = {  # classes that users read and do not create: what they have are attributes
    "trainers.datasets.Dataset",
    "trainers.watching.history.Epoch",
}
ITEM = re.compile(
    r"(\*{0,2}[a-z_][\w.`]*(?:\([\w, ]*\)|(?:, \*{0,2}[a-z_][\w.`]*)*)): (\S.*)"
)  # "Attributes: ..." is a sentence
STAR = re.compile(r"(?<![\\`\w*])(\*{1,2})(?=[\w=])")


def with_code_blocks(lines: list[str]) -> Iterator[str]:
    """Yield the lines, with ".. code-block" before each indented block that follows an empty line or a colon."""
    before = ""
    block = table = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not block and not before:
            yield from (".. code-block:: python", "")
            block = True
        elif indented and not block and before.endswith(":") and not before.startswith(" ") and not ITEM.match(before):
            yield from ("", ".. code-block:: text", "")
            block = table = True
        elif line and not line.startswith(" "):
            if table and before:
                yield ""
            block = table = False
        yield line
        before = line


def as_fields(_app: Any, _kind: str, name: str, documented: Any, _options: Any, lines: list[str]) -> None:
    """Turn the lines "name: description" of a docstring into reStructuredText, in place.

    Parameters of the function, or of the class's constructor, become fields; other names items of a list.
    """
    try:
        parameters = {*inspect.signature(documented).parameters} if name not in RESULTS else set()
    except (TypeError, ValueError):
        parameters = set()
    made: list[str] = []
    inside, starts = False, ""
    for line in with_code_blocks(lines):
        match = ITEM.fullmatch(line)
        if match and (inside or not made or not made[-1] or made[-1].endswith((".", ":", ")"))):
            names = match[1].replace("*", r"\*").replace(", ", ",")  # Sphinx takes a word before a space as the type
            is_parameter = parameters.issuperset(each.strip("*") for each in match[1].split(", "))
            before, starts = starts, ":param" if is_parameter else "-"
            if made and made[-1] and not (inside and before == starts):
                made.append("")
            made.append(f":param {names}: {match[2]}" if is_parameter else f"- ``{match[1]}``: {match[2]}")
            inside = True
        else:
            if inside and line and not line.startswith(" "):
                made.append("")
            inside = inside and bool(line.startswith(" "))
            if inside and starts == "-":
                made.append("  " + STAR.sub(r"\\\1", line.strip()) if line else line)
            else:
                made.append(line if line.startswith("    ") and not inside else STAR.sub(r"\\\1", line))
    lines[:] = [*made, ""]


def polish(_app: Any, doctree: Any) -> None:
    """Write "x, y: text" for an argument, where Sphinx writes "x,y -- text"."""
    for name in doctree.findall(addnodes.literal_strong):
        following = name.next_node(descend=False, siblings=True)
        if isinstance(following, nodes.Text) and following.startswith(" -- "):
            name.parent.replace(following, nodes.Text(":" + following[3:]))
        if name.astext() == ",":
            name.parent.replace(name, nodes.Text(", "))


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_fields)
    app.connect("doctree-read", polish)
