"""The parser of every command line, and converters from an option's text to its value. No MPI."""

import argparse
import difflib
from typing import Any, NoReturn

from trainers.errors import ArgumentError


class Parser(argparse.ArgumentParser):
    """Takes no abbreviated options, and names the nearest option when one is mistyped. Shows texts as they are."""

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
    """Raises ArgumentError for bad arguments, and is silent on all ranks but one.

    shown: whether this rank prints.
    """

    def __init__(self, shown: bool, **options: Any) -> None:
        super().__init__(**options)
        self._shown = shown

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (--help shows all options)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._shown:
            super()._print_message(message, file)


def flag(name: str) -> str:
    """An option as the command line spells it: "--max-staleness" of "max_staleness"."""
    return "--" + name.replace("_", "-")


def integer(least: int) -> Any:
    """Converts to an integer of at least `least`."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 18) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
        return int(text)

    return convert


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


def layer_sizes(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f'must be a list of layer sizes such as 64,32, or "none", got {text!r}')
    return tuple(map(int, parts))


def ranks_per_node(text: str) -> int | tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be a number of ranks such as 2, or a list such as 3,1, got {text!r}")
    return int(text) if len(parts) == 1 else tuple(map(int, parts))


def table_file(text: str) -> str:
    if not text.endswith((".jsonl", ".csv")):
        raise argparse.ArgumentTypeError(f"must be the name of a file that ends in .jsonl or .csv, got {text!r}")
    return text
