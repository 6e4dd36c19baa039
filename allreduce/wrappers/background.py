"""Background: runs another backend's calls in the topology's worker thread, so that computation overlaps with them.

MPI mostly moves data only while some thread is in an MPI call, so overlap needs a thread. Collectives match by their
order, so one thread runs them all, in the same order on all ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

from allreduce.arrays import gpu
from allreduce.backend import AllReduce
from allreduce.engine.queue import Future, Worker
from allreduce.topology import Topology
from allreduce.transport.control import on_all
from allreduce.wrappers.wrapper import Wrapper


def oversubscribed(topology: Topology) -> bool:
    """Return True if some node has fewer than two cores for each of its ranks. Collective."""
    return not on_all(topology.world, topology.cores >= 2 * topology.sharing, "check for spare cores")


class Background(Wrapper):
    """Runs the calls of a backend in a thread. Creating it is collective.

    `submit` returns at once; all other collective methods submit and wait. All ranks must submit the same calls in the
    same order; the calls of different users of a topology may interleave differently. Do not touch a buffer before its
    call has ended, and use the inner backend only through the wrapper.

    Raises UnavailableError on all ranks if MPI lacks MPI_THREAD_MULTIPLE on any rank.
    """

    def __init__(self, topology: Topology, *, inner: AllReduce) -> None:
        queue = topology.service(Worker).queue(f"Background({inner.name})", threaded=True)
        super().__init__(topology, inner=inner)
        self._queue = queue

    def submit(self, work: Callable[[], object], description: str = "", numbers: Sequence[int] = ()) -> Future:
        """Submit `work`, which the worker thread runs after all earlier submissions. Local; see Queue.submit.

        Do not wait for a future inside `work`.
        """
        self.check_open()
        return self._queue.submit(work, description, numbers)

    def around(self, kind: str, call: Callable[[], Any], array: Any = None, op: str = "") -> Any:
        """Run `call` in the worker thread, wait, and return its result; a CuPy array is used on the caller's stream."""
        call = gpu.on_current_stream(call) if gpu.is_gpu_array(array) else call
        results: list[Any] = []
        self.submit(lambda: results.append(call())).wait()
        return results[0]

    def abandon(self) -> None:
        super().abandon()
        self._queue.abandon()

    def _close(self) -> None:
        self._queue.close()
