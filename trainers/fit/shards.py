"""Training on data in several files, the shards, of which each rank reads its own."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from allreduce.arrays.chunks import chunk, segments
from allreduce.topology import Topology
from allreduce.transport.control import agree, all_values, together
from trainers import datasets
from trainers.data import Batch, BatchSource, Data, batch_sizes
from trainers.datasets.columns import Columns
from trainers.datasets.shards import ShardRows, Shards, Share, is_pattern, matching, shares
from trainers.errors import DataError, TrainerError
from trainers.fit.evaluation import ROWS
from trainers.group import RankGroup

LARGEST_SHARE = 1.5  # of the mean of the ranks; more is said


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


class ShardBatches(BatchSource):
    """The batches of rows in shards. Each part of a batch has rows of its own shards.

    The rows of all shards have one order, in which those of each shard are evenly spread; batch s has the rows from
    s * batch_size on. In each epoch each shard's rows are shuffled among themselves. So a batch is the same on any
    number of ranks, and a rank reads few shards. Arguments: as for `Batches`.
    """

    def __init__(
        self, data: ShardRows, batch_size: int, part: int | None, parts: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        self._data, self._seed, self._shuffle = data, seed, shuffle
        self.batch_size = min(int(batch_size), len(data))
        keys = [(np.arange(count) + 0.5) / max(count, 1) for count in data.counts.tolist()]
        places = np.empty(len(data), np.int64)
        places[np.argsort(np.concatenate(keys), kind="stable")] = np.arange(len(data))
        self._places = np.split(places, np.cumsum(data.counts)[:-1])  # of each shard's rows in the order
        self._divided: dict[tuple[int, int], list[Share]] = {}  # `shares` of a part of some parts
        self._visited: dict[int, tuple[int, np.ndarray]] = {}  # by shard: an epoch, and the order of its rows
        super().__init__(batch_sizes(len(data), self.batch_size), part, parts)

    @property
    def settings(self) -> dict[str, Any]:
        shards = zlib.crc32(repr(self._data.counts.tolist()).encode())
        found = {"rows": len(self._data), "batch_size": self.batch_size, "shards": shards}
        return found | {"seed": int(self._seed), "shuffle": bool(self._shuffle)}

    def __str__(self) -> str:
        return str(self._data)

    def first(self) -> Data | None:
        batch = self.share(0, 0, self._part)
        return batch.data if batch.own else None

    def share(self, epoch: int, step: int, part: int | None, parts: int | None = None) -> Batch:
        own = [] if part is None else self._shares(part, parts or self._parts)
        found = [self._rows_of(epoch, step, share) for share in own]
        kept = [pair for pair in found if len(pair[0])]
        total = self._sizes[step]
        shards = self._data.shards
        none = np.empty((0, shards.features), shards.dtype), np.empty(0, np.int64)
        x, y = none if not kept else kept[0] if len(kept) == 1 else map(np.concatenate, zip(*kept, strict=True))
        return Batch(x, y, total, len(x) / total)

    def part_rows(self, step: int, part: int, parts: int) -> int:
        spans = [self._span(step, share) for share in self._shares(part, parts)]
        return sum(span.stop - span.start for span in spans)

    def _shares(self, part: int, parts: int) -> list[Share]:
        if (part, parts) not in self._divided:
            self._divided[part, parts] = shares(self._data.shards.sizes, part, parts)
        return self._divided[part, parts]

    def _span(self, step: int, share: Share) -> slice:
        """Return the rows of a shard's share that are in batch `step`, as a slice of the shard's order."""
        size = self.batch_size
        first, last = np.searchsorted(self._places[share.shard], [step * size, (step + 1) * size]).tolist()
        mine = chunk(last - first, share.parts, share.part)
        return slice(first + mine.start, first + mine.stop)

    def _rows_of(self, epoch: int, step: int, share: Share) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a shard's share that are in batch `step`."""
        rows = self._order(epoch, share.shard)[self._span(step, share)]
        x, y = self._data.rows(share.shard)
        return x[rows], y[rows]

    def _order(self, epoch: int, shard: int) -> np.ndarray:
        if shard not in self._visited or self._visited[shard][0] != epoch:
            count = int(self._data.counts[shard])
            random = np.random.default_rng([self._seed, epoch, shard])
            self._visited[shard] = epoch, random.permutation(count) if self._shuffle else np.arange(count)
        return self._visited[shard][1]


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


def uneven_text(data: ShardRows, parts: int) -> str:
    """Return a warning if one part has far more rows than the mean; "" otherwise."""
    loads = [
        sum(int(data.counts[share.shard]) / share.parts for share in shares(data.shards.sizes, part, parts))
        for part in range(parts)
    ]
    if max(loads) <= LARGEST_SHARE * sum(loads) / parts:
        return ""
    return f"one rank has {max(loads) / sum(loads):.0%} of the rows, and the others wait: make shards of equal sizes"
