"""Data in several files, the shards: each rank reads its own."""

import glob
import os
import zlib
from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from trainers.data import Data, NumberedRows, part_slice
from trainers.datasets import dataset, learning
from trainers.datasets.columns import Columns
from trainers.datasets.dataset import Rows
from trainers.datasets.files import read_archive
from trainers.datasets.learning import Choices, Exchange, Moments, alone
from trainers.datasets.rows import TableFile, is_table
from trainers.errors import ArgumentError, DataError, as_error


class Share(NamedTuple):
    """A share of a shard: one of `parts` parts of its rows in each batch. shard: its number."""

    shard: int
    part: int
    parts: int


def is_pattern(source: str) -> bool:
    """Whether a source is a pattern of paths, as for a shell: part-*.npz"""
    return glob.has_magic(source) and not os.path.exists(source)


def matching(pattern: str) -> list[str]:
    """Return the paths that match, in alphabetical order. Raises DataError if there are none."""
    found = sorted(path for path in glob.glob(pattern) if os.path.isfile(path))
    if not found:
        raise DataError(f"no file matches {pattern!r}")
    return found


def shares(sizes: Sequence[int], part: int, parts: int) -> list[Share]:
    """Return the shares of one of `parts` parts. Each shard is one part's, unless there are more parts than shards.

    sizes: of the shards. The largest shard first goes to the part that has the least.
    """
    if parts > len(sizes):
        shard, number = part % len(sizes), part // len(sizes)
        return [Share(shard, number, len(range(shard, parts, len(sizes))))]
    loads, owners = [0] * parts, {}
    for shard in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        owners[shard] = loads.index(min(loads))
        loads[owners[shard]] += sizes[shard] + 1  # so that each part gets one, even if they are all empty
    return [Share(shard, 0, 1) for shard in range(len(sizes)) if owners[shard] == part]


class Shards:
    """Files whose rows are divided among ranks: tables with a header, or .npz archives.

    paths: of all files, the same on all ranks. choices: how tables are read; None for archives, or with `columns`.
    columns: of a trained model, which are used as they are; None to learn them from the rows to train of all files.
    part, parts: the shards that this rank reads at once, see `shares`; it reads others when it needs them.
    exchange: brings together what the ranks find. Collective if `exchange` is; raises DataError on all ranks.

    A fifth of each file is to test, the same rows always; .npz archives may have a test part of their own.

    Attributes: features, classes, shift, scale, columns as of a Dataset, the same on all ranks. dtype: of x. sizes: of
    the files in bytes. train, test: the rows to train and to test. name: for messages.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        choices: Choices | None = None,
        columns: Columns | None = None,
        part: int = 0,
        parts: int = 1,
        exchange: Exchange = alone,
    ) -> None:
        self.name, self.paths, self.columns = name, list(paths), columns
        self._tables = all(map(is_table, paths))
        self._check(choices)
        self.sizes = self._agreed_sizes(exchange)
        self._held: dict[int, Rows] = {}
        own = [share.shard for share in shares(self.sizes, part, parts)]
        self.shift: np.ndarray | float = 0.0
        self.scale: np.ndarray | float = 1.0
        self.dtype = "float32"  # of x
        if not self._tables:
            self._read_archives(own, exchange)
        else:
            self._read_tables(own, choices, exchange)
        counts = {
            int(number): each
            for rank in exchange(lambda: {str(n): [len(r.y_train), len(r.y_test)] for n, r in self._held.items()})
            for number, each in rank.items()
        }
        self.train, self.test = (
            ShardRows(self, test, np.array([counts[number][test] for number in range(len(paths))])) for test in (0, 1)
        )
        if not self.train.counts.sum() or not self.test.counts.sum():
            raise DataError(
                f"{name} has {len(self.train)} rows to train and {len(self.test)} to test; at least 1 is needed of each"
            )

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.paths)} shards, {len(self.train)} samples to train, {len(self.test)} to test, "
            f"{self.features} features, {len(self.classes)} classes"
        )

    def rows(self, shard: int) -> Rows:
        """Return the rows of a shard, and read them first if that has not been done. Raises DataError."""
        if shard not in self._held:
            path = self.paths[shard]
            if self.columns is not None:
                self._held[shard] = learning.load(TableFile(path), self.columns)
            else:
                self._held[shard] = _archived(path)
        return self._held[shard]

    def _check(self, choices: Choices | None) -> None:
        if not self._tables and not all(path.endswith(".npz") for path in self.paths):
            raise DataError(f"{self.name}: shards are all tables (.csv, .tsv) or all .npz archives")
        if self._tables and choices is None and self.columns is None:
            raise DataError(f"{self.name}: name the column of the label (label=..., --label)")
        if not self._tables and (choices is not None or self.columns is not None):
            raise DataError(f"{self.name}: .npz archives have no columns with names, so leave out the label")

    def _agreed_sizes(self, exchange: Exchange) -> list[int]:
        """Return the sizes of the files in bytes. Raises DataError if the ranks see different files."""
        seen = exchange(lambda: [[path, _size(path)] for path in self.paths])
        if any(each != seen[0] for each in seen):
            texts = [
                f"  rank {rank}: {len(each)} files, {sum(size for _, size in each)} bytes"
                for rank, each in enumerate(seen)
            ]
            raise DataError("\n".join([f"{self.name}: the ranks see different files; all need the same:", *texts]))
        return [size for _, size in seen[0]]

    def _read_tables(self, own: Sequence[int], choices: Choices | None, exchange: Exchange) -> None:
        tables: dict[int, TableFile] = {}
        exchange(lambda: tables.update({shard: TableFile(self.paths[shard]) for shard in own}))
        if self.columns is None:
            assert choices is not None
            self.columns, self._held = learning.learn(self.name, tables, choices, exchange)
        else:
            exchange(lambda: [self.rows(shard) for shard in own] and None)
        self.features, self.classes = self.columns.features, self.columns.classes

    def _read_archives(self, own: Sequence[int], exchange: Exchange) -> None:
        def describe() -> dict[str, Any]:
            found = {shard: self.rows(shard) for shard in own}
            return {str(shard): _described(rows) for shard, rows in found.items()}

        described = {int(shard): each for rank in exchange(describe) for shard, each in rank.items()}
        kinds = {shard: (each["features"], each["dtype"]) for shard, each in described.items() if each["rows"]}
        if not kinds:
            raise DataError(f"{self.name} has no rows")
        first = min(kinds)
        for shard, (features, dtype) in sorted(kinds.items()):
            if (features, dtype) != kinds[first]:
                raise DataError(
                    f"{self.paths[shard]} has {features} features, {dtype}, and {self.paths[first]} has "
                    f"{kinds[first][0]}, {kinds[first][1]}; all shards need the same"
                )
        self.features, self.dtype = kinds[first]
        self.classes = dataset.numbers(max(described[shard]["classes"] for shard in kinds))
        if kinds[first][1] == "uint8":
            self.shift, self.scale = dataset.PIXELS
            return
        trained = [described[shard]["moments"] for shard in sorted(kinds) if described[shard]["moments"]]
        moments = reduce(Moments.__add__, [Moments(*map(np.array, each)) for each in trained])
        self.shift, self.scale = dataset.standardized(moments.mean, moments.deviation)


class ShardRows(NumberedRows):
    """The rows of shards to train, or to test. `fit` and `evaluate` of a trainer take them instead of arrays.

    Each part of a batch has rows of its own shards. In the order of an epoch those of each shard are evenly spread, and
    shuffled among themselves. So a batch is the same on any number of ranks, and a rank reads few shards.

    counts: the rows of each shard, (shards,) int64. test: 1 for the rows to test, else 0.
    """

    def __init__(self, shards: Shards, test: int, counts: np.ndarray) -> None:
        self.shards, self.counts, self._test = shards, counts, test
        self.settings = {"shards": zlib.crc32(repr(counts.tolist()).encode())}
        self._ends = np.cumsum(counts)  # of the numbers of each shard's rows
        self._shares: dict[tuple[int, int], list[Share]] = {}  # `shares` of a part of some parts
        self._visited: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}  # by shard: seeds, and the order of its rows

    def __len__(self) -> int:
        return int(self.counts.sum())

    def __str__(self) -> str:
        return f"{len(self)} rows in {len(self.counts)} shards"

    def rows(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of one shard."""
        found = self.shards.rows(shard)
        return (found.x_test, found.y_test) if self._test else (found.x_train, found.y_train)

    @cached_property
    def _spread(self) -> np.ndarray:
        keys = [(np.arange(count) + 0.5) / max(count, 1) for count in self.counts.tolist()]
        return np.argsort(np.concatenate(keys), kind="stable")

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the order of every epoch: `take` shuffles the rows of each shard."""
        return self._spread

    def mine(self, batch: np.ndarray, part: int | None, parts: int, micro_batch: int | None = None) -> np.ndarray:
        if micro_batch is not None:
            raise ArgumentError("fit: Exact takes all rows on every rank, so not shards, of which each rank has some")
        if part is None:
            return batch[:0]
        if (part, parts) not in self._shares:
            self._shares[part, parts] = shares(self.shards.sizes, part, parts)
        rows = self._by_shard(batch)
        own = [(rows[share.shard], share) for share in self._shares[part, parts]]
        return np.concatenate([each[part_slice(each.size, share.part, share.parts)] for each, share in own])

    def take(self, rows: np.ndarray, seeds: tuple[int, ...] = ()) -> Data:
        """Return these rows, shard by shard. seeds: of the order of each shard's rows; () for that of the file."""
        found = []
        for shard, own in enumerate(self._by_shard(rows)):
            if own.size:
                places = self._order(shard, seeds)[own - (self._ends[shard] - self.counts[shard])]
                found.append(tuple(array[places] for array in self.rows(shard)))
        if not found:
            return np.empty((0, self.shards.features), self.shards.dtype), np.empty(0, np.int64)
        return found[0] if len(found) == 1 else tuple(map(np.concatenate, zip(*found, strict=True)))

    def _by_shard(self, rows: np.ndarray) -> list[np.ndarray]:
        shards = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(shards, kind="stable")
        ends = np.searchsorted(shards[order], np.arange(len(self.counts)), side="right").tolist()
        return [rows[order[start:end]] for start, end in pairwise([0, *ends])]

    def _order(self, shard: int, seeds: tuple[int, ...]) -> np.ndarray:
        found = self._visited.get(shard)
        if found is None or found[0] != seeds:
            rows = np.arange(self.counts[shard])
            order = np.random.default_rng([*seeds, shard]).permutation(rows) if seeds else rows
            found = self._visited[shard] = seeds, order
        return found[1]


def _size(path: str) -> int:
    with as_error(DataError, f"{path} can't be read"):
        return os.path.getsize(path)


def _archived(path: str) -> Rows:
    arrays = read_archive(path)
    if len(arrays) == 2 and len(arrays[0]) == len(arrays[1]) == 0 and arrays[0].ndim:
        x, y = arrays[0].reshape(0, 0), arrays[1].astype(np.int64)
        return Rows(x, y, x, y)
    x, y = dataset.checked(path, arrays[0], arrays[1])
    if len(arrays) == 4:
        return Rows(x, y, *dataset.checked(f"{path} (test)", arrays[2], arrays[3]))
    return Rows.divided(x, y)


def _described(rows: Rows) -> dict[str, Any]:
    found = len(rows.y_train) + len(rows.y_test)
    floats = rows.x_train.dtype != np.uint8 and len(rows.x_train)
    return {
        "rows": found,
        "features": rows.x_train.shape[1],
        "dtype": str(rows.x_train.dtype),
        "classes": max(int(y.max(initial=-1)) for y in (rows.y_train, rows.y_test)) + 1,
        "moments": [np.asarray(each).tolist() for each in Moments.of(rows.x_train)] if floats else None,
    }
