"""Writes predictions of any number of rows to files, in constant memory: each rank predicts and writes its own rows."""

import csv
import glob
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
from typing import Any, Protocol, TextIO

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
from trainers.watching.progress import on_terminal

log = logging.getLogger("trainers")

ENDINGS = (".csv", ".jsonl")
IN_FOLDER = "part-*.csv"  # the names of the files in a folder that is given alone
ROUND = 1 << 17  # rows that a rank predicts between two agreements of the ranks
STALE_SECONDS = 24 * 3600.0  # after which a temporary file belongs to no prediction that still runs
LINE_SECONDS = 10.0  # between two lines of progress
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
    """Where predictions go. out: a file that ends in .csv or .jsonl; a folder; or a path with a * that stands for the
    number of the rank, in a folder, such as "predictions/part-*.jsonl".

    Raises ArgumentError if `out` is none of them, or if it can't be written. A file is replaced; a folder must be new,
    or without visible files.
    """

    def __init__(self, out: Any) -> None:
        if out is None:
            raise ArgumentError("predict: x are files: say where the predictions go, by out=")
        if not isinstance(out, str | os.PathLike) or not str(out):
            raise ArgumentError(f"out={out!r}: give a file that ends in .csv or .jsonl, or a folder")
        self._out = os.fspath(out)
        folder, name = os.path.split(self._out)
        self.divided = "*" in name or not name.endswith(ENDINGS)
        if self.divided and "*" not in name:
            if os.path.splitext(name)[1][1:].isalpha() and not os.path.isdir(self._out):
                raise ArgumentError(f"out={self._out!r}: a file ends in .csv or .jsonl; of a new folder write {name}/")
            folder, name = self._out, IN_FOLDER
        self._folder, self._name = folder or ".", name
        self.ending = os.path.splitext(name)[1]
        if self.ending not in ENDINGS or name.count("*") > 1 or glob.has_magic(folder):
            raise ArgumentError(
                f"out={self._out!r}: a file ends in .csv or .jsonl; * stands once, in the name of a file in a folder"
            )
        self._check()

    def _check(self) -> None:
        if not self.divided:
            if os.path.exists(self._out) and not os.path.isfile(self._out):
                raise ArgumentError(f"out={self._out!r} is no regular file")
            if not writable(self._out):
                raise ArgumentError(f"out={self._out!r} can't be written; give a file in a folder that exists")
            return
        there = os.path.isdir(self._folder)
        if there and any(not name.startswith(".") for name in os.listdir(self._folder)):
            raise ArgumentError(f"out={self._out!r}: the folder {self._folder} has files already; give another one")
        parent = self._folder if there else os.path.dirname(os.path.abspath(self._folder))
        if not os.access(parent, os.W_OK) or (os.path.exists(self._folder) and not there):
            raise ArgumentError(f"out={self._out!r}: the folder {self._folder} can't be made")

    def path(self, rank: int, ranks: int) -> str:
        """Return the path of a rank's file; all ranks have one if the predictions are not divided."""
        if not self.divided:
            return os.path.realpath(self._out)
        return os.path.join(self._folder, self._name.replace("*", f"{rank:0{max(4, len(str(ranks - 1)))}}"))

    def aside(self, rank: int, ranks: int, token: str) -> str:
        """Return the path of a rank's file while it is written."""
        folder, name = os.path.split(self.path(rank, ranks))
        return os.path.join(folder, f".{name}.{token}.{rank}")

    def remove_stale(self) -> None:
        """Remove the files that a killed prediction to this target left a day ago, or longer. Local, on one rank."""
        folder, name = os.path.split(self.path(0, 1))
        if self.divided:
            name = self._name
        left = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.\d+".replace(r"\*", r"\d+"))
        with suppress(OSError):
            for found in filter(left.fullmatch, os.listdir(folder)):
                path = os.path.join(folder, found)
                if time.time() - os.stat(path).st_mtime > STALE_SECONDS:
                    os.unlink(path)

    def make_folder(self) -> None:
        if self.divided:
            os.makedirs(self._folder, exist_ok=True)

    def remove_folder(self) -> None:
        """Remove the folder if it is empty."""
        if self.divided:
            with suppress(OSError):
                os.rmdir(self._folder)


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


class Progress:
    """Shows on rank 0 how many rows are predicted: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, wanted: bool, rank: int, rows: int, stream: TextIO | None) -> None:
        self._shown, self._rows, self._stream, self._bar = wanted and rank == 0, rows, stream, None
        self._since = time.monotonic()
        if self._shown and on_terminal():
            from tqdm import tqdm

            self._bar = tqdm(total=rows, desc="predict", unit="row", leave=False, delay=0.5, ncols=80)

    def show(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif self._shown and time.monotonic() - self._since > LINE_SECONDS:
            self._since = time.monotonic()
            text = f"predict: {done:,} of {self._rows:,} rows ({100 * done // max(self._rows, 1)} %)"
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def predict_into(
    group: RankGroup,
    model: Predictor,
    rows: Callable[[dict[str, int]], Stream],
    out: Any,
    progress: bool,
    output: TextIO | None,
    classes: Sequence[str] = (),
) -> list[str]:
    """Predict all rows, and write them to files; returns the paths of the files. Collective.

    rows: opens the rows. It counts in the dict the values of each column that training has not met; they are logged.
    out: as for `Trainer.predict`. output: where lines of progress go; None for stdout. classes: see Lines.
    """
    unknown: dict[str, int] = {}
    target, stream = together(group.comm, lambda: (Target(out), rows(unknown)))
    paths = _written(group, model, stream, target, lambda count: Progress(progress, group.rank, count, output), classes)
    everyone = group.values(unknown, "predict: values that training has not met")
    text = unknown_text(sum(map(Counter, everyone), Counter()))
    if text and group.rank == 0:
        log.warning("trainers: predict: %s", text)
    return paths


def _written(
    group: RankGroup,
    model: Predictor,
    stream: Stream,
    target: Target,
    progress: Callable[[int], Progress],
    classes: Sequence[str],
) -> list[str]:
    """Predict all rows of a stream, and write them to the target; returns the paths of the files. Collective.

    Each rank predicts a run of consecutive rows. It writes them to a temporary file; these are renamed, or put together
    to one file, when all ranks are done. After an error, which all ranks raise, nothing is left, and a file that was
    there before is unchanged.
    """
    comm, rank, ranks = group.comm, group.rank, group.size
    mine = chunk(stream.units, ranks, rank)
    own = together(comm, lambda: stream.count(mine.start, mine.stop))
    counts = group.values(own, "predict: the rows of the ranks")
    token = root_value(comm, secrets.token_hex(4), "predict: the names of temporary files")
    aside = target.aside(rank, ranks, token)
    shown = progress(sum(counts))
    lines = Lines(target.ending, model, classes)
    shard = _Shard(model, stream.pieces(mine.start, mine.stop), lines, sum(counts[:rank]))
    try:
        together(comm, target.make_folder)
        together(comm, target.remove_stale if rank == 0 else int)
        names = group.values(together(comm, shard.begin), "predict: the names of the outputs")
        known = next((each for each in names if each is not None), None)
        together(comm, lambda: shard.open(aside, known if target.divided or rank == 0 else []))
        done = 0
        while done < max(counts):
            together(comm, partial(shard.write, max(0, min(ROUND, own - done))))
            done += ROUND
            shown.show(sum(min(done, count) for count in counts))
        together(comm, lambda: shard.end(own))
        paths = _finish(group, target, token)
    except BaseException:
        shard.close()
        target.remove_folder()
        raise
    finally:
        shown.close()
    return paths


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


def _finish(group: RankGroup, target: Target, token: str) -> list[str]:
    """Give the files their names, or put them together to one; returns the paths. Collective."""
    comm, rank, ranks = group.comm, group.rank, group.size
    own, path = target.aside(rank, ranks, token), target.path(rank, ranks)

    def rename() -> None:
        with writing(path):
            os.replace(own, path)

    if target.divided:
        try:
            together(comm, rename)
        except BaseException:
            if not os.path.exists(own):  # renamed, and another rank's was not
                with suppress(OSError):
                    os.unlink(path)
            raise
        return [target.path(each, ranks) for each in range(ranks)]

    def join() -> None:
        with writing(path), open(own, "ab") as whole:
            for other in range(1, ranks):
                with open(target.aside(other, ranks, token), "rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
        rename()

    group.on_one(join)
    together(comm, lambda: os.unlink(own) if rank else None)
    return [path]
