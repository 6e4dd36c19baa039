"""Runs a reader on many inputs, and counts the outcomes: accepted, refused by a named error, or anything else."""

import contextlib
import faulthandler
import io
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

BATCH = 500  # inputs of one run of Hypothesis, which remembers all of them
LONGEST_SECONDS = 20  # that one input may take; most take a thousandth
BATCH_SECONDS = 900
MOST_BYTES = 1 << 30  # of address space that a reader may take besides what its process has
MOST_TEXT = 4000  # characters of an error


@dataclass(frozen=True)
class Reader:
    """A function that reads input from others. inputs: strategy of its inputs. read: reads one of them, in an empty
    folder; returns its output or None; must raise one of `errors` to refuse the input, and nothing else. share:
    fraction of the run's inputs, smaller for slow readers. laid: of a reader of files, the input whose file has a given
    content, or is no file."""

    name: str
    inputs: "st.SearchStrategy[Any]"
    read: Callable[[Any, Path], str | None]
    errors: tuple[type[Exception], ...]
    share: float = 1.0
    laid: Callable[[Any], Any] | None = None


@dataclass
class Count:
    """Outcomes of a reader. others: for each kind of defect one traceback, with the input that showed it."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    defects: int = 0
    others: dict[str, str] = field(default_factory=dict)


class Hung(BaseException):
    """An input took longer than LONGEST_SECONDS."""


def run(reader: Reader, inputs: int, first: int, folder: Path) -> Count:
    """Read this number of inputs. first: the seed. folder: for the reader's files."""
    count, batch = Count(), 0
    while count.inputs < inputs:
        _one_batch(reader, min(BATCH, inputs - count.inputs), first * 1_000_003 + batch, folder, count)
        batch += 1
    return count


def _one_batch(reader: Reader, inputs: int, number: int, folder: Path, count: Count) -> None:
    @seed(number)
    @settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(reader.inputs)
    def one(value: Any) -> None:
        count.inputs += 1
        try:
            judge(reader, value, folder, count)
        finally:
            _empty(folder)

    faulthandler.dump_traceback_later(BATCH_SECONDS, exit=True)  # where no handler of Python's is reached
    try:
        one()
    finally:
        faulthandler.cancel_dump_traceback_later()


def judge(reader: Reader, value: Any, folder: Path, count: Count) -> str:
    """Read one input, count its outcome, and return the text of its error."""
    error: BaseException | None = None
    said: str | None = None
    try:
        with limited():
            said = reader.read(value, folder)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as raised:
        error = raised
    problem = _problem(reader, error, said)
    if problem is not None:
        count.defects += 1
        shown = repr(value)
        shown = shown if len(shown) < 3000 else shown[:3000] + "..."
        trace = "".join(traceback.format_exception(error)) if error else ""
        count.others.setdefault(problem, f"{problem}\ninput: {shown}\n{trace[-6000:]}")
    elif error is None:
        count.accepted += 1
    else:
        count.refused += 1
    return str(error or "")


def _problem(reader: Reader, error: BaseException | None, said: str | None) -> str | None:
    """Return the defect of an outcome as a line, the same for the same defect."""
    if error is not None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        if not isinstance(error, reader.errors):
            return f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}"
        if any(isinstance(each, MemoryError) for each in _chain(error)):
            return f"more than {MOST_BYTES} bytes were asked for, before {Path(where.filename).name}:{where.lineno}"
        said = str(error)
        if len(said) > MOST_TEXT:
            return f"an error of {len(said):.0e} characters from {Path(where.filename).name}:{where.lineno}"
    if said is not None and not all(char.isprintable() or char == "\n" for char in said):
        return "characters that no terminal should get" + (
            f", from {Path(where.filename).name}:{where.lineno}" if error else ""
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Context manager: in the block, this process may take MOST_BYTES more memory, and LONGEST_SECONDS."""

    def ring(*_: object) -> None:
        raise Hung(f"nothing after {LONGEST_SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (_size() + MOST_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def quietly(main: Callable[[list[str]], int], arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of a command, and its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(arguments)
    return code, out.getvalue()


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)


def _size() -> int:
    """Return the size of the address space in bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
