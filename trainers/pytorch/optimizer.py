"""MirroredOptimizer: three lines that make a training loop data-parallel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from allreduce.base import AllReduce, TwoPhase
from allreduce.errors import ClosedError, OptionError
from allreduce.topology import Topology
from trainers.pytorch import checks, choices
from trainers.pytorch.averaging import AVERAGED, SCATTERED, Averager, Submit, at_once
from trainers.pytorch.broadcast import broadcast_state, broadcast_tensors, compare
from trainers.pytorch.loading import load_of_root
from trainers.pytorch.ownership import take_over
from trainers.pytorch.report import Report
from trainers.pytorch.rollcall import RollCall
from trainers.pytorch.sharded import ShardedUpdate

MIB = 1 << 20
AGAIN = "close() this one (after state_dict(), when sharded) and make it again"
GROUP_ADDED = f"parameters were added after MirroredOptimizer was made, so their gradients have no place; {AGAIN}"


class MirroredOptimizer(Optimizer):
    """Wraps a PyTorch optimizer: gradients are averaged over all ranks, and replicas stay identical.

        model = Net()
        optimizer = MirroredOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        for x, y in share_of_this_rank:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # when it returns, .grad is the average over the ranks
            optimizer.step()

    optimizer: any torch.optim.Optimizer on parameters of `model`.
    model: a torch.nn.Module on the CPU. Its parameters and buffers, and the optimizer's state, are
        overwritten with those of rank 0; buffers (running means, say) are not averaged later.
    allreduce: a backend's name, or a backend, which then belongs to the caller.
    topology: the ranks; all of MPI.COMM_WORLD when none is given, the backend's when that is given.
    update: "replicated": every rank updates everything. "sharded": every rank updates its own slice, which
        divides the update's time and the optimizer's memory by the ranks; for optimizers that treat every
        element apart from the others (trainers.pytorch.ELEMENTWISE). SGD, Adam and AdamW then take PyTorch's
        fused implementation, whose last bits may differ, unless they were made with fused= or foreach=.
    overlap: True: buckets of gradients are reduced in a thread while backward goes on; False: all of them
        when it ends; "auto": True on several nodes, and on one that has two cores a rank.
    bucket_mb, first_bucket_mb: the least size of a bucket, and of the first one, in MiB, with overlap.

    All ranks must do the same in the same order: creating, backward, `step`, `synchronize` and `close` are
    collective, and so are `load_state_dict` and, when sharded, `state_dict`. A rank that leaves out a step
    makes all ranks raise a DisagreementError that tells where each of them is.

    It is itself a torch.optim.Optimizer: schedulers, GradScaler and clipping take it. Parameters that no
    rank has used keep `.grad` None; where only some ranks used one, the others count as zeros.

    With update="sharded", between backward and step() `.grad` is averaged in this rank's slice only:
    call `synchronize()` before clipping or GradScaler, or a GradientError reminds of it; step() sets it to
    None. And the parameters of all ranks of a node are the same memory: edit them on one rank, or alike.

    Raises on all ranks, before anything is changed: OptionError, DisagreementError (models that differ),
    UnavailableError, UnsupportedDtypeError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        allreduce: str | AllReduce = "auto",
        *,
        topology: Topology | None = None,
        update: str = "replicated",
        overlap: bool | str = "auto",
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
    ) -> None:
        self.closed = False
        self.optimizer, self.model, self.update = optimizer, model, update
        self._owns_topology = topology is None and not isinstance(allreduce, AllReduce)
        self.topology = allreduce.topology if isinstance(allreduce, AllReduce) else topology or Topology()
        self._comm = self.topology.private()
        name = allreduce.name if isinstance(allreduce, AllReduce) else allreduce
        checks.together(self._comm, optimizer, model, name, update, overlap, (first_bucket_mb, bucket_mb))
        self._trained, self._frozen = checks.sort(optimizer, model)
        compare(self._comm, checks.describe(optimizer, model))
        self._broadcast()
        self._owns_backend = not isinstance(allreduce, AllReduce)
        self.backend = choices.backend_for(allreduce, self.topology, update)
        self._rollcall = RollCall(self._comm)
        self._background = choices.background_for(self.backend, self.topology, overlap)
        self._averager = self._make_averager((first_bucket_mb * MIB, bucket_mb * MIB))
        self._sharded: ShardedUpdate | None = None
        if update == "sharded":
            assert isinstance(self.backend, TwoPhase)
            self._sharded = ShardedUpdate(optimizer, self._averager, self.backend, self._comm)
        take_over(self._trained.values(), self)
        Optimizer.__setstate__(self, {})  # the hooks that every optimizer has; the rest is the wrapped one's
        choices.tell_threads(self.topology)

    def _broadcast(self) -> None:
        if self._comm.size > 1:
            broadcast_tensors(self._comm, [*self.model.parameters(), *self.model.buffers()])
            broadcast_state(self._comm, self.optimizer)

    def _make_averager(self, bucket_bytes: tuple[float, float]) -> Averager:
        backend = self.backend
        reduce: Callable[[np.ndarray], object] = partial(backend, op="mean")
        reduces_to = AVERAGED
        if self.update == "sharded":
            assert isinstance(backend, TwoPhase)
            reduce, reduces_to = partial(backend.reduce_scatter, op="mean"), SCATTERED
        submit: Submit = self._background.submit if self._background else at_once
        return Averager(
            self._trained,
            backend,
            self._rollcall,
            reduce=reduce,
            reduces_to=reduces_to,
            submit=submit,
            during=self._background is not None,
            bucket_bytes=bucket_bytes,
        )

    # What an optimizer has

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's: what is changed here takes effect."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state by parameter; only of frozen ones when sharded (`state_dict` gathers it)."""
        return self.optimizer.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, where backward has not done so, and update the parameters. Collective.

        closure: as for any optimizer; what is returned is the mean of its losses over the ranks.
        """
        self._check_usable()
        sharded = self._sharded
        loss = self._step_replicated(closure) if sharded is None else self._step_sharded(sharded, closure)
        self._rollcall.steps += 1
        self._averager.forget(release=sharded is not None)
        return loss

    def _step_replicated(self, closure: Callable[[], Any] | None) -> Any:
        if closure is not None:
            return self.optimizer.step(partial(self._mean_loss, closure))
        self._averager.finish()
        return self.optimizer.step()

    def _step_sharded(self, sharded: ShardedUpdate, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = self._mean_loss(closure)
        self._averager.finish()
        self._averager.check_unchanged()
        self._averager.clock.wait(partial(self._rollcall, "updates parameters"))
        sharded.step(self._rollcall.any([each.grad is not None for each in self._trained.values()]))
        return loss

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """What a closure returns, averaged: optimizers decide by it, and must decide alike on all ranks."""
        loss = closure()
        self._averager.finish()
        if loss is None or self._comm.size == 1:
            return loss
        self._rollcall("averages the loss of a closure")
        if isinstance(loss, torch.Tensor):
            return torch.full_like(loss.detach(), self._rollcall.mean(loss.item()))
        return self._rollcall.mean(float(loss))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. model.zero_grad() does as well, except with update="sharded" and False."""
        self._averager.forget(release=False)
        self._averager.leftover.clear()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def synchronize(self) -> None:
        """Make `.grad` of every parameter the average over the ranks, if it is not that yet. Collective.

        Call it before clipping where a rank may have had no backward, and with update="sharded" always.
        """
        self._check_usable()
        self._averager.finish()
        if self._averager.state == SCATTERED:
            assert isinstance(self.backend, TwoPhase)
            self._averager.check_unchanged()
            self._rollcall("gathers gradients")
            self._averager.gathered(self.backend.all_gather)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds up this rank's gradients without averaging; the next one outside averages the sum.

        for x, y in parts[:-1]:
            with optimizer.no_sync():
                (loss(model(x), y) / len(parts)).backward()
        """
        before, self._averager.enabled = self._averager.enabled, False
        try:
            yield
        finally:
            self._averager.enabled = before

    def state_dict(self) -> dict[str, Any]:
        """The state_dict of the plain optimizer, equal on all ranks. Collective when sharded."""
        if self._sharded is None:
            return self.optimizer.state_dict()
        self._check_usable()
        self._rollcall("gathers the optimizer's state")
        return self._sharded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Load a state_dict of the plain optimizer: rank 0's, which all ranks get. Collective.

        state_dict: may be None on other ranks than 0, so that only one needs to read the file.
        """
        self._check_usable()
        self._rollcall("loads the optimizer's state")
        load_of_root(self._comm, self.optimizer, state_dict)
        if self._sharded is not None:
            self._sharded.load()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not offered, neither here nor at the plain optimizer: the gradients' memory is laid out once."""
        raise OptionError(GROUP_ADDED)

    def report(self) -> Report:
        """What averaging has cost this rank so far. Print it."""
        clock, sizes = self._averager.clock, self._averager.sizes
        return Report(
            backend=self.backend.name,
            update=self.update,
            overlap=self._background is not None,
            ranks=self.topology.size,
            steps=self._rollcall.steps,
            averages=self._rollcall.averages,
            communication=clock.communication,
            exposed=clock.exposed,
            waiting=clock.waiting,
            bytes=sum(sizes) * self._rollcall.averages,
            buckets=sizes,
        )

    def close(self) -> None:
        """Give memory and communicators back. Collective; closing twice does nothing.

        The model stays as it is, on every rank, without `.grad`; a backward through it raises ClosedError from
        now on. The state of a sharded update is dropped: take `state_dict()` before, to go on elsewhere.
        """
        if self.closed:
            return
        self._averager.abandon()
        self._rollcall("closes the optimizer")
        self.closed = self._rollcall.closed = True
        self._averager.close()
        if self._sharded is not None:
            self._sharded.close()
        if self._background is not None:
            self._background.close()
        if self._owns_backend:
            self.backend.close()
        self.topology.release(self._comm)
        if self._owns_topology:
            self.topology.close()

    def __enter__(self) -> "MirroredOptimizer":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    def __repr__(self) -> str:
        return f"MirroredOptimizer({self.update} on {self.topology}, backend {self.backend.name}, {self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a MirroredOptimizer can't be copied or pickled; save its state_dict()")

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedError("this MirroredOptimizer is closed; make it again to go on")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad and parameter.grad is not None:
                raise OptionError(
                    f"{name} was frozen when MirroredOptimizer was made, so its gradient has no place to be "
                    f"averaged in; set requires_grad before, or {AGAIN}"
                )
        if sum(len(group["params"]) for group in self.param_groups) != len(self._trained) + len(self._frozen):
            raise OptionError(GROUP_ADDED)
