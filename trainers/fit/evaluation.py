"""The rows of an evaluation or a prediction, and a rank's part of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.arrays.chunks import chunk, segments
from allreduce.transport.control import all_values, together
from allreduce.transport.tables import table
from trainers.data import Arrays, Samples, Tree, checksum, leaves, mapped, row_count
from trainers.errors import DataError
from trainers.fit.reader import Reader
from trainers.group import RankGroup
from trainers.options.loader import DIVIDED, Loader
from trainers.replica import Replica, check_rows, weight_of

EXACT_ROWS = 128  # of a segment, if bits must not depend on the ranks
ROWS = 1024  # that a replica evaluates or predicts at a time


def means_of(names: Sequence[str], counts: bool, sums: np.ndarray, rows: int) -> dict[str, float]:
    """Return the metrics of an evaluation. names, counts: of the replica. sums: of the rows of `evaluate_rows`."""
    means = sums[:-1] / rows
    if counts:
        means[0] = sums[0] / sums[-1] if sums[-1] else 0.0
    return dict(zip(names, means.tolist(), strict=True))


def predict_chunk(replica: Replica, rows: Arrays | Samples, ranks: int, rank: int) -> Tree:
    """Predict the chunk of rows of `rank`. Returns arrays for the outputs of all rows, in which only that chunk is
    filled."""
    mine = chunk(len(rows), ranks, rank)
    parts = [replica.predict(*rows.part(segment)) for segment in segments(mine, ROWS)]
    like = parts[0] if parts else replica.predict(*rows.part(slice(0, 1)))  # not every model can be fed with no rows
    outputs = mapped(lambda array: np.empty((len(rows), *array.shape[1:]), array.dtype), like)
    if parts:
        for output, *pieces in zip(leaves(outputs), *map(leaves, parts), strict=True):
            np.concatenate(pieces, out=output[mine])
    return outputs


def evaluate_rows(replica: Replica, rows: Arrays | Samples, ranks: int, rank: int, exact: bool = False) -> np.ndarray:
    """Evaluate the chunk of rows of `rank`; returns sums for `means_of`, (segments, metrics + 1) float64: of the
    replica's metrics, and of the weights that the loss has counted.

    exact: the segments of all ranks are the same on any number of ranks.
    """
    mine, size = chunk(len(rows), ranks, rank), ROWS
    if exact:
        whole, size = chunk(-(-len(rows) // EXACT_ROWS), ranks, rank), EXACT_ROWS
        mine = slice(whole.start * size, min(whole.stop * size, len(rows)))
    sums = []
    for segment in segments(mine, size):
        batch = rows.part(segment)
        if not rows.checked:
            check_rows(replica, batch, batch=True)
        sums.append([*map(float, replica.evaluate(*batch)), weight_of(replica, batch[1])])
    return np.array(sums, np.float64).reshape(-1, len(replica.metrics) + 1)


def evaluate_on_ranks(
    replica: Replica, rows: Arrays | Samples | Loader, group: RankGroup, exact: bool
) -> tuple[np.ndarray, int, int]:
    """Evaluate rows on all ranks. Returns this rank's terms, as `evaluate_rows`, their number on all ranks, and the
    number of rows on all ranks. Collective. Raises the same error on all ranks.

    rows: of all ranks; or a Loader of batches, whose data are None on a rank that has none. exact: see `evaluate_rows`.
    """
    comm = group.comm
    if not isinstance(rows, Loader):
        terms = together(comm, lambda: evaluate_rows(replica, rows, group.size, group.rank, exact))
        return terms, -(-len(rows) // EXACT_ROWS), len(rows)
    divided, have = rows.rows == DIVIDED, all_values(comm, rows.data is not None, "learn which ranks have a loader")
    ranks, rank = (1, 0) if divided else (sum(have), sum(have[: group.rank]))
    own, terms = together(comm, lambda: _read(replica, rows, ranks, rank, exact))
    read = all_values(comm, [own, len(terms)], "learn the rows of an evaluation")
    count = together(comm, lambda: rows_of_loaders([each for each, _ in read], divided))
    return terms, sum(number for _, number in read), count


def _read(replica: Replica, loader: Loader, ranks: int, rank: int, exact: bool) -> tuple[list[int] | None, np.ndarray]:
    """Evaluate the chunk of `rank` of every batch of a loader. Returns its batches, rows and checksum (None if there
    are no data, 0 if each rank has other rows), and the terms. Local."""
    terms, batches, rows, total = np.empty((0, len(replica.metrics) + 1)), 0, 0, 0
    if loader.data is None:
        return None, terms
    reader, limit = Reader(loader.data, loader.collate), loader.steps
    try:
        while limit is None or batches < limit:
            data = reader.read(f"batch {batches + 1} of an evaluation", again=limit is not None)
            if data is None:
                break
            check_rows(replica, data, batch=True)
            terms = np.concatenate([terms, evaluate_rows(replica, Arrays(data), ranks, rank, exact)])
            if not exact:
                terms = terms.sum(axis=0, keepdims=True)
            batches, rows = batches + 1, rows + row_count(data)
            total = checksum(data, total) if ranks > 1 else 0
    finally:
        reader.stop()
    return [batches, rows, total], terms


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
