"""The parser of all command lines."""

import argparse
import difflib
from typing import Any, NoReturn

from trainers.errors import ArgumentError


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


class RankParser(Parser):
    """A Parser that raises ArgumentError for invalid arguments, and prints on one rank only.

    shown: whether this rank prints. everything: the option that shows all options.
    """

    def __init__(self, shown: bool, everything: str = "--help-all", **options: Any) -> None:
        super().__init__(**options)
        self.shown, self._everything = shown, everything

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} ({self._everything} shows all options)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if self.shown:
            super()._print_message(message, file)
