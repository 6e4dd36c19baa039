"""Writes text files under a temporary name and renames them, so that only a complete file replaces an old one."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import TextIO

from allreduce.errors import OptionError


def writable(path: str) -> bool:
    """Return whether `replacing` can write to `path`. For checks of options before the work begins. Local."""
    special = os.path.exists(path) and not os.path.isfile(path)
    folder = os.path.dirname(os.path.realpath(path))
    return not os.path.isdir(path) and os.access(path if special else folder, os.W_OK)


@contextlib.contextmanager
def replacing(path: str, what: str) -> Iterator[TextIO]:
    """Context manager: a text file that replaces `path` when it is complete. Devices and pipes are written directly.

    what: the file's name in the OptionError that is raised if it can't be written.
    """
    target = os.path.realpath(path)
    special = os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target)
    folder, name = os.path.split(target)
    aside = target if special else os.path.join(folder, f".{name}.{secrets.token_hex(4)}")  # an unpredictable name
    try:
        with open(aside, "w" if special else "x", encoding="ascii") as file:
            yield file
        if not special:
            os.replace(aside, target)
    except OSError as error:
        raise OptionError(f"{what} can't be written to {path}: {error.strerror or error}") from error
    finally:
        if not special:
            with contextlib.suppress(OSError):
                os.unlink(aside)  # it is there if the file was not finished
