"""Tables with a header (.csv, .tsv, gzipped or not), read a few rows at a time."""

import csv
import io
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import IO, NamedTuple

from trainers.datasets import files
from trainers.errors import DataError

ENDINGS = {".csv": ",", ".tsv": "\t"}  # the character between the cells
BLOCK = 1 << 13  # rows that are read at a time, to bound the memory
MOST_COLUMNS = 1 << 14
LONGEST_SHOWN = 60  # characters of a cell in an error

Cells = Sequence[str]


class Block(NamedTuple):
    """Consecutive rows. columns: the cells of each column. lines: the number of the line where each row begins."""

    columns: list[Cells]
    lines: Sequence[int]


def is_table(path: str) -> bool:
    return path.removesuffix(".gz").endswith(tuple(ENDINGS))


class TableFile:
    """A table whose first row has the names of the columns. Every other row has as many cells.

    names: of the columns. size: of the file in bytes.

    A cell in quotation marks may have line breaks. Empty lines are skipped; in a .tsv a line of tabs is a row of
    missing values. Raises DataError, with the path and the line.
    """

    def __init__(self, path: str, is_header: Callable[[list[str]], bool] | None = None) -> None:
        """is_header: for a table that may lack the row with names: returns whether the cells of the first row are
        names, which are then not checked."""
        self.path = path
        self._delimiter = next(mark for end, mark in ENDINGS.items() if path.removesuffix(".gz").endswith(end))
        with files.opened(path):
            self.size = os.path.getsize(path)
        with closing(self._rows()) as rows:
            line, cells = next(rows, (0, []))
        if not cells:
            raise DataError(f"{path} is empty: expected a line with the names of the columns")
        if is_header is None:
            self.names, self._begin = self._names(line, cells), 1
        else:
            self.names = tuple(f"column {place + 1}" for place in range(len(cells)))
            self._begin = int(is_header(cells))  # rows before those with values

    def _names(self, line: int, cells: list[str]) -> tuple[str, ...]:
        names = [name.strip() for name in cells]
        where = f"{self.path}, line {line}"
        if len(names) > MOST_COLUMNS:
            raise DataError(f"{where} has more than {MOST_COLUMNS} columns; is it a table?")
        if len(names) == 1:
            other = next((mark for mark in ";|,\t" if mark != self._delimiter and mark in names[0]), None)
            hint = f"; the cells seem to be separated by {other!r}, not by {self._delimiter!r}" if other else ""
            raise DataError(f"{where} has one column; expected the names of several columns{hint}")
        if all(map(is_number, names)):
            raise DataError(f"{where} has numbers; expected the names of the columns")
        for place, name in enumerate(names):
            if not name:
                raise DataError(f"{where}: column {place + 1} has no name; expected a name for each column")
            if name in names[:place]:
                raise DataError(f"{where} has the column {shown(name)} more than once")
        return tuple(names)

    def blocks(self) -> Iterator[Block]:
        """Yield all rows, some at a time."""
        width = len(self.names)
        rows = islice(self._rows(), self._begin, None)
        while block := list(islice(rows, BLOCK)):
            for line, cells in block:
                if len(cells) != width:
                    found = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
                    raise DataError(
                        f"{self.path}, line {line} has {found}, and the first line has {width}; is the file truncated, "
                        "or a cell with a comma not in quotation marks?"
                    )
            lines, values = zip(*block, strict=True)
            yield Block(list(zip(*values, strict=True)), lines)

    def _rows(self) -> Generator[tuple[int, list[str]]]:
        """Yield the number of the line where each row begins, and its cells."""
        with files.opened(self.path) as (file, most):
            lines = self._lines(io.BufferedReader(file), most)  # type: ignore[type-var]  # reads lines faster
            rows = csv.reader(lines, delimiter=self._delimiter, skipinitialspace=True, strict=True)
            line = 1
            try:
                for cells in rows:
                    if cells:
                        yield line, cells
                    line = rows.line_num + 1
            except UnicodeDecodeError as error:
                where, byte = f"{self.path}, line {rows.line_num + 1}", error.object[error.start]
                text = f"{where} is not UTF-8 text (byte 0x{byte:02x}); save the table as UTF-8"
                raise DataError(text) from error
            except csv.Error as error:
                raise DataError(f"{self.path}, line {line}: {error}; is a quotation mark not closed?") from error

    def _lines(self, file: IO[bytes], most: int) -> Iterator[str]:
        """Yield the lines of a file that may hold `most` bytes."""
        encoding, read = "utf-8-sig", 0  # some programs write a byte order mark before the text
        while line := file.readline(most + 1 - read):
            read += len(line)
            if read > most:
                break
            yield line.decode(encoding)
            encoding = "utf-8"
        if os.path.getsize(self.path) != self.size:
            raise DataError(f"{self.path} changed while it was read")
        if read > most:
            raise files.too_large_error(self.path, most)


def is_number(cell: str) -> bool:
    """Whether a cell is a number, perhaps not a finite one."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def shown(text: str) -> str:
    """Return the beginning of a cell or a name in quotation marks, for a message."""
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "...")
