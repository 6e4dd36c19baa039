"""A rank's part of an evaluation or a prediction. Local; a replica or a data set may raise anything."""

from typing import Any

import numpy as np

from allreduce.arrays.chunks import chunk, segments
from trainers.data import Samples
from trainers.replica import Replica

EXACT_ROWS = 128  # of a segment, if bits must not depend on the ranks
ROWS = 1024  # that a replica evaluates or predicts at a time


def predict_chunk(replica: Replica, x: np.ndarray, ranks: int, rank: int) -> np.ndarray:
    """Predict the chunk of rows of `rank`. Returns an array for the outputs of all rows, in which only that chunk is
    filled."""
    mine = chunk(len(x), ranks, rank)
    parts = [replica.predict(x[part]) for part in segments(mine, ROWS)]
    like = parts[0] if parts else replica.predict(x[:1])  # not every model can be fed with no rows
    outputs = np.empty((len(x), *like.shape[1:]), like.dtype)
    if parts:
        np.concatenate(parts, out=outputs[mine])
    return outputs


def evaluate_chunk(
    replica: Replica, x: Any, y: np.ndarray | None, ranks: int, rank: int, exact: bool = False
) -> np.ndarray:
    """Evaluate the chunk of rows of `rank`; returns the sums of the replica's metrics, (segments, metrics) float64.

    x, y: all rows, arrays; or Samples, and None. exact: the segments of all ranks are the same on any number of ranks.
    """
    mine, size = chunk(len(x), ranks, rank), ROWS
    if exact:
        whole, size = chunk(-(-len(x) // EXACT_ROWS), ranks, rank), EXACT_ROWS
        mine = slice(whole.start * size, min(whole.stop * size, len(x)))
    sums = [list(map(float, replica.evaluate(*_rows(replica, x, y, part)))) for part in segments(mine, size)]
    return np.array(sums, np.float64).reshape(-1, len(replica.metrics))


def _rows(replica: Replica, x: Any, y: Any, part: slice) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(x, Samples):
        return x[part], y[part]
    batch = x.take(np.arange(part.start, part.stop))
    replica.check_batch(*batch)
    return batch
