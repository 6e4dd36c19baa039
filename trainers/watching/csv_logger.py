"""CSVLogger: a line for each epoch."""

import csv
import os
from contextlib import suppress
from typing import IO, Any

from trainers.errors import ArgumentError
from trainers.watching.callback import Callback, Logs


class CSVLogger(Callback):
    """Writes what was measured in each epoch to a file, by rank 0; on other ranks it does nothing. Keras' arguments.

    filename: of the file. separator: between the columns. append: go on with a file that is there.

    The columns are the epoch, from 0, and the logs by name; what an epoch lacks is NA. Raises ArgumentError on all
    ranks when the file can't be written.
    """

    reads_batches = False

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        if not isinstance(separator, str) or len(separator) != 1:
            raise ArgumentError(f"separator={separator!r}: give one character")
        self.filename, self.separator, self.append = os.fspath(filename), separator, append
        self._file: IO[str] | None = None
        self._writer: csv.DictWriter | None = None
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] | None = None  # of this fit so far, on every rank

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._rows = []
        if self.trainer.rank == 0:
            self._open(self.append)

    def on_ranks_change(self) -> None:
        """Who has become rank 0 goes on with the file, and adds what the one before has not come to write."""
        if self._rows is None or self.trainer.rank or self._file is not None:
            return
        self._open(append=True)
        written = self._last_epoch()
        epochs = [row["epoch"] for row in self._rows]
        for row in self._rows[epochs.index(written) + 1 if written in epochs else 0 :]:
            self._write(row)

    def _open(self, append: bool) -> None:
        try:
            self._columns = self._header() if append else []
            self._file = open(self.filename, "a" if append else "w", newline="", encoding="utf-8")  # noqa: SIM115
            if self._columns and not self._ends_in_a_line():
                self._file.write("\n")
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise self._refused(error) from error

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        row = {"epoch": epoch, **(logs or {})}
        if self._rows is not None:
            self._rows.append(row)
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            if self._writer is None:
                columns = self._columns or ["epoch", *sorted(row.keys() - {"epoch"})]
                style: dict[str, Any] = {"delimiter": self.separator, "lineterminator": "\n"}
                self._writer = csv.DictWriter(self._file, columns, restval="NA", extrasaction="ignore", **style)
                if not self._columns:
                    self._writer.writeheader()
            self._writer.writerow(row)
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error

    def on_train_end(self, logs: Logs | None = None) -> None:
        try:
            self._close()
        except OSError as error:
            raise self._refused(error) from error

    def set_trainer(self, trainer: Any) -> None:
        super().set_trainer(trainer)
        if trainer is None:
            with suppress(OSError):  # the fit has ended in an error already
                self._close()

    def _header(self) -> list[str]:
        """The columns of the file that is there, if there is one."""
        if not os.path.isfile(self.filename):  # reading a pipe would wait for ever
            return []
        with open(self.filename, newline="", encoding="utf-8") as file:
            return next(csv.reader([file.readline(1 << 16)], delimiter=self.separator), [])

    def _last_epoch(self) -> int | None:
        """That of the last whole line."""
        with open(self.filename, newline="", encoding="utf-8") as file:
            lines = [line.split(self.separator)[0] for line in file if line.endswith("\n")]
        return next((int(first) for first in reversed(lines) if first.isdecimal()), None)

    def _ends_in_a_line(self) -> bool:
        """A writer that was killed may have left a part of one."""
        with open(self.filename, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _close(self) -> None:
        file, self._file, self._writer, self._rows = self._file, None, None, None
        if file is not None:
            file.close()

    def _refused(self, error: Exception) -> ArgumentError:
        return ArgumentError(f"{self.filename} can't be written: {getattr(error, 'strerror', None) or error}")
