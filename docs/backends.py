"""The directive `backends`: the table of all backends, from their classes, their docstrings and those of `cost`."""

import inspect
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from allreduce import algorithms

HOW = Path(__file__).parent / "how"
TITLES = "backend", "what it does", "seconds of a call", "reduce_scatter", "16-bit floats"


def paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def row(name: str) -> tuple[str, ...]:
    kind = algorithms.class_of(name)
    shown = f"[`{name}`]({name}.md)" if (HOW / f"{name}.md").exists() else f"`{name}`"
    about = (sys.modules[kind.__module__].__doc__ or "").partition("\n")[0].partition(": ")[2]
    seconds = paragraph(kind.cost.__doc__) if "cost" in vars(kind) else ""
    return shown, about, seconds, "yes" if kind.two_phase else "no", "yes" if kind.sums_half else "no"


def table() -> str:
    """Return the table in Markdown."""
    rows = [TITLES, ("---",) * len(TITLES), *(row(name) for name in (*algorithms.BACKENDS, *algorithms.OTHERS))]
    return "\n".join(f"| {' | '.join(each)} |" for each in rows)


class Backends(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        parent = nodes.Element()
        self.state.nested_parse(StringList(table().splitlines(), __file__), self.content_offset, parent)
        return parent.children


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("backends", Backends)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    print(table())
