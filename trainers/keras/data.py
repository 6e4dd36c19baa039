"""shard: divides a data set among the ranks."""

from typing import Any

import keras

from allreduce.topology import Topology
from trainers.errors import ArgumentError


def shard(data: Any, topology: Topology) -> Any:
    """Return this rank's part of a data set that every rank has completely. All parts have equally many rows. Local.

    data: an array; a list, tuple or dict of arrays with the same number of rows, as (x, y); or a tf.data.Dataset.
    topology: optimizer.topology of a MirroredOptimizer.

    Rank r of n gets rows r, r + n, r + 2n, ... (views of arrays), or these elements of a tf.data.Dataset: call shard
    before batch(). Up to n - 1 rows at the end are left out, so that the parts are equal. Raises ArgumentError. With
    unshuffled batches of b / n rows, a step on all ranks uses the same rows as a step of one process with b rows.
    """
    rank, ranks = topology.rank, topology.size
    if hasattr(data, "element_spec") and hasattr(data, "shard"):
        return _of_dataset(data, rank, ranks)
    lengths = {_rows(array) for array in keras.tree.flatten(data)}
    if len(lengths) != 1:
        raise ArgumentError(f"the arrays differ in rows: {', '.join(map(str, sorted(lengths)))}; make these equal")
    rows = lengths.pop()
    if rows < ranks:
        raise ArgumentError(f"{rows} rows can't be divided among {ranks} ranks: some would have none")
    return keras.tree.map_structure(lambda array: array[rank : rows - rows % ranks : ranks], data)


def _rows(array: Any) -> int:
    if not getattr(array, "shape", ()):
        raise ArgumentError(
            f"shard takes arrays and tf.data.Datasets, not {type(array).__qualname__}; for a torch DataLoader give a "
            "torch.utils.data.DistributedSampler(dataset, size, rank); a PyDataset or a generator must yield only the "
            "batches of its rank, equally many on each rank"
        )
    return int(array.shape[0])


def _of_dataset(dataset: Any, rank: int, ranks: int) -> Any:
    length = int(dataset.cardinality())
    if length == -2:
        raise ArgumentError(
            "this dataset does not know its length, and ranks need equally many elements: set it with "
            "dataset.apply(tf.data.experimental.assert_cardinality(length)) before shard"
        )
    return dataset.shard(ranks, rank) if length < 0 else dataset.take(length - length % ranks).shard(ranks, rank)
