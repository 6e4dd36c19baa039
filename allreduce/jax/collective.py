"""The record of a collective on JAX arrays, the table of their kinds, and the work that a kind does on NumPy arrays."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays import trees
from allreduce.backend import AllReduce

Arrays = Sequence[np.ndarray]

# backend -> its last error
last_errors: weakref.WeakKeyDictionary[AllReduce, BaseException] = weakref.WeakKeyDictionary()
_layout = functools.lru_cache(4096)(trees.layout)


class Collective(NamedTuple):
    """A collective on the arrays of one dtype. All fields but `backend` are equal on all ranks.

    kind: a key of KINDS. text: for errors, and for the comparison of the ranks. op: of a reduction. root: of
    "broadcast".
    """

    backend: AllReduce
    kind: str
    text: str
    op: str = "sum"
    root: int = 0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for an array of `shape`."""
        kind = KINDS[self.kind]
        return (self.backend.size,) * kind.gives_rows + shape[kind.takes_rows :]

    def transposed(self) -> "Collective | None":
        """Return the collective of the gradients, None if there is none."""
        if self.op not in ("sum", "mean"):
            return None
        return self._replace(kind=KINDS[self.kind].transposed or self.kind, text=f"the gradient of {self.text}")

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
    "all_gather": Kind(_all_gather, "psum_scatter", gives_rows=True, moves=True),
    "broadcast": Kind(_broadcast, "psum", moves=True),
}
