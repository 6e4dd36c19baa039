"""Reading files, gzipped or not, with errors that name the file."""

import gzip
import zlib

from trainers.errors import DataError

GZIP = b"\x1f\x8b"


def read(path: str) -> bytes:
    """The content of a file, unpacked when it is gzipped (whatever its name). Raises DataError."""
    try:
        with open(path, "rb") as file:
            content = file.read()
        if content.startswith(GZIP):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is truncated or damaged: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    if not content:
        raise DataError(f"{path} is empty")
    return content
