"""MirroredOptimizer: three lines that make a training loop data-parallel."""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from allreduce.backend import AllReduce, TwoPhase
from allreduce.errors import ClosedError, CopyError, OptionError
from allreduce.keywords import known_only
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport import ulfm
from allreduce.transport.control import all_values
from trainers import checks, malloc
from trainers.checks import MAJORITY
from trainers.pytorch import assembly
from trainers.pytorch.assembly import drop, make
from trainers.pytorch.comparing import compare_replicas
from trainers.pytorch.optimizer_group import Family, family_of
from trainers.pytorch.options import GROUP_ADDED, Options, still_fit
from trainers.pytorch.recovery import Whole, recover, said, surviving
from trainers.pytorch.reducer import SCATTERED, Averager
from trainers.pytorch.report import Report, report_of
from trainers.pytorch.sharded import Kernels, ShardedOptimizer, gather
from trainers.pytorch.state import broadcast_state, broadcast_tensors, load_of_root


class Life:
    """What a MirroredOptimizer is made of. optimizer: the plain one."""

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module, options: Options) -> None:
        self.closed = False
        self.whole: Whole | None = None  # the state of all slices, while a loss is repaired
        self.kept_twice = False  # whether that was found when a rank was lost
        self.optimizer, self.model, self.update = optimizer, model, options.update
        self._options = options
        given = options.allreduce.topology if isinstance(options.allreduce, AllReduce) else options.topology
        family = family_of(given)
        self._make(given or family.topology, family)
        self._source = checks.Source(options.source, self.topology.world)
        said(self.topology)

    def _make(self, topology: Topology, family: Family) -> None:
        """Make all parts. Collective."""
        self.topology = topology
        self._parts = make(self.optimizer, self.model, self._options, topology, family)
        self.backend, self._averager, self._kernels, self._sharded, self._trained, self._frozen, *_ = self._parts
        own = self._averager, self._kernels, self._sharded, self._trained
        self._stepper = Stepper(self.optimizer, *own, self._options)
        self._averager.take_over(self)
        self._dropped = weakref.finalize(self, drop, family, self._averager, self._parts.made)
        self._dropped.atexit = False
        family.owners[self._averager.number] = self

    @property
    def steps(self) -> int:
        """How many steps this optimizer has done, the same on all ranks: the number of the next batch."""
        return self._averager.steps

    @property
    def steps_skipped(self) -> int:
        """How many steps all ranks have left out, with check_gradients="skip"."""
        return self._stepper.skipped

    def report(self) -> Report:
        """What averaging has cost this rank so far. Print it."""
        return report_of(self._averager, self.backend.name, self.update)

    def close(self) -> None:
        """Give memory and communicators back. Collective; closing twice does nothing.

        The model stays as it is, on every rank, without `.grad`; a backward through it raises ClosedError from
        now on. The state of a sharded update is dropped: take `state_dict()` before, to go on elsewhere.
        """
        while not self.closed:
            family = self._averager.family
            ok = True
            try:
                self._averager.together("closes the optimizer", lambda: None)
            except Exception as error:
                if ulfm.lost(error) is None:
                    raise
                ok = False
            if ulfm.in_force() and not family.topology.finished(ok):
                lost = recover(family)  # others have not done their last step; they do it, or it is done already
                if self.update == "sharded" and not self.kept_twice:
                    raise lost
                continue
            self.closed = True
            self._dropped.detach()
            self._parts.made.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not come to a collective close
            self.close()

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedError("this MirroredOptimizer is closed; make it again to go on")
        still_fit(self.optimizer, self._trained, self._frozen)

    def _surviving(self) -> Any:
        """Inside, a lost rank has this optimizer made again, and is raised."""
        return surviving(self._averager.family)

    # What `recovering` calls

    def _reconnect(self, family: Family) -> None:
        """Make all parts again on the ranks of a new family. Collective."""
        old, skipped = self._averager, self._stepper.skipped
        self._let_go()
        self._source.move(family.topology.world)
        self._options = _again(self._options, family.topology.size, self._source.rank)
        self.closed = True  # while its parameters are nobody's
        try:
            self._make(family.topology, family)
        except Exception as error:
            self.closed = ulfm.lost(error) is None  # or else it is made once more, by those that are left then
            raise
        self.closed = False
        new = self._averager
        new.steps, new.averages, new.joining, new.enabled = old.steps, old.averages, old.joining, old.enabled
        self._stepper.skipped = skipped
        if self._sharded is not None and self._sharded.twins is not None:
            self._sharded.twins.count_from(new.steps)

    @torch.no_grad()
    def _take_whole(self, whole: Whole) -> None:
        """Take on what all slices were. Local."""
        self.whole, self._averager.steps = whole, whole.steps
        for here, there in zip(self._averager.parameters, whole.parameters, strict=True):
            here.copy_(there)
        assert self._sharded is not None
        self.optimizer.load_state_dict(self._sharded.as_plain(whole.state))

    def _let_go(self) -> None:
        """Hold on to nothing that the lost ranks have shared. Local."""
        self._dropped.detach()
        self._parts.local.close()

    def _drop(self) -> None:
        """Another rank has dropped this optimizer. Local."""
        self._let_go()
        self.closed = True


def _again(options: Options, ranks: int, source: str | int) -> Options:
    """The options of an optimizer that is made again on the ranks that are left, so many."""
    given = options.allreduce
    if isinstance(given, AllReduce):
        if given.recipe is None:
            raise OptionError(
                f"{given!r} was not made by allreduce.create(), so it can't be made again without the lost rank"
            )
        given = given.recipe
    copies = options.copies if ranks > 1 else 1
    return options._replace(allreduce=given, topology=None, trace=None, source=source, copies=copies)


CHECK_EVERY = 1000  # steps


class MirroredOptimizer(Life, Optimizer):
    """Wraps a PyTorch optimizer: gradients are averaged over all ranks, and replicas stay identical.

        model = Net()
        optimizer = MirroredOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        for x, y in share_of_this_rank:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # when it returns, .grad is the average over the ranks
            optimizer.step()

    optimizer: any torch.optim.Optimizer on parameters of `model`.
    model: a torch.nn.Module on the CPU, or on one GPU, this rank's. Its parameters and buffers, and the optimizer's
        state, are overwritten with those of rank 0; buffers (running means, say) are not averaged later.
    allreduce: a backend's name, or a backend, which then belongs to the caller.
    topology: the ranks; all of MPI.COMM_WORLD when none is given, the backend's when that is given.
    update: "replicated": every rank updates everything. "sharded": every rank updates its own slice, which
        divides the update's time and the optimizer's memory by the ranks; for optimizers that treat every
        element apart from the others (trainers.pytorch.ELEMENTWISE). SGD, Adam and AdamW then take PyTorch's
        fused implementation, whose last bits may differ, unless they were made with fused= or foreach=, or a trial on
        a few elements, when this object is made, has given wrong numbers for this dtype and these options (PyTorch
        2.13's fused SGD leaves 16-bit parameters as they are). fused=True is then replaced in `param_groups`, with a
        warning.
    compress: "bfloat16" or "float16": gradients go to the other ranks with 16 bits and are added up in float32, which
        rounds them twice; parameters lose nothing, nor do sparse gradients. For networks between nodes.
    copies: 2, with update="sharded" and where ranks may be lost (mpirun --with-ft ulfm): after each step another rank,
        on another node where there is one, gets what this one has of its slice, parameters and state. After a loss
        the others have the whole state of the last finished step, unless a rank is lost together with the one that
        keeps its slice. Four slices more are held. Edits that neither `editing` nor `load_state_dict` (call it after
        the model's) has made are kept with the next step.
    overlap: True: buckets of gradients are reduced in a thread while backward goes on; False: all of them
        when it ends; "auto": True on several nodes, on one that has two cores a rank, and on GPUs.
    bucket_mb, first_bucket_mb: the least size of a bucket, and of the first one, in MiB, with overlap.
    check_every: after so many steps the ranks compare a hash of parameters, state and hyperparameters, and name rank
        and parameter when they differ: a gradient that was edited on one rank, a scheduler that saw a rank's own
        loss, nn.Embedding(max_norm=). 0 for never. Sharded parameters of one node are one memory: they can't differ.
    on_divergence, source: what is done then. "raise": a DivergenceError on all ranks. "copy": all get those of
        `source` again, a rank, or the "majority" (the lowest rank's of the most frequent), and go on.
    check_gradients: look at every rank's gradients before they are averaged. "raise": NaN and infinite ones make all
        ranks raise a NotFiniteError that names the rank that brought them, as do those that are too large to be sent
        (65504 is the largest with compress="float16"); "skip": no rank takes that step (one with
        a closure raises), and the model's buffers, the running statistics of batch norm say, become what they were
        before it was called for that step. Costs one reading of the gradients, a small message, and with "skip" a copy
        of the buffers.
    trace: a file for Perfetto that `close` writes: compute, each bucket, waits and updates of all ranks; or a Trace.

    All ranks must do the same in the same order: creating, backward, `step`, `synchronize` and `close` are
    collective, and so are `rows`, `load_state_dict`, `editing` and, when sharded, `state_dict`. A rank that leaves
    out a step makes all ranks raise a DisagreementError that tells where each of them is; one for which the others
    wait too long, a CollectiveTimeoutError (`Topology(timeout=seconds)`). Only the order in which one backward comes
    to several optimizers is free.

    Ranks with different numbers of rows tell them by `rows(n)` before backward, and the average is the mean over all
    rows; ranks with different numbers of batches go through them inside of `with optimizer.join():`.

    It is itself a torch.optim.Optimizer: schedulers, GradScaler and clipping take it. Parameters that no
    rank has used keep `.grad` None; where only some ranks used one, the others count as zeros.

    Gradients of an nn.Embedding(sparse=True), or EmbeddingBag, stay sparse where the optimizer takes such: SGD,
    SparseAdam and Adagrad without momentum and weight_decay (trainers.pytorch.TAKES_SPARSE); of others, and where the
    weights belong to another layer too, they are averaged as dense ones, which is said once. Only the rows that a batch
    has used go to the other ranks; `.grad` is a coalesced sparse tensor of all ranks' rows. Every rank updates such a
    parameter whole, with update="sharded" too: a step touches a few of its rows, which may all lie in one slice.

    With update="sharded", between backward and step() `.grad` is averaged in this rank's slice only, and holds
    leftovers elsewhere: call `synchronize()` before clipping or GradScaler, or a GradientError reminds of it; step()
    sets it to None. After `synchronize()` gradients may be changed in place or replaced (`p.grad = ...`), the same on
    all ranks. And the parameters of all ranks of a node are the same memory: edit them inside of `editing()`.

    Raises on all ranks, before anything is changed: OptionError, DisagreementError (models that differ),
    UnavailableError, UnsupportedDtypeError.
    """

    @known_only
    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        allreduce: str | AllReduce = "auto",
        *,
        topology: Topology | None = None,
        update: str = "replicated",
        compress: str | None = None,
        copies: int = 1,
        overlap: bool | str = "auto",
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        check_every: int = CHECK_EVERY,
        on_divergence: str = "raise",
        source: str | int = MAJORITY,
        check_gradients: str | None = None,
        trace: str | os.PathLike[str] | Trace | None = None,
    ) -> None:
        self.check_every = check_every
        sizes, checks = (first_bucket_mb, bucket_mb), (check_every, on_divergence, source, check_gradients)
        Life.__init__(
            self,
            optimizer,
            model,
            Options(allreduce, topology, update, overlap, sizes, *checks, trace, copies, compress),
        )
        Optimizer.__setstate__(self, {})  # the hooks that every optimizer has; the rest is the wrapped one's
        assembly.tell_threads(self.topology)
        malloc.keep_freed_memory()

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
        with self._surviving():
            return self._stepper.step(closure)

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
        with self._surviving():
            self._averager.average()
            if self._averager.state == SCATTERED:
                assert isinstance(self.backend, TwoPhase)
                gather(self._averager, self.backend.all_gather)

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
        with self._surviving():
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
        would update differently raise a DisagreementError. Raises an OptionError on all ranks when there is another
        MirroredOptimizer on them.
        """
        self._check_usable()
        with self._surviving():
            self._averager.together("enters join()", self._averager.family.only_one)
        self._averager.joining = True
        try:
            yield
            with self._surviving():
                leave(self._averager, self.optimizer, self._trained, self._sharded, self._stepper.stepped)
        finally:
            self._averager.joining = False

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, parameters may be edited in any way; afterwards all ranks have what rank 0 made of them. Collective.

        with optimizer.editing(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        """
        self._check_usable()
        with self._surviving(), editing(self._averager, self.model, self._sharded):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state_dict of the plain optimizer, equal on all ranks. Collective when sharded."""
        if self._sharded is None:
            return self.optimizer.state_dict()
        self._check_usable()
        with self._surviving():
            return self._averager.together("gathers the optimizer's state", self._sharded.state_dict)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Load a state_dict of the plain optimizer: rank 0's, which all ranks get. Collective.

        state_dict: may be None on other ranks than 0, so that only one needs to read the file.
        """
        self._check_usable()
        load = partial(load_of_root, self._averager.comm, self.optimizer, state_dict)
        with self._surviving():
            self._averager.together("loads the optimizer's state", load)
            self._averager.together("tries fused kernels", partial(self._kernels.look, self._averager.comm))
            if self._sharded is not None:
                self._sharded.load()
                self._averager.together("keeps slices twice", self._sharded.keep)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not offered, neither here nor at the plain optimizer: the gradients' memory is laid out once."""
        raise OptionError(GROUP_ADDED)

    def __repr__(self) -> str:
        return f"MirroredOptimizer({self.update} on {self.topology}, backend {self.backend.name}, {self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise CopyError(
            "a MirroredOptimizer can't be copied or pickled, as its communicators can't; keep its state_dict()"
        )


class Stepper:
    """The steps of one MirroredOptimizer; see there. All methods are collective.

    optimizer: the plain one. kernels: of this one. trained: its parameters by name. sharded: what updates slices; None
        where every rank updates everything.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        averager: Averager,
        kernels: Kernels,
        sharded: ShardedOptimizer | None,
        trained: dict[str, Parameter],
        options: Options,
    ) -> None:
        self._optimizer, self._averager, self._sharded, self._trained = optimizer, averager, sharded, trained
        self._kernels = kernels
        self._every = options.check_every
        self._answer = options.on_divergence, options.source
        self.skipped = 0  # steps that all ranks have left out

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Average, update, and count; returns what a closure's losses are on average."""
        averager, sharded = self._averager, self._sharded
        averager.in_closure = closure is not None
        try:
            loss = self._replicated(closure) if sharded is None else self._slices(sharded, closure)
        finally:
            averager.in_closure = False
        self.stepped()
        return loss

    def _replicated(self, closure: Callable[[], Any] | None) -> Any:
        averager = self._averager
        self._kernels.replace_broken()
        if closure is not None:
            return self._optimizer.step(partial(mean_loss, averager, closure))
        averager.average()
        return None if averager.leaves_out() else averager.clock.update(self._optimizer.step)

    def _slices(self, sharded: ShardedOptimizer, closure: Callable[[], Any] | None) -> Any:
        averager, loss = self._averager, None
        if closure is not None:
            with torch.enable_grad():
                loss = mean_loss(averager, closure)
        averager.average()
        if not averager.leaves_out():
            averager.clock.update(sharded.update)
        return loss

    def stepped(self) -> None:
        """What a step ends with."""
        averager = self._averager
        self.skipped += averager.leaves_out()
        if averager.check is not None and averager.check.forwards is not None:
            averager.check.forwards.stepped(averager.leaves_out())
        if averager.leaves_out() and self._sharded is not None and self._sharded.twins is not None:
            self._sharded.twins.left_out()
        behind = self._some_are_behind()
        averager.stepped(release=self._sharded is not None)
        if self._every and averager.steps % self._every == 0 and not behind:
            compare = partial(
                compare_replicas, averager.comm, self._optimizer, self._trained, self._sharded, *self._answer
            )
            averager.together("compares the replicas", compare)

    def _some_are_behind(self) -> bool:
        """Whether ranks have run out of batches in join(): those get the parameters when it ends, so they differ now.

        Local, after the averages of a step; the same on all ranks.
        """
        averager = self._averager
        counted = averager.rows if averager.joining and self._sharded is None else None
        return counted is not None and counted.ranks() < averager.comm.size


def mean_loss(averager: Averager, closure: Callable[[], Any]) -> Any:
    """Call a closure, average its gradients, and return the mean of its losses over the ranks. Collective.

    A tensor comes back as a new one of the same shape, a number as a float, and None as None.
    """
    loss = closure()
    averager.average()
    if loss is None or averager.ranks == 1:
        return loss
    value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
    mean = averager.together("averages the loss of a closure", partial(_mean, averager, value))
    return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean


def _mean(averager: Averager, value: float) -> float:
    """The mean of a number over all ranks, or over all rows, the same bits on each. Runs in the lane."""
    weight = 1.0 if averager.rows is None else averager.rows.weight
    return sum(all_values(averager.comm, value * weight, "average the loss of a closure")) / averager.ranks


@contextmanager
def editing(averager: Averager, model: Module, sharded: ShardedOptimizer | None) -> Iterator[None]:
    """Inside, every rank has parameters of its own; afterwards all have rank 0's. Collective.

    sharded: what keeps the parameters in the memory of the node, and takes them in again; None where none does.
    """
    if sharded is not None:
        sharded.placement.move_out()
    yield
    averager.together("edits parameters", partial(_take_in, averager.comm, model, sharded))


def _take_in(comm: MPI.Intracomm, model: Module, sharded: ShardedOptimizer | None) -> None:
    if comm.size > 1:
        broadcast_tensors(comm, model.parameters())
    if sharded is not None:
        sharded.placement.move_in()
        sharded.keep()


def leave(
    averager: Averager,
    optimizer: Optimizer,
    trained: dict[str, Parameter],
    sharded: ShardedOptimizer | None,
    stepped: Callable[[], None],
) -> None:
    """Take part in the steps of ranks that have batches left, until none has. Collective.

    optimizer, trained: the plain optimizer and its parameters; overwritten with those of a rank that was among the
        last, where each rank has its own.
    sharded: how each rank updates its slice, of which the others need the result; None where each updates everything.
    stepped: what a step ends with.
    """
    mine = averager.steps
    while averager.count_rows(0, active=False).ranks():
        averager.forget(release=True)
        averager.average()
        if sharded is not None and not averager.leaves_out():
            sharded.update()
        stepped()
    averager.rows = None
    follow = partial(_follow, averager, mine, optimizer, trained)
    averager.together("leaves join()", follow if sharded is None else lambda: None)


def _follow(averager: Averager, mine: int, optimizer: Optimizer, trained: dict[str, Parameter]) -> None:
    """Take over from the first of the ranks that have done the most steps, of which this one did `mine` itself.

    Runs in the lane.
    """
    comm = averager.comm
    steps = all_values(comm, mine, "learn who has done the most steps")
    if min(steps) < max(steps):
        root = steps.index(max(steps))
        broadcast_tensors(comm, trained.values(), root)
        broadcast_state(comm, optimizer, root)
