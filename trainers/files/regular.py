"""Files of a user's choice, opened so that neither a pipe nor a device nor a compressed bomb takes us in."""

import os
import stat
from typing import IO

PIECE = 1 << 20  # bytes read at a time, so that memory grows with what comes, never with what a header claims
LEAST_LIMIT, MOST_FOLD = 1 << 25, 25  # what is compressed may become so many bytes, or so many times its size


def open_regular(path: str) -> IO[bytes]:
    """A regular file, open for reading. Raises OSError: a pipe could make us wait for ever, a device never ends."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def size(file: IO[bytes]) -> int:
    """The bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def most_unpacked(packed: int) -> int:
    """The bytes that a compressed file of `packed` bytes may hold; data is never compressed more than that."""
    return max(LEAST_LIMIT, MOST_FOLD * packed)


def take(file: IO[bytes], count: int) -> bytearray:
    """The next `count` bytes, or what is left when there are fewer."""
    taken = bytearray()
    while len(taken) < count and (piece := file.read(min(PIECE, count - len(taken)))):
        taken += piece
    return taken
