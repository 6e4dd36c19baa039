"""MirroredOptimizer: three lines that make a training loop data-parallel."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from allreduce.base import AllReduce
from allreduce.errors import CopyError, OptionError
from allreduce.keywords import known_only
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.two_phase import TwoPhase
from trainers import malloc
from trainers.divergence import MAJORITY
from trainers.pytorch import choices
from trainers.pytorch.averaging import SCATTERED
from trainers.pytorch.checks import GROUP_ADDED, Options
from trainers.pytorch.editing import editing
from trainers.pytorch.gathering import gather
from trainers.pytorch.joining import leave
from trainers.pytorch.life import Life
from trainers.pytorch.loading import load_of_root

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
        choices.tell_threads(self.topology)
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
