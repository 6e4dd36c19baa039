"""The process group: what torch.distributed calls, turned into operations for the group's executor."""

# What PyTorch's stubs say of these methods differs from version to version, and some have two forms at once.
# mypy: disable-error-code="override, assignment"

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from allreduce import notices
from allreduce.topology import Topology
from allreduce.torch_backend import gpu
from allreduce.torch_backend.arguments import Tensors, as_list, inner, not_offered, operation
from allreduce.torch_backend.executor import Executor
from allreduce.torch_backend.messages import Message, barrier_tag, monitored_barrier
from allreduce.torch_backend.moving import Mover
from allreduce.torch_backend.named_group import NamedGroup
from allreduce.torch_backend.options import Options
from allreduce.torch_backend.reducing import Reducer
from allreduce.torch_backend.tensors import check
from allreduce.torch_backend.work import Work, seconds
from allreduce.wrappers.background import crowded

CLOSE_SECONDS = 10.0  # destroy_process_group waits this long for the other ranks to call it too


class AllReduceProcessGroup(NamedGroup):
    """A process group over our backends and MPI.

    topology: of the group's ranks, which `shutdown` closes. timeout: seconds for an operation.

    Methods have the names and arguments by which torch.distributed, DDP's reducer (in C++) and the
    functional collectives call them; older names of the same call are kept for older versions of PyTorch.
    All but messages are executed in the order of submission.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, topology: Topology, options: Options, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the form for subclasses, which the stubs leave out
        self._store = store
        self._topology = topology
        self._timeout = timeout.total_seconds()
        self._messages = topology.private()
        comm = topology.private()
        self._comm = comm
        self._mover = Mover(comm)
        self._reducer = Reducer(topology, comm, options)
        self._executor = Executor(topology.world, options.overlap, crowded(topology))
        self._coalesced: list[Work] | None = None

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        (tensor,) = as_list(tensors)
        return self._submit(
            "all_reduce", [tensor], opts, partial(self._reducer.all_reduce, tensor, operation(opts)), timeout
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        tensors = as_list(tensors)
        return self._submit(
            "all_reduce_coalesced", tensors, opts, partial(self._reducer.all_reduce_many, tensors, operation(opts))
        )

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,) = as_list(tensors)
        return self._submit(
            "reduce", [tensor], opts, partial(self._reducer.reduce, tensor, opts.rootRank, operation(opts))
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: Any = None) -> Work:
        (output,) = as_list(outputs)
        sources = inner(inputs)
        action = partial(self._reducer.reduce_scatter, output, sources, operation(opts))
        return self._submit("reduce_scatter", [output], opts, action, timeout, sources)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        action = partial(self._reducer.reduce_scatter, output, [source], operation(opts))
        return self._submit("reduce_scatter_tensor", [output], opts, action, None, [source])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def action() -> None:
            for output, source in zip(outputs, sources, strict=True):
                self._reducer.reduce_scatter(output, [source], operation(opts))

        return self._submit("reduce_scatter_tensor_coalesced", outputs, opts, action, None, sources)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements

    def broadcast(self, tensors: Tensors, opts: Any = 0, timeout: Any = None) -> Work:
        (tensor,) = as_list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        return self._submit("broadcast", [tensor], opts, partial(self._mover.broadcast, tensor, root), timeout)

    def allgather(self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        (source,) = as_list(inputs)
        places = inner(outputs)
        action = partial(self._mover.all_gather, places, source)
        return self._submit("all_gather", places, opts, action, timeout, [source])

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def action() -> None:
            for index, source in enumerate(sources):
                self._mover.all_gather([places[index] for places in outputs], source)

        flat = [place for places in outputs for place in places]
        return self._submit("all_gather_coalesced", flat, opts, action, None, sources)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        action = partial(self._mover.all_gather_single, output, source)
        return self._submit("all_gather_into_tensor", [output], opts, action, None, [source])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def action() -> None:
            for output, source in zip(outputs, sources, strict=True):
                self._mover.all_gather_single(output, source)

        return self._submit("all_gather_into_tensor_coalesced", outputs, opts, action, None, sources)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Any], inputs: Tensors, opts: Any) -> Work:
        (source,) = as_list(inputs)
        places = inner(outputs)
        action = partial(self._mover.gather, places, source, opts.rootRank)
        return self._submit("gather", places, opts, action, None, [source])

    def scatter(self, outputs: Tensors, inputs: Sequence[Any], opts: Any) -> Work:
        (output,) = as_list(outputs)
        sources = inner(inputs)
        action = partial(self._mover.scatter, output, sources, opts.rootRank)
        return self._submit("scatter", [output], opts, action, None, sources)

    def alltoall(self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None) -> Work:
        action = partial(self._mover.all_to_all, outputs, sources)
        return self._submit("all_to_all", outputs, opts, action, None, sources)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        action = partial(self._mover.all_to_all_single, output, source, list(output_splits), list(source_splits))
        return self._submit("all_to_all_single", [output], opts, action, None, [source])

    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, dest: int, tag: int) -> Work:
        (tensor,) = as_list(tensors)
        return self._bracketed(self._message(f"send to rank {dest}", tensor, tag).send(self._messages, dest, tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        (tensor,) = as_list(tensors)
        message = self._message(f"recv from rank {source}", tensor, tag)
        return self._bracketed(message.receive(self._messages, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        (tensor,) = as_list(tensors)
        message = self._message("recv from any rank", tensor, tag)
        return self._bracketed(message.receive(self._messages, MPI.ANY_SOURCE, tag))

    def _message(self, name: str, tensor: torch.Tensor, tag: int) -> Message:
        check(name, [tensor])
        if self._executor.broken is not None:
            raise self._executor.broken
        largest = barrier_tag(self._messages) - 1
        if not 0 <= tag <= largest:
            raise ValueError(f"{name}: tag {tag} is not between 0 and {largest}, the largest of this MPI")
        gpu.Streams([tensor]).before()
        return Message(name, tensor, self._timeout)

    # Barriers

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        return self._submit("barrier", [], opts, self._comm.Barrier, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which did not come in time, on rank 0.

        torch.distributed.monitored_barrier takes no backend but gloo; call this method of the group. All
        that are missing are named, whatever `wait_all_ranks` says.
        """
        monitored_barrier(self._messages, seconds(timeout, self._timeout))

    # Coalescing, of the kind that brackets calls of any sort (batch_isend_irecv, DTensor)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _bracketed(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _end_coalescing(self, device: Any = None) -> Work:
        members, self._coalesced = self._coalesced or [], None

        def action() -> None:
            for member in members:
                member.wait()

        return self._submit("coalesced operations", [], None, action)

    # The group itself

    def get_group_store(self) -> dist.Store:
        return self._store

    def shutdown(self) -> None:
        """Free the communicators and shared windows, after all that was submitted. Collective.

        A rank whose companions don't come within seconds leaves them to the end of the program.
        """
        if not self._executor.stop():
            return
        request = self._comm.Ibarrier()
        deadline = time.monotonic() + CLOSE_SECONDS
        while not request.Test():
            if time.monotonic() > deadline:
                notices.log.warning("allreduce: other ranks don't destroy this process group, so it is not freed")
                return
            time.sleep(1e-4)
        self._reducer.close()
        self._topology.close()

    def abort(self) -> None:
        """Give the group up: what runs and waits fails, nothing is freed."""
        self._executor.fail(RuntimeError("this process group has been aborted"))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

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

    def _submit(
        self,
        name: str,
        written: Sequence[torch.Tensor],
        opts: Any,
        action: Callable[[], None],
        timeout: timedelta | None = None,
        read: Sequence[torch.Tensor] = (),
    ) -> Work:
        check(name, [*written, *read])
        streams = gpu.Streams([*written, *read])

        def run() -> None:
            streams.before()
            action()
            streams.after()

        limit = seconds(timeout or getattr(opts, "timeout", None), self._timeout)
        return self._bracketed(self._executor.submit(Work(name, written, limit), run))
