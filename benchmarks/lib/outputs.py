"""What a command writes: files, checked before anything is measured and replaced as a whole; text and records."""

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from mpi4py import MPI

from allreduce.errors import AllReduceError, OptionError
from allreduce.transport.control import raise_together, root_value
from trainers.files.model_file import is_special, replacing


def check(comm: MPI.Intracomm, wanted: Mapping[str, str | None]) -> None:
    """Raise the same OptionError on all ranks when rank 0 can't write a file later. Collective.

    wanted: option -> path, or None where the option was not given.
    """
    given = {option: path for option, path in wanted.items() if path is not None}
    error: AllReduceError | None = None
    if comm.rank == 0:
        lines = [f"{option} {path}: {problem}" for option, path in given.items() if (problem := unwritable(path))]
        if len({os.path.realpath(path) for path in given.values()}) < len(given):
            lines.append(f"two outputs go to the same file: {', '.join(f'{o} {p}' for o, p in given.items())}")
        error = OptionError("; ".join(lines)) if lines else None
    text = root_value(comm, str(error) if error else None, "check the outputs")
    raise_together(comm, OptionError(text) if text else None)


def write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace the file at `path` as a whole: readers see the old content or the new, never a part.

    A link stays a link, and what is no regular file (/dev/null) is written to, not replaced.
    """
    with replacing(os.fspath(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)


class Screen:
    """What rank 0 prints for people, and the record that --json asks for: into a file, or to stdout where it is "-".

    Text goes to stderr where the record goes to stdout. Making one is collective: it checks that the file can be
    written. more: other options and their files, to be checked too.
    """

    def __init__(self, comm: MPI.Intracomm, target: str | None, more: Mapping[str, str | None] | None = None) -> None:
        check(comm, {"--json": None if target == "-" else target, **(more or {})})
        self._shown, self._target = comm.rank == 0, target

    def say(self, *lines: str) -> None:
        """Print lines."""
        if self._shown:
            print(*lines, sep="\n", file=sys.stderr if self._target == "-" else sys.stdout, flush=True)

    def put(self, record: object) -> None:
        """Write the record, where one was asked for."""
        text = json.dumps(record, indent=1)
        if self._shown and self._target == "-":
            print(text, flush=True)
        elif self._shown and self._target:
            write(self._target, text + "\n")


def unwritable(path: str) -> str | None:
    """Why `write` would fail at `path`, or None."""
    if not path or os.path.isdir(path):  # not Path.is_dir, which raises where a folder may not be looked into
        return "this is a folder; give the name of a file" if path else "give the name of a file"
    if is_special(path):
        return None if os.access(path, os.W_OK) else "it can't be written to; give the name of a file"
    folder, name = os.path.split(os.path.realpath(path))
    if not os.path.isdir(folder):
        return f"the folder {Path(path).parent} does not exist; make it first"
    try:
        probe = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")  # as `replacing` names it
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(probe)
    except OSError as error:
        return f"it can't be made in {folder} ({error.strerror}); give another place"
    return None
