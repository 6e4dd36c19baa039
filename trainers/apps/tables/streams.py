"""Rows to predict that are read a piece at a time, in constant memory: tables, .npy and .npz files of any size."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from trainers.data import Tree, cut, row_count, sliced
from trainers.datasets import files
from trainers.datasets.columns import Columns
from trainers.datasets.learning import place
from trainers.datasets.rows import Block, TableFile, is_number, is_table
from trainers.datasets.shards import is_pattern, matching
from trainers.datasets.table import features
from trainers.errors import DataError
from trainers.files import model_file

PIECE = 1 << 13  # rows of arrays that are read at a time
ARRAY = "x"  # the array of an .npz that is read
FORMATS = ".csv, .tsv, .npy or .npz"


class Stream(ABC):
    """Rows that are read from any unit to any other. units: bytes of a table, or rows of arrays."""

    units: int

    def count(self, start: int, stop: int) -> int:
        """Return the number of rows in the units from `start` to `stop`. Raises DataError."""
        return stop - start

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[Any]:
        """Yield x of the rows in the units from `start` to `stop`, a few rows at a time. Raises DataError."""


class Arrays(Stream):
    """Rows of arrays in memory."""

    def __init__(self, x: Tree) -> None:
        self._x, self.units = x, row_count(x)

    def pieces(self, start: int, stop: int) -> Iterator[Tree]:
        yield from cut(sliced(self._x, slice(start, stop)), stop - start, PIECE)


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
        self.units = self._table.end - self._table.begin
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

    def count(self, start: int, stop: int) -> int:
        return self._table.count(self._table.begin + start, self._table.begin + stop).rows

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        begin, end = self._table.begin + start, self._table.begin + stop
        try:
            yield from self._pieces(begin, end, 0)
        except DataError:
            if not start:
                raise
            lines = self._table.count(self._table.begin, begin).lines  # for the right number in the message
            for _ in self._pieces(begin, end, lines):
                pass
            raise

    def _pieces(self, begin: int, end: int, lines: int) -> Iterator[np.ndarray]:
        for block in self._table.blocks(begin, end, lines):
            yield self._encoded(block)

    def _encoded(self, block: Block) -> np.ndarray:
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
        self.units = header.shape[0]

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        shape, dtype = self._header.shape[1:], self._header.dtype
        width = math.prod(shape) * dtype.itemsize
        with self._open() as (_, file):
            file.seek(start * width, 1)
            for first in range(start, stop, PIECE):
                rows = min(PIECE, stop - first)
                content = model_file.read_up_to(file, rows * width)
                if len(content) < rows * width:
                    raise DataError(f"{self._path} became shorter while it was read")
                x = np.frombuffer(content, dtype).reshape(rows, *shape)
                if dtype.kind == "f" and not np.isfinite(x).all():
                    row = first + int(np.argwhere(~np.isfinite(x))[0][0])
                    raise DataError(f"{self._path}: row {row} has an element that is not a finite number")
                yield x.astype(dtype.newbyteorder("="), copy=False)

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
        self.units = sum(stream.units for stream in streams)

    def _segments(self, start: int, stop: int) -> Iterator[tuple[Stream, int, int]]:
        before = 0
        for stream in self._streams:
            first, last = max(start - before, 0), min(stop - before, stream.units)
            if first < last:
                yield stream, first, last
            before += stream.units

    def count(self, start: int, stop: int) -> int:
        return sum(stream.count(*segment) for stream, *segment in self._segments(start, stop))

    def pieces(self, start: int, stop: int) -> Iterator[Any]:
        for stream, *segment in self._segments(start, stop):
            yield from stream.pieces(*segment)


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
