"""Command: the options and the help of a command of `python -m trainers`, such as `predict`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.cli.parser import RankParser


@dataclass(frozen=True)
class Command:
    """The options of a command, and the texts of its help. add_options: adds the options to a parser."""

    usage: str
    about: str
    examples: str
    add_options: Callable[[RankParser], None]

    def parser(self, shown: bool, program: str) -> RankParser:
        """Return the parser of the command's own options. shown: whether this rank prints. program: its name."""
        texts = {"usage": f"%(prog)s {self.usage}", "description": self.about, "epilog": self.examples}
        parser = RankParser(shown, "--help", prog=program, **texts)
        self.add_options(parser)
        return parser

    def parse(self, arguments: Sequence[str], shown: bool, program: str) -> Any:
        """Return the parsed arguments. Local. Raises ArgumentError; --help exits."""
        return self.parser(shown, program).parse_args(arguments)
