"""The process group: the calls of torch.distributed, turned into operations for the group's executor."""

# What PyTorch's stubs say of these methods differs from version to version, and some have two forms at once.
# mypy: disable-error-code="override, assignment"

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from allreduce import notices
from allreduce.errors import CollectiveTimeoutError, OptionError, RankLeftError, RankLostError, UnavailableError
from allreduce.topology import Topology
from allreduce.torch_backend import checks
from allreduce.torch_backend.checks import NAME, Tensors, not_offered, only, only_list, operation
from allreduce.torch_backend.move import TensorMover
from allreduce.torch_backend.point_to_point import Message, MessageWaits, MonitoredBarrier, barrier_tag
from allreduce.torch_backend.reduce import Options, TensorReducer, resolve
from allreduce.torch_backend.tensors import Streams
from allreduce.torch_backend.work import Executor, Several, TimedOut, Work, exact_seconds, seconds, untraced

CLOSE_SECONDS = 10.0  # destroy_process_group waits this long for the other ranks to call it too


def device_names() -> list[str]:
    """The devices whose tensors the backend takes here. Asking for CUDA's this way starts nothing, so forks go on."""
    return ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]


@untraced
class AllReduceProcessGroup(dist.ProcessGroup):
    """A process group over our backends and MPI.

    topology: of the group's ranks, which `shutdown` closes. timeout: seconds for an operation.

    torch.distributed, DDP's reducer (in C++), the functional collectives and users call the methods by these names and
    arguments: `opts` are PyTorch's options for the call, or their content (an operation, a root, a time-out). Older
    names of the same call are kept for older versions of PyTorch. A call with senseless arguments raises at once, and
    submits nothing. All calls but messages are executed in the order of submission.
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
        self._timeout = timeout.total_seconds()  # of an operation
        self._messages = topology.private()
        self._waits = MessageWaits(topology, name)
        self._monitored_barrier = MonitoredBarrier(self._messages, self._waits)
        comm = topology.private()
        self._mover = TensorMover(comm)
        self._reducer = TensorReducer(topology, comm, options)
        self._executor = Executor(topology, name, options.overlap)
        self._coalesced: list[Work] | None = None
        self._alone = False  # whether a monitored barrier has missed a rank
        self.in_words = f"{options.backend} on {topology}"

    def _submit(
        self,
        name: str,
        written: Sequence[torch.Tensor],
        action: Callable[[], None],
        opts: Any,
        timeout: Any = None,
        *,
        read: Sequence[torch.Tensor] = (),
        alike: str = "",
    ) -> Work:
        """Have `action` executed after all that was submitted before.

        written, read: its tensors. opts, timeout: where the caller may have given a time-out. alike: the arguments
        that must be the same on all ranks, in words; the ranks compare them before the operation begins.
        """
        checks.devices(name, [*written, *read])
        streams = Streams([*written, *read])

        def run() -> None:
            streams.before()
            action()
            streams.after()

        limit = seconds(timeout or getattr(opts, "timeout", None), self._timeout)
        return self._bracketed(self._executor.submit(Work(name, written, limit, alike), run))

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Work:
        tensor = only("all_reduce", tensors)
        reduction = resolve(operation(opts, op), tensor.dtype, tensor.is_sparse)
        action = partial(self._reducer.all_reduce, tensor, reduction)
        return self._submit("all_reduce", [tensor], action, opts, timeout, alike=f"{_of([tensor])}, {reduction.op}")

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        checks.one_dtype("all_reduce_coalesced", tensors)
        reduction = resolve(operation(opts), tensors[0].dtype)
        action = partial(self._reducer.all_reduce_many, tensors, reduction)
        return self._submit("all_reduce_coalesced", tensors, action, opts, alike=f"{_of(tensors)}, {reduction.op}")

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        tensor, root = only("reduce", tensors), checks.root_of("reduce", opts, root, self.size())
        reduction = resolve(operation(None if isinstance(opts, int) else opts, op), tensor.dtype)
        action = partial(self._reducer.reduce, tensor, root, reduction)
        alike = f"{_of([tensor])}, {reduction.op}, to rank {root}"
        return self._submit("reduce", [tensor], action, opts, timeout, alike=alike)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        output, sources = only("reduce_scatter", outputs), only_list("reduce_scatter", inputs)
        checks.count("reduce_scatter", sources, self.size())
        return self._reduce_scatter("reduce_scatter", [output], [sources], operation(opts, op), opts, timeout)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter("reduce_scatter_tensor", [output], [[source]], operation(opts), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        name = "reduce_scatter_tensor_coalesced"
        checks.pairs(name, outputs, sources)
        return self._reduce_scatter(name, outputs, [[source] for source in sources], operation(opts), opts)

    def _reduce_scatter(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        op: Any,
        opts: Any,
        timeout: Any = None,
    ) -> Work:
        """Reduce each of the outputs from its list of inputs."""
        for output, sources in zip(outputs, inputs, strict=True):
            checks.scattered(name, output, sources, self.size(), self.rank())
        reductions = [resolve(op, output.dtype) for output in outputs]

        def action() -> None:
            for output, sources, reduction in zip(outputs, inputs, reductions, strict=True):
                self._reducer.reduce_scatter(output, sources, reduction)

        read = list(chain(*inputs))
        alike = f"{_of(read)}, {reductions[0].op}"
        return self._submit(name, outputs, action, opts, timeout, read=read, alike=alike)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Work:
        tensor, root = only("broadcast", tensors), checks.root_of("broadcast", opts, root, self.size())
        action = partial(self._mover.broadcast, tensor, root)
        return self._submit("broadcast", [tensor], action, opts, timeout, alike=f"{_of([tensor])} from rank {root}")

    def allgather(self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        source, received = only("all_gather", inputs), only_list("all_gather", outputs)
        return self._all_gather_lists("all_gather", [received], [source], opts, timeout)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        name = "all_gather_coalesced"
        checks.one_dtype(name, sources)
        checks.count(name, outputs, self.size())
        for of_rank in outputs:
            checks.pairs(name, of_rank, sources)
        lists = [[of_rank[index] for of_rank in outputs] for index in range(len(sources))]
        return self._all_gather_lists(name, lists, sources, opts)

    def _all_gather_lists(
        self,
        name: str,
        lists: list[list[torch.Tensor]],
        sources: list[torch.Tensor],
        opts: Any,
        timeout: Any = None,
    ) -> Work:
        """Fill each of the lists, which have a tensor for each rank, from its source on every rank."""
        for received, source in zip(lists, sources, strict=True):
            checks.for_each_rank(name, received, self.size(), self.rank(), source)

        def action() -> None:
            for received, source in zip(lists, sources, strict=True):
                self._mover.all_gather(received, source)

        written = list(chain(*lists))
        return self._submit(name, written, action, opts, timeout, read=sources, alike=_of(written))

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._all_gather("all_gather_into_tensor", [output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._all_gather("all_gather_into_tensor_coalesced", outputs, sources, opts)

    def _all_gather(self, name: str, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any) -> Work:
        """Fill each of the outputs from its source on every rank."""
        checks.pairs(name, outputs, sources)
        for output, source in zip(outputs, sources, strict=True):
            checks.gathered(name, output, source, self.size())

        def action() -> None:
            for output, source in zip(outputs, sources, strict=True):
                self._mover.all_gather_single(output, source)

        return self._submit(name, outputs, action, opts, read=sources, alike=_of(sources))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        source, received = only("gather", inputs), only_list("gather", outputs)
        root = checks.root_of("gather", opts, root, self.size())
        checks.at_root("gather", received, self.size(), self.rank(), source, root)
        action = partial(self._mover.gather, received, source, root)
        alike = f"{_of([source])} to rank {root}"
        return self._submit("gather", received, action, opts, timeout, read=[source], alike=alike)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        output, sources = only("scatter", outputs), only_list("scatter", inputs)
        root = checks.root_of("scatter", opts, root, self.size())
        checks.at_root("scatter", sources, self.size(), self.rank(), output, root)
        action = partial(self._mover.scatter, output, sources, root)
        alike = f"{_of([output])} from rank {root}"
        return self._submit("scatter", [output], action, opts, timeout, read=sources, alike=alike)

    def alltoall(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None, timeout: Any = None
    ) -> Work:
        checks.count("all_to_all", sources, self.size())
        checks.for_each_rank("all_to_all", outputs, self.size(), self.rank(), sources[self.rank()])
        checks.one_dtype("all_to_all", sources)
        action = partial(self._mover.all_to_all, outputs, sources)
        alike = f" of {sources[0].dtype}"
        return self._submit("all_to_all", outputs, action, opts, timeout, read=sources, alike=alike)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        sizes = checks.exchanged("all_to_all_single", output, source, output_splits, source_splits, self.size())
        action = partial(self._mover.all_to_all_single, output, source, *sizes)
        alike = f" of {source.dtype}"
        return self._submit("all_to_all_single", [output], action, opts, timeout, read=[source], alike=alike)

    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, dest: int, tag: int) -> Work:
        message = self._message("send", f"send to rank {dest} with tag {tag}", tensors, tag, dest)
        with self._topology.detector.hearing():
            return self._bracketed(message.send(self._messages, dest, tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        message = self._message("recv", f"recv from rank {source} with tag {tag}", tensors, tag, source)
        with self._topology.detector.hearing():
            return self._bracketed(message.receive(self._messages, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        message = self._message("recv", f"recv from any rank with tag {tag}", tensors, tag)
        with self._topology.detector.hearing():
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
        Streams([tensor]).before()
        return Message(kind, name, tensor, self._timeout, self._waits)

    # Barriers

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """An operation that does nothing: it begins when all ranks have come to it."""
        return self._submit("barrier", [], _nothing, opts, timeout)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the rank which did not come in time, on rank 0.

        timeout: a timedelta or seconds; zero waits for nobody. By default, and where it is negative, the group's.
        torch.distributed.monitored_barrier comes here too. wait_all_ranks: name all ranks that are missing, and not
        only the first of them.
        """
        limit = self._timeout if timeout is None else exact_seconds(timeout)
        try:
            with self._topology.detector.hearing():
                self._monitored_barrier(limit if limit >= 0 else self._timeout, wait_all_ranks)
        except TimedOut:
            self._alone = True
            raise

    # Coalescing, of the kind that brackets calls of any sort (batch_isend_irecv, DTensor)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _bracketed(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _end_coalescing(self, device: Any = None) -> Work:
        members, self._coalesced = self._coalesced or [], None
        return Several("coalesced operations", members, self._timeout)

    # The end of the group

    def shutdown(self) -> None:
        """Free the communicators and shared windows, after all that was submitted. Collective.

        A rank that has waited for the other ranks for some seconds frees nothing: the end of the program does.
        """
        if not (self._executor.close(0.0 if self._alone else CLOSE_SECONDS) and self._freed()):
            notices.log.warning(
                "allreduce: this process group is not freed: an operation has failed, or other ranks don't destroy it"
            )

    def _freed(self) -> bool:
        """Free what the group has made. A rank may have given up just before this one came, and is not waited for."""
        self._topology.detector.timeout = min(self._topology.detector.timeout, CLOSE_SECONDS)
        try:
            self._reducer.close()
            self._topology.close()
        except (CollectiveTimeoutError, RankLeftError, RankLostError):
            self._topology.abandon()
            return False
        return True

    def abort(self) -> None:
        """Give the group up: the running operation and all that wait fail, nothing is freed."""
        self._executor.fail(RuntimeError("this process group has been aborted"))

    # The group itself: PyTorch keeps names and abilities in a C++ backend, which a group written in Python has not.
    # C++ asks by the names in mixed case, Python by the others; state_dict and async_save ask for devices.

    _name = _description = ""
    _device_types = property(lambda _: [torch.device(name) for name in device_names()])
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> "AllReduceProcessGroup":
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

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


def _of(tensors: Sequence[torch.Tensor]) -> str:
    """How many elements of which dtype: " of 3 elements of torch.float32", " of 3, 4 elements ..." of several."""
    lengths = ", ".join(str(tensor.numel()) for tensor in tensors)
    return f" of {lengths} elements of {tensors[0].dtype}" if tensors else ""


def create_group(request: Any, pg_options: Any) -> AllReduceProcessGroup:
    """Make the process group for which torch.distributed asks. Collective over the members of the group.

    request: PyTorch's store, rank, size, timeout, name and global ranks of the group (none for the world).
    """
    options = Options.parse(pg_options)
    members = list(request.global_ranks_in_group)
    # The group has time-outs of its own, by which its program may go on.
    topology = Topology.of_ranks(members, request.group_id, math.inf) if members else Topology(timeout=math.inf)
    if (request.group_rank, request.group_size) != (topology.rank, topology.size):
        raise OptionError(
            f"PyTorch takes this process for rank {request.group_rank} of {request.group_size} and MPI for rank "
            f"{topology.rank} of {topology.size}. Start the program by mpirun -n {max(request.group_size, 2)} python "
            "... (MPI does not know what torchrun or accelerate launch starts), leave rank and world_size of "
            "init_process_group out, and have RANK and WORLD_SIZE unset"
        )
    return AllReduceProcessGroup(
        request.store, request.group_rank, request.group_size, topology, options, request.timeout, request.group_id
    )


_FIRST = f'call torch.distributed.init_process_group("{NAME}") before the framework makes a process group of its own'


def require(model: torch.nn.Module | None = None) -> str:
    """Make sure that torch.distributed runs on this backend. Local: nothing is sent.

    For programs whose framework makes its process group itself. model: what the framework trains; then its
    DistributedDataParallel must be there, and use this backend too. Returns one line to print: the backend in force and
    its ranks. Raises UnavailableError, which says what is in force instead: no process group, gloo, a model that is not
    wrapped.
    """
    if not dist.is_initialized():
        raise UnavailableError(f"torch.distributed has no process group; {_FIRST}")
    group, name = dist.group.WORLD, dist.get_backend()
    if not isinstance(group, AllReduceProcessGroup):
        raise UnavailableError(f'torch.distributed runs on "{name}", not on "{NAME}"; {_FIRST}')
    if model is not None:
        _require_wrapped(model)
    return f"torch.distributed: {NAME}, {group.in_words}"


def _require_wrapped(model: torch.nn.Module) -> None:
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not wrapped and dist.get_world_size() > 1:
        raise UnavailableError(
            f"{type(model).__name__} holds no DistributedDataParallel, so its gradients are not averaged; give what "
            "the framework has prepared (Accelerate: what prepare() returned; Transformers: trainer.model_wrapped)"
        )
    for module in wrapped:
        name = dist.get_backend(module.process_group)
        if name != NAME:
            raise UnavailableError(f'the model\'s DistributedDataParallel averages over "{name}", not over "{NAME}"')
