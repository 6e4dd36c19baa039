"""What every backend can do with rows of a table: each rank brings a few, and all get the sums of all of them.

The gradient of an embedding is such a thing: of a million rows a batch touches some hundred.
"""

from abc import abstractmethod
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, gpu
from allreduce.arrays.memory_kinds import FOREIGN
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace
from allreduce.engine.call import Signature, numbers
from allreduce.engine.engine import Call
from allreduce.errors import AllReduceError, NotAnArrayError, OptionError, UnsupportedOpError
from allreduce.health import abort
from allreduce.moves import Moves, nothing_to_do
from allreduce.transport import chunked

INDEX = np.dtype(np.int64)
LARGEST_TABLE = 2**40 - 1  # elements, as of a buffer
OPS = ("sum", "mean")
DENSE_RATIO, DENSE_BYTES = 2, 1 << 20  # see dense_is_cheaper

Rows = tuple[np.ndarray, np.ndarray]  # indices, and a row of values for each


class Sparse(Moves):
    """A part of every backend: sums of rows, which ranks bring different numbers of."""

    workspace: Workspace

    def sparse(self, indices: Any, values: Any, rows: int, op: str = "mean") -> tuple[Any, Any]:
        """The sums, over all ranks, of rows of a table of `rows` rows, of which each rank brings some. Collective.

        indices: a 1-D array of integers from 0 to rows - 1: to which row of the table each of `values` belongs. In any
            order, and more than once: what has the same index is added. Each rank has its own, any number, also none.
        values: an array of shape (len(indices), ...); dtype and the shape of a row are alike on all ranks. NumPy's
            or CuPy's; neither array is changed.
        op: "sum", or "mean" ("average"): the sum divided by the number of ranks, also of those without that row.

        Returns new arrays, the same bits on all ranks: the rows that any rank has brought, int64, ascending, each once,
        and their sums, of shape (number of these, ...), of the dtype of `values`. 16-bit floats are added in float32
        and rounded once. The memory that it takes is that of the rows which were brought, never that of the table.

        How: each rank adds what it has twice; then the indices of all are gathered, and their rows, which every rank
        adds up in the order of the ranks. Where many ranks bring the same rows these are reduced by the backend
        instead, with zeros for what a rank has not: when the ranks bring at least twice as many rows as there are
        different ones, of 1 MiB and more. (2 to 4 ranks, 64 to 16384 rows of 8 to 256 elements: below 1 MiB neither
        way was faster beyond doubt; above, gathering took 0.6 to 1 times as long as reducing at 1.7 times as many
        rows, the same at 2.1, and 1.1 to 1.6 times as long where all ranks bring the same.)

        Raises on all ranks, before anything is sent: DisagreementError (another dtype, width, `rows` or op on some
        rank), OptionError (indices out of range), NotAnArrayError, UnsupportedOpError, UnsupportedDtypeError.
        """
        call, mine = self._admit_rows(indices, values, rows, op)
        results: list[Rows] = []

        def add(_: np.ndarray, op: Op) -> None:
            found, sums = self._add_rows(*mine, op)
            results.append((found, sums.astype(values.dtype, copy=False).reshape(found.size, *values.shape[1:])))

        self._calls.run(call, self._calls.quiet(add), mine[1])
        found, sums = results[0]
        return (gpu.cupy().asarray(found), gpu.cupy().asarray(sums)) if gpu.is_gpu_array(values) else (found, sums)

    def _admit_rows(self, indices: Any, values: Any, rows: int, op: str) -> tuple[Call, Rows]:
        """Check the arguments, agree about them with the other ranks where that is due, and add duplicates."""
        self._check_open()
        abort.communicates()
        error: AllReduceError | None = None
        signature, resolved, mine = None, None, None
        try:
            given = _checked(indices, values, rows)
            accumulator = _dtype(values.dtype).accumulator
            resolved = self._resolve(op, values.dtype)
            if resolved.name not in OPS:
                raise UnsupportedOpError(f'sparse() takes op "sum" or "mean", not {op!r}')
            shape = values.shape[1:]
            length = int(rows) * int(np.prod(shape, dtype=object))
            if length > LARGEST_TABLE:
                raise OptionError(f"rows={rows!r} of shape {shape} are {length} elements; at most {LARGEST_TABLE}")
            table = (int(rows), *shape)
            signature = Signature(length, values.dtype, resolved.name, FOREIGN, "C", "sparse", table)
            with np.errstate(all="ignore"):  # an overflow would be this rank's alone
                mine = _without_duplicates(*given, accumulator)
        except AllReduceError as refused:
            error = refused
        self._agree_once(signature, signature, numbers(signature, resolved), error)
        assert signature is not None
        assert resolved is not None
        assert mine is not None
        return Call(signature, nothing_to_do, resolved), mine

    def _add_rows(self, indices: np.ndarray, values: np.ndarray, op: Op) -> Rows:
        """The sums of all ranks' rows. indices: ascending, each once. values: 2-D, of an accumulator's dtype."""
        if self.size == 1:
            return indices.copy(), values.copy()
        counts = chunked.counts(self._comm, indices.size)
        everyone = chunked.gather(self._comm, indices, counts)
        found, places = np.unique(everyone, return_inverse=True)
        sums = np.zeros((found.size, values.shape[1]), values.dtype)
        ends = np.cumsum(counts)[:-1]
        of_ranks = np.split(places.reshape(-1), ends)  # where each rank's rows are in `sums`
        if dense_is_cheaper(everyone.size, found.size, sums.nbytes):
            sums[of_ranks[self.rank]] = values
            if sums.size:
                self._reduce(sums.reshape(-1), op)
            return found, sums
        for place, part in zip(of_ranks, np.split(chunked.gather(self._comm, values, counts), ends), strict=True):
            sums[place] += part  # no index is twice in a rank's
        op.finish(sums)
        return found, sums

    @abstractmethod
    def _reduce(self, buffer: np.ndarray, op: Op) -> None: ...

    @abstractmethod
    def _resolve(self, op: str, dtype: np.dtype) -> Op: ...


def dense_is_cheaper(brought: int, found: int, nbytes: int) -> bool:
    """Whether the backend reduces the rows that any rank has brought, in place of gathering what each has.

    brought: rows, of all ranks together. found: how many of these are different ones. nbytes: of the sums.
    """
    return nbytes >= DENSE_BYTES and brought >= DENSE_RATIO * found


def _dtype(dtype: np.dtype) -> dtypes.Type:
    if dtype not in dtypes.TYPES:
        raise dtypes.unsupported(dtype)
    return dtypes.TYPES[dtype]


def _checked(indices: Any, values: Any, rows: int) -> Rows:
    """The arguments in the host's memory, or the error that says what is wrong with them."""
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 0:
        raise OptionError(f"rows={rows!r}: give the number of the table's rows, an integer from 0 on")
    for name, array in (("indices", indices), ("values", values)):
        if not isinstance(array, np.ndarray | np.generic) and not gpu.is_gpu_array(array):
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise NotAnArrayError(f"sparse() takes {name} as a NumPy or CuPy array, not {kind}")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise NotAnArrayError(
            f"indices must be a 1-D array of integers, not one of shape {indices.shape} and dtype {indices.dtype}"
        )
    if values.ndim == 0 or values.shape[0] != indices.size:
        raise NotAnArrayError(
            f"values must have a row for each of the {indices.size} indices, and have the shape {values.shape}"
        )
    found, brought = (each.get() if gpu.is_gpu_array(each) else np.asarray(each) for each in (indices, values))
    if found.size and not (found.min() >= 0 and found.max() < rows):
        wrong = found[(found < 0) | (found >= rows)]
        raise OptionError(
            f"{wrong.size} of {found.size} indices are no rows of a table of {rows} (the first is {wrong[0]}); "
            f"give them from 0 to {rows - 1}"
        )
    return found.astype(INDEX, copy=False), brought


def _without_duplicates(indices: np.ndarray, values: np.ndarray, accumulator: np.dtype) -> Rows:
    """Indices ascending, each once, and a row of sums for each, of the accumulator's dtype; a 2-D array. Contiguous."""
    table = values.reshape(indices.size, int(np.prod(values.shape[1:], dtype=np.int64)))
    if (indices[1:] > indices[:-1]).all():
        return np.ascontiguousarray(indices), np.ascontiguousarray(table, accumulator)
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    first = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    rows = table[order].astype(accumulator, copy=False)
    if first.all():
        return ordered, rows
    return ordered[first], np.add.reduceat(rows, np.flatnonzero(first), axis=0)
