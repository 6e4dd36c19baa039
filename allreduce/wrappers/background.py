"""Background: the calls of another backend run in the topology's worker, so that computation goes on meanwhile.

MPI mostly moves data only while some thread is inside of an MPI call, so overlap needs a thread; and
collectives match by their order, so one thread runs them all, in an order that all ranks follow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allreduce.arrays import gpu
from allreduce.backend import AllReduce
from allreduce.engine.queue import Future, Worker
from allreduce.topology import Topology
from allreduce.transport.control import on_all
from allreduce.wrappers.wrapper import Wrapper


def oversubscribed(topology: Topology) -> bool:
    """True where some node has no core to spare for a second thread of each of its ranks. Collective."""
    return not on_all(topology.world, topology.cores >= 2 * topology.sharing, "see whether cores are to spare")


class Background(Wrapper):
    """Runs the calls of a backend in a thread. Creating it is collective.

    `submit` returns at once; calling it as any other backend submits and waits. All ranks submit the same calls,
    several users of one topology in any order. Until a call has ended its buffer belongs to it, and the backend
    must be used through the wrapper only.

    Raises UnavailableError on all ranks when MPI was not started with MPI_THREAD_MULTIPLE on all of them.
    """

    def __init__(self, topology: Topology, *, inner: AllReduce) -> None:
        queue = topology.once(Worker).queue(f"Background({inner.name})", threaded=True)
        super().__init__(topology, inner=inner)
        self._queue = queue

    def submit(self, work: Callable[[], object], what: str = "", numbers: Sequence[int] = ()) -> Future:
        """Have the thread call `work`, after all that was submitted here before. Not to be waited for inside."""
        self.check_open()
        return self._queue.submit(work, what, numbers)

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        self._in_queue(lambda: self.inner(buffer, op), buffer)

    def bind(self, array: Any, op: str = "mean") -> Callable[[], None]:
        inner = self._in_queue(lambda: self.inner.bind(array, op), array)
        return lambda: self._in_queue(inner, array)

    def allocate(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        return self._in_queue(lambda: self.inner.allocate(length, dtype, device))

    def broadcast(self, array: Any, root: int = 0) -> None:
        self._in_queue(lambda: self.inner.broadcast(array, root), array)

    def stack(self, array: Any) -> Any:
        return self._in_queue(lambda: self.inner.stack(array), array)

    def sparse(self, indices: Any, values: Any, rows: int, op: str = "mean") -> tuple[Any, Any]:
        return self._in_queue(lambda: self.inner.sparse(indices, values, rows, op), values)

    def all_gather(self, buffer: np.ndarray) -> None:
        self._in_queue(lambda: self.inner.all_gather(buffer), buffer)

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        self._check_phases()
        return self._in_queue(lambda: self.inner.reduce_scatter(buffer, op), buffer)  # type: ignore[attr-defined]

    def _in_queue(self, call: Callable[[], Any], array: Any = None) -> Any:
        """What `call` of the inner backend returns: in its turn, and in the thread that communicates.

        array: what the call works on; one of CuPy's on the caller's stream.
        """
        call = gpu.carried(call) if gpu.is_gpu_array(array) else call
        results: list[Any] = []
        self.submit(lambda: results.append(call())).wait()
        return results[0]

    def abandon(self) -> None:
        super().abandon()
        self._queue.abandon()

    def _close(self) -> None:
        self._queue.close()
