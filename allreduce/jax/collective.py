"""The record of a collective on JAX arrays, the table of their kinds, and the work that a kind does on NumPy arrays."""

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import dtypes, ops, trees
from allreduce.arrays.arguments import is_integer
from allreduce.backend import AllReduce
from allreduce.call.call import Call
from allreduce.errors import OptionError
from allreduce.transport import chunked

Arrays = Sequence[np.ndarray]
Route = tuple[int, Any]  # a rank, and the index of a slice: a row, or everything

SHOWN_PAIRS = 4  # of ppermute, in a text
# backend -> its last error
last_errors: weakref.WeakKeyDictionary[AllReduce, BaseException] = weakref.WeakKeyDictionary()
_layout = functools.lru_cache(4096)(trees.layout)


class Collective(NamedTuple):
    """A collective on the arrays of one dtype. All fields but `backend` are equal on all ranks.

    kind: a key of KINDS. text: for errors, and for the comparison of the ranks. op: of a reduction. root: of
    "broadcast", "gather" and "scatter". perm: pairs (source, destination) of "ppermute".
    """

    backend: AllReduce
    kind: str
    text: str
    op: str = "sum"
    root: int = 0
    perm: tuple[tuple[int, int], ...] = ()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for an array of `shape`."""
        kind = KINDS[self.kind]
        return (self.backend.size,) * kind.gives_rows + shape[kind.takes_rows :]

    def transposed(self) -> "Collective | None":
        """Return the collective of the gradients, None if there is none."""
        if self.op not in ("sum", "mean"):
            return None
        kind, perm = KINDS[self.kind].transposed or self.kind, tuple((there, here) for here, there in self.perm)
        return self._replace(kind=kind, text=f"the gradient of {self.text}", perm=perm)

    def on_host(self, *arrays: np.ndarray) -> list[Any]:
        """Run the collective; return new arrays or views of the backend's memory.

        XLA calls it in its own thread, and copies the result before the next ordered call.
        """
        try:
            return KINDS[self.kind].work(self, arrays)
        except BaseException as error:
            last_errors[self.backend] = error
            raise

    def on_buffers(self, _: Any, *buffers: Any) -> tuple[()]:
        """Run the collective on XLA's buffers: a token and the arguments, then a token and the results."""
        half = len(buffers) // 2
        made = self.on_host(*map(np.asarray, buffers[1:half]))
        for place, array in zip(buffers[half + 1 :], made, strict=True):
            np.copyto(np.asarray(place), array)
        return ()


class Kind(NamedTuple):
    """A kind of collective.

    work: see Collective.on_host. transposed: the kind of the gradients; "" for the same. takes_rows, gives_rows: the
    first axis of the arrays, of the results, has a row for each rank. moves: it only copies elements, of any dtype.
    """

    work: Callable[[Collective, Arrays], list[Any]]
    transposed: str = ""
    takes_rows: bool = False
    gives_rows: bool = False
    moves: bool = False


def check_perm(perm: Any, size: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ppermute, sorted; raise OptionError if they are not as jax.lax.ppermute's."""
    found: list[tuple[Any, ...]] = [()]
    with contextlib.suppress(TypeError, ValueError):  # of arguments that are no sequences of numbers
        found = [tuple(pair) if np.ndim(pair) == 1 else () for pair in perm]
    ranks = all(len(pair) == 2 and all(is_integer(rank, 0, size - 1) for rank in pair) for pair in found)
    if not ranks or any(len(set(side)) < len(found) for side in zip(*found, strict=True)):
        raise OptionError(
            f"perm must have pairs (source, destination) of ranks, 0 to {size - 1}, and no rank twice as a source or "
            f"as a destination; got {perm!r}"
        )
    return tuple(sorted((int(here), int(there)) for here, there in found))


def words_of_perm(perm: tuple[tuple[int, int], ...]) -> str:
    """Return the pairs for a collective's text: of many, the first ones and a number by which ranks compare them."""
    if len(perm) <= SHOWN_PAIRS:
        return str(perm)
    return f"{len(perm)} pairs, {str(perm[:SHOWN_PAIRS])[1:-1]} ... #{zlib.crc32(np.array(perm, np.int64).data):08x}"


def _tree(call: Collective, arrays: Arrays) -> trees.Named:
    return trees.Named(call.text, list(arrays))


def _reduce(call: Collective, arrays: Arrays) -> list[Any]:
    return call.backend.reduced(_tree(call, arrays), call.op).arrays


def _broadcast(call: Collective, arrays: Arrays) -> list[Any]:
    copies = _tree(call, [np.array(array) for array in arrays])
    call.backend.broadcast(copies, call.root)
    return copies.arrays


def _all_gather(call: Collective, arrays: Arrays) -> list[Any]:
    return call.backend.stack(_tree(call, arrays)).arrays


def _reduce_scatter(call: Collective, arrays: Arrays) -> list[Any]:
    """A reduce-scatter of one buffer if the ranks own equal slices of it, otherwise this rank's rows of the sums."""
    backend, length = call.backend, sum(array[0].size for array in arrays)
    owned = [backend.owned(length * backend.size, rank) for rank in range(backend.size)]
    if not backend.two_phase or any(span.stop - span.start != length for span in owned):
        return [array[backend.rank] for array in _reduce(call, arrays)]
    backend.executor.compare(_described(call, arrays))
    buffer = np.empty(length * backend.size, arrays[0].dtype)
    for rank, span in enumerate(owned):
        np.concatenate([array[rank].reshape(-1) for array in arrays], out=buffer[span])
    mine = backend.reduce_scatter(buffer, call.op)
    parts = np.split(mine, np.cumsum([array[0].size for array in arrays])[:-1])
    return [part.reshape(array.shape[1:]) for part, array in zip(parts, arrays, strict=True)]


def _exchange(call: Collective, arrays: Arrays) -> list[Any]:
    """Send slices of the arrays; return the received ones, zeros elsewhere."""
    made = [np.zeros(call.shape(array.shape), array.dtype) for array in arrays]
    routes = _routes(call)
    sent, received = (
        [(rank, array[index]) for array in side for rank, index in pairs]
        for side, pairs in zip((arrays, made), routes, strict=True)
    )
    executor = call.backend.executor
    _run(call, arrays, lambda _: chunked.exchange(executor.comm, sent, received, executor.tag(), call.text))
    return made


def _routes(call: Collective) -> tuple[list[Route], list[Route]]:
    """Return the slices that this rank sends to ranks, and the slices that it receives."""
    rank = call.backend.rank
    rows: list[Route] = [(each, (each, ...)) for each in range(call.backend.size)]
    root: list[Route] = [(call.root, ...)]
    if call.kind == "gather":
        return root, rows if rank == call.root else []
    if call.kind == "scatter":
        return rows if rank == call.root else [], root
    if call.kind == "ppermute":
        sent: list[Route] = [(there, ...) for here, there in call.perm if here == rank]
        received: list[Route] = [(here, ...) for here, there in call.perm if there == rank]
        return sent, received
    return rows, rows


def _scan(call: Collective, arrays: Arrays) -> list[Any]:
    """Combine each array with the arrays of the ranks before; in "scan_back", of the ranks behind.

    In round k a rank gets the combined arrays of 2^k ranks. 16-bit floats are combined in float32 and rounded once.
    """
    backend, op, dtype = call.backend, ops.resolve(call.op, arrays[0].dtype, 1), arrays[0].dtype
    executor, ranks = backend.executor, range(backend.size)
    totals = [np.array(array, dtypes.TYPES[dtype].accumulator, order="C") for array in arrays]
    arrived, made = [np.empty_like(total) for total in totals], [np.empty_like(array) for array in arrays]

    def work(_: Any) -> None:
        distance = 1 if call.kind == "scan" else -1
        while abs(distance) < backend.size:
            there, here = backend.rank + distance, backend.rank - distance
            sent = [(there, total) for total in totals if there in ranks]
            received = [(here, each) for each in arrived if here in ranks]
            chunked.exchange(executor.comm, sent, received, executor.tag(), call.text)
            for (_, each), total in zip(received, totals, strict=False):
                op.combine(each, total, out=total)
            distance *= 2
        for place, total in zip(made, totals, strict=True):
            np.copyto(place, total, casting="unsafe")

    _run(call, arrays, work)
    return made


def _run(call: Collective, arrays: Arrays, work: Callable[[Any], object]) -> None:
    """Do `work` when all ranks have reached this collective with the same tree."""
    record = Call(call.kind, sum(array.size for array in arrays), arrays[0].dtype)
    call.backend.executor.run(record, work, None, _described(call, arrays))


def _described(call: Collective, arrays: Arrays) -> str:
    """Return the tree in words, with the number by which ranks compare a long one."""
    layout = _layout(trees.key(call.text, arrays))
    return f"{layout.text} #{layout.number}"


KINDS = {
    "pmean": Kind(_reduce),
    "psum": Kind(_reduce),
    "pmax": Kind(_reduce),
    "pmin": Kind(_reduce),
    "psum_scatter": Kind(_reduce_scatter, "all_gather", takes_rows=True),
    "scan": Kind(_scan, "scan_back"),
    "scan_back": Kind(_scan, "scan"),
    "all_gather": Kind(_all_gather, "psum_scatter", gives_rows=True, moves=True),
    "broadcast": Kind(_broadcast, "psum", moves=True),
    "all_to_all": Kind(_exchange, takes_rows=True, gives_rows=True, moves=True),
    "gather": Kind(_exchange, "scatter", gives_rows=True, moves=True),
    "scatter": Kind(_exchange, "gather", takes_rows=True, moves=True),
    "ppermute": Kind(_exchange, moves=True),
}
