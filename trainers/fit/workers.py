"""Reads the rows of a data set in worker processes, by PyTorch's DataLoader or by grain.

The random generators are seeded before each row is read (Samples.take), so what a row becomes depends neither on the
number of workers nor on the process that reads it. Workers are started with the first batch, and end with `close`.
"""

import importlib.util
import itertools
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

import allreduce  # noqa: F401, a worker process that has imported it ends with its rank, also if that is killed
from trainers.arguments import integer_error, require
from trainers.data import Data, Samples, keeping_generators, leaves, mapped
from trainers.errors import ArgumentError, DataError
from trainers.fit import prefetch

BUFFERED = 2  # batches that each worker reads in advance
TORCH, GRAIN = "torch", "grain"  # libraries that read, and the extras with which they are installed
ENDLESS = sys.maxsize
NEEDS = (
    'Workers need a data set that can be pickled, if __name__ == "__main__": around the code of the ranks\' script, '
    "and enough memory, also in /dev/shm; workers=0 reads in the rank itself"
)
ResultT = TypeVar("ResultT")

Rows = list[Data]
"""The rows of a batch: those of each of its micro-batches, or all."""


class Source(Protocol):
    """Reads batches. It is pickled for each worker.

    source[index] reads batch number `index`; source[epoch, [rows]] reads these rows. Raises DataError.
    """

    def __getitem__(self, wanted: Any) -> Rows: ...


class Workers:
    """Reads the batches of a source in worker processes, one after the other and in advance, or some rows on demand.

    samples: the data set, for messages. workers: the number of processes; 0: in this one, without reading in advance.
    library: reads in processes: TORCH or GRAIN.
    """

    def __init__(self, samples: Samples, workers: int, library: str) -> None:
        self.workers, self._samples, self._library = workers, samples, library
        self._source: Source
        self._batches: Stream | None = None
        self._next = 0  # the number of the batch that `_batches` gives next
        self._deals: OnDemand | None = None

    def use(self, source: Source) -> None:
        """Read from `source` from now on. Ends the workers. Local."""
        self.close()
        self._source = source

    def get(self, index: int) -> Rows:
        """Return batch `index`. Batches that are not asked for in order are not read in advance. Raises DataError."""
        if not self.workers:
            return self._here(index)
        if self._batches is None or self._next != index:
            self.close()
            make = Loaded if self._library == TORCH else Grains
            self._batches, self._next = self._tried(lambda: make(self._source, self.workers, index)), index
        self._next += 1
        return self._tried(self._batches.next)

    def take(self, epoch: int, rows: np.ndarray) -> Data:
        """Return these rows, of which each worker reads some. Raises DataError."""
        if not self.workers or not rows.size:
            return self._here((epoch, [rows]))[0]
        if self._deals is None:
            self._deals = self._tried(lambda: OnDemand(self._source, self.workers))
        deals = self._deals
        pieces = np.array_split(rows, min(self.workers, rows.size)) if self._samples.stacks else [rows]
        found = self._tried(lambda: deals.read([(epoch, [piece]) for piece in pieces]))
        return _joined([each for (each,) in found])

    def _here(self, wanted: Any) -> Rows:
        with keeping_generators():
            return self._source[wanted]

    def _tried(self, action: Callable[[], ResultT]) -> ResultT:
        """Return action(). Raises DataError, which holds no frame of the action: the workers end when it is freed."""
        try:
            return action()
        except DataError as error:
            text = str(error)
        except Exception as error:  # of the library: a worker was killed, or the data set can't be pickled
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            text = f"the workers that read the {self._samples.name} have ended: {reason}. {NEEDS}"
        raise DataError(text)

    def close(self) -> None:
        """End the workers. Local."""
        streams, self._batches, self._deals = (self._batches, self._deals), None, None
        for stream in streams:
            if stream is not None:
                stream.close()


class Reading(NamedTuple):
    """How the rows of a data set are read: arguments of `fit`, as given, and `deals_rows` of the strategy."""

    workers: Any = None
    prefetch: bool | None = None
    deals_rows: bool = False

    @property
    def described(self) -> dict[str, str]:
        """What must be equal on all ranks, by name: whether there are workers, not how many."""
        return {} if self.workers is None else {"workers": "given"}

    def ahead(self, x: Any, y: Any, exact: bool) -> int:
        """Return how many batches a thread fetches in advance. exact: whether the random generators of this process are
        seeded for each micro-batch."""
        if self.workers is not None:
            return prefetch.AHEAD if self.workers else 0
        if exact and y is None:
            return 0
        return prefetch.AHEAD if (prefetch.wanted(x, y) if self.prefetch is None else self.prefetch) else 0

    def check(self, x: Any) -> None:
        """Raise ArgumentError if these arguments do not fit, or a library is missing. x: Samples, or an array."""
        workers = self.workers
        if workers is None:
            return
        require(integer_error("workers", workers, 0, optional=True))
        if not isinstance(x, Samples):
            raise ArgumentError(
                f"workers={workers} read the rows of a data set (len() and rows by number, and no y), and x is an "
                "array: leave out workers"
            )
        if self.prefetch is not None:
            raise ArgumentError(
                f"prefetch={self.prefetch}: workers={workers} says what is read ahead; leave out prefetch"
            )
        library = self._library(x)
        if workers and importlib.util.find_spec(library) is None:
            raise ArgumentError(
                f"workers={workers} reads the {x.name} with {library}, which is not installed here: install the extra "
                f'"{library}", or use workers=0'
            )

    def reader(self, x: Any) -> "Workers | None":
        """Return what reads the rows of Samples; None for this process. x: Samples, or an array, after `check`."""
        if self.workers is None or not isinstance(x, Samples):
            return None
        return Workers(x, int(self.workers), self._library(x))

    def _library(self, samples: Samples) -> str:
        """Return the library that reads: grain can't read rows that are dealt."""
        torch = sys.modules.get("torch")  # a program with PyTorch's rows has imported it
        if self.deals_rows:
            return TORCH
        known = torch is not None and (
            isinstance(samples.data, torch.utils.data.Dataset) or samples.holds(torch.Tensor)
        )
        return TORCH if known else GRAIN


class Guarded:
    """A source in a worker: returns a batch and "", or None and the text of the error. first: added to the index."""

    def __init__(self, source: Source, first: int = 0) -> None:
        self._source, self._first = source, first

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, wanted: Any) -> tuple[Rows | None, str]:
        try:
            return self._source[wanted + self._first if isinstance(wanted, int) else wanted], ""
        except DataError as error:
            return None, str(error)
        except BaseException as error:  # also a SystemExit: the rank would wait for this worker
            return None, f"a worker met {type(error).__name__}: {error}"


def _checked(outcome: tuple[Rows | None, str]) -> Rows:
    """Return the rows in a result of Guarded. Raises DataError."""
    rows, text = outcome
    if rows is None:
        raise DataError(text)
    return [mapped(_as_array, each) for each in rows]


class Stream(Protocol):
    """Batches that workers read in order."""

    def next(self) -> Rows: ...

    def close(self) -> None: ...


class Grains:
    """Batches from `first` on, read by grain."""

    def __init__(self, source: Source, workers: int, first: int) -> None:
        import grain
        from absl import flags

        if not flags.FLAGS.is_parsed():  # the program does not use absl, which grain needs
            flags.FLAGS.mark_as_parsed()
        rows = grain.MapDataset.source(Guarded(source, first))
        # no threads in a worker: they would share the random generators
        read = rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        self._batches: Any = iter(read.mp_prefetch(grain.MultiprocessingOptions(workers, BUFFERED)))

    def next(self) -> Rows:
        return _checked(next(self._batches))

    def close(self) -> None:
        self._batches.close()


class Loaded:
    """Batches from `first` on, read by a DataLoader."""

    def __init__(self, source: Source, workers: int, first: int) -> None:
        loader = _loader(source, workers, itertools.count(first))
        self._batches: Iterator[Any] | None = _in_thread(lambda: iter(loader))

    def next(self) -> Rows:
        assert self._batches is not None
        return _checked(next(self._batches))

    def close(self) -> None:
        self._batches = None


class OnDemand:
    """Workers of a DataLoader that wait for what they are asked to read."""

    def __init__(self, source: Source, workers: int) -> None:
        self._wanted: list[Any] = []
        self._loader: Any = _loader(source, workers, self._wanted, persistent_workers=True)

    def read(self, wanted: list[Any]) -> list[Rows]:
        """Return source[each] for each of `wanted`, in this order."""
        self._wanted[:] = wanted
        found = _in_thread(lambda: list(self._loader))
        return [_checked(each) for each in found]

    def close(self) -> None:
        self._loader = None


def _loader(source: Source, workers: int, wanted: Any, **options: Any) -> Any:
    """Return a DataLoader that reads what the iterable `wanted` names."""
    import torch
    from torch.utils.data import DataLoader

    # A fork of a rank would copy MPI's state, and locks that other threads hold. A forkserver is a new process, which
    # imports PyTorch once for all workers.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch.utils.data", __name__])
    return DataLoader(
        Guarded(source),  # type: ignore[arg-type]
        batch_size=None,
        sampler=wanted,
        num_workers=workers,
        collate_fn=_as_tensors,  # type: ignore[arg-type]
        prefetch_factor=BUFFERED,
        multiprocessing_context=processes,
        generator=torch.Generator(),  # otherwise it would draw from the generator of the model
        **options,
    )


def _in_thread(action: Callable[[], ResultT]) -> ResultT:
    """Return action(), called in another thread. A DataLoader that is iterated in the main thread makes a killed worker
    an exception there, at any time, in the middle of a message to other ranks too."""
    with ThreadPoolExecutor(1, "reads rows") as thread, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Got pickle error")  # it advises to fork; `_tried` says what to do
        return thread.submit(action).result()


def _as_tensors(outcome: tuple[Rows | None, str]) -> tuple[Rows | None, str]:
    """Return a result of Guarded with tensors, which go through shared memory, in place of arrays. In a worker."""
    import torch

    def tensor(array: np.ndarray) -> Any:
        try:
            return torch.from_numpy(array) if array.flags.writeable else array
        except TypeError:  # PyTorch has no such dtype
            return array

    rows, text = outcome
    return rows and [mapped(tensor, each) for each in rows], text


def _as_array(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.numpy()


def _joined(trees: Sequence[Any]) -> Any:
    """Return the rows of all trees in one tree."""
    if len(trees) == 1:
        return trees[0]
    columns = zip(*map(leaves, trees), strict=True)
    return mapped(lambda _: np.concatenate(next(columns)), trees[0])
