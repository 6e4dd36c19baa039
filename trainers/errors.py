"""Named errors of trainers, data sets and model files.

They do not derive from allreduce.errors.AllReduceError, because data sets and saved models are used
without MPI too; `ranks` means the same here as there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# the longest error text that quotes a file, and how much of its end is kept
MOST_CHARACTERS, LAST_CHARACTERS = 500, 150
LEFT_OUT = " ... "


def printable(text: str) -> str:
    """Return a text in which control characters are escaped; the middle of a long text is left out."""
    escaped = _escaped(text[:MOST_CHARACTERS])
    if len(text) <= MOST_CHARACTERS and len(escaped) <= MOST_CHARACTERS:
        return escaped
    last = _escaped(text[-LAST_CHARACTERS:])[-LAST_CHARACTERS:]
    return escaped[: MOST_CHARACTERS - len(LEFT_OUT) - len(last)] + LEFT_OUT + last


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


class TrainerError(Exception):
    """Base of the errors of this package.

    ranks: the ranks of MPI.COMM_WORLD that all raised this error, so that one report of it is enough; None if only
        this rank raised it.
    """

    ranks: tuple[int, ...] | None = None


class ArgumentError(TrainerError, ValueError):
    """An argument is invalid: shapes that do not fit, a batch size below 1, an unknown name."""


class RunError(TrainerError, RuntimeError):
    """A job of `trainers.run` has failed.

    rank: the rank of MPI.COMM_WORLD whose exception came first, or None if no rank reported one. traceback: the rank's,
        or the end of the job's stderr.
    """

    def __init__(self, text: str, rank: int | None, traceback: str) -> None:
        super().__init__(text)
        self.rank, self.traceback = rank, traceback


class SearchError(TrainerError, RuntimeError):
    """No trial of a search is complete; the message has the first reason. Or its sampler or pruner has failed."""


class _FileError(TrainerError, ValueError):
    """Base of errors about a file. Its text may quote an untrusted file, so it is made `printable`."""

    def __init__(self, text: object = "") -> None:
        super().__init__(printable(str(text)))


class DataError(_FileError):
    """A data set is missing, truncated, mislabelled, empty or not numeric; the message names the file."""


class ModelFileError(_FileError):
    """A model file is missing, damaged or holds another model."""


class CheckpointError(ModelFileError):
    """A checkpoint can't be written, or there is none from which this training can be resumed."""


class UnusableError(CheckpointError):
    """A checkpoint is damaged, or this kind of trainer can't resume from it; an older checkpoint may be usable."""


class ExportError(_FileError):
    """A model can't be exported: its graph, or the file; or the exported model gives other outputs."""


class DivergedError(TrainerError, ArithmeticError):
    """The loss became NaN or infinite in training."""


class NotFiniteError(DivergedError):
    """Gradients became NaN or infinite; the message names the ranks that computed them."""


@contextmanager
def needing(text: str, kind: type[Exception] = ArgumentError) -> Iterator[None]:
    """Context manager: raise an ImportError of the block as an error of this kind. text: of the error; {} stands for
    the reason."""
    try:
        yield
    except ImportError as error:
        raise kind(text.format(error)) from error


@contextmanager
def as_error(kind: type[TrainerError], text: str) -> Iterator[None]:
    """Context manager: raise an OSError of the block as an error of this kind: the text, and the reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{text}: {error.strerror or error}") from error


@contextmanager
def explained(kind: type[TrainerError], text: str, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Context manager for code of others, which may raise anything: raise an exception of the block as an error of this
    kind: the text, and the exception's type and text. passes: types of exceptions that are raised as they are."""
    try:
        yield
    except passes:
        raise
    except Exception as error:
        raise kind(f"{text}: {type(error).__name__}: {error}") from error
