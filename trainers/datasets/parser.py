"""The parser of all command lines. It is in this package because `python -m trainers.datasets` runs without MPI."""

import argparse
import difflib
from typing import Any


class Parser(argparse.ArgumentParser):
    """Takes no abbreviated options, and suggests the nearest option for a mistyped one. Keeps line breaks of texts."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            unknown = next((each for each in rest if each.startswith("-")), rest[0]).partition("=")[0]
            near = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return options
