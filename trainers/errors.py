"""Named errors of trainers, data sets and model files.

They do not derive from allreduce.errors.AllReduceError, because data sets and saved models are used
without MPI as well; `ranks` means the same here as there.
"""


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


class DataError(TrainerError, ValueError):
    """A data set is missing, truncated, mislabelled, empty or not numeric; the message names the file."""


class ModelFileError(TrainerError, ValueError):
    """A model file is missing, damaged or holds another model."""


class CheckpointError(ModelFileError):
    """A checkpoint can't be written, or there is none that this training can go on from."""


class DivergedError(TrainerError, ArithmeticError):
    """The loss became NaN or infinite in training."""


class NotFiniteError(DivergedError):
    """Gradients became NaN or infinite; the message names the ranks that brought them."""
