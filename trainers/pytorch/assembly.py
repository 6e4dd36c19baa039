"""Creates the parts of a MirroredOptimizer, creates them again after a failure, and frees them."""

from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from mpi4py import MPI
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from allreduce import notices
from allreduce.backend import AllReduce, Config
from allreduce.errors import ClosedError
from allreduce.topology import Topology
from allreduce.tracing import trace as tracing
from allreduce.tracing.recorder import Recorder, record
from allreduce.transport import ulfm
from allreduce.transport.control import everywhere, together
from trainers.backends import backend_for, connected_nccl
from trainers.pytorch.buckets import own_gpu
from trainers.pytorch.hooks import Hook
from trainers.pytorch.local_sgd import LocalSteps
from trainers.pytorch.optimizer_group import DROPPED, OptimizerGroup, group_of
from trainers.pytorch.options import Options, check_arguments, check_still_fit, describe, split_frozen
from trainers.pytorch.owners import TorchOwners
from trainers.pytorch.reducer import Clock, Reducer
from trainers.pytorch.sharded import ShardedOptimizer
from trainers.pytorch.sparse import sparse_parameters, warn_of_dense
from trainers.pytorch.state import broadcast_state, broadcast_tensors, compare
from trainers.pytorch.transforms import started
from trainers.replicas.pytorch import devices
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.division import TENSORS, division_of
from trainers.replicas.pytorch.replica import Buffers
from trainers.state.backup import kept_copies
from trainers.strategies.transforms.transform import AppliedTransforms

POLICY = "failed ranks (ULFM): MirroredOptimizer continues on the remaining ranks, and raises RankLostError"


class Assembly:
    """The parts of one MirroredOptimizer. Has no reference to it, so that Python can collect a dropped one.

    optimizer: the plain one. The constructor checks the arguments and gives all ranks rank 0's model and state. It is
    collective, and raises on all ranks, before anything is changed.

    topology: the ranks. backend: reduces the gradients. reducer: averages them. owners: the ranks that update.
    trained, frozen: the parameters of `optimizer`, by name.
    transforms: the started ones, which go on after a failure.
    buffers: with SkipNotFinite, copies of the model's buffers from before the step.
    """

    topology: Topology
    backend: AllReduce
    reducer: Reducer
    transforms: AppliedTransforms
    owners: TorchOwners

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module, options: Options) -> None:
        self.optimizer, self.model, self.options = optimizer, model, options
        self.buffers = Buffers(model)
        self.closed = False
        given = options.allreduce.topology if isinstance(options.allreduce, AllReduce) else options.topology
        group = group_of(given)
        self._make(given or group.topology, group)
        if ulfm.in_force() and self.topology.size > 1:
            notices.once(self.topology.rank, POLICY)
        warn_of_threads(self.topology)

    # Creation

    def _make(self, topology: Topology, group: OptimizerGroup, steps: int = 0) -> None:
        """Create all parts; `steps` steps are done already. Collective. After an error everything created is freed."""
        self.topology = topology
        self._cleanup = ExitStack()  # frees the parts, collectively
        self._local_cleanup = ExitStack()  # detaches the parts from the model, locally, after a failure
        try:
            self._make_parts(group, steps)
        except Exception as error:
            if everywhere(error, topology.world):
                self._cleanup.close()
            else:
                self._local_cleanup.close()
            raise

    def _make_parts(self, group: OptimizerGroup, steps: int) -> None:
        topology, options, optimizer, model = self.topology, self.options, self.optimizer, self.model
        self.buffers.forget()  # saved in a step that a failure interrupted
        comm = topology.private()
        number = group.enter(comm)
        self._cleanup.callback(group.leave, number)
        self._cleanup.callback(topology.release, comm)
        check_arguments(comm, optimizer, model, options)
        if "transforms" not in vars(self):
            self.transforms = together(comm, partial(started, options.transforms, options.average))
        self.trained, self.frozen = split_frozen(optimizer, model)
        compare(comm, describe(optimizer, model))
        warn_of_dense(comm.rank, optimizer, model, self.trained)
        device = devices.device_of(self.trained.values())
        clock = Clock(self._make_backend(comm, device))
        if comm.size > 1:
            broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
            broadcast_state(comm, optimizer)
        self._make_reducer(comm, group, number, clock)
        self.reducer.steps = steps
        self.owners = self._make_owners(comm)
        if options.on_bad == "skip":
            self._hook(model.register_forward_pre_hook(Hook(self.buffers.before_forward)))
        self.reducer.take_over(self)
        group.members[number] = self

    def _make_backend(self, comm: MPI.Intracomm, device: Host) -> Recorder | None:
        """Create the backend. Returns the observer that records its calls, if a trace is given. Collective."""
        backend = together(comm, partial(_backend, self.options, self.topology, device))
        if backend is not self.options.allreduce:
            self._cleanup.callback(backend.close)
        self.backend = backend
        if self.options.trace is None:
            return None
        trace, owned = tracing.of(self.options.trace, self.topology)
        if owned:
            self._cleanup.callback(trace.close)
        recorder = record(backend, trace)
        self._cleanup.callback(backend.observers.remove, recorder)
        return recorder

    def _make_reducer(self, comm: MPI.Intracomm, group: OptimizerGroup, number: int, clock: Clock) -> None:
        """Create the Reducer, with the buckets of dense and sparse gradients. Collective."""
        options, on_gpu = self.options, next(iter(self.trained.values())).is_cuda
        queue, during = group.queue(number, self.topology, options.buckets.overlap, on_gpu)
        self._cleanup.callback(queue.drop)
        sparse = sparse_parameters(self.optimizer, self.model)
        tensors = options.sharded is not None and division_of(self.optimizer, options.sharded.shard)[0] == TENSORS
        given = self.trained, sparse, options, self.backend, comm, queue, during, group, number
        self.reducer = Reducer(*given, tensors, clock)
        self._cleanup.callback(self.reducer.close)
        self._local_cleanup.callback(self.reducer.close, None)

    def _make_owners(self, comm: MPI.Intracomm) -> TorchOwners:
        """Create the owners of the parameters. Collective."""
        options, before = self.options, vars(self).get("owners")
        given = self.optimizer, self.model, self.reducer, self.buffers, self.transforms, before
        if options.local:
            return LocalSteps(*given)
        if options.sharded is None or not self.reducer.parameters:
            return TorchOwners(*given)
        copies = kept_copies(options.sharded.copies, comm.rank, ulfm.in_force()) if comm.size > 1 else 1
        sharded = ShardedOptimizer(*given, copies=copies)
        self._cleanup.callback(sharded.abandon)
        self._local_cleanup.callback(sharded.abandon)
        for module in self.model.modules():
            self._hook(module.register_load_state_dict_post_hook(Hook(sharded.shards.accept_edits)))
        return sharded

    def _hook(self, hook: RemovableHandle) -> None:
        """Register a hook of the model, to be removed at the end."""
        self._cleanup.callback(hook.remove)
        self._local_cleanup.callback(hook.remove)

    # In use

    def usable(self) -> AbstractContextManager[None]:
        """As OptimizerGroup.surviving, for a collective call. Raises ClosedError when this is closed."""
        if self.closed:
            raise ClosedError("this MirroredOptimizer is closed; make a new one to continue")
        check_still_fit(self.optimizer, self.trained, self.frozen)
        return self.reducer.group.surviving()

    # The end

    def close(self) -> None:
        """Free everything. Collective; closing twice does nothing. Raises the error of a last round of local SGD."""
        met: Exception | None = None
        while not self.closed:
            group = self.reducer.group
            ok = True
            try:
                met = met or self._end_round()
                self.reducer.run_in_queue("closes the optimizer", lambda: None)
            except Exception as error:
                if ulfm.lost(error) is None:
                    raise
                ok = False
            if ulfm.in_force() and not group.topology.finished(ok):
                lost = group.regroup()  # other ranks may still have to do their last step
                if self.owners.lost:
                    raise lost
                continue
            self.closed = True
            self._cleanup.close()
        if met is not None:
            raise met

    def _end_round(self) -> Exception | None:
        """End a round of local SGD; return an error that all ranks have. Collective."""
        try:
            self.owners.end_round()
        except Exception as error:
            if ulfm.lost(error) is not None or not everywhere(error, self.topology.world):
                raise
            return error
        return None

    def dropped(self) -> None:
        """Called when the MirroredOptimizer is garbage-collected: backward raises from now on. Local."""
        if not self.closed:
            self.closed = True
            self.reducer.close(DROPPED)
            self.reducer.group.keep(self.reducer.number, self._cleanup)

    def drop(self) -> None:
        """Close this optimizer locally, because another rank has dropped it. Local."""
        self._local_cleanup.close()
        self.closed = True

    # After a failure

    def rebuild(self, group: OptimizerGroup) -> None:
        """Create all parts again on the ranks of `group`. Collective."""
        before, old, unsent = vars(self).copy(), self.reducer, self.backend.state()
        self._local_cleanup.close()
        self.options = self.options.for_survivors()
        self.closed = True  # while its parameters have no owner
        try:
            self._make(group.topology, group, old.steps)
        except Exception as error:
            vars(self).update(before)  # the new parts are incomplete; keep the old ones for the next attempt
            self.closed = ulfm.lost(error) is None  # after another failure, the remaining ranks try again
            raise
        self.closed = False
        new = self.reducer
        new.joining, new.enabled = old.joining, old.enabled
        if unsent:
            self.backend.load_state(unsent)


def _backend(options: Options, topology: Topology, device: Host) -> AllReduce:
    given, compress = options.allreduce, options.compress
    if device.kind == "cuda" and not isinstance(given, Config):
        with own_gpu(device):
            if (backend := connected_nccl(given, topology, compress)) is not None:
                return backend
    return backend_for(given, topology, options.update_name, compress)


def warn_of_threads(topology: Topology) -> None:
    """Notify once if the ranks of a node together compute with more threads than the node has cores."""
    cores, threads = topology.cores, torch.get_num_threads()
    if topology.node_size > 1 and topology.node_size * threads > max(cores, topology.node_size):
        notices.once(
            topology.rank,
            f"{topology.node_size} ranks compute with {threads} threads each on {cores} cores, so they slow each "
            f"other; set OMP_NUM_THREADS={max(1, cores // topology.node_size)} or torch.set_num_threads",
        )
