"""What every backend can do besides reducing: arrays go from one rank to others as they are."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import trees
from allreduce.arrays import chunks, dtypes, gpu, ops
from allreduce.arrays.memory_kinds import FOREIGN, GPU
from allreduce.engine.call import Signature, inspect, numbers
from allreduce.engine.engine import Call, Calls, Find, without_numpy
from allreduce.errors import AllReduceError, OptionError
from allreduce.health import abort
from allreduce.transport.chunked import overwrite


class Moves(ABC):
    """A part of every backend, by the MPI library's own broadcast."""

    rank: int
    size: int
    _comm: MPI.Intracomm
    _calls: Calls
    _agreed: set[Any]

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite `array` on every rank with what rank `root` has in it. Collective.

        array: as for a call, of the same shape on all ranks, and of any dtype without references to Python objects.
        """
        if isinstance(array, trees.KINDS):
            trees.broadcast(self, array, root)
            return
        call = self._admit_move(array, "broadcast", root)
        flat = array.reshape(-1, order="A")
        host = flat.get() if call.signature.memory == GPU else flat
        self._calls.run(call, lambda buffer, _: overwrite(self._comm, buffer, root), host)
        if host is not flat:
            flat.set(host)

    def collect(self, array: Any) -> Any:
        """All ranks' arrays, on every rank: a new array of shape (ranks, *array.shape). Collective.

        array: an array, or a number, of the same shape and dtype on all ranks, of any dtype as in `broadcast`; or a
            tree of arrays, which gives a tree. It stays as it is. The new one is NumPy's, of CuPy's arrays too.
        """
        if isinstance(array, trees.KINDS):
            return trees.collect(self, array)
        table = array.get() if gpu.is_gpu_array(array) else array
        if isinstance(table, np.ndarray | np.generic | int | float | complex):
            mine = np.asarray(table)
            table = np.empty((self.size, *mine.shape), mine.dtype)
            table[self.rank] = mine
        call = self._admit_move(table, "collect")
        rows = [table[rank : rank + 1].reshape(-1) for rank in range(self.size)]
        self._calls.run(call, lambda *_: self._hand_round(rows), table)
        return table

    def all_gather(self, buffer: np.ndarray) -> None:
        """Fill `buffer` on every rank from the slices that the ranks own (see `owned`), in place. Collective.

        buffer: a contiguous 1-D NumPy array of the same length and dtype on all ranks, of any dtype as in `broadcast`.
        """
        call = self._admit_move(buffer, "all_gather")
        slices = [buffer[self.owned(buffer.size, rank)] for rank in range(self.size)]
        self._calls.run(call, lambda *_: self._hand_round(slices), buffer)

    def owned(self, length: int, rank: int | None = None) -> slice:
        """The slice of a buffer of `length` elements that `rank` finishes, this rank when none is given."""
        return chunks.chunk(length, self.size, self.rank if rank is None else rank)

    def _admit_move(self, array: Any, call: str, root: int = 0, placed: bool = False) -> Call:
        """As `_admit`, for calls that move arrays and reduce nothing.

        placed: whether it matters in whose memory the arrays are.
        """
        self._check_open()
        abort.communicates()
        error: AllReduceError | None = None
        signature = None
        try:
            signature = inspect(array, "sum", self._where(array), call)
            if signature.memory != GPU and not placed:
                signature = signature._replace(memory=FOREIGN)
            dtypes.refuse_references(signature.dtype)
            if call == "broadcast":
                if isinstance(root, bool) or not isinstance(root, int | np.integer) or not 0 <= root < self.size:
                    raise OptionError(f"root must be a rank of this topology, 0 to {self.size - 1}, got {root!r}")
                signature = signature._replace(root=int(root))
        except AllReduceError as refused:
            error = refused
        op = ops.OPS["sum"] if error is None else None
        self._agree_once(signature, signature, numbers(signature, op), error)
        assert signature is not None
        find = self._finding(signature) if placed else None
        return self._calls.admit(Call(signature, nothing_to_do, ops.OPS["sum"], find=find))

    def _hand_round(self, slices: list[np.ndarray]) -> None:
        """Every rank's slice, in turn, to all others."""
        for rank, part in enumerate(slices):
            overwrite(self._comm, part, rank)

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _where(self, buffer: Any) -> int: ...

    @abstractmethod
    def _finding(self, signature: Signature) -> Find | None: ...

    @abstractmethod
    def _agree_once(self, key: Any, text: object, values: list[int], error: AllReduceError | None) -> None: ...


@without_numpy
def nothing_to_do(buffer: Any, op: ops.Op) -> None:
    """The reduction of no element, of one rank's alone, and of a call that only moves."""
