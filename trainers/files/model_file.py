"""Model files: a .npz of plain arrays, readable with NumPy alone. No pickle, no MPI, no number of ranks.

A checkpoint (trainers.files.checkpoint) is a model file with additional arrays, which are ignored here.
"""

import io
import json
import math
import os
import secrets
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

import numpy as np

from trainers.errors import CheckpointError, ModelFileError, TrainerError, as_error

# the methods that NumPy writes; others could unpack a small file to any size
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Archive:
    """The arrays of an .npz archive by name, each read on access. Invalid bytes raise any error; see `open_archive`."""

    def __init__(self, archive: zipfile.ZipFile, packed: int) -> None:
        self._archive = archive
        arrays = [each for each in archive.infolist() if each.filename.endswith(".npy")]
        self._members = {each.filename[:-4]: each for each in arrays}
        if len(self._members) < len(arrays):
            twice = Counter(each.filename[:-4] for each in arrays).most_common(1)[0][0]
            raise ValueError(f"it holds {twice} more than once")
        held = sum(each.file_size for each in self._members.values())
        if held > most_unpacked(packed):
            raise ValueError(f"it claims to hold {held} bytes in a file of {packed}; store large data uncompressed")

    @property
    def names(self) -> list[str]:
        return list(self._members)

    @property
    def checksums(self) -> dict[str, int]:
        """The CRC-32 of each array's member; reading an array checks it."""
        return {name: member.CRC for name, member in self._members.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        member = self._checked(name)
        with self._archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    @contextmanager
    def reading(self, name: str) -> Iterator[tuple["ArrayHeader", IO[bytes]]]:
        """Context manager: yield the header of an array, and a file that stands at its first element."""
        with self._archive.open(self._checked(name)) as file:
            yield read_array_header(file), file

    def _checked(self, name: str) -> zipfile.ZipInfo:
        """Return the member of an array. Raises ValueError if its header, its size or its compression is invalid."""
        member = self._members[name]
        if member.compress_type not in METHODS:
            raise ValueError(f"{name} is compressed in a way that NumPy does not write")
        if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
            raise ValueError(f"{name} claims {member.file_size} bytes, and {member.compress_size} are stored")
        with self._archive.open(member) as file:
            check_array_header(name, file, member.file_size)
        return member


class ArrayHeader(NamedTuple):
    """The header of an array in NumPy's format. fortran: whether the elements are in Fortran's order."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype


def read_array_header(file: IO[bytes]) -> ArrayHeader:
    """Read the header of an array. Invalid bytes raise any error."""
    return ArrayHeader(*HEADERS[np.lib.format.read_magic(file)](file))


def check_array_header(name: str, file: IO[bytes], size: int) -> ArrayHeader:
    """Read the header of an array in a file of `size` bytes. Raises ValueError if it does not match that size, before
    memory is allocated for it."""
    header = read_array_header(file)
    wanted = file.tell() + math.prod(header.shape) * header.dtype.itemsize
    if wanted != size and not header.dtype.hasobject:  # read_array refuses object arrays with an error of its own
        raise ValueError(f"{name} has {size} bytes; its header says {wanted} (shape {header.shape}, {header.dtype})")
    return header


def put(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    """Write an array as member `name`, uncompressed, as NumPy does. Writes small pieces without a copy, so that other
    threads can run."""
    array = np.asarray(array, order="C")
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, np.lib.format.header_data_from_array_1_0(array))
        content = array.reshape(-1).view(np.uint8).data
        for start in range(0, content.nbytes, PIECE):
            member.write(content[start : start + PIECE])


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Pack arrays into bytes (an .npz archive), for a message."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, array in arrays.items():
            put(archive, name, array)
    return memory.getvalue()


def unpack(content: bytes) -> dict[str, np.ndarray]:
    """Unpack the bytes of `pack` into arrays. Raises CheckpointError if they are damaged."""

    def damaged(error: object) -> CheckpointError:
        return CheckpointError(f"the message with a rank's part of a checkpoint is damaged: {error}")

    with open_archive(io.BytesIO(content), len(content), damaged) as archive:
        return {name: archive[name] for name in archive.names}


@contextmanager
def open_archive(file: IO[bytes], packed: int, error_of: Callable[[Exception], TrainerError]) -> Iterator[Archive]:
    """Context manager: open the archive in `file`, which has `packed` bytes. An exception in the block is raised as
    error_of(exception); a TrainerError is raised as it is."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield Archive(archive, packed)
    except TrainerError:
        raise
    except Exception as error:  # zipfile, zlib, tokenize and NumPy raise a dozen types for invalid bytes
        raise error_of(error) from error


HEADER = "model"  # the array that holds the JSON text {"format", "kind", "config"}
FORMAT = 1
CHECKPOINT = "checkpoint"  # names with this prefix do not belong to the model


def write(path: str, kind: str, config: dict[str, Any], state: dict[str, np.ndarray]) -> None:
    """Write a model to exactly `path`. Raises ModelFileError."""
    with as_error(ModelFileError, f"the model can't be written to {path}"), replacing(path) as file:
        np.savez(file, allow_pickle=False, **{HEADER: header_of(kind, config)}, **state)


def header_of(kind: str, config: dict[str, Any]) -> np.ndarray:
    """Return the header: an array of the JSON text {"format", "kind", "config"}."""
    return np.array(json.dumps({"format": FORMAT, "kind": kind, "config": config}))


def read(path: str, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a model of class `kind`; returns (config, state). Raises ModelFileError."""
    with _opened(path) as archive:
        header, arrays = model_in(archive)
        _check_header(path, header)
    if header["kind"] != kind:
        raise ModelFileError(f"{path} holds a model of another kind ({header['kind']}); expected {kind}")
    for name, array in arrays.items():
        check_numbers(path, name, array)
    return header["config"], arrays


def read_header(path: str) -> tuple[str, dict[str, Any]]:
    """Return the class of a saved model and its config. Raises ModelFileError."""
    with _opened(path) as archive:
        header = json.loads(str(archive[HEADER]))
        _check_header(path, header)
    return header["kind"], header["config"]


@contextmanager
def _opened(path: str) -> Iterator[Archive]:
    def damaged(error: object) -> ModelFileError:
        return ModelFileError(f"{path} is not a model file, or it is damaged ({error}); save() writes one")

    with as_error(ModelFileError, f"the model file {path} can't be read"):
        file = open_regular(path)
    with file, open_archive(file, size(file), damaged) as archive:
        yield archive


def _check_header(path: str, header: Any) -> None:
    """Raise ValueError or ModelFileError if a header does not describe a model."""
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError(f"its header is {header!r}")
    if header.get("format") != FORMAT:
        raise ModelFileError(f"{path} has format {header.get('format')!r}; this version reads format {FORMAT}")
    if not isinstance(header.get("config"), dict):
        raise ValueError("its header has no config")


def model_in(archive: Archive) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays of the model in an archive. Invalid contents may raise any exception."""
    arrays = {name: archive[name] for name in archive.names if not name.startswith(CHECKPOINT)}
    header = json.loads(str(arrays.pop(HEADER)))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {header!r}")
    return header, arrays


def check_numbers(path: str, name: str, array: np.ndarray) -> None:
    """Raise ModelFileError if an array is not numeric, or if parameters, optimizer state or inputs are not finite.
    (Other buffers may hold infinities.)"""
    if array.dtype.kind not in "iufcb":
        raise ModelFileError(f"{path} is damaged: {name} is {array.dtype}, not numbers")
    trained = name in ("parameters", "ema") or name.startswith(("optimizer.", "input."))
    if trained and not np.isfinite(array).all():
        raise ModelFileError(f"{path} holds a model that has diverged: {name} has elements that are not finite")


@contextmanager
def replacing(path: str, durable: bool = False) -> Iterator[IO[bytes]]:
    """Context manager: write to a temporary file, which replaces `path` at the end of the block. After an exception the
    temporary file is removed, and `path` is unchanged.

    A symbolic link is followed. Anything that is not a regular file (/dev/stdout, a named pipe) is written in place.
    durable: sync the file before it replaces `path`, and the folder afterwards, so that a crash of the machine leaves
        either the old or the new file. Also replaces a link or a pipe at `path`.
    """
    if not durable:
        if is_special(path):
            with open(path, "wb") as file:
                yield file
            return
        path = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}")
    # permissions as the umask allows
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):  # the whole folder may be gone
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    """Sync a folder, so that the names of its files are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_special(path: str) -> bool:
    """Whether `path` exists and is not a regular file."""
    return os.path.exists(path) and not os.path.isfile(path)


PIECE = 1 << 20  # bytes read at a time, so that memory grows with the bytes read, not with what a header claims
# compressed data may unpack to LEAST_LIMIT bytes or to MOST_FOLD times its size, whichever is more
LEAST_LIMIT, MOST_FOLD = 1 << 25, 25


def open_regular(path: str) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError for anything else: a pipe may block for ever, a device may never
    end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def most_unpacked(packed: int) -> int:
    """Return the largest unpacked size that is accepted for a file of `packed` bytes."""
    return max(LEAST_LIMIT, MOST_FOLD * packed)


def read_up_to(file: IO[bytes], count: int) -> bytearray:
    """Read the next `count` bytes, or all that remain if there are fewer."""
    taken = bytearray()
    while len(taken) < count and (piece := file.read(min(PIECE, count - len(taken)))):
        taken += piece
    return taken
