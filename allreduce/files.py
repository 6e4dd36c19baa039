"""Text files: written under a temporary name and renamed, so that only a complete file replaces an old one; read with a
limit, because their content is untrusted."""

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from typing import Any, TextIO

from allreduce.errors import OptionError
from allreduce.notices import shown


class ContentError(ValueError):
    """The reader of a file can't use its content."""


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """Return the text of a regular file of at most `most` bytes. Raises OSError or ContentError. Local.

    A pipe may block for ever, and a device never ends.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ContentError("it is not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ContentError(f"it has more than {most} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ContentError("it is not text") from None


def json_of(text: str, format: str, version: int, lacks: str) -> dict[str, Any]:
    """Return the object in a JSON text of this format and version. Raises ContentError: `lacks` for another format."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"it is not JSON ({error})") from None
    if not isinstance(found, dict) or found.get("format") != format:
        raise ContentError(lacks)
    if found.get("version") != version:
        given = shown(found.get("version"))
        raise ContentError(f"it has version {given} of the format, and this is version {version}")
    return found


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
