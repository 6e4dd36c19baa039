"""Writes predictions of any number of rows to a file, in constant memory: the ranks take turns, and rank 0 writes."""

import csv
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np
from mpi4py import MPI

from allreduce.elastic.ranks import all_values, on_all_ranks, root_value, segments, together
from allreduce.files import writable
from trainers.apps.tables.streams import Stream, unknown_text
from trainers.data import Tree, row_count, sliced
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError, DataError
from trainers.files.model_file import replacing
from trainers.fit.evaluation import ROWS
from trainers.watching.callback import writing

log = logging.getLogger("trainers")

ResultT = TypeVar("ResultT")

ENDINGS = (".csv", ".jsonl")
DIGITS = 6  # of numbers in the files


class Predictor(Protocol):
    """A model that predicts rows, such as a replica. columns, probabilities, check, predict: as a Replica has them."""

    @property
    def columns(self) -> Columns | None: ...

    @property
    def probabilities(self) -> bool: ...

    def check(self, x: Tree, y: Tree | None) -> None: ...

    def predict(self, x: Any) -> Tree: ...


def checked_path(out: Any) -> str:
    """Return the path of the predictions. out: a file that ends in .csv or .jsonl, which is replaced. Raises
    ArgumentError if it is none, or can't be written."""
    if out is None:
        raise ArgumentError("predict: x are files: say where the predictions go, by out=")
    if not isinstance(out, str | os.PathLike) or os.path.splitext(out)[1] not in ENDINGS:
        raise ArgumentError(f"out={out!r}: give a file that ends in .csv or .jsonl")
    if os.path.exists(out) and not os.path.isfile(out):
        raise ArgumentError(f"out={out!r} is no regular file")
    if not writable(os.fspath(out)):
        raise ArgumentError(f"out={out!r} can't be written; give a file in a folder that exists")
    return os.path.realpath(out)  # a link stays one, and its file may have another ending


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
        """Return the names of the values in a line, from some outputs; none from no rows."""
        if not len(outputs):
            return []
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
        if not len(outputs):
            return ""
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
    comm: MPI.Intracomm,
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
    path, stream = together(comm, lambda: (checked_path(out), rows(unknown)))
    _write(comm, stream, path, model, Lines(os.path.splitext(out)[1], model, classes))
    everyone = all_values(comm, unknown, "predict: values that training has not met")
    text = unknown_text(sum(map(Counter, everyone), Counter()))
    if text and comm.rank == 0:
        log.warning("trainers: predict: %s", text)
    return path


def _write(comm: MPI.Intracomm, stream: Stream, path: str, model: Predictor, lines: "Lines") -> None:
    """Predict all rows of a stream, and write their lines to a file. Collective.

    In each round every rank predicts a piece, and rank 0 writes the lines in order. After an error, which all ranks
    raise, nothing is left, and a file that was there before is unchanged.
    """
    if len(set(all_values(comm, stream.size, "predict: the size of the data"))) > 1:
        raise on_all_ranks(DataError("the data change while they are read, or are others on each rank"), comm)
    pieces = islice(stream.pieces(), comm.rank, None, comm.size)
    written, begun, ended = 0, False, False
    with ExitStack() as opened:
        file: Any = _on_first(comm, path, lambda: opened.enter_context(replacing(path)))

        def put(text: str) -> None:
            _on_first(comm, path, lambda: file.write(text.encode()))

        while not ended:
            outputs = together(comm, partial(_predicted, model, pieces))
            mine = np.empty(0) if outputs is None else outputs
            names = together(comm, partial(lines.learn, mine))
            row = [None if outputs is None else len(mine), names]
            everyone = all_values(comm, row, "predict: the rows of the ranks")
            counts, known = [count or 0 for count, _ in everyone], next((each for _, each in everyone if each), None)
            ended = all(count is None for count, _ in everyone)
            text = together(comm, partial(lines.text, written + sum(counts[: comm.rank]), mine))
            written += sum(counts)
            if not begun and (known or ended):
                lines.names, begun = known or lines.names, True
                put(lines.header())
            for rank in range(comm.size):  # one by one: together they may be too long
                put(root_value(comm, text, "predict: the lines of a rank", rank))
        _on_first(comm, path, opened.close)  # the file gets its name


def _on_first(comm: MPI.Intracomm, path: str, action: Callable[[], ResultT]) -> ResultT | None:
    """Do something with a file on rank 0; returns the result there. An error is raised on all ranks. Collective."""

    def done() -> ResultT | None:
        with writing(path):
            return action() if comm.rank == 0 else None

    return together(comm, done)


def _predicted(model: Predictor, pieces: Iterator[Callable[[], Any]]) -> np.ndarray | None:
    """Predict the rows of this rank's next piece, perhaps none; returns None if there is no piece."""
    piece = next(pieces, None)
    x = None if piece is None else piece()
    if x is None or not row_count(x):
        return None if piece is None else np.empty(0)
    model.check(x, None)
    outputs = [model.predict(sliced(x, part)) for part in segments(slice(0, row_count(x)), ROWS)]
    if not isinstance(outputs[0], np.ndarray):
        raise ArgumentError("predict: the model has several outputs, and out= takes one array: leave out out=")
    found = np.concatenate(outputs)
    if len(found) != row_count(x):
        raise DataError(f"predict: the model returns {len(found)} rows for {row_count(x)}")
    return found
