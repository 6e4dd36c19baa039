"""Text files that are written aside and renamed, so that what was there is lost only when all is written."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import TextIO

from allreduce.errors import OptionError


def writable(path: str) -> bool:
    """Whether a file can be written at `path`, as `replacing` does; for options, before the work begins. Local."""
    special = os.path.exists(path) and not os.path.isfile(path)
    folder = os.path.dirname(os.path.realpath(path))
    return not os.path.isdir(path) and os.access(path if special else folder, os.W_OK)


@contextlib.contextmanager
def replacing(path: str, what: str) -> Iterator[TextIO]:
    """A text file that becomes `path` when it is complete; a device or a pipe is written to.

    Raises OptionError, in which it is called `what`.
    """
    target = os.path.realpath(path)
    special = os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target)
    folder, name = os.path.split(target)
    aside = target if special else os.path.join(folder, f".{name}.{secrets.token_hex(4)}")  # which nobody can foresee
    try:
        with open(aside, "w" if special else "x", encoding="ascii") as file:
            yield file
        if not special:
            os.replace(aside, target)
    except OSError as error:
        if not special:
            with contextlib.suppress(OSError):
                os.unlink(aside)
        raise OptionError(f"{what} can't be written to {path}: {error.strerror or error}") from error
