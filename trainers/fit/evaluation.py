"""A rank's part of an evaluation or a prediction. Local; a replica or a data set may raise anything."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays.chunks import chunk, segments
from allreduce.transport.tables import table
from trainers.data import Data, Samples, Tree, checksum, leaves, mapped, row_count, sliced
from trainers.errors import DataError
from trainers.fit.reader import Reader
from trainers.replica import Replica, check_rows

EXACT_ROWS = 128  # of a segment, if bits must not depend on the ranks
ROWS = 1024  # that a replica evaluates or predicts at a time


def rows_in(data: Data) -> int:
    """Return the number of rows of arrays, or of (Samples, None)."""
    return len(data[0]) if isinstance(data[0], Samples) else row_count(data)


def means_of(names: Sequence[str], counts: bool, sums: np.ndarray, rows: int) -> dict[str, float]:
    """Return the metrics of an evaluation. names, counts: of the replica. sums: of the rows of `evaluate_chunk`."""
    means = sums[:-1] / rows
    if counts:
        means[0] = sums[0] / sums[-1] if sums[-1] else 0.0
    return dict(zip(names, means.tolist(), strict=True))


def predict_chunk(replica: Replica, x: Tree, ranks: int, rank: int) -> Tree:
    """Predict the chunk of rows of `rank`. Returns arrays for the outputs of all rows, in which only that chunk is
    filled."""
    rows = row_count(x)
    mine = chunk(rows, ranks, rank)
    parts = [replica.predict(sliced(x, part)) for part in segments(mine, ROWS)]
    like = parts[0] if parts else replica.predict(sliced(x, slice(1)))  # not every model can be fed with no rows
    outputs = mapped(lambda array: np.empty((rows, *array.shape[1:]), array.dtype), like)
    if parts:
        for output, *pieces in zip(leaves(outputs), *map(leaves, parts), strict=True):
            np.concatenate(pieces, out=output[mine])
    return outputs


class Evaluation:
    """An evaluation of the same rows, any number of times.

    data: all rows, arrays; or (Samples, None).
    """

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return rows_in(self._data)

    def evaluate_chunk(self, replica: Replica, ranks: int, rank: int, exact: bool = False) -> np.ndarray:
        """Evaluate the chunk of rows of `rank`; returns sums for `means_of`, (segments, metrics + 1) float64: of the
        replica's metrics, and of the weights that the loss has counted.

        exact: the segments of all ranks are the same on any number of ranks.
        """
        mine, size = chunk(len(self), ranks, rank), ROWS
        if exact:
            whole, size = chunk(-(-len(self) // EXACT_ROWS), ranks, rank), EXACT_ROWS
            mine = slice(whole.start * size, min(whole.stop * size, len(self)))
        parts = list(segments(mine, size))
        sums = [[*map(float, replica.evaluate(*rows)), replica.counted(rows[1])] for rows in self._rows(replica, parts)]
        return np.array(sums, np.float64).reshape(-1, len(replica.metrics) + 1)

    def _rows(self, replica: Replica, parts: list[slice]) -> Iterator[Data]:
        samples = self._data[0]
        if not isinstance(samples, Samples):
            yield from (sliced(self._data, part) for part in parts)
            return
        for part in parts:
            batch = samples.take(np.arange(part.start, part.stop))
            check_rows(replica, batch, batch=True)
            yield batch


class Evaluated(NamedTuple):
    """A rank's part of an evaluation of a loader: sums of `evaluate_chunk`, (terms, metrics + 1); the batches and
    the rows that the rank has read, and a checksum of them if all ranks read the same."""

    terms: np.ndarray
    batches: int
    rows: int
    sum: int = 0


def evaluate_loader(
    replica: Replica, reader: Reader, limit: int | None, ranks: int, rank: int, exact: bool = False
) -> Evaluated:
    """Evaluate the chunk of `rank` of every batch of a pass over a loader, or of `limit` batches of it."""
    terms, batches, rows, total = np.empty((0, len(replica.metrics) + 1)), 0, 0, 0
    if not reader.once:
        reader.rewind()
    while limit is None or batches < limit:
        data = reader.read(f"batch {batches + 1} of an evaluation", again=limit is not None)
        if data is None:
            break
        check_rows(replica, data, batch=True)
        terms = np.concatenate([terms, Evaluation(data).evaluate_chunk(replica, ranks, rank, exact)])
        if not exact:
            terms = terms.sum(axis=0, keepdims=True)
        batches, rows = batches + 1, rows + row_count(data)
        total = checksum(data, total) if ranks > 1 else 0
    if not reader.once:
        reader.stop()
    return Evaluated(terms, batches, rows, total)


def rows_of_loaders(read: Sequence[Any], divided: bool) -> int:
    """Return the rows of an evaluation. read: (batches, rows, checksum) of each rank, or None. Raises DataError."""
    given = [each for each in read if each is not None]
    rows = sum(rows for _, rows, _ in given) if divided else max(rows for _, rows, _ in given)
    if not rows:
        raise DataError(
            "no rank's loader gives a batch to evaluate: it has no rows, or is an iterator that has ended; give a "
            "loader that can be iterated again"
        )
    if not divided and any(each != given[0] for each in given):
        texts = ["no loader" if each is None else f"{each[0]} batches, {each[1]} rows, #{each[2]:08x}" for each in read]
        raise DataError(
            'rows="whole" takes the same batches on all ranks, and their loaders have given:\n' + table(texts)
        )
    return rows
