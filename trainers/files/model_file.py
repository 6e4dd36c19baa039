"""Model files: a .npz of plain arrays, readable with NumPy alone. No pickle, no MPI, no number of ranks.

A checkpoint (trainers.files.checkpoint) is a model file with more in it, which is passed over here.
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
from typing import IO, Any

import numpy as np

from trainers.errors import CheckpointError, ModelFileError, TrainerError

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes; the others can hide any size in any file
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Archive:
    """The arrays of an .npz archive by name, each read when it is asked for. Raises all kinds of errors."""

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
        """The CRC-32 of each array's member; bytes that do not have it are refused when they are read."""
        return {name: member.CRC for name, member in self._members.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        member = self._members[name]
        if member.compress_type not in METHODS:
            raise ValueError(f"{name} is compressed in a way that NumPy does not write")
        if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
            raise ValueError(f"{name} claims {member.file_size} bytes, and {member.compress_size} are stored")
        with self._archive.open(member) as file:
            self._check_header(name, file, member.file_size)
        with self._archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    def _check_header(self, name: str, file: IO[bytes], size: int) -> None:
        """Hold what an array's header claims against the bytes that there are, before memory is taken for it."""
        shape, _, dtype = HEADERS[np.lib.format.read_magic(file)](file)
        wanted = file.tell() + math.prod(shape) * dtype.itemsize
        if wanted != size and not dtype.hasobject:  # of objects read_array says what is wrong with them
            raise ValueError(f"{name} has {size} bytes; its header says {wanted} (shape {shape}, {dtype})")


def put(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    """Write an array as `name`, uncompressed, as NumPy does; no copy, and no piece that holds up other threads."""
    array = np.asarray(array, order="C")
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, np.lib.format.header_data_from_array_1_0(array))
        content = array.reshape(-1).view(np.uint8).data
        for start in range(0, content.nbytes, PIECE):
            member.write(content[start : start + PIECE])


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as one piece of memory, for a message."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, array in arrays.items():
            put(archive, name, array)
    return memory.getvalue()


def unpacked(content: bytes) -> dict[str, np.ndarray]:
    """What `packed` was given, on another rank say. Raises CheckpointError when it was damaged on its way."""
    damaged = "a message with what a rank has for a checkpoint is damaged"
    with opened(io.BytesIO(content), len(content), lambda error: CheckpointError(f"{damaged}: {error}")) as archive:
        return {name: archive[name] for name in archive.names}


@contextmanager
def opened(file: IO[bytes], packed: int, refusal: Callable[[Exception], TrainerError]) -> Iterator[Archive]:
    """The archive in a file of `packed` bytes; whatever is found wrong in the block raises refusal(what it was)."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield Archive(archive, packed)
    except TrainerError:
        raise
    except Exception as error:  # zipfile, zlib, tokenize and NumPy raise a dozen types for bytes that are wrong
        raise refusal(error) from error


HEADER = "model"  # the array that holds the JSON text {"format", "kind", "config"}
FORMAT = 1
BESIDE = "checkpoint"  # names that begin so are no part of the model


def write(path: str, kind: str, config: dict[str, Any], state: dict[str, np.ndarray]) -> None:
    """Write a model to exactly `path`. Raises ModelFileError."""
    try:
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **{HEADER: header_of(kind, config)}, **state)
    except OSError as error:
        raise ModelFileError(f"the model can't be written to {path}: {error.strerror or error}") from error


def header_of(kind: str, config: dict[str, Any]) -> np.ndarray:
    """What says which model the other arrays are."""
    return np.array(json.dumps({"format": FORMAT, "kind": kind, "config": config}))


def read(path: str, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the state of a model of this kind. Raises ModelFileError."""

    def refusal(error: object) -> ModelFileError:
        return ModelFileError(f"{path} is no model file, or it is damaged ({error}); save() writes one")

    try:
        file = open_regular(path)
    except OSError as error:
        raise ModelFileError(f"the model file {path} can't be read: {error.strerror or error}") from error
    with file, opened(file, size(file), refusal) as archive:
        header, arrays = model_in(archive)
    if header.get("format") != FORMAT or header.get("kind") != kind:
        found = f"{header.get('kind')}, format {header.get('format')}"
        raise ModelFileError(f"{path} holds a model of another kind ({found}); expected {kind}, format {FORMAT}")
    if not isinstance(header.get("config"), dict):
        raise refusal("its header has no config")
    for name, array in arrays.items():
        check_numbers(path, name, array)
    return header["config"], arrays


def model_in(archive: Archive) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of the model. Raises all kinds of errors."""
    arrays = {name: archive[name] for name in archive.names if not name.startswith(BESIDE)}
    header = json.loads(str(arrays.pop(HEADER)))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {header!r}")
    return header, arrays


def check_numbers(path: str, name: str, array: np.ndarray) -> None:
    """Refuse text, and numbers that training can't go on from; a module's own buffers may hold infinities."""
    if array.dtype.kind not in "iufcb":
        raise ModelFileError(f"{path} is damaged: {name} is {array.dtype}, no numbers")
    trained = name == "parameters" or name.startswith(("optimizer.", "input."))
    if trained and not np.isfinite(array).all():
        raise ModelFileError(f"{path} holds a model that has diverged: {name} has elements that are not finite")


@contextmanager
def replacing(path: str, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when it is complete; after an exception nothing is left.

    A link is followed. What is no regular file (/dev/stdout, a named pipe) stays, and is written to as it is.
    durable: have it on the disk before it takes its place, and its name after, so that a crash of the machine leaves
        either the old file or the new one. It replaces a link or a pipe too, which nobody but a user could mean.
    """
    if not durable:
        if is_special(path):
            with open(path, "wb") as file:
                yield file
            return
        path = os.path.realpath(path)
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # as the umask has it
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(FileNotFoundError):  # the whole folder may be gone
            os.unlink(aside)
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_special(path: str) -> bool:
    """Whether something is there that is no regular file."""
    return os.path.exists(path) and not os.path.isfile(path)


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
