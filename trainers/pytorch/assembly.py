"""The parts of a MirroredOptimizer: made by all ranks together, made again after a rank was lost, and given back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from mpi4py import MPI
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from allreduce import create, notices
from allreduce.backend import AllReduce, Recipe, TwoPhase
from allreduce.elastic.retry import Commit
from allreduce.errors import ClosedError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import all_values, everywhere, together
from allreduce.wrappers.traced import Traced
from trainers import checks
from trainers.backends import backend_for, connected_nccl
from trainers.pytorch.buckets import own_gpu
from trainers.pytorch.hooks import Hook
from trainers.pytorch.optimizer_group import DROPPED, OptimizerGroup, group_of
from trainers.pytorch.options import Options, check_arguments, check_still_fit, describe, sort
from trainers.pytorch.recovery import newest_replica, regroup, surviving, tell_policy
from trainers.pytorch.reducer import Reducer
from trainers.pytorch.report import TracedClock
from trainers.pytorch.sharded import Kernels, ShardedOptimizer, Whole
from trainers.pytorch.sparse import SparseGradients, sparse_parameters, warn_of_dense
from trainers.pytorch.state import broadcast_state, broadcast_tensors, compare
from trainers.replicas.pytorch import devices
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.replica import Buffers
from trainers.state.backup import NO_BACKUP

MIB = 1 << 20


class Assembly:
    """The parts of one MirroredOptimizer. It knows nothing of the MirroredOptimizer, which owns it.

    optimizer: the plain one. The constructor checks the arguments and gives all ranks rank 0's model and state. It is
    collective, and raises on all ranks, before anything is changed.

    topology: the ranks. backend: reduces. reducer: averages gradients. sharded: updates slices; None where every rank
    updates everything. kernels: fused ones of the plain optimizer. trained, frozen: its parameters by name. buffers:
    the model's, as they were before the step, with check_gradients="skip". source: whose replica is copied when they
    differ.
    """

    topology: Topology
    backend: AllReduce
    reducer: Reducer
    kernels: Kernels
    sharded: ShardedOptimizer | None

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module, options: Options) -> None:
        self.optimizer, self.model, self.options = optimizer, model, options
        self.buffers = Buffers(model)
        self.closed = False
        self.slices_lost = False  # the last recovery has not found all slices of a sharded update
        self._whole: Whole | None = None  # the state of all slices, while a lost rank is recovered from
        given = options.allreduce.topology if isinstance(options.allreduce, AllReduce) else options.topology
        group = group_of(given)
        self._make(given or group.topology, group)
        self.source = checks.Source(options.source, self.topology.world)
        tell_policy(self.topology)
        warn_of_threads(self.topology)

    @property
    def steps(self) -> int:
        """How many steps the optimizer has done."""
        return self.reducer.steps

    # Made by all ranks together

    def _make(self, topology: Topology, group: OptimizerGroup, steps: int = 0) -> None:
        """Make all parts, after so many steps. Collective. What fails is given back."""
        self.topology = topology
        self._made = ExitStack()  # gives the parts back, by all ranks together
        self._local = ExitStack()  # takes the parts' hands off the model, on this rank alone, when a rank was lost
        try:
            self._make_parts(group, steps)
        except Exception as error:
            if everywhere(error, topology.world):
                self._made.close()
            else:
                self._local.close()
            raise

    def _make_parts(self, group: OptimizerGroup, steps: int) -> None:
        topology, options, optimizer, model = self.topology, self.options, self.optimizer, self.model
        self.buffers.forget()  # of a step that a failed rank has interrupted
        comm = topology.private()
        number = group.enter(comm)
        self._made.callback(group.leave, number)
        self._made.callback(topology.release, comm)
        check_arguments(comm, optimizer, model, options)
        self.trained, self.frozen = sort(optimizer, model)
        compare(comm, describe(optimizer, model))
        warn_of_dense(comm.rank, optimizer, model, self.trained)
        device = devices.device_of(self.trained.values())
        traced = self._make_backend(comm, device)
        if comm.size > 1:
            broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
            broadcast_state(comm, optimizer)
        self._make_reducer(comm, group, number, device)
        self.reducer.steps = steps
        if traced is not None:
            self.reducer.clock = TracedClock(traced.trace, traced.calls)
        self.kernels, self.sharded = Kernels(optimizer, comm), None
        if options.update == "sharded" and self.reducer.parameters:
            self._shard(comm)
        if options.check_gradients == "skip":
            self._hook(model.register_forward_pre_hook(Hook(self.buffers.before_forward)))
        self.reducer.take_over(self)
        group.members[number] = self

    def _make_backend(self, comm: MPI.Intracomm, device: Host) -> Traced | None:
        """Make what reduces; what traces it where a trace is asked for. Collective."""
        backend = together(comm, partial(_backend, self.options, self.topology, device))
        if backend is not self.options.allreduce:
            self._made.callback(backend.close)
        traced = None
        if self.options.trace is not None:
            backend = traced = Traced(self.topology, inner=backend, trace=self.options.trace)
            self._made.callback(traced.close)
        self.backend = backend
        return traced

    def _make_reducer(self, comm: MPI.Intracomm, group: OptimizerGroup, number: int, device: Host) -> None:
        """Make the buckets of dense gradients, and those of sparse ones. Collective."""
        options = self.options
        queue, during = group.queue(number, self.topology, options.overlap, device.kind == "cuda")
        self._made.callback(queue.abandon)
        are_sparse = sparse_parameters(self.optimizer, self.model)
        dense = {name: each for name, each in self.trained.items() if id(each) not in are_sparse}
        sparse = {name: each for name, each in self.trained.items() if id(each) in are_sparse}
        self.reducer = Reducer(
            dense,
            SparseGradients(sparse, self.backend.sparse),
            bucket_bytes=(options.first_bucket_mb * MIB, options.bucket_mb * MIB),
            queue=queue,
            during=during,
            comm=comm,
            backend=self.backend,
            scatter=options.update == "sharded" and bool(dense),
            check_gradients=options.check_gradients,
            group=group,
            number=number,
            guard=partial(surviving, group),
            device=device,
        )
        self._made.callback(self.reducer.close)
        self._local.callback(self.reducer.close, None)

    def _shard(self, comm: MPI.Intracomm) -> None:
        """Divide the update by the ranks. Collective."""
        assert isinstance(self.backend, TwoPhase)
        copies = self.options.copies
        if copies == 2 and not ulfm.in_force():
            notices.once(comm.rank, NO_BACKUP)
            copies = 1
        self.sharded = ShardedOptimizer(self.optimizer, self.reducer, self.backend, comm, self.kernels, copies)
        self._made.callback(self.sharded.close)
        self._local.callback(self.sharded.abandon)
        for module in self.model.modules():
            self._hook(module.register_load_state_dict_post_hook(Hook(self.sharded.placement.accept)))

    def _hook(self, hook: RemovableHandle) -> None:
        """Remove a hook of the model in the end."""
        self._made.callback(hook.remove)
        self._local.callback(hook.remove)

    # In use

    def usable(self) -> AbstractContextManager[None]:
        """For a collective call: inside, a lost rank has the parts made again, and is raised. Raises ClosedError."""
        if self.closed:
            raise ClosedError("this MirroredOptimizer is closed; make it again to go on")
        check_still_fit(self.optimizer, self.trained, self.frozen)
        return self.reducer.guard()

    def placed_again(self) -> None:
        """All ranks have the same parameters, each in its own memory: place and keep them. Collective, in the queue."""
        if self.sharded is not None:
            self.sharded.placement.move_in()
            self.sharded.keep(self.reducer.steps)

    def join_in(self) -> Callable[[], object]:
        """Take part in an average that other ranks have begun; call the result to finish it."""
        return self.reducer.join_in()

    # The end

    def close(self) -> None:
        """Give everything back. Collective; closing twice does nothing."""
        while not self.closed:
            group = self.reducer.group
            ok = True
            try:
                self.reducer.together("closes the optimizer", lambda: None)
            except Exception as error:
                if ulfm.lost(error) is None:
                    raise
                ok = False
            if ulfm.in_force() and not group.topology.finished(ok):
                lost = regroup(group)  # others have not done their last step; they do it, or it is done already
                if self.slices_lost:
                    raise lost
                continue
            self.closed = True
            self._made.close()

    def dropped(self) -> None:
        """The program has dropped the MirroredOptimizer: its model must not go on as if it were averaged. Local."""
        if not self.closed:
            self.closed = True
            self.reducer.close(DROPPED)
            self.reducer.group.keep(self.reducer.number, self._made)

    def drop(self) -> None:
        """Another rank has dropped this optimizer. Local."""
        self._local.close()
        self.closed = True

    # After a rank was lost

    def newest_state(self, comm: MPI.Intracomm) -> Commit:
        """Get the newest state that the ranks of `comm` have; the result takes it on, locally. Collective."""
        steps, take = newest_replica(comm, self.model, self.optimizer, self.steps)
        whole = self._whole_slices(comm)

        @torch.no_grad()
        def commit() -> None:
            take()
            self.reducer.steps = steps
            self.slices_lost = self.sharded is not None and whole is None
            if whole is None:
                return
            self._whole, self.reducer.steps = whole, whole.steps
            for here, there in zip(self.reducer.parameters, whole.parameters, strict=True):
                here.copy_(there)
            assert self.sharded is not None
            self.optimizer.load_state_dict(self.sharded.as_plain(whole.state))

        return commit

    def _whole_slices(self, comm: MPI.Intracomm) -> Whole | None:
        """What the ranks that are left have of a sharded update with backups, if it is all. Collective."""
        if any(all_values(comm, self._whole is not None, "go on without a lost rank")):
            return self._whole  # on all of them, since all have made it their own before another one was lost
        if self.sharded is None or self.sharded.backup is None:
            return None
        return self.sharded.join(comm, self.sharded.backup.pieces())

    def rebuild(self, group: OptimizerGroup) -> None:
        """Make all parts again on the ranks of another group. Collective."""
        before, old = vars(self).copy(), self.reducer
        self._local.close()
        self.source.move(group.topology.world)
        self.options = self.options.for_survivors(group.topology.size, self.source.rank)
        self.closed = True  # while its parameters are nobody's
        try:
            self._make(group.topology, group, old.steps)
        except Exception as error:
            vars(self).update(before)  # half-made parts have no state to go on from
            self.closed = ulfm.lost(error) is None  # or else it is made once more, by those that are left then
            raise
        self.closed = False
        new = self.reducer
        new.averages, new.joining, new.enabled = old.averages, old.joining, old.enabled

    def recovered(self) -> None:
        """The recovery is complete on all ranks. Local."""
        self._whole = None


def _backend(options: Options, topology: Topology, device: Host) -> AllReduce:
    given = options.allreduce
    if isinstance(given, Recipe):
        return create(given.name, topology, **given.options)
    if device.kind == "cuda":
        with own_gpu(device):
            if (backend := connected_nccl(given, topology, options.compress)) is not None:
                return backend
    return backend_for(given, topology, options.update, options.compress)


def warn_of_threads(topology: Topology) -> None:
    """A notice when the ranks of a node compute with more threads than it has cores."""
    cores, threads = topology.cores, torch.get_num_threads()
    if topology.node_size > 1 and topology.node_size * threads > max(cores, topology.node_size):
        notices.once(
            topology.rank,
            f"{topology.node_size} ranks compute with {threads} threads each on {cores} cores, so they slow each "
            f"other; set OMP_NUM_THREADS={max(1, cores // topology.node_size)} or torch.set_num_threads",
        )
