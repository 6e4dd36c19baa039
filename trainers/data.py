"""Divides data among the ranks: the same seeded permutation on every rank, and every rank's share of each batch.

A batch is global. Batch s of an epoch is rows order[s * B : (s + 1) * B]; rank r takes the r-th chunk of
it. So the batches do not depend on the number of ranks; the last may be short, and a rank may have no row.
"""

import random
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from trainers.errors import ArgumentError, DataError

Collate = Callable[[Sequence[Any]], Any]


class Samples:
    """A data set whose rows are fetched when they are needed.

    data: len(data) is the number of rows, and data[i] is row i, a pair (x, y).
    collate: makes (x, y), arrays whose first axis is the sample, from a list of rows; by default the x and the y
        of the rows are stacked. Rows that are not pairs need a collate.

    Rows come from `data.__getitems__(list of numbers)`, if it exists (PyTorch's protocol); else, without a collate,
    from data[array of numbers], if that gives the same (x, y) as row by row; else row by row. Raises ArgumentError.
    """

    def __init__(self, data: Any, collate: Collate | None = None) -> None:
        self.name = type(data).__name__
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ArgumentError(
                f"x is a {self.name}, and there is no y: give arrays x and y, or a data set with len() and rows by "
                'number; or say which rows a loader brings: rows="divided" (each rank its own), rows="whole"'
            )
        self._data, self._collate = data, collate or _stack
        self._rows = len(data)
        if self._rows == 0:
            raise ArgumentError(f"there are no samples: the {self.name} is empty")
        self._fetch = self._one_by_one
        try:
            probe = np.array([0, self._rows - 1])
            x, y = self.first = self.take(probe)
        except DataError as error:
            raise ArgumentError(str(error)) from error
        if collate is None and not hasattr(data, "__getitems__") and self._takes_arrays(probe):
            self._fetch = self._at_once
        self._none = x[:0], y[:0]

    def __len__(self) -> int:
        return self._rows

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in zip("xy", self.first, strict=True)
        )
        return f"{self.name} of {self._rows} rows, {kinds}"

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of these rows. Raises DataError, which names the data set and quotes its error."""
        if rows.size == 0:
            return self._none
        try:
            x, y = (np.asarray(each) for each in self._fetch(rows))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"the {self.name} can't give rows {_shown(rows)}: {reason}") from error
        if not (x.ndim and y.ndim and len(x) == len(y) == rows.size):
            raise DataError(
                f"the {self.name} gave x of shape {x.shape} and y of shape {y.shape} for {rows.size} rows; their first "
                "axes must be the samples"
            )
        return x, y

    def _one_by_one(self, rows: np.ndarray) -> Any:
        numbers = rows.tolist()
        several = getattr(self._data, "__getitems__", None)
        return self._collate(several(numbers) if several else [self._data[number] for number in numbers])

    def _at_once(self, rows: np.ndarray) -> Any:
        return self._data[rows]

    def _takes_arrays(self, probe: np.ndarray) -> bool:
        """Whether data[array of numbers] gives the same rows as data[number] does; False if rows are augmented at
        random."""
        try:
            x, y = (np.asarray(each) for each in self._at_once(probe))
            return all(
                there.dtype == here.dtype and np.array_equal(there, here)
                for there, here in zip((x, y), self.first, strict=True)
            )
        except Exception:  # any error: it takes no arrays
            return False


def _stack(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != 2:
            raise TypeError(f"a row is a {type(row).__name__}, not a pair (x, y); pass collate= to make pairs")
    return np.stack([np.asarray(x) for x, _ in rows]), np.stack([np.asarray(y) for _, y in rows])


def _shown(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:5].tolist()))
    return f"{shown}, ... ({rows.size} of them)" if rows.size > 5 else shown


# rows read for a fingerprint, spread over all rows: of arrays, and of data sets, whose rows may be slow
OF_ARRAYS, OF_SAMPLES = 64, 16
SHOWN = 5  # rows that a message names

# for "x" and "y": "kind", the dtype and shape of a row; "rows", the CRC-32 of some rows
Fingerprint = dict[str, dict[str, Any]]


def fingerprint(x: Any, y: Any) -> Fingerprint:
    """The fingerprint of arrays x and y, or of Samples and None, to tell data sets apart. Raises DataError.

    Rows of arrays are read once. Rows of a data set are read twice, because it may augment them at random: x, or y,
    gets no checksums if the two readings differ. The caller restores the global random generators that a data set used.
    """
    rows = _sampled(len(x), OF_SAMPLES if isinstance(x, Samples) else OF_ARRAYS)
    if not isinstance(x, Samples):
        return {name: _described(array, [array[row] for row in rows]) for name, array in (("x", x), ("y", y))}
    first, again = ([_described(array, array) for array in x.take(rows)] for _ in range(2))
    for described, other in zip(first, again, strict=True):
        if described != other:
            described["rows"] = []
    return dict(zip("xy", first, strict=True))


def difference(before: Any, now: Fingerprint, count: int) -> str:
    """Return the difference between the data of a checkpoint and the data of now as text; "" for none.

    before: the fingerprint in the checkpoint, not validated yet. count: the number of rows in the data of now.
    """
    for name, here in now.items():
        there = before.get(name) if isinstance(before, dict) else None
        if not isinstance(there, dict) or not isinstance(there.get("rows"), list):
            continue  # written by another version
        if there.get("kind") != here["kind"]:
            return f"a row of {name} was {there.get('kind')}, and is {here['kind']}"
        sampled = _sampled(count, len(here["rows"])) if here["rows"] else ()
        if len(there["rows"]) != len(sampled):
            continue
        pairs = zip(sampled, there["rows"], here["rows"], strict=True)
        differ = [str(row) for row, old, new in pairs if old != new]
        if differ:
            shown = ", ".join(differ[:SHOWN]) + (", ..." if len(differ) > SHOWN else "")
            return f"{len(differ)} of {len(sampled)} sampled rows of {name} differ ({shown})"
    return ""


def _sampled(count: int, most: int) -> np.ndarray:
    """Return at most `most` row numbers spread over `count` rows, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _described(array: np.ndarray, rows: Iterable[Any]) -> dict[str, Any]:
    sums = [] if array.dtype.hasobject else [zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in rows]
    return {"kind": f"{array.dtype}{list(array.shape[1:])}", "rows": sums}


def order(rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The order in which an epoch (0, 1, ...) visits the rows; (rows,) int64, a function of its arguments alone."""
    if not shuffle:
        return np.arange(rows)
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Batch(NamedTuple):
    """A rank's share of one global batch; the arrays are overwritten by a later batch.

    x, y: the rows; with micro-batches of a data set, whose shapes may differ, only those of the first one.
    """

    x: np.ndarray
    y: np.ndarray
    rows: int  # in the global batch
    share: float  # this rank's rows / rows
    seeds: tuple[int, ...] = ()  # of random numbers: for each of this rank's micro-batches
    parts: Sequence[tuple[np.ndarray, np.ndarray]] = ()  # x and y of each of them


class BatchSource(ABC):
    """Gives one rank its share of every global batch, epoch by epoch.

    steps, rows: the batches of the current epoch, and their rows; of a stream those that the ranks know of so far.
    batch_size: the rows of the largest batch; of a stream those of the newest batch that the ranks know of.
    streams: whether the number of batches is not known before they are read. The ranks then learn the rows of the next
        batch with each step: every rank calls `begin`, then `peek` during each step and `learn` after it.
    coming: the rows of the next batch on this rank, if it streams; else 0.
    planned: the batches in an epoch; None if that is not known.
    checked: whether all rows could be checked before the training. ahead: how many batches may be fetched in advance.
    """

    streams = False
    coming = 0
    checked = False
    ahead = 0
    steps: int
    rows: int
    batch_size: int

    @property
    def planned(self) -> int | None:
        return self.steps

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings that decide which rows are in which batch."""

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the data. Raises DataError."""

    @abstractmethod
    def set_part(self, part: int | None, parts: int) -> None:
        """Set the number of parts of every batch, and the part that this rank gets."""

    @abstractmethod
    def sizes(self) -> np.ndarray:
        """The rows of each of the `steps` global batches."""

    def total(self, epoch: int, step: int) -> int:
        """The number of steps from the beginning of the training to `step` of `epoch`."""
        return epoch * self.steps + step

    @abstractmethod
    def epoch(self, number: int, first: int = 0) -> Generator[Batch]:
        """This rank's shares of the batches of epoch `number`, from `first` on. Raises DataError."""

    @abstractmethod
    def share(self, epoch: int, step: int, part: int | None) -> Batch:
        """Return part `part` of batch `step` of an epoch. Raises DataError."""

    def begin(self, epoch: int, step: int) -> int:
        """Go to batch `step` of `epoch`; returns its rows on this rank. Local. Raises DataError."""
        return 0

    def peek(self, step: int) -> None:  # noqa: B027
        """Fetch batch `step` in advance, and set `coming`. Local. Raises DataError."""

    def learn(self, step: int, rows: int) -> None:  # noqa: B027
        """Take the rows of batch `step` on all ranks; 0 if there is none. Local, the same on all ranks."""

    def empty(self, epoch: int) -> DataError:
        """Return the error if no rank has a batch in an epoch."""
        return DataError(f"there are no batches in epoch {epoch + 1}")

    def position(self) -> dict[str, Any]:
        """Return what `resume` needs besides the numbers of steps, as JSON types, the same on all ranks. Local."""
        return {}

    def depends_on_ranks(self, step: int, total: int) -> bool:
        """Whether the rows after `step` steps of an epoch, `total` of the training, depend on the number of ranks."""
        return False

    def resume(self, epoch: int, step: int, total: int, position: Any) -> None:  # noqa: B027
        """Continue at batch `step` of `epoch`, after `total` steps. position: of the checkpoint, not validated. Raises
        CheckpointError."""

    def close(self) -> None:  # noqa: B027
        """Stop reading. Local."""


class Batches(BatchSource):
    """The batches of rows that all ranks have.

    x, y: the whole data, the same on every rank (memory maps will do); or `Samples`, and None.
    batch_size: rows in a global batch.
    parts: the number of parts of every batch. part: the part that this rank gets; None for shares without rows.
    micro_batch: a rank gets whole micro-batches of this number of rows, the last one of a batch perhaps shorter. Random
        numbers that a data set draws then follow from the micro-batch. None: a rank gets any rows.
    ahead: how many batches may be fetched in advance; the arrays of a batch stay valid while these are fetched.
    """

    def __init__(
        self,
        x: Any,
        y: np.ndarray | None,
        batch_size: int,
        part: int | None,
        parts: int,
        seed: int = 0,
        shuffle: bool = True,
        ahead: int = 0,
        micro_batch: int | None = None,
    ) -> None:
        self.rows, self.batch_size = len(x), min(batch_size, len(x))
        self._x, self._y, self.ahead = x, y, ahead
        self._seed, self._shuffle, self._micro_batch = seed, shuffle, micro_batch
        self.checked = not isinstance(x, Samples)  # whether all rows could be checked before the training (arrays)
        self._visited = -1, np.empty(0, np.int64)  # an epoch, and the order in which it visits the rows
        self.set_part(part, parts)

    def set_part(self, part: int | None, parts: int) -> None:
        self._part, self._parts = part, parts
        unit = self._micro_batch or 1
        units = -(-self.batch_size // unit)
        most = -(-units // parts) * unit
        x = self._x
        self._source = x if isinstance(x, Samples) else _Arrays(x, self._y, most, self.ahead + 1)

    @property
    def settings(self) -> dict[str, Any]:
        rows, size = int(self.rows), int(self.batch_size)
        found = {"rows": rows, "batch_size": size, "seed": int(self._seed), "shuffle": bool(self._shuffle)}
        return found if self._micro_batch is None else found | {"micro_batch": int(self._micro_batch)}

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self._x, self._y)

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Batches in an epoch."""
        return -(-self.rows // self.batch_size)

    def sizes(self) -> np.ndarray:
        sizes = np.full(self.steps, self.batch_size)
        sizes[-1] = self.rows - (self.steps - 1) * self.batch_size
        return sizes

    def epoch(self, number: int, first: int = 0) -> Generator[Batch]:
        for step in range(first, self.steps):
            if self._micro_batch is None:
                yield self.share(number, step, self._part)
            else:
                yield self._micro_batches(number, step)

    def _rows_of(self, epoch: int, step: int) -> np.ndarray:
        """Return the rows of batch `step`."""
        if self._visited[0] != epoch:
            self._visited = epoch, order(self.rows, self._seed, epoch, self._shuffle)
        return self._visited[1][step * self.batch_size : (step + 1) * self.batch_size]

    def share(self, epoch: int, step: int, part: int | None) -> Batch:
        batch = self._rows_of(epoch, step)
        begin, end = (0, 0) if part is None else (batch.size * each // self._parts for each in (part, part + 1))
        mine = batch[begin:end]
        x, y = self._source.take(mine)
        return Batch(x, y, batch.size, mine.size / batch.size)

    def _micro_batches(self, epoch: int, step: int) -> Batch:
        """Return this rank's micro-batches of a batch. Raises DataError."""
        size, part = self._micro_batch or 1, self._part
        batch = self._rows_of(epoch, step)
        numbers = range(0) if part is None else micro_batches_of(-(-batch.size // size), part, self._parts)
        seeds = tuple(seed_of(self._seed, epoch, step, number) for number in numbers)
        mine = batch[numbers.start * size : numbers.stop * size]
        if self.checked or not seeds:
            x, y = self._source.take(mine)
            parts = [(x[start : start + size], y[start : start + size]) for start in range(0, mine.size, size)]
        else:
            parts = []
            for number, seed in enumerate(seeds):
                seed_generators(seed)  # a data set may augment rows at random
                parts.append(self._source.take(mine[number * size : (number + 1) * size]))
            x, y = parts[0]
        return Batch(x, y, batch.size, mine.size / batch.size, seeds, parts)


def micro_batches_of(count: int, part: int, parts: int) -> range:
    """Return the numbers of the micro-batches, of `count` in a batch, that part `part` of `parts` gets."""
    return range(-(-count * part // parts), -(-count * (part + 1) // parts))


def seed_of(*numbers: int) -> int:
    """Return a number of 63 bits that depends on all of `numbers`."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def seed_generators(number: int) -> None:
    """Seed the global random generators of Python, NumPy and, if it is imported, PyTorch."""
    random.seed(number)
    np.random.seed(number % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Context manager: restores the state of the generators that `seed_generators` seeds at the end of the block."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch:
            torch.set_rng_state(states[2])


class _Arrays:
    """Copies rows of arrays into `sets` pairs of buffers, which are used in turn. most: the most rows in a call."""

    def __init__(self, x: np.ndarray, y: Any, most: int, sets: int) -> None:
        self._x, self._y = x, y
        self._sets = [
            (np.empty((most, *x.shape[1:]), x.dtype), np.empty((most, *y.shape[1:]), y.dtype)) for _ in range(sets)
        ]
        self._turn = 0

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = (array[: rows.size] for array in self._sets[self._turn % len(self._sets)])
        self._turn += 1
        self._x.take(rows, axis=0, out=x, mode="clip")  # "raise" would go through a buffer
        self._y.take(rows, axis=0, out=y, mode="clip")
        return x, y
