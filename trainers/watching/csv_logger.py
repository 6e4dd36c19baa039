"""CSVLogger: a line for each epoch."""

import csv
import os
from typing import IO, Any

from trainers.errors import ArgumentError
from trainers.watching.callback import FileCallback, Logs, writing


class CSVLogger(FileCallback):
    """Writes the logs of each epoch to a CSV file on rank 0. Takes the arguments of Keras' CSVLogger.

    filename: the file. separator: one character between the columns. append: append to an existing file.

    The columns are the epoch, from 0, and the logs by name; missing values are NA. If rank 0 fails, the new rank 0
    continues the file; the line of the epoch at whose end rank 0 failed may be missing, and History has it. Raises
    ArgumentError on all ranks when the file can't be written.
    """

    reads_batches = False

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        if not isinstance(separator, str) or len(separator) != 1:
            raise ArgumentError(f"separator={separator!r}: give one character")
        self.filename, self.separator, self.append = os.fspath(filename), separator, append
        self._file: IO[str] | None = None
        self._writer: csv.DictWriter | None = None
        self._columns: list[str] = []

    def _open(self, append: bool) -> None:
        append = append or self.append
        with writing(self.filename):
            self._columns = self._header() if append else []
            self._file = open(self.filename, "a" if append else "w", newline="", encoding="utf-8")  # noqa: SIM115
            if self._columns and not self._ends_in_a_line():
                self._file.write("\n")

    def _write_epoch(self, epoch: int, logs: Logs) -> None:
        assert self._file is not None
        row: dict[str, Any] = {"epoch": epoch, **logs}
        with writing(self.filename):
            if self._writer is None:
                columns = self._columns or ["epoch", *sorted(row.keys() - {"epoch"})]
                style: dict[str, Any] = {"delimiter": self.separator, "lineterminator": "\n"}
                self._writer = csv.DictWriter(self._file, columns, restval="NA", extrasaction="ignore", **style)
                if not self._columns:
                    self._writer.writeheader()
            self._writer.writerow(row)
            self._file.flush()

    def _close(self) -> None:
        file, self._file, self._writer = self._file, None, None
        with writing(self.filename):
            if file is not None:
                file.close()

    def _header(self) -> list[str]:
        """Return the columns of the existing file; [] if there is none."""
        if not os.path.isfile(self.filename):  # reading a pipe would block
            return []
        with open(self.filename, newline="", encoding="utf-8") as file:
            return next(csv.reader([file.readline(1 << 16)], delimiter=self.separator), [])

    def _ends_in_a_line(self) -> bool:
        """Whether the file ends with a newline: a killed writer may have left part of a line."""
        with open(self.filename, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
