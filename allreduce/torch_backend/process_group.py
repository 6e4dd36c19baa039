"""The process group: turns torch.distributed's calls into operations of the group's executor."""

# PyTorch's stubs of these methods differ from version to version, and some give two signatures.
# mypy: disable-error-code="override, assignment"

import math
import zlib
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
from allreduce.process import malloc
from allreduce.topology import Topology
from allreduce.torch_backend import checks
from allreduce.torch_backend.checks import NAME, Tensors, not_offered, operation, single_list, single_tensor
from allreduce.torch_backend.move import TensorMover
from allreduce.torch_backend.point_to_point import GroupMessages, SentMessage
from allreduce.torch_backend.reduce import Options, TensorReducer, resolve
from allreduce.torch_backend.tensors import Streams
from allreduce.torch_backend.work import (
    CoalescedWork,
    Operation,
    OperationQueue,
    TimedOut,
    exact_seconds,
    not_compiled,
    timeout_seconds,
)

CLOSE_SECONDS = 10.0  # destroy_process_group waits this long for the other ranks to call it too


@not_compiled
class AllReduceProcessGroup(dist.ProcessGroup):
    """A process group over our backends and MPI.

    request: PyTorch's, with store, timeout and name. topology: of the group's ranks, which `shutdown` closes.

    torch.distributed, DDP's reducer (in C++), the functional collectives and users call the methods by these names and
    arguments; a method has further names for older versions of PyTorch. `opts` is PyTorch's options object, or the
    value itself (operation, root or timeout). Invalid arguments raise at once, on this rank, and nothing is submitted.
    All operations except messages run in the order of submission.
    """

    def __init__(self, request: Any, topology: Topology, options: Options) -> None:
        # the signature for subclasses, which the stubs lack
        super().__init__(topology.rank, topology.size)  # type: ignore[call-arg]
        self._store = request.store
        self._topology = topology
        self._timeout = request.timeout.total_seconds()  # of an operation
        self._messages = GroupMessages(topology, request.group_id)
        comm = topology.private()
        self._mover = TensorMover(comm)
        self.options = options
        self._reducer = TensorReducer(topology, comm, options)
        self._operations = OperationQueue(topology, request.group_id, self._reducer.main.executor, options.overlap)
        self._coalesced: list[Operation] | None = None
        self._rank_missing = False  # True after a monitored barrier has timed out
        self.description = f"{options.backend} on {topology}"

    def _submit(
        self,
        name: str,
        written: Sequence[torch.Tensor],
        action: Callable[[], None],
        opts: Any,
        timeout: Any = None,
        *,
        read: Sequence[torch.Tensor] = (),
        signature: str | None = "",
        here: bool = False,
    ) -> Operation:
        """Submit `action`, to run after all earlier operations; return its Operation.

        written, read: the tensors that `action` writes and reads. opts, timeout: either may hold the caller's timeout.
        signature: see OperationQueue.submit. here: the caller may do it, if it waits at once: the waits of `action` end
        after the timeout. A thread inside MPI can't be told that the time is over.
        """
        tensors = [*written, *read]
        checks.check_devices(name, tensors)
        streams = Streams(tensors)

        def run() -> None:
            streams.wait_for_caller()
            action()
            streams.synchronize()

        limit = timeout_seconds(timeout or getattr(opts, "timeout", None), self._timeout)
        here = here and self._coalesced is None and not getattr(opts, "asyncOp", True)
        return self._coalesce(self._operations.submit(name, written, limit, run, signature, here))

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Operation:
        tensor = single_tensor("all_reduce", tensors)
        reduction = self.options.resolve(operation(opts, op), tensor.dtype, tensor.numel(), tensor.is_sparse)
        action = partial(self._reducer.all_reduce, tensor, reduction)
        one_call, here = self._reducer.one_call("all_reduce", tensor, reduction)
        signature = None if one_call else f"{_lengths([tensor])}, {reduction.op}"
        return self._submit("all_reduce", [tensor], action, opts, timeout, signature=signature, here=here)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Operation:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        checks.check_one_dtype("all_reduce_coalesced", tensors)
        reduction = resolve(operation(opts), tensors[0].dtype)
        action = partial(self._reducer.all_reduce_many, tensors, reduction)
        signature = f"{_lengths(tensors)}, {reduction.op}"
        return self._submit("all_reduce_coalesced", tensors, action, opts, signature=signature)

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Operation:
        tensor, root = single_tensor("reduce", tensors), checks.root_of("reduce", opts, root, self.size())
        reduction = resolve(operation(None if isinstance(opts, int) else opts, op), tensor.dtype)
        action = partial(self._reducer.reduce, tensor, root, reduction)
        signature = f"{_lengths([tensor])}, {reduction.op}, to rank {root}"
        return self._submit("reduce", [tensor], action, opts, timeout, signature=signature)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Operation:
        output, sources = single_tensor("reduce_scatter", outputs), single_list("reduce_scatter", inputs)
        checks.check_count("reduce_scatter", sources, self.size())
        return self._reduce_scatter("reduce_scatter", [output], [sources], operation(opts, op), opts, timeout)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Operation:
        return self._reduce_scatter("reduce_scatter_tensor", [output], [[source]], operation(opts), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Operation:
        name = "reduce_scatter_tensor_coalesced"
        checks.check_count(name, sources, len(outputs), "outputs")
        return self._reduce_scatter(name, outputs, [[source] for source in sources], operation(opts), opts)

    def _reduce_scatter(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        op: Any,
        opts: Any,
        timeout: Any = None,
    ) -> Operation:
        """Reduce each of the outputs from its list of inputs."""
        calls = []
        for output, sources in zip(outputs, inputs, strict=True):
            checks.check_scatter(name, output, sources, self.size(), self.rank())
            elements = sum(source.numel() for source in sources)
            calls.append((output, sources, self.options.resolve(op, output.dtype, elements)))

        def action() -> None:
            for call in calls:
                self._reducer.reduce_scatter(*call)

        read, reduction = list(chain(*inputs)), calls[0][2]
        one_call, here = len(read) == 1, False
        if one_call:
            one_call, here = self._reducer.one_call("reduce_scatter", read[0], reduction)
        signature = None if one_call else f"{_lengths(read)}, {reduction.op}"
        return self._submit(name, outputs, action, opts, timeout, read=read, signature=signature, here=here)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reset_compression(self) -> None:
        """Set the error feedback of the compression to zero, after the operations before it. Collective."""
        self._submit("reset_compression", [], self._reducer.reset, None).wait()

    # Data movement

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Operation:
        tensor, root = single_tensor("broadcast", tensors), checks.root_of("broadcast", opts, root, self.size())
        action = partial(self._mover.broadcast, tensor, root)
        signature = f"{_lengths([tensor])} from rank {root}"
        return self._submit("broadcast", [tensor], action, opts, timeout, signature=signature)

    def allgather(self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: Any = None) -> Operation:
        source, received = single_tensor("all_gather", inputs), single_list("all_gather", outputs)
        return self._all_gather("all_gather", [received], [source], opts, timeout)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None
    ) -> Operation:
        name = "all_gather_coalesced"
        checks.check_one_dtype(name, sources)
        checks.check_count(name, outputs, self.size())
        for of_rank in outputs:
            checks.check_count(name, sources, len(of_rank), "outputs")
        return self._all_gather(name, [list(each) for each in zip(*outputs, strict=True)], sources, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Operation:
        return self._all_gather("all_gather_into_tensor", [[output]], [source], opts, single=True)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Operation:
        name = "all_gather_into_tensor_coalesced"
        checks.check_count(name, sources, len(outputs), "outputs")
        return self._all_gather(name, [[output] for output in outputs], sources, opts, single=True)

    def _all_gather(
        self,
        name: str,
        outputs: list[list[torch.Tensor]],
        sources: list[torch.Tensor],
        opts: Any,
        timeout: Any = None,
        single: bool = False,
    ) -> Operation:
        """Fill outputs[i], which has one tensor for each rank or a single one for all, from every rank's sources[i]."""
        for received, source in zip(outputs, sources, strict=True):
            if single:
                checks.check_gather(name, received[0], source, self.size())
            else:
                checks.check_list(name, received, self.size(), self.rank(), source)

        def action() -> None:
            for received, source in zip(outputs, sources, strict=True):
                self._mover.all_gather(received, source)

        written = list(chain(*outputs))
        signature = _lengths(sources if single else written)
        return self._submit(name, written, action, opts, timeout, read=sources, signature=signature)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Operation:
        source, root = single_tensor("gather", inputs), checks.root_of("gather", opts, root, self.size())
        received = single_list("gather", outputs) if self.rank() == root else []
        if self.rank() == root:
            checks.check_list("gather", received, self.size(), self.rank(), source)
        action = partial(self._mover.exchange, "gather", [(root, source)], enumerate(received))
        signature = f"{_lengths(_unlike([source, *received]))} to rank {root}"
        return self._submit("gather", received, action, opts, timeout, read=[source], signature=signature)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Operation:
        output, root = single_tensor("scatter", outputs), checks.root_of("scatter", opts, root, self.size())
        sources = single_list("scatter", inputs) if self.rank() == root else []
        if self.rank() == root:
            checks.check_list("scatter", sources, self.size(), self.rank(), output)
        action = partial(self._mover.exchange, "scatter", enumerate(sources), [(root, output)])
        signature = f"{_lengths(_unlike([output, *sources]))} from rank {root}"
        return self._submit("scatter", [output], action, opts, timeout, read=sources, signature=signature)

    def alltoall(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None, timeout: Any = None
    ) -> Operation:
        checks.check_count("all_to_all", sources, self.size())
        checks.check_list("all_to_all", outputs, self.size(), self.rank(), sources[self.rank()])
        checks.check_one_dtype("all_to_all", sources)
        action = partial(self._mover.all_to_all, outputs, sources)
        signature = f" of {sources[0].dtype}"
        return self._submit("all_to_all", outputs, action, opts, timeout, read=sources, signature=signature)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Operation:
        sizes = checks.split_lengths("all_to_all_single", output, source, output_splits, source_splits, self.size())
        action = partial(self._mover.all_to_all_single, output, source, *sizes)
        signature = f" of {source.dtype}"
        return self._submit("all_to_all_single", [output], action, opts, timeout, read=[source], signature=signature)

    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, dest: int, tag: int) -> Operation:
        return self._message("send", f"to rank {dest}", tensors, dest, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Operation:
        return self._message("recv", f"from rank {source}", tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Operation:
        return self._message("recv", "from any rank", tensors, None, tag)

    def _message(self, kind: str, where: str, tensors: Tensors, peer: int | None, tag: int) -> Operation:
        """Start a message. peer: the other rank; None: any."""
        name, tensor = f"{kind} {where} with tag {tag}", single_tensor(kind, tensors)
        checks.check_member(kind, peer or 0, self.size())
        checks.check_devices(name, [tensor])
        if self._operations.queue.broken is not None:
            raise self._operations.queue.broken
        if not 0 <= tag <= (largest := self._messages.largest_tag):
            raise ValueError(f"{name}: tag {tag} is not between 0 and {largest}, the largest of this MPI")
        Streams([tensor]).wait_for_caller()
        rank = MPI.ANY_SOURCE if peer is None else peer
        with self._topology.detector.translating_failures():
            message = SentMessage(kind, name, tensor, self._timeout, self._messages, rank, tag, kind == "recv")
        return self._coalesce(message)

    # Barriers

    def barrier(self, opts: Any = None, timeout: Any = None) -> Operation:
        """Submit an empty operation; it ends once all ranks have reached it."""
        return self._submit("barrier", [], lambda: None, opts, timeout)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; after `timeout` raise TimedOut, on rank 0 with the missing rank. Collective.

        timeout: a timedelta or seconds; 0 does not wait. None or negative: the group's timeout. wait_all_ranks: name
        all missing ranks, not only the first. torch.distributed.monitored_barrier calls this too.
        """
        limit = self._timeout if timeout is None else exact_seconds(timeout)
        try:
            with self._topology.detector.translating_failures():
                self._messages.monitored_barrier(limit if limit >= 0 else self._timeout, wait_all_ranks)
        except TimedOut:
            self._rank_missing = True
            raise

    # Coalescing of the calls between _start_coalescing and _end_coalescing (batch_isend_irecv, DTensor)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _coalesce(self, work: Operation) -> Operation:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _end_coalescing(self, device: Any = None) -> Operation:
        members, self._coalesced = self._coalesced or [], None
        return CoalescedWork("coalesced operations", members, self._timeout)

    # The end of the group

    def shutdown(self) -> None:
        """Finish all submitted operations, then free communicators and shared memory. Collective.

        If other ranks do not follow within CLOSE_SECONDS, nothing is freed until the program ends. Messages that have
        not arrived by then end in an error.
        """
        closed = self._operations.close(0.0 if self._rank_missing else CLOSE_SECONDS)
        self._messages.fail(RuntimeError("this process group has been destroyed"))
        if not (closed and self._free()):
            notices.log.warning(
                "allreduce: this process group is not freed: an operation failed, or another rank did not call "
                "destroy_process_group"
            )

    def _free(self) -> bool:
        """Free the group's resources; return False if another rank does not take part within CLOSE_SECONDS."""
        self._topology.detector.timeout = min(self._topology.detector.timeout, CLOSE_SECONDS)
        try:
            self._reducer.close()
            self._topology.close()
        except (CollectiveTimeoutError, RankLeftError, RankLostError):
            self._topology.abandon()
            return False
        return True

    def abort(self) -> None:
        """Fail the running operation, all waiting ones, and unfinished messages. Local; nothing is freed."""
        error = RuntimeError("this process group has been aborted")
        self._operations.fail(error)
        self._messages.fail(error)

    # Group properties. PyTorch keeps names and capabilities in a C++ backend object, which a group written in Python
    # lacks. C++ calls the camelCase names, Python the others; state_dict and async_save ask for devices.

    group_name = group_desc = ""
    _device_types = property(lambda _: [torch.device(name) for name in dist.Backend.backend_capability[NAME]])
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.group_desc

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815

    def _get_backend(self, device: torch.device) -> "AllReduceProcessGroup":
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._timeout = exact_seconds(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: MPI needs no sequence number."""

    def _get_sequence_number_for_group(self) -> int:
        return self._operations.submitted

    def split_group(self, *_: Any, **__: Any) -> None:
        raise not_offered("split_group", "use torch.distributed.new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> None:
        raise not_offered("merge_remote_group", "start all ranks by one mpirun")

    def _register_on_completion_hook(self, *_: Any) -> None:
        raise not_offered("completion hooks", "use work.get_future().then(...)")


def _lengths(tensors: Sequence[torch.Tensor]) -> str:
    """Describe tensors: " of 3 elements of torch.float32", or of several tensors " of 3, 4 elements ..."."""
    lengths = ", ".join(str(tensor.numel()) for tensor in tensors)
    return f" of {lengths} elements of {tensors[0].dtype}" if tensors else ""


def _unlike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor of each length: only one if a root's list fits the tensors of all ranks."""
    return list({tensor.numel(): tensor for tensor in tensors}.values())


def create_group(request: Any, pg_options: Any) -> AllReduceProcessGroup:
    """Create the process group that torch.distributed requests. Collective over the members of the group.

    request: PyTorch's store, rank, size, timeout, name and global ranks of the group (none for the world).
    """
    options = Options.parse(pg_options)
    malloc.keep_freed_memory()
    members = list(request.global_ranks_in_group)
    # No topology timeout: operations have their own, and the program may continue after a time-out.
    topology = Topology.of_ranks(members, request.group_id, math.inf) if members else Topology(timeout=math.inf)
    if (request.group_rank, request.group_size) != (topology.rank, topology.size):
        raise OptionError(
            f"PyTorch takes this process for rank {request.group_rank} of {request.group_size} and MPI for rank "
            f"{topology.rank} of {topology.size}. Start the program by mpirun -n {max(request.group_size, 2)} python "
            "... (MPI does not know what torchrun or accelerate launch starts), leave rank and world_size of "
            "init_process_group out, and have RANK and WORLD_SIZE unset"
        )
    topology.agree([zlib.crc32(options.shared.encode())], f"pg_options={options.shared}")
    try:
        return AllReduceProcessGroup(request, topology, options)
    except UnavailableError:  # on all ranks: this backend can't work here
        topology.close()
        raise


_FIRST = f'call torch.distributed.init_process_group("{NAME}") before the framework creates its own process group'


def require(model: torch.nn.Module | None = None) -> str:
    """Check that torch.distributed uses this backend; return one line that describes it. Local.

    For programs whose framework creates the process group itself. model: if given, it must contain a
    DistributedDataParallel that uses this backend (not needed with one rank). Raises UnavailableError, which says what
    was found instead: no process group, gloo, a model that is not wrapped.
    """
    if not dist.is_initialized():
        raise UnavailableError(f"torch.distributed has no process group; {_FIRST}")
    group, name = dist.group.WORLD, dist.get_backend()
    if not isinstance(group, AllReduceProcessGroup):
        raise UnavailableError(f'torch.distributed runs on "{name}", not on "{NAME}"; {_FIRST}')
    if model is not None:
        _require_wrapped(model)
    return f"torch.distributed: {NAME}, {group.description}"


def _require_wrapped(model: torch.nn.Module) -> None:
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not wrapped and dist.get_world_size() > 1:
        raise UnavailableError(
            f"{type(model).__name__} holds no DistributedDataParallel, so its gradients are not averaged; pass the "
            "model that the framework wraps (Accelerate: returned by prepare(); Transformers: trainer.model_wrapped)"
        )
    for module in wrapped:
        name = dist.get_backend(module.process_group)
        if name != NAME:
            raise UnavailableError(f'the model\'s DistributedDataParallel averages over "{name}", not over "{NAME}"')
