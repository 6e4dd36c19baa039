"""A rank's part of an evaluation or a prediction. Local; a replica or a data set may raise anything."""

import numpy as np

from allreduce.arrays.chunks import chunk, segments
from trainers.data import Data, Samples, Tree, row_count, sliced
from trainers.replica import Replica, check_rows

EXACT_ROWS = 128  # of a segment, if bits must not depend on the ranks
ROWS = 1024  # that a replica evaluates or predicts at a time


def rows_in(data: Data) -> int:
    """Return the number of rows of arrays, or of (Samples, None)."""
    return len(data[0]) if isinstance(data[0], Samples) else row_count(data)


def predict_chunk(replica: Replica, x: Tree, ranks: int, rank: int) -> np.ndarray:
    """Predict the chunk of rows of `rank`. Returns an array for the outputs of all rows, in which only that chunk is
    filled."""
    rows = row_count(x)
    mine = chunk(rows, ranks, rank)
    parts = [replica.predict(sliced(x, part)) for part in segments(mine, ROWS)]
    like = parts[0] if parts else replica.predict(sliced(x, slice(1)))  # not every model can be fed with no rows
    outputs = np.empty((rows, *like.shape[1:]), like.dtype)
    if parts:
        np.concatenate(parts, out=outputs[mine])
    return outputs


def evaluate_chunk(replica: Replica, data: Data, ranks: int, rank: int, exact: bool = False) -> np.ndarray:
    """Evaluate the chunk of rows of `rank`; returns the sums of the replica's metrics, (segments, metrics) float64.

    data: all rows, arrays; or (Samples, None). exact: the segments of all ranks are the same on any number of ranks.
    """
    rows = rows_in(data)
    mine, size = chunk(rows, ranks, rank), ROWS
    if exact:
        whole, size = chunk(-(-rows // EXACT_ROWS), ranks, rank), EXACT_ROWS
        mine = slice(whole.start * size, min(whole.stop * size, rows))
    sums = [list(map(float, replica.evaluate(*_rows(replica, data, part)))) for part in segments(mine, size)]
    return np.array(sums, np.float64).reshape(-1, len(replica.metrics))


def _rows(replica: Replica, data: Data, part: slice) -> Data:
    if not isinstance(data[0], Samples):
        return sliced(data, part)
    batch = data[0].take(np.arange(part.start, part.stop))
    check_rows(replica, batch, batch=True)
    return batch
