"""Rows to predict that are read a piece at a time, in constant memory: tables, .npy and .npz files of any size."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import IO, Any

import numpy as np

from trainers.data import Tree, row_count, sliced
from trainers.datasets import files
from trainers.datasets.columns import Columns
from trainers.datasets.learning import place
from trainers.datasets.rows import TableFile, is_number, is_table
from trainers.datasets.shards import is_pattern, matching
from trainers.datasets.table import features
from trainers.errors import DataError
from trainers.files import model_file

PIECE = 1 << 13  # rows of arrays that are read at a time
ARRAY = "x"  # the array of an .npz that is read
FORMATS = ".csv, .tsv, .npy or .npz"


class Stream(ABC):
    """Rows in pieces. size: bytes of a table, or rows of arrays: what the ranks compare."""

    size: int

    @abstractmethod
    def pieces(self) -> Iterator[Callable[[], Any]]:
        """Yield a function for each piece, which returns x of its rows, perhaps of none, and may raise DataError. Each
        rank reads all pieces, which is quick, and makes rows of its share. Raises DataError."""


class Arrays(Stream):
    """Rows of arrays in memory."""

    def __init__(self, x: Tree) -> None:
        self._x, self.size = x, row_count(x)

    def pieces(self) -> Iterator[Callable[[], Tree]]:
        for start in range(0, self.size, PIECE):
            yield partial(sliced, self._x, slice(start, start + PIECE))


def _has_a_word(cells: list[str]) -> bool:
    return not all(map(is_number, cells))


class TableStream(Stream):
    """Rows of a table.

    columns: of the model; None for one that was trained on numbers alone: then all cells are numbers, and the table may
        have no header. features: of a row, None if the model does not tell. If such a table has one column more, its
        last column is the label.
    unknown: counts, by column, values of categories that training has not met.
    """

    def __init__(self, path: str, columns: Columns | None, features: int | None, unknown: dict[str, int]) -> None:
        self._table = TableFile(path, None if columns is not None else _has_a_word)
        self.size = self._table.end - self._table.begin
        self._columns, self._unknown = columns, unknown
        width = len(self._table.names)
        if columns is not None:
            self._places, _ = columns.places(path, self._table.names)
        elif features in (None, width, width - 1):
            self._places = list(range(width if features is None else features))
        else:
            raise DataError(
                f"{path} has {width} columns; the model takes {features} numbers a row, and perhaps a label"
            )

    def pieces(self) -> Iterator[Callable[[], np.ndarray | None]]:
        for piece, number in self._table.pieces():
            yield partial(self._encoded, piece, number)

    def _encoded(self, piece: bytes, number: int) -> np.ndarray | None:
        block = self._table.block(piece, number)
        if not len(block):
            return None
        cells = [block.columns[column] for column in self._places]
        if self._columns is None:
            return np.ascontiguousarray(features(self._table.path, cells, block.lines))
        return self._columns.encode(cells, place(self._table, block), self._unknown)


class ArrayStream(Stream):
    """Rows of an array in a .npy file, or of the array `x` of an .npz."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._open() as (header, _):
            if header.dtype.kind not in "iufb" or not header.shape:
                raise DataError(f"{path} has {header.dtype} of shape {header.shape}; expected rows of numbers")
            if header.fortran and len(header.shape) > 1:
                raise DataError(f"{path} is in Fortran's order; save np.ascontiguousarray(x)")
            self._header = header
        self.size = header.shape[0]

    def pieces(self) -> Iterator[Callable[[], np.ndarray]]:
        width = math.prod(self._header.shape[1:]) * self._header.dtype.itemsize
        with self._open() as (_, file):
            for first in range(0, self.size, PIECE):
                rows = min(PIECE, self.size - first)
                content = model_file.read_up_to(file, rows * width)
                if len(content) < rows * width:
                    raise DataError(f"{self._path} became shorter while it was read")
                yield partial(self._rows, content, first, rows)

    def _rows(self, content: bytearray, first: int, rows: int) -> np.ndarray:
        dtype = self._header.dtype
        x = np.frombuffer(content, dtype).reshape(rows, *self._header.shape[1:])
        if dtype.kind == "f" and not np.isfinite(x).all():
            row = first + int(np.argwhere(~np.isfinite(x))[0][0])
            raise DataError(f"{self._path}: row {row} has an element that is not a finite number")
        return x.astype(dtype.newbyteorder("="), copy=False)

    @contextmanager
    def _open(self) -> Iterator[tuple[model_file.ArrayHeader, IO[bytes]]]:
        """Context manager: yield the header, and a file that stands at the first element."""

        def refusal(error: Exception) -> DataError:
            return DataError(f"{self._path} is not a file of numbers in NumPy's format, or is damaged: {error}")

        with files.seekable(self._path) as (file, size):
            if not self._path.endswith(".npz"):
                try:
                    header = model_file.check_array_header(ARRAY, file, size)
                except Exception as error:  # NumPy raises several types for invalid bytes
                    raise refusal(error) from error
                yield header, file
                return
            with model_file.open_archive(file, size, refusal) as archive:
                if ARRAY not in archive.names:
                    raise DataError(f"{self._path} holds {', '.join(archive.names) or 'nothing'}; expected {ARRAY}")
                with archive.reading(ARRAY) as (header, member):
                    yield header, member


class Several(Stream):
    """The rows of several streams, one after the other."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self.size = sum(stream.size for stream in streams)

    def pieces(self) -> Iterator[Callable[[], Any]]:
        return chain.from_iterable(stream.pieces() for stream in self._streams)


def open_stream(
    given: str | Sequence[str], columns: Columns | None, features: int | None, unknown: dict[str, int]
) -> Stream:
    """Open files to predict: a path, a pattern of paths, or a list of paths. Raises DataError. See TableStream."""
    paths = [given] if isinstance(given, str) else list(given)
    paths = [path for each in paths for path in (matching(each) if is_pattern(each) else [each])]
    streams: list[Stream] = []
    for path in paths:
        if is_table(path):
            streams.append(TableStream(path, columns, features, unknown))
        elif not path.endswith((".npy", ".npz")):
            raise DataError(f"{path}: expected a {FORMATS} file")
        elif columns is not None:
            raise DataError(f"{path}: the model was trained on a table ({columns}); expected a .csv or .tsv file")
        else:
            streams.append(ArrayStream(path))
    if not streams:
        raise DataError("there are no files to predict: the list is empty")
    return streams[0] if len(streams) == 1 else Several(streams)


def unknown_text(unknown: Mapping[str, int]) -> str:
    """Return the warning about values of categories that training has not met; "" if there are none."""
    counts = ", ".join(f"{count} in the column {name!r}" for name, count in unknown.items())
    return counts and f"values that training has not met count as missing: {counts}"
