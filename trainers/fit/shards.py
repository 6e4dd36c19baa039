"""Data in several files, the shards, of which each rank reads its own."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from allreduce.arrays.chunks import chunk, segments
from allreduce.topology import Topology
from allreduce.transport.control import agree, all_values, together
from trainers import datasets
from trainers.datasets.columns import Columns
from trainers.datasets.shards import ShardRows, Shards, is_pattern, matching, shares
from trainers.errors import DataError, TrainerError
from trainers.fit.evaluation import ROWS
from trainers.group import RankGroup


def load_shards(
    source: str | Sequence[str],
    label: str | None = None,
    *,
    topology: Topology | None = None,
    ignore: str | Sequence[str] = (),
    categories: str | Sequence[str] = (),
    columns: Columns | None = None,
) -> Shards:
    """Load data in several files, of which each rank reads its own. Collective.

    source: a pattern such as `part-*.npz`, or a list of paths, the same on all ranks. All files are .npz archives, or
        all are tables (.csv, .tsv) with the same columns. Files may have no rows, and there may be fewer files than
        ranks: ranks then share a file.
    topology: the ranks; None for all ranks. label, ignore, categories, columns: of tables, as for `datasets.load`.

    `fit` and `evaluate` take `train` and `test` of the result. What was learned of the columns is the same on all
    ranks. Raises DataError or ArgumentError on all ranks.
    """
    if topology is None:
        with Topology() as made:
            return load_shards(source, label, topology=made, ignore=ignore, categories=categories, columns=columns)
    comm = topology.world
    name, paths, choices = "", [], None
    error: Exception | None = None
    try:
        patterns = [source] if isinstance(source, str) else list(source)
        paths = [path for each in patterns for path in (matching(each) if is_pattern(each) else [each])]
        if not paths:
            raise DataError("there are no shards: the list of files is empty")
        name = source if isinstance(source, str) else f"{len(paths)} files"
        choices = datasets.checked_choices(paths[0], label, ignore, categories, columns)
    except TrainerError as refused:
        error = refused
    text = f"load_shards: {source}, label={label}, ignore={ignore}, categories={categories}"
    agree(comm, [zlib.crc32(text.encode())], text, error)

    def exchange(step: Callable[[], Any]) -> list[Any]:
        return all_values(comm, together(comm, step), "load shards")

    return together(comm, lambda: Shards(name, paths, choices, columns, topology.rank, topology.size, exchange))


class OwnRows:
    """A loader of a rank's rows of shards: pairs (x, y) of a few rows. group: the ranks, at each pass those that it has
    then."""

    def __init__(self, data: ShardRows, group: RankGroup) -> None:
        self._data, self._group = data, group

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for share in shares(self._data.shards.sizes, self._group.rank, self._group.size):
            x, y = self._data.rows(share.shard)
            for part in segments(chunk(len(x), share.parts, share.part), ROWS):
                yield x[part], y[part]
