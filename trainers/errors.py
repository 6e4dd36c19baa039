"""Named errors of trainers, data sets and model files.

They do not derive from allreduce.errors.AllReduceError, because data sets and saved models are used
without MPI as well; `ranks` means the same here as there.
"""

MOST_CHARACTERS, LAST_CHARACTERS = 500, 150  # of an error that quotes a file; what to do stands at its end
LEFT_OUT = " ... "


def printable(text: str) -> str:
    """A text for people that quotes a file: control characters are escaped, and the middle of a long one left out."""
    escaped = _escaped(text[:MOST_CHARACTERS])
    if len(text) <= MOST_CHARACTERS and len(escaped) <= MOST_CHARACTERS:
        return escaped
    last = _escaped(text[-LAST_CHARACTERS:])[-LAST_CHARACTERS:]
    return escaped[: MOST_CHARACTERS - len(LEFT_OUT) - len(last)] + LEFT_OUT + last


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


class TrainerError(Exception):
    """Base of the errors of this package.

    ranks: the ranks of MPI.COMM_WORLD that all raised this same error, so that one report of it is enough;
        None when it is this rank's alone.
    """

    ranks: tuple[int, ...] | None = None


class ArgumentError(TrainerError, ValueError):
    """An argument makes no sense: shapes that do not fit, a batch size below 1, an unknown name."""


class RoleError(ArgumentError):
    """The roles of the ranks make no sense: no worker left, a TF_CONFIG that does not describe these ranks."""


class _FileError(TrainerError, ValueError):
    """What is wrong with a file, which may be anybody's: what is quoted of it is made `printable`."""

    def __init__(self, text: object = "") -> None:
        super().__init__(printable(str(text)))


class DataError(_FileError):
    """A data set is missing, truncated, mislabelled, empty or not numeric; the message names the file."""


class ModelFileError(_FileError):
    """A model file is missing, damaged or holds another model."""


class CheckpointError(ModelFileError):
    """A checkpoint can't be written, or there is none that this training can go on from."""


class UnusableError(CheckpointError):
    """A checkpoint is damaged, or this kind of trainer can't go on from it; an older checkpoint may be usable."""


class DivergedError(TrainerError, ArithmeticError):
    """The loss became NaN or infinite in training."""


class NotFiniteError(DivergedError):
    """Gradients became NaN or infinite; the message names the ranks that brought them."""
