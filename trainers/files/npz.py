"""Writing .npz archives in small pieces, and reading some that may be damaged, hostile, or no archives. No pickle."""

import io
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import numpy as np

from trainers.errors import CheckpointError, TrainerError
from trainers.files import regular

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
        if held > regular.most_unpacked(packed):
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
        for start in range(0, content.nbytes, regular.PIECE):
            member.write(content[start : start + regular.PIECE])


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
