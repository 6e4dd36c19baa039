"""The directive `before-after`: what a program has gained, as a diff, and the program after and before, in three tabs.

    ```{before-after} ../programs/torch_ddp.py
    ```

The argument is the program after the change, as a path from the page. `:before:` is the path of the other one, by
default of the same name in the folder before/ beside it. Docstrings are left out of the diff.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

DOCSTRING = re.compile(r'\A""".*?"""\n+', re.DOTALL)
CONTEXT = 2  # lines around a change

TABS = """\
`````{{tab-set}}
````{{tab-item}} What changes
```{{code-block}} diff
{diff}
```
````
````{{tab-item}} After
```{{literalinclude}} {after}
:language: python
:emphasize-lines: {changed}
```
````
````{{tab-item}} Before
```{{literalinclude}} {before}
:language: python
```
````
`````
"""


def difference(before: list[str], after: list[str], skipped: int) -> Iterator[str]:
    """Yield the lines of a diff; each block begins with its line in the program after. skipped: lines before it."""
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        yield f"@@ line {group[0][3] + 1 + skipped} @@"
        for kind, first, last, start, stop in group:
            if kind == "equal":
                yield from (f" {line}" for line in after[start:stop])
            else:
                yield from (f"-{line}" for line in before[first:last])
                yield from (f"+{line}" for line in after[start:stop])


def changed(before: list[str], after: list[str], skipped: int) -> str:
    """The numbers of the lines that only the program after has, as emphasize-lines takes them."""
    opcodes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    new = [range(start, stop) for kind, _, _, start, stop in opcodes if kind != "equal"]
    return ",".join(str(line + 1 + skipped) for lines in new for line in lines)


class BeforeAfter(SphinxDirective):
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"before": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        after = self.arguments[0]
        folder, _, name = after.rpartition("/")
        before = self.options.get("before", f"{folder}/before/{name}")
        programs, skipped = [], 0
        for path in (before, after):
            relative, absolute = self.env.relfn2path(path)
            self.env.note_dependency(relative)
            text = Path(absolute).read_text()
            docstring = DOCSTRING.match(text)
            skipped = docstring[0].count("\n") if docstring else 0
            programs.append(text[docstring.end() :].splitlines() if docstring else text.splitlines())
        made = TABS.format(
            diff="\n".join(difference(*programs, skipped)),
            changed=changed(*programs, skipped),
            after=after,
            before=before,
        )
        parent = nodes.Element()
        self.state.nested_parse(StringList(made.splitlines(), self.get_source_info()[0]), self.content_offset, parent)
        return parent.children


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("before-after", BeforeAfter)
    return {"parallel_read_safe": True}
