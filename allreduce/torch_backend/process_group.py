"""The process group: what torch.distributed calls, turned into operations for the group's executor."""

# What PyTorch's stubs say of these methods differs from version to version, and some have two forms at once.
# mypy: disable-error-code="override, assignment"

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from allreduce import notices
from allreduce.errors import CollectiveTimeoutError, RankLeftError, RankLostError
from allreduce.topology import Topology
from allreduce.torch_backend import checks, gpu
from allreduce.torch_backend.arguments import Tensors, not_offered, only
from allreduce.torch_backend.collectives import Collectives
from allreduce.torch_backend.executor import Executor
from allreduce.torch_backend.messages import Message, MessageWaits, MonitoredBarrier, barrier_tag
from allreduce.torch_backend.moving import Mover
from allreduce.torch_backend.options import Options
from allreduce.torch_backend.reducing import Reducer
from allreduce.torch_backend.untraced import untraced
from allreduce.torch_backend.work import TimedOut, Work, exact_seconds

CLOSE_SECONDS = 10.0  # destroy_process_group waits this long for the other ranks to call it too


@untraced
class AllReduceProcessGroup(Collectives):
    """A process group over our backends and MPI.

    topology: of the group's ranks, which `shutdown` closes. timeout: seconds for an operation.

    All but messages are executed in the order of submission.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        topology: Topology,
        options: Options,
        timeout: timedelta,
        name: str,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the form for subclasses, which the stubs leave out
        self._store = store
        self._topology = topology
        self._timeout = timeout.total_seconds()
        self._messages = topology.private()
        self._waits = MessageWaits(topology, name)
        self._monitored_barrier = MonitoredBarrier(self._messages, self._waits)
        comm = topology.private()
        self._comm = comm
        self._mover = Mover(comm)
        self._reducer = Reducer(topology, comm, options)
        self._executor = Executor(topology, name, options.overlap)
        self._alone = False  # whether a monitored barrier has missed a rank
        self.in_words = f"{options.backend} on {topology}"

    # Messages

    def send(self, tensors: Tensors, dest: int, tag: int) -> Work:
        message = self._message("send", f"send to rank {dest} with tag {tag}", tensors, tag, dest)
        with self._topology.watch.hearing():
            return self._bracketed(message.send(self._messages, dest, tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        message = self._message("recv", f"recv from rank {source} with tag {tag}", tensors, tag, source)
        with self._topology.watch.hearing():
            return self._bracketed(message.receive(self._messages, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        message = self._message("recv", f"recv from any rank with tag {tag}", tensors, tag)
        with self._topology.watch.hearing():
            return self._bracketed(message.receive(self._messages, MPI.ANY_SOURCE, tag))

    def _message(self, kind: str, name: str, tensors: Tensors, tag: int, rank: int = 0) -> Message:
        tensor = only(kind, tensors)
        checks.member(kind, rank, self.size())
        checks.devices(name, [tensor])
        if self._executor.broken is not None:
            raise self._executor.broken
        largest = barrier_tag(self._messages) - 1
        if not 0 <= tag <= largest:
            raise ValueError(f"{name}: tag {tag} is not between 0 and {largest}, the largest of this MPI")
        gpu.Streams([tensor]).before()
        return Message(kind, name, tensor, self._timeout, self._waits)

    # Barriers

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """An operation that does nothing: it begins when all ranks have come to it."""
        return self._submit("barrier", [], opts, _nothing, timeout)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the rank which did not come in time, on rank 0.

        timeout: a timedelta or seconds; zero waits for nobody. By default, and where it is negative, the group's.
        torch.distributed.monitored_barrier comes here too. wait_all_ranks: name all ranks that are missing, and not
        only the first of them.
        """
        limit = self._timeout if timeout is None else exact_seconds(timeout)
        try:
            with self._topology.watch.hearing():
                self._monitored_barrier(limit if limit >= 0 else self._timeout, wait_all_ranks)
        except TimedOut:
            self._alone = True
            raise

    # The group itself

    def get_group_store(self) -> dist.Store:
        return self._store

    def shutdown(self) -> None:
        """Free the communicators and shared windows, after all that was submitted. Collective.

        A rank whose companions don't come within seconds leaves them to the end of the program.
        """
        if not (self._executor.close(0.0 if self._alone else CLOSE_SECONDS) and self._freed()):
            notices.log.warning(
                "allreduce: this process group is not freed: an operation has failed, or other ranks don't destroy it"
            )

    def _freed(self) -> bool:
        """Free what the group has made. A rank may have given up just before this one came, and is not waited for."""
        self._topology.watch.timeout = min(self._topology.watch.timeout, CLOSE_SECONDS)
        try:
            self._reducer.close()
            self._topology.close()
        except (CollectiveTimeoutError, RankLeftError, RankLostError):
            self._topology.abandon()
            return False
        return True

    def abort(self) -> None:
        """Give the group up: what runs and waits fails, nothing is freed."""
        self._executor.fail(RuntimeError("this process group has been aborted"))

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._timeout = exact_seconds(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: MPI keeps the order."""

    def _get_sequence_number_for_group(self) -> int:
        return self._executor.submitted

    def split_group(self, *_: Any, **__: Any) -> None:
        raise not_offered("split_group", "use torch.distributed.new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> None:
        raise not_offered("merge_remote_group", "start all ranks by one mpirun")

    def _register_on_completion_hook(self, *_: Any) -> None:
        raise not_offered("completion hooks", "use work.get_future().then(...)")


def _nothing() -> None: ...
