"""Errors of Horovod's types, which are also those of this library. Invalid arguments are an OptionError."""

import warnings

from allreduce.errors import AllReduceError


class HorovodInternalError(AllReduceError, RuntimeError):
    """A collective call has failed; __cause__ is the reason. hvd.elastic.run continues after failures of ranks."""


class OrderError(AllReduceError, AssertionError):
    """A method of an optimizer was called while it averages gradients."""


def as_internal_error(error: BaseException) -> HorovodInternalError:
    """The error that `synchronize` raises when `error` has ended a call."""
    if isinstance(error, HorovodInternalError):
        return error
    made = HorovodInternalError(f"{type(error).__name__}: {error}")
    made.ranks, made.reporter = getattr(error, "ranks", None), getattr(error, "reporter", None)
    return made


def warn_deprecated(text: str) -> None:
    """Warn that an argument is deprecated, once for each line that makes the call."""
    warnings.warn(text, DeprecationWarning, stacklevel=4)
