"""Writes the API reference from the docstrings: python scripts/api_pages.py FOLDER (scripts/docs.sh installs pdoc).

pdoc does it, and guide_pages.py the guides. Here is which modules there are, and how the docstrings of this project
become Markdown: a line "name: what it is" with what belongs to it indented becomes an item of a list.
"""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras' own choice may not be installed

import guide_pages
import keras  # noqa: F401 - it starts a process, which pdoc would not let it do
import pdoc
import pdoc.docstrings

import allreduce
import trainers

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("allreduce", "trainers", "benchmarks")
ITEM = re.compile(r"[\w.`*\[\]]+(, [\w.`*\[\]]+)*: \S")


def modules() -> Iterator[str]:
    """Every module of the packages, but for programs."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.endswith("__main__"):
                yield name


def guides() -> list[Path]:
    """README.md, those beside the code, CONTRIBUTING.md and CHANGELOG.md, relative to the checkout."""
    folders = (*PACKAGES, "scripts", "tests")
    beside = [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("README.md"))]
    return [Path("README.md"), *beside, Path("CONTRIBUTING.md"), Path("CHANGELOG.md")]


def as_markdown(docstring: str) -> str:
    """A docstring of this project as Markdown: its lists of arguments as lists."""
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


def main(folder: str) -> None:
    for name in trainers.__all__:  # imported when first used, which pdoc does not know
        setattr(trainers, name, getattr(trainers, name))
    call = allreduce.backend.AllReduce.__call__
    call.__doc__ = f"{inspect.getdoc(call)}\n@public"  # pdoc leaves methods with underscores out
    warnings.filterwarnings("ignore", "The module specification", UserWarning)  # a module comes with its package too
    convert = pdoc.docstrings.convert
    pdoc.docstrings.convert = lambda text, style, source: convert(as_markdown(text), style, source)
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"allreduce {allreduce.__version__}")
    pdoc.pdoc(*modules(), output_directory=Path(folder))
    guide_pages.write(ROOT, guides(), Path(folder))
    print(f"{folder}/index.html")


if __name__ == "__main__":
    main(sys.argv[1])
