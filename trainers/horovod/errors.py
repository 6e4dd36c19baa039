"""Errors that derive from Horovod's types (HorovodInternalError, ValueError) and from those in allreduce.errors."""

import warnings

from allreduce.errors import (
    AllReduceError,
    CollectiveTimeoutError,
    DisagreementError,
    OptionError,
    RankLeftError,
    RankLostError,
)


class HorovodInternalError(AllReduceError, RuntimeError):
    """A collective call has failed; __cause__ is the reason. hvd.elastic.run continues after failures of ranks."""


class MismatchError(HorovodInternalError, DisagreementError):
    """Ranks called the same name with different shapes, dtypes or other arguments."""


class StalledError(HorovodInternalError, CollectiveTimeoutError):
    """Not all ranks have made a call of some name in time."""


class LeftError(HorovodInternalError, RankLeftError):
    """A rank has ended its program while others wait for it."""


class LostError(HorovodInternalError, RankLostError):
    """A rank has failed."""


class NotInitializedError(AllReduceError, ValueError):
    """hvd.init() was not called, or hvd.shutdown() was."""

    def __init__(self, text: str = "call hvd.init() first: this function of Horovod's API needs it") -> None:
        super().__init__(text)


class DuplicateNameError(OptionError):
    """A call has the name of another call that has not ended."""


class ArgumentError(OptionError):
    """An argument is invalid."""


class ProcessSetError(OptionError):
    """A process set does not exist, exists already, or lacks this rank."""


class NotSendableError(OptionError, TypeError):
    """An object could only be sent as a pickle, which is not supported: reading a pickle can run any code."""


class OrderError(AllReduceError, AssertionError):
    """A method of an optimizer was called while it averages gradients."""


class AdasumError(HorovodInternalError, NotImplementedError):
    """This call does not support Adasum."""


_KINDS: tuple[tuple[type[AllReduceError], type[HorovodInternalError]], ...] = (
    (RankLostError, LostError),
    (RankLeftError, LeftError),
    (DisagreementError, MismatchError),
    (CollectiveTimeoutError, StalledError),
)


def as_internal_error(error: BaseException) -> HorovodInternalError:
    """The error that `synchronize` raises when `error` has ended a call."""
    if isinstance(error, HorovodInternalError):
        return error
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), HorovodInternalError)
    text = str(error) if kind is not HorovodInternalError else f"{type(error).__name__}: {error}"
    made = kind(text)
    made.ranks = getattr(error, "ranks", None)
    if isinstance(made, LeftError) and isinstance(error, RankLeftError):
        made.job_code = error.job_code
    if isinstance(made, LostError) and isinstance(error, RankLostError):
        made.lost, made.reporter = error.lost, error.reporter
    return made


def warn_deprecated(text: str) -> None:
    """Warn that an argument is deprecated, once for each line that makes the call."""
    warnings.warn(text, DeprecationWarning, stacklevel=4)
