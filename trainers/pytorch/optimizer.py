"""MirroredOptimizer: three lines that make a training loop data-parallel."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch.optim import Optimizer

from allreduce.base import AllReduce
from allreduce.errors import ClosedError, OptionError
from allreduce.messages.agreement import together
from allreduce.topology import Topology
from allreduce.two_phase import TwoPhase
from trainers import malloc
from trainers.backends import backend_for
from trainers.pytorch import checks, choices
from trainers.pytorch.averaging import AVERAGED, SCATTERED, Averager
from trainers.pytorch.broadcast import broadcast_state, broadcast_tensors, compare
from trainers.pytorch.comparing import compare_replicas
from trainers.pytorch.family import DROPPED, Family, family_of
from trainers.pytorch.loading import load_of_root
from trainers.pytorch.ownership import take_over
from trainers.pytorch.placement import AfterLoading
from trainers.pytorch.report import Report
from trainers.pytorch.sharded import ShardedUpdate

MIB = 1 << 20
AGAIN = "close() this one (after state_dict(), when sharded) and make it again"
GROUP_ADDED = f"parameters were added after MirroredOptimizer was made, so their gradients have no place; {AGAIN}"
CHECK_EVERY = 1000  # steps

ResultT = TypeVar("ResultT")


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
    check_every: after so many steps the ranks compare a hash of all parameters and hyperparameters, and raise
        a DisagreementError that names rank and parameter when they differ: a gradient that was edited on one
        rank, a scheduler that saw a rank's own loss, nn.Embedding(max_norm=). 0 for never.

    All ranks must do the same in the same order: creating, backward, `step`, `synchronize` and `close` are
    collective, and so are `rows`, `load_state_dict`, `editing` and, when sharded, `state_dict`. A rank that leaves
    out a step makes all ranks raise a DisagreementError that tells where each of them is; one for which the others
    wait too long, a CollectiveTimeoutError (`Topology(timeout=seconds)`). Only the order in which one backward comes
    to several optimizers is free.

    Ranks with different numbers of rows tell them by `rows(n)` before backward, and the average is the mean over all
    rows; ranks with different numbers of batches go through them inside of `with optimizer.join():`.

    It is itself a torch.optim.Optimizer: schedulers, GradScaler and clipping take it. Parameters that no
    rank has used keep `.grad` None; where only some ranks used one, the others count as zeros.

    With update="sharded", between backward and step() `.grad` is averaged in this rank's slice only:
    call `synchronize()` before clipping or GradScaler, or a GradientError reminds of it; step() sets it to
    None. And the parameters of all ranks of a node are the same memory: edit them inside of `editing()`.

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
        check_every: int = CHECK_EVERY,
    ) -> None:
        self.closed = False
        self.optimizer, self.model, self.update, self.check_every = optimizer, model, update, check_every
        given = allreduce.topology if isinstance(allreduce, AllReduce) else topology
        family = family_of(given)
        self.topology = given or family.topology
        self._ranks = self.topology.size
        self._sharded: ShardedUpdate | None = None
        # What is given back in the end, by all ranks together. Nothing in it may hold on to this object.
        self._made = ExitStack()
        try:
            number = self._make(family, allreduce, overlap, (first_bucket_mb, bucket_mb))
        except Exception as error:
            if getattr(error, "ranks", None) is not None:  # all ranks are here
                self._made.close()
            raise
        self._dropped = weakref.finalize(self, _drop, family, number, self._averager, self._made)
        self._dropped.atexit = False
        Optimizer.__setstate__(self, {})  # the hooks that every optimizer has; the rest is the wrapped one's
        choices.tell_threads(self.topology)
        malloc.keep_freed_memory()

    def _make(
        self, family: Family, allreduce: str | AllReduce, overlap: bool | str, bucket_mb: tuple[float, float]
    ) -> int:
        """Make all that communicates, and the averager; the number of this optimizer in its family. Collective."""
        comm, made = self.topology.private(), self._made
        number = family.enter(comm)
        made.callback(family.leave, number)
        made.callback(self.topology.release, comm)
        name = allreduce.name if isinstance(allreduce, AllReduce) else allreduce
        checks.together(comm, self.optimizer, self.model, name, self.update, overlap, bucket_mb, self.check_every)
        self._trained, self._frozen = checks.sort(self.optimizer, self.model)
        compare(comm, checks.describe(self.optimizer, self.model))
        self.backend = together(comm, partial(backend_for, allreduce, self.topology, self.update))
        if self.backend is not allreduce:
            made.callback(self.backend.close)
        self._lane, during = choices.lane_of(family, self.topology, overlap)
        made.callback(self._lane.abandon)
        if comm.size > 1:
            broadcast_tensors(comm, [*self.model.parameters(), *self.model.buffers()])
            broadcast_state(comm, self.optimizer)
        self._averager = self._make_averager(family, comm, during, (bucket_mb[0] * MIB, bucket_mb[1] * MIB))
        made.callback(self._averager.close)
        if self.update == "sharded":
            assert isinstance(self.backend, TwoPhase)
            self._sharded = ShardedUpdate(self.optimizer, self._averager, self.backend, comm)
            made.callback(self._sharded.close)
            for module in self.model.modules():
                made.callback(module.register_load_state_dict_post_hook(AfterLoading(self._sharded.placement)).remove)
        take_over(self._trained.values(), self)
        family.add(self._averager)
        return number

    def _make_averager(
        self, family: Family, comm: MPI.Intracomm, during: bool, bucket_bytes: tuple[float, float]
    ) -> Averager:
        backend = self.backend
        reduce: Callable[[np.ndarray], object] = partial(backend, op="mean")
        reduces_to = AVERAGED
        if self.update == "sharded":
            assert isinstance(backend, TwoPhase)
            reduce, reduces_to = partial(backend.reduce_scatter, op="mean"), SCATTERED
        return Averager(
            self._trained,
            backend,
            family,
            self._lane,
            comm,
            reduce=reduce,
            reduces_to=reduces_to,
            during=during,
            bucket_bytes=bucket_bytes,
        )

    def _together(self, what: str, work: Callable[[], ResultT]) -> ResultT:
        """Do `work` when all ranks have come to it, after all that was submitted before. Collective."""
        self._averager.abandon()
        results: list[ResultT] = []
        self._lane.submit(lambda: results.append(work()), self._averager.call(what)).wait()
        return results[0]

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
        self._stepped()
        return loss

    def _step_replicated(self, closure: Callable[[], Any] | None) -> Any:
        if closure is not None:
            return self.optimizer.step(partial(self._mean_loss, closure))
        self._averager.average()
        return self.optimizer.step()

    def _step_sharded(self, sharded: ShardedUpdate, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = self._mean_loss(closure)
        self._averager.average()
        moved = sharded.placement.moved()
        what = f"updates parameters with lr {', '.join(str(float(group['lr'])) for group in self.param_groups)}"
        if moved:
            what += f" after {', '.join(moved)} got other memory"
        settle = partial(sharded.placement.settle, bool(moved), self._averager.edited())
        clock = self._averager.clock
        used = clock.wait(partial(self._together, what, settle))
        sharded.step(used)
        what, count = "shares parameters", clock.wait if sharded.placement.in_common else clock.communicate
        count(partial(self._together, what, sharded.placement.share))
        return loss

    def _stepped(self) -> None:
        self._averager.stepped(release=self._sharded is not None)
        if self.check_every and self._averager.steps % self.check_every == 0:
            self._together(
                "compares the replicas",
                partial(compare_replicas, self._averager.comm, self.optimizer, self._trained),
            )

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """What a closure returns, averaged: optimizers decide by it, and must decide alike on all ranks."""
        loss = closure()
        self._averager.average()
        if loss is None or self._ranks == 1:
            return loss
        value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
        mean = self._together("averages the loss of a closure", partial(self._averager.mean, value))
        return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

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
        self._averager.average()
        if self._averager.state == SCATTERED:
            assert isinstance(self.backend, TwoPhase)
            gather = partial(self._averager.gathered, self.backend.all_gather, self._averager.edited())
            self._averager.clock.communicate(partial(self._together, "gathers gradients", gather))

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

    def rows(self, number: float) -> None:
        """Tell how many rows this rank brings to the next step, before its backward. Collective.

        The loss of a rank is the mean over its rows, so the average of the gradients is weighted by them: ranks
        train as one does on all rows, also when their batches differ in size. It holds until step(). With
        accumulation it is the rows of all parts together. Any weight will do; 0 takes part and counts nothing.
        Costs one small message, which nobody waits for; equal numbers change no bit. What makes no sense is raised
        by all ranks when they average.
        """
        self._check_usable()
        self._averager.count_rows(number)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside, ranks may have different numbers of batches, each one backward and one step. Collective.

        with optimizer.join():
            for x, y in share_of_this_rank:
                optimizer.rows(len(x))  # where batches differ in size
                ...

        A rank that leaves it takes part in the others' steps, with no rows, until all have left. Then all get the
        parameters and the state of a rank that was among the last, since what a loop does besides (clipping,
        schedulers) was not done here; with update="sharded", where every rank is needed for its slice, ranks that
        would update differently raise a DisagreementError.
        """
        self._check_usable()
        self._averager.joining = True
        try:
            yield
            self._take_part()
        finally:
            self._averager.joining = False

    def _take_part(self) -> None:
        """Take part in the steps of ranks that have batches left, until none has."""
        mine = self._averager.steps
        while self._averager.count_rows(0, active=False).ranks():
            self._averager.forget(release=True)
            self._averager.average()
            if self._sharded is not None:
                self._step_sharded(self._sharded, None)
            self._stepped()
        self._averager.rows = None
        self._together("leaves join()", partial(self._follow, mine))

    def _follow(self, mine: int) -> None:
        """Take over from the first of the ranks that have done the most steps. Runs in the lane."""
        comm = self._averager.comm
        steps = comm.allgather(mine)
        if self._sharded is None and min(steps) < max(steps):
            root = steps.index(max(steps))
            broadcast_tensors(comm, self._trained.values(), root)
            broadcast_state(comm, self.optimizer, root)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, parameters may be edited in any way; afterwards all ranks have what rank 0 made of them. Collective.

        with optimizer.editing(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        """
        self._check_usable()
        if self._sharded is not None:
            self._sharded.placement.move_out()
        yield
        self._together("edits parameters", self._edited)

    def _edited(self) -> None:
        if self._averager.comm.size > 1:
            broadcast_tensors(self._averager.comm, self.model.parameters())
        if self._sharded is not None:
            self._sharded.placement.move_in()

    def state_dict(self) -> dict[str, Any]:
        """The state_dict of the plain optimizer, equal on all ranks. Collective when sharded."""
        if self._sharded is None:
            return self.optimizer.state_dict()
        self._check_usable()
        return self._together("gathers the optimizer's state", self._sharded.state_dict)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Load a state_dict of the plain optimizer: rank 0's, which all ranks get. Collective.

        state_dict: may be None on other ranks than 0, so that only one needs to read the file.
        """
        self._check_usable()
        load = partial(load_of_root, self._averager.comm, self.optimizer, state_dict)
        self._together("loads the optimizer's state", load)
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
            overlap=self._averager.during,
            ranks=self._ranks,
            steps=self._averager.steps,
            averages=self._averager.averages,
            communication=clock.communication,
            exposed=clock.exposed,
            waiting=clock.waiting,
            bytes=sum(sizes) * self._averager.averages,
            buckets=sizes,
        )

    def close(self) -> None:
        """Give memory and communicators back. Collective; closing twice does nothing.

        The model stays as it is, on every rank, without `.grad`; a backward through it raises ClosedError from
        now on. The state of a sharded update is dropped: take `state_dict()` before, to go on elsewhere.
        """
        if self.closed:
            return
        self._together("closes the optimizer", lambda: None)
        self.closed = True
        self._dropped.detach()
        self._made.close()

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


def _drop(family: Family, number: int, averager: Averager, made: ExitStack) -> None:
    """An optimizer was dropped by the program. Its model must not go on as if it were averaged. Local."""
    averager.close(DROPPED)
    family.keep(number, made)
