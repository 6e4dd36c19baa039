"""By which command this program was started, and how another process runs the same one."""

import functools
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from allreduce.errors import UnavailableError

WITH_VALUES = ("W", "X")  # options of Python whose value may be an argument of its own
LONG_WITH_VALUES = ("--check-hash-based-pycs",)


class Program(NamedTuple):
    """flags: of Python. kind: "-c" or "-m", or "" for a script. what: the code, the module, the script's path."""

    flags: tuple[str, ...]
    kind: str
    what: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """What stands behind the interpreter."""
        return [*self.flags, *filter(None, [self.kind]), self.what, *self.arguments]

    @classmethod
    def parse(cls, command: Sequence[str]) -> "Program":
        """The program of a command of Python. Raises UnavailableError when it is none: an interactive session, say."""
        place = 0
        while place < len(command):
            kind, inside, taken = _option(command[place])
            if kind is None:
                break
            if kind in "cm" and kind:
                what = inside or (command[place + 1] if place + 1 < len(command) else "")
                rest = command[place + (1 if inside else 2) :]
                return cls((*command[:place], *taken), f"-{kind}", what, tuple(rest))
            place += 2 if kind == "value" else 1
        if place >= len(command) or command[place] == "-":
            raise UnavailableError("this program was not started by a command that can be run again")
        return cls(tuple(command[:place]), "", command[place], tuple(command[place + 1 :]))

    def run(self) -> None:
        """Run it in this process, as its main program."""
        sys.argv[:] = [self.what if self.kind != "-c" else "-c", *self.arguments]
        if self.kind == "-m":
            sys.path[0] = str(Path.cwd())
            runpy.run_module(self.what, run_name="__main__", alter_sys=True)
        elif self.kind == "-c":
            exec(compile(self.what, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.path[0] = str(Path(self.what).resolve().parent)
            runpy.run_path(self.what, run_name="__main__")


def _option(text: str) -> tuple[str | None, str, tuple[str, ...]]:
    """What an argument of Python is: "c" or "m", with what stands in it already, and the flags before it; "value", an
    option whose value is the next argument; "" another option; None none.
    """
    if text.startswith("--"):
        return ("value" if text in LONG_WITH_VALUES else ""), "", ()
    if not text.startswith("-") or text == "-":
        return None, "", ()
    for place, letter in enumerate(text[1:], 1):
        if letter in "cm":
            return letter, text[place + 1 :], (text[:place],) if place > 1 else ()
        if letter in WITH_VALUES:
            return ("value" if place + 1 == len(text) else ""), "", ()
    return "", "", ()


@functools.cache
def program() -> Program:
    """The program that this process runs. Raises UnavailableError as Program.parse does."""
    return Program.parse(sys.orig_argv[1:])
