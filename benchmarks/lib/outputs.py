"""Output of commands: text, JSON records, and files, which are checked before the measurement and replaced whole."""

import argparse
import json
import os
import secrets
import sys
from pathlib import Path

from mpi4py import MPI
from tqdm import tqdm

from allreduce.errors import OptionError
from allreduce.process.proc import on_terminal
from allreduce.transport.control import raise_together, root_value
from benchmarks.lib import plot
from trainers.files.model_file import is_special, replacing

STDOUT = "-"
FILES = ("json", "csv", "plot", "html", "output")  # options of commands whose values are files that they write


def problems(options: argparse.Namespace) -> list[str]:
    """Return a line for each file in the options that the command can't write, with the reason."""
    given = {f"--{name}": path for name in FILES if (path := getattr(options, name, None)) is not None}
    found: list[str | None] = [
        f"{option} {path}: {problem}" for option, path in given.items() if (problem := unwritable(path))
    ]
    if len({os.path.realpath(path) for path in given.values()}) < len(given):
        found.append(f"two outputs go to the same file: {', '.join(f'{o} {p}' for o, p in given.items())}")
    found += [plot.missing(option, given[option]) for option in ("--plot", "--html") if option in given]
    return [problem for problem in found if problem]


def check(comm: MPI.Intracomm, options: argparse.Namespace) -> None:
    """Raise OptionError on all ranks if rank 0 can't write a command's files. Collective."""
    text = root_value(comm, "; ".join(problems(options)) if comm.rank == 0 else "", "check the outputs")
    raise_together(comm, OptionError(text) if text else None)


def write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace the file at `path` atomically; "-" is stdout.

    A symbolic link is followed; anything but a regular file (/dev/null) is written in place.
    """
    if path == STDOUT and isinstance(content, str):
        print(content, end="", flush=True)
        return
    with replacing(os.fspath(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)


class Screen:
    """Prints text on rank 0, and writes the record of --json to a file, or to stdout if it is "-".

    If the record goes to stdout, text goes to stderr. command: the command line of the run.
    """

    def __init__(self, shown: bool, target: str | None, command: str) -> None:
        self._shown, self._target, self.command = shown, target, command

    def say(self, *lines: str) -> None:
        """Print lines, above the progress bar."""
        if self._shown:
            file = sys.stderr if self._target == STDOUT else sys.stdout
            tqdm.write("\n".join(lines), file=file)
            file.flush()

    def bar(self, total: int, unit: str = "size") -> tqdm:
        """Return a progress bar for `total` measurements; it is shown on a terminal only."""
        return tqdm(total=total, unit=unit, leave=False, file=sys.stderr, disable=not (self._shown and on_terminal()))

    def write_record(self, record: object) -> None:
        """Write the record, if --json was given."""
        if self._shown and self._target:
            write(self._target, json.dumps(record, indent=1) + "\n")


def unwritable(path: str) -> str | None:
    """Return why `write` would fail for `path`, or None."""
    if path == STDOUT:
        return None
    if not path or os.path.isdir(path):  # not Path.is_dir, which raises without permission
        return "this is a folder; give the name of a file" if path else "give the name of a file"
    if is_special(path):
        return None if os.access(path, os.W_OK) else "it can't be written to; give the name of a file"
    folder, name = os.path.split(os.path.realpath(path))
    if not os.path.isdir(folder):
        return f"the folder {Path(path).parent} does not exist; create it first"
    try:
        probe = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")  # as `replacing` names it
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(probe)
    except OSError as error:
        return f"it can't be created in {folder} ({error.strerror}); give another path"
    return None
