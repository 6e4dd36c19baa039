"""Writes predictions of any number of rows to a file, in constant memory: each rank writes its own rows."""

import csv
import io
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np

from allreduce.elastic.ranks import chunk, root_value, segments, together
from allreduce.files import writable
from trainers.apps.tables.streams import Stream, unknown_text
from trainers.data import Tree, row_count, sliced
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError, DataError
from trainers.fit.evaluation import ROWS
from trainers.group import RankGroup
from trainers.watching.callback import writing

log = logging.getLogger("trainers")

ENDINGS = (".csv", ".jsonl")
ROUND = 1 << 17  # rows that a rank predicts between two agreements of the ranks
STALE_SECONDS = 24 * 3600.0  # after which a temporary file belongs to no prediction that still runs
DIGITS = 6  # of numbers in the files


class Predictor(Protocol):
    """A model that predicts rows, such as a replica. columns, probabilities, check, predict: as a Replica has them."""

    @property
    def columns(self) -> Columns | None: ...

    @property
    def probabilities(self) -> bool: ...

    def check(self, x: Tree, y: Tree | None) -> None: ...

    def predict(self, x: Any) -> Tree: ...


class Target:
    """Where predictions go. out: a file that ends in .csv or .jsonl, which is replaced.

    Raises ArgumentError if it is none, or can't be written.
    """

    def __init__(self, out: Any) -> None:
        if out is None:
            raise ArgumentError("predict: x are files: say where the predictions go, by out=")
        self.ending = os.path.splitext(out)[1] if isinstance(out, str | os.PathLike) else ""
        if self.ending not in ENDINGS:
            raise ArgumentError(f"out={out!r}: give a file that ends in .csv or .jsonl")
        if os.path.exists(out) and not os.path.isfile(out):
            raise ArgumentError(f"out={out!r} is no regular file")
        if not writable(os.fspath(out)):
            raise ArgumentError(f"out={out!r} can't be written; give a file in a folder that exists")
        self.path = os.path.realpath(out)  # a link stays one, and its file may have another ending
        self._folder, self._name = os.path.split(self.path)

    def aside(self, rank: int, token: str) -> str:
        """Return the path of a rank's file while it is written."""
        return os.path.join(self._folder, f".{self._name}.{token}.{rank}")

    def remove_stale(self) -> None:
        """Remove the files that a killed prediction to this target left a day ago, or longer. Local, on one rank."""
        left = re.compile(rf"\.{re.escape(self._name)}\.[0-9a-f]{{8}}\.\d+")
        with suppress(OSError):
            for found in filter(left.fullmatch, os.listdir(self._folder)):
                path = os.path.join(self._folder, found)
                if time.time() - os.stat(path).st_mtime > STALE_SECONDS:
                    os.unlink(path)


class Lines:
    """Makes lines of predictions. ending: of the file. classes: their names; () for those of the model's columns. If
    there are names, or the model predicts probabilities, a line has the class in words and its probability, otherwise
    all outputs."""

    def __init__(self, ending: str, model: Predictor, classes: Sequence[str]) -> None:
        self._json = ending == ".jsonl"
        self._classes = tuple(classes) or (() if model.columns is None else model.columns.classes)
        self._value = "probability" if model.probabilities else "output"
        self._words: list[str] = []
        self.names = ["row", "prediction", self._value]

    def learn(self, outputs: np.ndarray) -> list[str]:
        """Return the names of the values in a line, from some outputs."""
        width = int(np.prod(outputs.shape[1:]))
        if outputs.ndim == 2 and (width == len(self._classes) if self._classes else self._value == "probability"):
            self._words = [*self._classes] or [str(number) for number in range(width)]
        else:
            self.names = ["row", *(["output"] if width == 1 else [f"output_{place}" for place in range(width)])]
        return self.names

    def header(self) -> str:
        """Return the first line of a file; "" for none."""
        return "" if self._json else self._table([self.names])

    def text(self, first: int, outputs: np.ndarray) -> str:
        """Return a line for each row. first: the number of the first row."""
        rows = range(first, first + len(outputs))
        if self._words:
            best = outputs.argmax(axis=1)
            values = outputs[np.arange(len(outputs)), best].tolist()
            words = [self._words[number] for number in best.tolist()]
            if self._json:
                known = {word: json.dumps(word) for word in self._words}
                columns: list[Sequence[Any]] = [rows, [known[word] for word in words], self._numbers(values)]
            else:
                columns = [rows, words, self._numbers(values)]
        else:
            flat = outputs.reshape(len(outputs), -1)
            columns = [rows, *(self._numbers(column) for column in flat.T.tolist())]
        if not self._json:
            return self._table(zip(*columns, strict=True))
        form = "{{" + ", ".join(f"{json.dumps(name)}: {{}}" for name in self.names) + "}}\n"
        return "".join(map(form.format, *columns))

    def _numbers(self, values: Sequence[float]) -> list[str]:
        found = [f"{value:.{DIGITS}g}" for value in values]
        if not self._json:
            return found
        return ["null" if text.lstrip("-") in ("nan", "inf") else text for text in found]

    @staticmethod
    def _table(rows: Any) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()


def predict_into(
    group: RankGroup,
    model: Predictor,
    rows: Callable[[dict[str, int]], Stream],
    out: Any,
    classes: Sequence[str] = (),
) -> str:
    """Predict all rows, and write them to a file; returns its path. Collective.

    rows: opens the rows. It counts in the dict the values of each column that training has not met; they are logged.
    out: as for `Trainer.predict`. classes: see Lines.
    """
    unknown: dict[str, int] = {}
    target, stream = together(group.comm, lambda: (Target(out), rows(unknown)))
    _write(group, model, stream, target, classes)
    everyone = group.values(unknown, "predict: values that training has not met")
    text = unknown_text(sum(map(Counter, everyone), Counter()))
    if text and group.rank == 0:
        log.warning("trainers: predict: %s", text)
    return target.path


def _write(group: RankGroup, model: Predictor, stream: Stream, target: Target, classes: Sequence[str]) -> None:
    """Predict all rows of a stream, and write them to the target. Collective.

    Each rank predicts a run of consecutive rows. It writes them to a temporary file; rank 0 puts these together when
    all ranks are done. After an error, which all ranks raise, nothing is left, and a file that was there before is
    unchanged.
    """
    comm, rank, ranks = group.comm, group.rank, group.size
    mine = chunk(stream.units, ranks, rank)
    own = together(comm, lambda: stream.count(mine.start, mine.stop))
    counts = group.values(own, "predict: the rows of the ranks")
    token = root_value(comm, secrets.token_hex(4), "predict: the names of temporary files")
    aside = target.aside(rank, token)
    lines = Lines(target.ending, model, classes)
    shard = _Shard(model, stream.pieces(mine.start, mine.stop), lines, sum(counts[:rank]))
    try:
        together(comm, target.remove_stale if rank == 0 else int)
        names = group.values(together(comm, shard.begin), "predict: the names of the outputs")
        known = next((each for each in names if each is not None), None)
        together(comm, lambda: shard.open(aside, known if rank == 0 else []))
        for done in range(0, max(counts), ROUND):
            together(comm, partial(shard.write, max(0, min(ROUND, own - done))))
        together(comm, lambda: shard.end(own))
        group.on_one(lambda: _join(target, [target.aside(each, token) for each in range(ranks)]))
        together(comm, lambda: os.unlink(aside) if rank else None)
    except BaseException:
        shard.close()
        raise


class _Shard:
    """Predicts the rows of a rank and writes them to its file. Local. first: the number of the first row."""

    def __init__(self, model: Predictor, pieces: Iterator[Any], lines: Lines, first: int) -> None:
        self._model, self._pieces, self._lines, self._first = model, pieces, lines, first
        self._written = self._ahead = 0  # rows; ahead: more than were asked for
        self._waiting: np.ndarray | None = None  # outputs that were not written yet
        self._path = ""
        self._file: Any = None

    def begin(self) -> list[str] | None:
        """Predict the first rows; returns the names of the values in a line, None without rows."""
        self._waiting = self._predicted()
        return None if self._waiting is None else self._lines.learn(self._waiting)

    def open(self, path: str, names: list[str] | None) -> None:
        """Open the file, and write the header with these names; [] for none, None if no rank has rows."""
        self._path = path
        with writing(path):
            self._file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115, closed by `end`
            if names != []:
                self._lines.names = names or self._lines.names
                self._file.write(self._lines.header())

    def write(self, rows: int) -> None:
        """Write at least `rows` rows more than those asked for before."""
        self._ahead -= rows
        while self._ahead < 0:
            outputs = self._predicted() if self._waiting is None else self._waiting
            self._waiting = None
            if outputs is None:
                raise DataError("the data changed while it was read: it has fewer rows than before")
            with writing(self._path):
                self._file.write(self._lines.text(self._first + self._written, outputs))
            self._written, self._ahead = self._written + len(outputs), self._ahead + len(outputs)

    def end(self, rows: int) -> None:
        """Check the number of rows, and close the file."""
        if self._written != rows:
            raise DataError(f"the data changed while it was read: {self._written} rows, and {rows} before")
        with writing(self._path):
            self._file.close()

    def close(self) -> None:
        """Close and remove the file."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
            os.unlink(self._path)

    def _predicted(self) -> np.ndarray | None:
        """Predict the next piece; None if there is none."""
        x = next(self._pieces, None)
        if x is None:
            return None
        self._model.check(x, None)
        rows = slice(0, row_count(x))
        outputs = [self._model.predict(sliced(x, part)) for part in segments(rows, ROWS)]
        if not isinstance(outputs[0], np.ndarray):
            raise ArgumentError("predict: the model has several outputs, and out= takes one array: leave out out=")
        return np.concatenate(outputs)


def _join(target: Target, parts: Sequence[str]) -> None:
    """Put the files of the ranks together in the first one, and give it the target's name."""
    with writing(target.path):
        with open(parts[0], "ab") as whole:
            for path in parts[1:]:
                with open(path, "rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
        os.replace(parts[0], target.path)
