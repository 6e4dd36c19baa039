"""Options of every command line of the project."""

import re
from pathlib import Path

import pytest

from tests import launch
from trainers.cli.parser import Parser

PARSERS = {"trainers/cli/parser.py", "allreduce/__main__.py"}  # the only modules that derive from ArgumentParser
FOLDERS = ("allreduce", "trainers", "benchmarks", "scripts")


@pytest.fixture
def parser() -> Parser:
    made = Parser(prog="program", description="first\n\n  second", epilog="the end")
    made.add_argument("--epochs", type=int)
    made.add_argument("-b", "--batch-size", type=int)
    return made


@pytest.mark.parametrize(
    ("given", "near"),
    [(["--epoch", "3"], "--epochs"), (["--epoch=3"], "--epochs"), (["-b", "3", "--batchsize", "4"], "--batch-size")],
)
def test_an_abbreviated_or_mistyped_option_is_refused_with_the_nearest_one(
    parser: Parser, capsys: pytest.CaptureFixture[str], given: list[str], near: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(given)
    assert f"did you mean {near}?" in capsys.readouterr().err


def test_no_option_is_named_that_is_unlike_it(parser: Parser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["stray"])
    assert capsys.readouterr().err.endswith("program: error: unrecognized arguments: stray\n")


def test_texts_are_shown_as_they_are(parser: Parser) -> None:
    assert "first\n\n  second" in parser.format_help()


def test_every_command_line_has_this_parser() -> None:
    """No other class makes or derives from an ArgumentParser."""
    modules = [path for folder in FOLDERS for path in (launch.ROOT / folder).rglob("*.py")]
    assert len(modules) > 100
    others = [path for path in modules if re.search(r"\bArgumentParser\b", _code(path))]
    named = {path.relative_to(launch.ROOT).as_posix() for path in others}
    assert named == PARSERS


def _code(path: Path) -> str:
    """Return the code without annotations of parameters and results, which name the base class."""
    return re.sub(r"(: |-> |\[\], )argparse\.ArgumentParser\b", "", path.read_text())
