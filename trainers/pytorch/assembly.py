"""What a MirroredOptimizer is made of: made by all ranks together, and given back by all of them together."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import Parameter
from torch.optim import Optimizer

from allreduce import create, notices
from allreduce.backend import AllReduce, Recipe, TwoPhase
from allreduce.engine.queue import Queue
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import everywhere, together
from allreduce.wrappers.traced import Traced
from trainers.backends import backend_for, connected_nccl
from trainers.pytorch import optimizer_group
from trainers.pytorch.buckets import own_gpu
from trainers.pytorch.hooks import Forwards, OnForward
from trainers.pytorch.optimizer_group import DROPPED, Family
from trainers.pytorch.options import Options, copies_of_all, describe, options_together, sort
from trainers.pytorch.reducer import AVERAGED, SCATTERED, Averager
from trainers.pytorch.report import TracedClock
from trainers.pytorch.sharded import AfterLoading, Kernels, ShardedOptimizer
from trainers.pytorch.sparse import SparseGradients, sparse_parameters, tell
from trainers.pytorch.state import broadcast_state, broadcast_tensors, compare
from trainers.pytorch.step_checks import GradientCheck
from trainers.replicas.pytorch import devices
from trainers.replicas.pytorch.devices import Host
from trainers.state.backup import NOT_KEPT

MIB = 1 << 20


class Parts(NamedTuple):
    """What a MirroredOptimizer is made of.

    kernels: of the plain optimizer. sharded: None with update="replicated".
    trained, frozen: the optimizer's parameters by name.
    made: what is given back in the end, by all ranks together. Nothing in it may hold on to the MirroredOptimizer.
    local: takes its hands off the model, on this rank alone: what a lost rank has a part in can't be given back.
    """

    backend: AllReduce
    averager: Averager
    kernels: Kernels
    sharded: ShardedOptimizer | None
    trained: dict[str, Parameter]
    frozen: dict[str, Parameter]
    made: ExitStack
    local: ExitStack


def make(optimizer: Optimizer, model: torch.nn.Module, options: Options, topology: Topology, family: Family) -> Parts:
    """Check the arguments, give all ranks rank 0's model and state, and make the parts. Collective.

    family: gets a new member. Raises on all ranks, before anything is changed, as MirroredOptimizer says.
    """
    made, local = ExitStack(), ExitStack()
    try:
        return _make(optimizer, model, options, topology, family, made, local)
    except Exception as error:
        if everywhere(error, topology.world):
            made.close()
        else:
            local.close()
        raise


def drop(family: Family, averager: Averager, made: ExitStack) -> None:
    """An optimizer was dropped by the program. Its model must not go on as if it were averaged. Local."""
    averager.close(DROPPED)
    family.keep(averager.number, made)


def _make(
    optimizer: Optimizer,
    model: torch.nn.Module,
    options: Options,
    topology: Topology,
    family: Family,
    made: ExitStack,
    local: ExitStack,
) -> Parts:
    comm = topology.private()
    made.callback(family.leave, family.enter(comm))
    made.callback(topology.release, comm)
    options_together(comm, optimizer, model, options)
    trained, frozen = sort(optimizer, model)
    compare(comm, describe(optimizer, model))
    tell(comm.rank, optimizer, model, trained)
    device = devices.device_of(trained.values())
    backend = together(comm, partial(_backend, options, topology, device))
    if backend is not options.allreduce:
        made.callback(backend.close)
    traced = None
    if options.trace is not None:
        backend = traced = Traced(topology, inner=backend, trace=options.trace)
        made.callback(traced.close)
    lane, during = optimizer_group.lane_of(family, topology, options.overlap, device)
    made.callback(lane.abandon)
    if comm.size > 1:
        broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
        broadcast_state(comm, optimizer)
    sparse = sparse_parameters(optimizer, model)
    dense = {name: each for name, each in trained.items() if id(each) not in sparse}
    rest = SparseGradients({name: each for name, each in trained.items() if id(each) in sparse}, backend.sparse)
    averager = _averager(dense, rest, backend, family, lane, comm, during, options, device)
    made.callback(averager.close)
    local.callback(averager.let_go)
    if traced is not None:
        averager.clock = TracedClock(traced.trace, traced.calls)
    kernels, sharded = Kernels(optimizer, comm), None
    if options.update == "sharded" and dense:
        assert isinstance(backend, TwoPhase)
        together(comm, partial(copies_of_all, options, averager.sparse.names))
        copies = copies_kept(topology, options.copies)
        sharded = ShardedOptimizer(optimizer, averager, backend, comm, kernels, copies)
        made.callback(sharded.close)
        local.callback(sharded.let_go)
        for module in model.modules():
            hook = module.register_load_state_dict_post_hook(AfterLoading(sharded.placement))
            made.callback(hook.remove)
            local.callback(hook.remove)
    if options.check_gradients is not None:
        averager.check = GradientCheck(
            options.check_gradients, averager.names, averager.buckets, averager.sparse, averager.owned, backend.sent
        )
    if options.check_gradients == "skip":
        assert averager.check is not None
        forwards = averager.check.forwards = Forwards(model)
        hook = model.register_forward_pre_hook(OnForward(forwards))
        made.callback(hook.remove)
        local.callback(hook.remove)
    family.add(averager)
    return Parts(backend, averager, kernels, sharded, trained, frozen, made, local)


def _backend(options: Options, topology: Topology, device: Host) -> AllReduce:
    given = options.allreduce
    if isinstance(given, Recipe):
        return create(given.name, topology, **given.options)
    if device.kind == "cuda":
        with own_gpu(device):
            if (backend := connected_nccl(given, topology, options.compress)) is not None:
                return backend
    return backend_for(given, topology, options.update, options.compress)


def _averager(
    dense: dict[str, Parameter],
    sparse: SparseGradients,
    backend: AllReduce,
    family: Family,
    lane: Queue,
    comm: MPI.Intracomm,
    during: bool,
    options: Options,
    device: Host,
) -> Averager:
    reduce: Callable[[np.ndarray], object] = partial(backend, op="mean")
    reduces_to = AVERAGED
    owned: Callable[[int], slice] = partial(slice, 0)
    if options.update == "sharded" and dense:
        assert isinstance(backend, TwoPhase)
        reduce, reduces_to, owned = partial(backend.reduce_scatter, op="mean"), SCATTERED, backend.owned
    return Averager(
        dense,
        sparse,
        backend,
        family,
        lane,
        comm,
        reduce=reduce,
        reduces_to=reduces_to,
        owned=owned,
        during=during,
        device=device,
        bucket_bytes=(options.bucket_mb[0] * MIB, options.bucket_mb[1] * MIB),
    )


def copies_kept(topology: Topology, copies: int) -> int:
    """How many ranks have each slice of a sharded update. Local. copies: as many were asked for."""
    if copies == 2 and not ulfm.in_force():
        notices.once(topology.rank, NOT_KEPT)
        return 1
    return copies


def tell_threads(topology: Topology) -> None:
    """A notice when the ranks of a node compute with more threads than it has cores."""
    cores, threads = topology.cores, torch.get_num_threads()
    if topology.node_size > 1 and topology.node_size * threads > max(cores, topology.node_size):
        notices.once(
            topology.rank,
            f"{topology.node_size} ranks compute with {threads} threads each on {cores} cores, so they slow each "
            f"other; set OMP_NUM_THREADS={max(1, cores // topology.node_size)} or torch.set_num_threads",
        )
