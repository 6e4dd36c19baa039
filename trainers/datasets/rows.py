"""Tables with a header (.csv, .tsv, gzipped or not), read a few lines at a time."""

import csv
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from trainers.datasets import files
from trainers.errors import DataError

ENDINGS = {".csv": ",", ".tsv": "\t"}  # the character between the cells
BLOCK = 1 << 20  # bytes that are parsed at a time, to bound the memory
LONGEST_LINE = 1 << 24  # bytes
MOST_COLUMNS = 1 << 14
LONGEST_SHOWN = 60  # characters of a cell in an error
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # before the text in files of some programs

Cells = Sequence[str]


class Block(NamedTuple):
    """Consecutive rows. columns: the cells of each column. lines: the number of each row's line in the file."""

    columns: list[Cells]
    lines: Sequence[int]

    def __len__(self) -> int:
        return len(self.lines)


def is_table(path: str) -> bool:
    return path.removesuffix(".gz").endswith(tuple(ENDINGS))


class TableFile:
    """A table whose first line has the names of the columns. Every other line is a row with as many cells.

    names: of the columns. begin, end: the bytes where the rows begin and end; of a gzipped table, unpacked bytes.

    A cell may be in quotation marks, but no row goes on in the next line, so a piece of rows is parsed without those
    before it. Blank lines are skipped; in a .tsv a line of tabs is a row of missing values. Raises DataError, with
    the path and the line.
    """

    def __init__(self, path: str, is_header: Callable[[list[str]], bool] | None = None) -> None:
        """is_header: for a table that may lack the line with names: returns whether the cells of the first line are
        names, which are then not checked."""
        self.path = path
        self._delimiter = next(mark for end, mark in ENDINGS.items() if path.removesuffix(".gz").endswith(end))
        self._blanks = " \t\r\v\f".replace(self._delimiter, "")  # the characters of a blank line
        with files.opened(path) as (file, most):
            start = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
            file.seek(start)
            number, line = 0, b""
            while not line.strip():
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    raise DataError(f"{path} is empty: expected a line with the names of the columns")
                number += 1
                if file.tell() > most:
                    raise files.too_large_error(path, most)
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path}, line {number} has more than {LONGEST_LINE} bytes; is it a table?")
            first: list[str] = []
            if is_header is not None:
                first = [cell.strip(' "') for cell in self._decoded(line, number).strip().split(self._delimiter)]
            bare = is_header is not None and not is_header(first)
            if bare:
                file.seek(start)
            self.begin = file.tell()
            self.end = self.begin + files.remaining(file, most)
            if self.end > most:
                raise files.too_large_error(path, most)
        self._header = 0 if bare else number  # the number of its line
        unnamed = tuple(f"column {place + 1}" for place in range(len(first)))
        self.names = self._names(line) if is_header is None else unnamed

    def _names(self, line: bytes) -> tuple[str, ...]:
        text = self._decoded(line, self._header).rstrip("\r\n")
        names = [name.strip() for name in self._parsed([text], [self._header])[0]]
        where = f"{self.path}, line {self._header}"
        if len(names) > MOST_COLUMNS:
            raise DataError(f"{where} has more than {MOST_COLUMNS} columns; is it a table?")
        if len(names) == 1:
            other = next((mark for mark in ";|,\t" if mark != self._delimiter and mark in text), None)
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
        for piece, number in self.pieces():
            block = self.block(piece, number)
            if len(block):
                yield block

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        """Yield whole lines, about BLOCK bytes at a time, and the number of the line before them: for `block`."""
        place, number = self.begin, self._header
        with files.opened(self.path) as (file, _):
            file.seek(place)
            while place < self.end:
                piece = file.read(min(BLOCK, self.end - place))
                if not piece:
                    raise DataError(f"{self.path} became shorter while it was read")
                if not piece.endswith(b"\n"):
                    piece += self._line_of(file)
                yield piece, number
                place += len(piece)
                number += piece.count(b"\n")

    def block(self, piece: bytes, number: int) -> Block:
        """Return the rows of a piece, perhaps none. number: of the line before it."""
        texts = self._decoded(piece, number + 1).split("\n")
        if not texts[-1]:
            texts.pop()
        numbers: Sequence[int] = range(number + 1, number + 1 + len(texts))
        if not all(map(str.strip, texts)):
            kept = [(line, text) for line, text in zip(numbers, texts, strict=True) if text.strip(self._blanks)]
            numbers, texts = [line for line, _ in kept], [text for _, text in kept]
        return self._block([text.removesuffix("\r") for text in texts], numbers) if texts else Block([], [])

    def _block(self, texts: list[str], numbers: Sequence[int]) -> Block:
        width, mark = len(self.names), self._delimiter
        if {text.count(mark) for text in texts} == {width - 1}:
            whole = mark.join(texts)
            if '"' not in whole and "\r" not in whole:  # many times faster than the parser
                cells = whole.split(mark)
                return Block([cells[column::width] for column in range(width)], numbers)
        rows = self._parsed(texts, numbers)
        if {*map(len, rows)} != {width}:
            row, cells = next((row, cells) for row, cells in enumerate(rows) if len(cells) != width)
            found = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
            raise DataError(
                f"{self.path}, line {numbers[row]} has {found}, and the first line has {width}; is the file "
                "truncated, or a cell with a comma not in quotation marks?"
            )
        return Block(list(zip(*rows, strict=True)), numbers)

    def _parsed(self, texts: list[str], numbers: Sequence[int]) -> list[list[str]]:
        options: dict[str, Any] = {"delimiter": self._delimiter, "skipinitialspace": True, "strict": True}
        try:
            rows = list(csv.reader(texts, **options))
            if len(rows) == len(texts):
                return rows
        except csv.Error:
            pass  # the search for the line raises it again
        for text, number in zip(texts, numbers, strict=True):
            try:
                list(csv.reader([text], **options))
            except csv.Error as error:
                unclosed = "a quotation mark is not closed; every row must be one line"
                reason = unclosed if "end of data" in str(error) else error
                raise DataError(f"{self.path}, line {number}: {reason}") from error
        raise DataError(f"{self.path}, line {numbers[0]} or after: the quotation marks do not match")

    def _decoded(self, piece: bytes, line: int) -> str:
        try:
            return piece.decode()
        except UnicodeDecodeError as error:
            line += piece[: error.start].count(b"\n")
            raise DataError(
                f"{self.path}, line {line} is not UTF-8 text (byte 0x{piece[error.start]:02x}); save the table as UTF-8"
            ) from error

    def _line_of(self, file: IO[Any]) -> bytes:
        line: bytes = file.readline(LONGEST_LINE)
        if len(line) == LONGEST_LINE:
            raise DataError(f"{self.path} has a line of more than {LONGEST_LINE} bytes; is it a table?")
        return line


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
