"""Divides data among the ranks: the same seeded permutation on every rank, and every rank's share of each batch.

A batch is global. Batch s of an epoch is rows order[s * B : (s + 1) * B]; rank r takes the r-th chunk of
it. So the batches do not depend on the number of ranks; the last may be short, and a rank may have no row.
"""

import random
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trainers.errors import ArgumentError, DataError, explained

Collate = Callable[[Sequence[Any]], Any]

Tree = Any
"""Inputs or targets of some rows: an array whose first axis is the sample, or a tuple or a dict of trees."""

Data = tuple[Tree, ...]
"""Some rows: (x, y), or (x, y, weights); x and y are trees, weights is (rows,) float64."""

NAMES = ("x", "y", "sample_weight")  # of the members of Data, for messages


def as_arrays(given: Any, lists: bool = False) -> Tree:
    """Return `given` as an array, or, if it is a dict or a tuple that holds arrays, as a tree of arrays.

    lists: whether a list that holds arrays is a tree too, as in the batches that PyTorch's default_collate makes.
    A tuple of numbers, or of lists, is one array. The keys of a dict are sorted.
    """
    if isinstance(given, Mapping):
        return {key: as_arrays(given[key], lists) for key in sorted(given, key=lambda key: (type(key).__name__, key))}
    if isinstance(given, (tuple, list) if lists else tuple) and any(_holds_arrays(each, lists) for each in given):
        return _tuple_like(given, [as_arrays(each, lists) for each in given])
    return np.asarray(given)


def _tuple_like(given: Sequence[Any], members: list[Tree]) -> Tree:
    return type(given)(*members) if hasattr(given, "_fields") else tuple(members)


def _holds_arrays(given: Any, lists: bool) -> bool:
    if isinstance(given, (tuple, list) if lists else tuple):
        return any(_holds_arrays(each, lists) for each in given)
    return isinstance(given, Mapping) or getattr(given, "ndim", 0) > 0


def as_data(given: Sequence[Any], lists: bool = False) -> Data:
    """Return a pair (x, y) or a triple (x, y, weights) as Data. Raises TypeError for anything else, and ArgumentError
    if the weights are no numbers."""
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        count = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise TypeError(f"a {type(given).__name__}{count}, not a pair (x, y) or a triple (x, y, weights)")
    x, y, *weights = given
    return as_arrays(x, lists), as_arrays(y, lists), *map(_as_weights, weights)


def _as_weights(given: Any) -> np.ndarray:
    try:
        return np.asarray(given).astype(np.float64, casting="same_kind", copy=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"sample_weight must be numbers >= 0, one for each row: {error}") from error


def leaves(tree: Tree) -> list[Any]:
    if isinstance(tree, tuple | dict):
        return [leaf for each in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(each)]
    return [tree]


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return a tree of the same structure: `function` of each array."""
    if isinstance(tree, dict):
        return {key: mapped(function, each) for key, each in tree.items()}
    if isinstance(tree, tuple):
        return _tuple_like(tree, [mapped(function, each) for each in tree])
    return function(tree)


def row_count(tree: Tree) -> int:
    return len(leaves(tree)[0])


def named(data: Data) -> list[tuple[str, Any]]:
    """Return the arrays with their names: "x", or "x[0]", "x['image']" if x is a tuple or a dict; ..."""
    return [pair for name, tree in zip(NAMES, data, strict=False) for pair in _named(tree, name)]


def _named(tree: Tree, name: str) -> list[tuple[str, Any]]:
    if not isinstance(tree, tuple | dict):
        return [(name, tree)]
    members = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [pair for key, each in members for pair in _named(each, f"{name}[{key!r}]")]


def kinds_of(data: Data) -> str:
    """Return the dtype and the shape of a row of each array, as text."""
    return ", ".join(f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in named(data))


def structure_of(tree: Tree) -> Any:
    """Return the structure of a tree as JSON types, with the dtype and the shape of a row of each array."""
    if isinstance(tree, dict):
        return {"dict": [[key, structure_of(each)] for key, each in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [structure_of(each) for each in tree]}
    return [str(tree.dtype), list(tree.shape[1:])]


def without_rows(structure: Any) -> Tree:
    """Return a tree of this structure, whose arrays have no rows."""
    if isinstance(structure, list):
        dtype, shape = structure
        return np.empty((0, *shape), np.dtype(dtype))
    if "dict" in structure:
        return {key: without_rows(each) for key, each in structure["dict"]}
    return tuple(map(without_rows, structure["tuple"]))


def rows_error(data: Data) -> str:
    """Return why these are no rows: their arrays differ in length, or weights are invalid; "" if they are."""
    arrays = named(data)
    if not all(map(leaves, data)):
        return "x or y is a dict without arrays; give an array, or a tuple or a dict of arrays"
    lengths = {len(array) if array.ndim else -1 for _, array in arrays}
    if len(lengths) != 1 or -1 in lengths:
        *first, last = [f"{name} has shape {array.shape}" for name, array in arrays]
        shapes = f"{', '.join(first)} and {last}" if first else last
        return f"{shapes}; they must have the same number of rows, one for each sample"
    for weights in data[2:]:
        if weights.ndim != 1:
            return f"sample_weight must have one number for each row, not shape {weights.shape}"
        wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
        if wrong.size:
            return f"sample_weight must be finite and >= 0, and row {wrong[0]} has {weights[wrong[0]]}"
    return ""


class NumberedRows(ABC):
    """Rows that are read by their numbers.

    checked: whether all rows could be checked before the training. settings: decide which rows are in which batch,
    besides the number of rows. first: the first rows, or a few rows; None if they are not known before a batch is.
    """

    checked = False
    first: Data | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows of all ranks."""

    @abstractmethod
    def take(self, rows: np.ndarray, seeds: tuple[int, ...] = ()) -> Data:
        """Return these rows. Raises DataError. seeds: (seed, epoch) or (), see Samples and ShardRows."""

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the order in which an epoch visits the rows, the same on all ranks."""
        return order(len(self), seed, epoch, shuffle)

    def mine(self, batch: np.ndarray, part: int | None, parts: int, micro_batch: int | None = None) -> np.ndarray:
        """Return the numbers of a batch's rows that a part gets."""
        return batch[part_slice(batch.size, part, parts, micro_batch)]


class Arrays(NumberedRows):
    """Rows in memory, or in memory maps. data: (x, y) or (x, y, weights); or (x,), for a prediction.

    As text it has a checksum of the first and the last row, by which ranks compare their rows. Raises ArgumentError.
    """

    checked = True

    def __init__(self, data: Data) -> None:
        if wrong := rows_error(data):
            raise ArgumentError(wrong)
        self.data = self.first = data
        if len(data) > 1 and not len(self):
            raise ArgumentError("there are no samples: x and y are empty")

    def __len__(self) -> int:
        return row_count(self.data)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {array.dtype}{list(array.shape)} {_ends_of(array)}" for name, array in named(self.data)
        )

    def take(self, rows: np.ndarray, seeds: tuple[int, ...] = ()) -> Data:
        return mapped(lambda array: np.asarray(array).take(rows, axis=0), self.data)  # also of memory maps

    def part(self, rows: slice) -> Data:
        """Return these rows, views."""
        return sliced(self.data, rows)


def _ends_of(array: np.ndarray) -> str:
    if array.ndim == 0 or len(array) == 0 or array.dtype.hasobject:
        return "empty"
    return f"#{zlib.crc32(np.ascontiguousarray(array[[0, -1]]).tobytes()):08x}"


class Samples(NumberedRows):
    """A data set whose rows are fetched when they are needed.

    data: len(data) is the number of rows, and data[i] is row i, a pair (x, y) or a triple (x, y, weight). x and y are
        arrays, or tuples or dicts of arrays. `data.__getitems__(list of numbers)` gives several rows, if it exists.
    collate: makes (x, y), or (x, y, weights), of arrays whose first axis is the sample, from a list of rows; by default
        the rows are stacked. Rows that are neither pairs nor triples need a collate.

    Attributes: collate, as given; first, a few rows. Raises ArgumentError.
    """

    first: Data

    def __init__(self, data: Any, collate: Collate | None = None) -> None:
        self.name = type(data).__name__
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ArgumentError(
                f"x is a {self.name}, and there is no y: give arrays x and y, or a data set with len() and rows by "
                'number; or say which rows a loader brings: Loader(x, rows="divided") (each rank its own), rows="whole"'
            )
        self.data, self.collate, self._collate = data, collate, collate or _stack
        self._rows = len(data)
        if self._rows == 0:
            raise ArgumentError(f"there are no samples: the {self.name} is empty")
        try:
            with keeping_generators():
                self.first = self.take(np.array([0, self._rows - 1]))
        except DataError as error:
            raise ArgumentError(str(error)) from error
        self._none = mapped(lambda array: array[:0], self.first)

    def __len__(self) -> int:
        return self._rows

    def __str__(self) -> str:
        return f"{self.name} of {self._rows} rows, {kinds_of(self.first)}"

    def take(self, rows: np.ndarray, seeds: tuple[int, ...] = ()) -> Data:
        """Return these rows. Raises DataError, which names the data set and quotes its error.

        seeds: (seed, epoch). The rows are then read one by one, and before each one the global random generators are
        seeded by these numbers and the row's. () for generators as they are.
        """
        if rows.size == 0:
            return self._none
        with explained(DataError, f"the {self.name} can't give rows {_shown(rows)}", passes=(DataError,)):
            found = as_data(self._seeded(rows, seeds) if seeds else self._fetch(rows), lists=True)
        arrays = named(found)
        if any(not array.ndim or len(array) != rows.size for _, array in arrays):
            shapes = " and ".join(f"{name} of shape {array.shape}" for name, array in arrays)
            given = f"the {self.name} gave {shapes} for {rows.size} rows"
            raise DataError(f"{given}; their first axes must be the samples")
        if wrong := rows_error(found):
            raise DataError(f"the {self.name} can't give rows {_shown(rows)}: {wrong}")
        return found

    def part(self, rows: slice) -> Data:
        """Return these rows. Raises DataError."""
        return self.take(np.arange(rows.start, rows.stop))

    def _fetch(self, rows: np.ndarray) -> Any:
        numbers = rows.tolist()
        several = getattr(self.data, "__getitems__", None)
        return self._collate(several(numbers) if several else [self.data[number] for number in numbers])

    def _seeded(self, rows: np.ndarray, seeds: tuple[int, ...]) -> Any:
        found = []
        for row in rows.tolist():
            seed_generators(seed_of(*seeds, row), gpus=False)
            with explained(DataError, f"the {self.name} can't give row {row}"):
                found.append(self.data[row])
        return self._collate(found)


def _stack(rows: Sequence[Any]) -> Data:
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) not in (2, 3):
            raise TypeError(f"a row is a {type(row).__name__}, not a pair (x, y); give a Loader(x, collate=...)")
        if len(row) != len(rows[0]):
            raise TypeError(f"a row has {len(row)} members, and the first one has {len(rows[0])}")
    return tuple(map(_stacked, zip(*rows, strict=True)))


def _stacked(values: Sequence[Any]) -> Tree:
    if not any(isinstance(each, tuple | Mapping) for each in values):
        return np.stack([np.asarray(each) for each in values])
    trees = [as_arrays(each) for each in values]
    first = [name for name, _ in _named(trees[0], "it")]
    for tree in trees:
        if (names := [name for name, _ in _named(tree, "it")]) != first:
            raise TypeError(f"a row has the arrays {names}, and the first one has {first}")
    columns = zip(*map(leaves, trees), strict=True)
    return mapped(lambda _: np.stack(next(columns)), trees[0])


def _shown(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:5].tolist()))
    return f"{shown}, ... ({rows.size} of them)" if rows.size > 5 else shown


SAMPLED, PIECE = 1 << 20, 256  # bytes of an array that a checksum reads, if it has more; bytes of a piece of them


def checksum(data: Data, start: int = 0) -> int:
    """Return a CRC-32 of rows, never 0. Of an array over a megabyte it reads a megabyte, spread over all rows. Raises
    DataError for Python objects."""
    found = start
    for leaf in leaves(data):
        if leaf.dtype.hasobject:
            raise DataError(
                f"an array of shape {leaf.shape} is of Python objects, not of numbers, so it can't be compared"
            )
        content = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        found = zlib.crc32(np.int64(content.size).tobytes(), found)
        if content.size > SAMPLED:
            pieces = content[: content.size // PIECE * PIECE].reshape(-1, PIECE)
            content = pieces[np.random.default_rng(0).integers(len(pieces), size=SAMPLED // PIECE)]
        found = zlib.crc32(content.data, found)
    return found or 1


def order(rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The order in which an epoch (0, 1, ...) visits the rows; (rows,) int64, a function of its arguments alone."""
    if not shuffle:
        return np.arange(rows)
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Batch(NamedTuple):
    """A rank's share of one global batch.

    data: the rows; with micro-batches of a data set, whose shapes may differ, only those of the first one.
    """

    data: Data
    rows: int  # in the global batch
    share: float  # this rank's rows / rows
    seeds: tuple[int, ...] = ()  # of random numbers: for each of this rank's micro-batches
    parts: Sequence[Data] = ()  # the rows of each of them

    @property
    def own(self) -> int:
        """The number of this rank's rows; with micro-batches of a data set, of the first one."""
        return row_count(self.data[0])


class BatchSource(ABC):
    """Gives one rank its share of every global batch, epoch by epoch.

    A stream does not know the number of batches before they are read. Its ranks learn the rows of the next batch with
    each step: every rank calls `begin`, then `peek` during each step and `learn` after it.

    steps: the batches of the epoch; of a stream those that the ranks know of so far.
    batch_size: the rows of the largest batch; of a stream those of the newest.
    streams: whether this is a stream. coming: the rows of its next batch on this rank; else 0. divided: whether each
        rank has other rows of it. seen: by step, the rows and a checksum of each batch of the epoch that this rank has
        read from it; 0 rows after the end, and no checksum (0) if it is divided.
    planned: the batches in an epoch; None if that is not known. length: that number, or the greatest len() of the
        ranks' loaders, which may be more than they bring; None if one of them has none.
    how_resumed: how this rank continues after `seek`, as text; "" if there is nothing to say.
    checked: whether all rows could be checked before the training. ahead: how many batches may be fetched in advance.
    part: that this rank gets, of `parts` parts of every batch; None for shares without rows.
    micro_batch: the rows of a micro-batch, of which a rank gets whole ones (the last one of a batch may be shorter);
        None: a rank gets any rows. seed: of the random numbers of micro-batches.
    weigh: weighs rows by their class; as text it is one of the settings.
    """

    streams = divided = checked = False
    coming = ahead = 0
    how_resumed = ""
    batch_size: int
    length: int | None

    def __init__(
        self,
        sizes: list[int],
        part: int | None,
        parts: int,
        seed: int = 0,
        micro_batch: int | None = None,
        weigh: Callable[[Data], Data] | None = None,
    ) -> None:
        self._sizes = sizes  # rows of the epoch's global batches
        self._seed, self._micro_batch, self._weigh = seed, micro_batch, weigh
        self.seen: dict[int, tuple[int, int]] = {}
        self.set_part(part, parts)

    @property
    def steps(self) -> int:
        return len(self._sizes)

    def sizes(self) -> np.ndarray:
        """The rows of each of the `steps` global batches."""
        return np.array(self._sizes, np.int64)

    @property
    def planned(self) -> int | None:
        return self.steps

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide which rows are in which batch."""
        found: dict[str, Any] = {"class_weight": None if self._weigh is None else str(self._weigh)}
        return found if self._micro_batch is None else found | {"micro_batch": int(self._micro_batch)}

    def set_part(self, part: int | None, parts: int) -> None:
        """Set the number of parts of every batch, and the part that this rank gets."""
        self._part, self._parts = part, parts

    def total(self, epoch: int, step: int) -> int:
        """The number of steps from the beginning of the training to `step` of `epoch`."""
        return epoch * self.steps + step

    def epoch(self, number: int, first: int = 0) -> Generator[Batch]:
        """This rank's shares of the batches of epoch `number`, from `first` on. Raises DataError."""
        while self.streams or first < self.steps:
            yield self.share(number, first, self._part)
            first += 1

    @abstractmethod
    def share(self, epoch: int, step: int, part: int | None, parts: int | None = None) -> Batch:
        """Return part `part` of batch `step` of an epoch. parts: the number of parts of the batch; None: that of
        `set_part`. Of a stream whose global batch the ranks do not know yet, `rows` and `share` of the result are the
        rows of this rank. Raises DataError."""

    def seeds(self, epoch: int, step: int, rows: int, part: int | None, parts: int | None) -> tuple[int, ...]:
        """Return a seed for each micro-batch in a part of a batch of `rows` rows, or (). parts: see `share`."""
        if self._micro_batch is None:
            return ()
        span = part_slice(rows, part, parts or self._parts, self._micro_batch)
        numbers = range(*(-(-end // self._micro_batch) for end in (span.start, span.stop)))
        return tuple(seed_of(self._seed, epoch, step, number) for number in numbers)

    def part_rows(self, step: int, part: int, parts: int) -> int:
        """Return the number of rows of part `part` of `parts` of batch `step`, the same in every epoch. Local."""
        raise NotImplementedError("nobody knows the rows of a stream's parts before they are read")

    def tell(self, epoch: int, step: int) -> tuple[Any, dict[str, np.ndarray]]:
        """Return what `seek` needs to go to batch `step` of `epoch`, the current or the next one: JSON types, the same
        on all ranks, and arrays of this rank. Local."""
        return {}, {}

    # A source whose ranks read batches of their own has more to do here

    @abstractmethod
    def first(self) -> Data | None:
        """Return the first batch, or a few rows; None if this rank has none. Local. Raises DataError."""

    def meet(self, values: Callable[[Any, str], list[Any]]) -> None:  # noqa: B027
        """Compare the first batches of all ranks, if no rank has all rows. Raises an error of the same type and text on
        all ranks. Collective. values: returns the value of every rank; see RankGroup.values."""

    def lose_ranks(self) -> None:  # noqa: B027
        """Warn if the rows of failed ranks are lost. Called on rank 0."""

    def begin(self, epoch: int, step: int) -> int:
        """Go to batch `step` of `epoch`; returns its rows on this rank. Local. Raises DataError."""
        return 0

    def peek(self, step: int) -> None:  # noqa: B027
        """Fetch the batches up to `step` in advance, and set `coming`. Local. Raises DataError."""

    def learn(self, step: int, rows: int) -> None:  # noqa: B027
        """Take the rows of batch `step` on all ranks; 0 if there is none. Local, the same on all ranks."""

    def seek(  # noqa: B027
        self, epoch: int, step: int, total: int, shared: Any, own: dict[str, np.ndarray]
    ) -> None:
        """Go on at a step, `total` steps after the beginning of the training. shared, own: of `tell`; shared is not
        validated, and without `own` a loader is read again up to there. Local. Raises CheckpointError."""

    def depends_on_ranks(self, step: int, total: int) -> bool:
        """Whether the rows after `step` steps of an epoch, `total` of the training, depend on the number of ranks."""
        return False

    def close(self) -> None:  # noqa: B027
        """Stop reading. Local."""


class Batches(BatchSource):
    """The batches of rows that are read by their numbers.

    rows: the same on every rank, or its own of each rank. batch_size: rows in a global batch.
    ahead: how many batches may be fetched in advance.
    part, parts, seed, micro_batch, weigh: see BatchSource. seed, shuffle: of the order of the rows. Of arrays the
        weights are known before, so `weigh` weighs the rows of data sets. With micro-batches, the random numbers that a
        data set draws for a row follow from the row and the epoch (see Samples.take).
    """

    def __init__(
        self,
        rows: NumberedRows,
        batch_size: int,
        part: int | None,
        parts: int,
        seed: int = 0,
        shuffle: bool = True,
        ahead: int = 0,
        micro_batch: int | None = None,
        weigh: Callable[[Data], Data] | None = None,
    ) -> None:
        self._rows, self.checked, count = rows, rows.checked, len(rows)
        self.batch_size, self.ahead, self._shuffle = min(int(batch_size), count), ahead, shuffle
        self._visited = -1, np.empty(0, np.int64)  # an epoch, and the order in which it visits the rows
        sizes = [min(self.batch_size, count - start) for start in range(0, count, self.batch_size)]
        self.length = len(sizes)
        super().__init__(sizes, part, parts, seed, micro_batch, weigh)

    @property
    def settings(self) -> dict[str, Any]:
        found = {"rows": len(self._rows), "batch_size": self.batch_size, **self._rows.settings}
        return found | {"seed": int(self._seed), "shuffle": bool(self._shuffle), **super().settings}

    def __str__(self) -> str:
        return str(self._rows)

    def first(self) -> Data | None:
        if self._rows.first is not None:
            return self._rows.first
        batch = self.share(0, 0, self._part)
        return batch.data if batch.own else None

    def part_rows(self, step: int, part: int, parts: int) -> int:
        return self._rows.mine(self._batch(max(0, self._visited[0]), step), part, parts).size

    def share(self, epoch: int, step: int, part: int | None, parts: int | None = None) -> Batch:
        batch = self._batch(epoch, step)
        own = self._rows.mine(batch, part, parts or self._parts, self._micro_batch)
        found = self._read(epoch, own)
        if self._weigh is not None and not self.checked:
            found = [self._weigh(each) for each in found]
        seeds = self.seeds(epoch, step, batch.size, part, parts)
        return Batch(found[0], batch.size, own.size / batch.size, seeds, found if seeds else ())

    def _batch(self, epoch: int, step: int) -> np.ndarray:
        """Return the numbers of the rows of a batch."""
        visited = self._visited
        if visited[0] != epoch:
            visited = self._visited = epoch, self._rows.order(self._seed, epoch, self._shuffle)
        return visited[1][step * self.batch_size : (step + 1) * self.batch_size]

    def _read(self, epoch: int, rows: np.ndarray) -> list[Data]:
        """Return these rows, in micro-batches if there are any. Raises DataError."""
        size = self._micro_batch or max(1, rows.size)
        if isinstance(self._rows, Samples) and self._micro_batch is not None:
            with keeping_generators():
                return [self._rows.take(each, (self._seed, epoch)) for each in cut(rows, rows.size, size) or [rows]]
        seeds = () if isinstance(self._rows, Samples) or not self._shuffle else (self._seed, epoch)
        found = self._rows.take(rows, seeds)
        return cut(found, rows.size, size) or [found]


def part_slice(rows: int, part: int | None, parts: int, micro_batch: int | None = None) -> slice:
    """Return the rows of a batch of `rows` rows that one of `parts` parts gets; none if `part` is None. micro_batch: a
    part gets whole micro-batches of this number of rows, the last one of the batch perhaps shorter."""
    if part is None:
        return slice(0, 0)
    if micro_batch is None:
        return slice(rows * part // parts, rows * (part + 1) // parts)
    count = -(-rows // micro_batch)
    first, stop = (-(-count * each // parts) * micro_batch for each in (part, part + 1))
    return slice(min(first, rows), min(stop, rows))


def cut(data: Tree, rows: int, size: int) -> list[Tree]:
    """Return `rows` rows in pieces of `size` rows, views; the last one may be shorter."""
    return [sliced(data, slice(start, start + size)) for start in range(0, rows, size)]


def sliced(tree: Tree, part: slice | np.ndarray) -> Tree:
    """Return some rows: views of a slice of them, copies of those with the numbers in an array."""
    return mapped(lambda array: array[part], tree)


def seed_of(*numbers: int) -> int:
    """Return a number of 63 bits that depends on all of `numbers`."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def seed_generators(number: int, gpus: bool = True) -> None:
    """Seed the global random generators of Python, NumPy and, if it is imported, PyTorch; `gpus`: also of its GPUs."""
    random.seed(number)
    np.random.seed(number % 2**32)
    if torch := sys.modules.get("torch"):
        (torch.manual_seed if gpus else torch.default_generator.manual_seed)(number)


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Context manager: restores the state of the generators that `seed_generators` seeds at the end of the block."""
    states = generator_states()
    try:
        yield
    finally:
        load_generator_states(states)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators that `seed_generators` seeds; the last one is None without PyTorch."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch and torch.get_rng_state()


WORDS = 624  # 32-bit words in the state of NumPy's generator


def load_generator_states(states: tuple[Any, ...]) -> None:
    """Load a result of `generator_states`. Raises an exception of any type for anything else."""
    of_python, of_numpy, of_torch = states
    _, words, position, has_gauss, _ = of_numpy
    if len(words) != WORDS or not 0 <= position <= WORDS or has_gauss not in (0, 1):  # NumPy does not check these
        raise ValueError(f"NumPy's random state has {len(words)} words, and the next one is number {position}")
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if of_torch is not None and (torch := sys.modules.get("torch")):
        torch.set_rng_state(of_torch)
