"""MirroredOptimizer: three lines that make a training loop data-parallel."""

import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from allreduce.arrays.compression import Given
from allreduce.backend import AllReduce
from allreduce.errors import CopyError, OptionError
from allreduce.process import malloc
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from trainers.arguments import is_number
from trainers.options.average import LocalSGD, Sharded
from trainers.options.buckets import DEFAULT_BUCKETS, Buckets
from trainers.pytorch.assembly import Assembly
from trainers.pytorch.options import GROUP_ADDED, Options
from trainers.pytorch.state import broadcast_tensors
from trainers.pytorch.transforms import Listed


class MirroredOptimizer(Optimizer):
    """Wraps a PyTorch optimizer: gradients are averaged over all ranks, and replicas stay identical.

        model = Net()
        optimizer = MirroredOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        for x, y in share_of_this_rank:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # when it returns, .grad is the average over the ranks
            optimizer.step()

    All ranks make the same calls in the same order: creating, backward, `step`, `synchronize` and `close` are
    collective, and so are `rows`, `load_state_dict`, `editing` and, when sharded, `state_dict`. A rank that leaves out
    a step, and then makes another call of this optimizer, gives a DisagreementError on all ranks. Ranks that wait too
    long raise a CollectiveTimeoutError (`Topology(timeout=seconds)`). Only the order in which one backward reaches
    several optimizers may differ between ranks.

    It is a torch.optim.Optimizer, so schedulers, GradScaler and clipping accept it. Parameters that no rank has used
    keep `.grad` None. If only some ranks have used a parameter, the gradients of the others count as zeros.

    With update="sharded", `.grad` is averaged only in this rank's slice between backward and step(): call
    `synchronize()` before clipping or GradScaler. The ranks of a node share the memory of the parameters: edit
    parameters inside of `editing()`.

    Raises on all ranks, before anything is changed: OptionError, DisagreementError (models that differ),
    UnavailableError, UnsupportedDtypeError.

    optimizer: any torch.optim.Optimizer on parameters of `model`.
    model: a torch.nn.Module on the CPU, or on this rank's GPU. Its parameters and buffers, and the optimizer's state,
        are overwritten with those of rank 0; buffers (running means, say) are not averaged later.
    """

    # The docstring of `Options` is appended below the class.

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        allreduce: str | AllReduce = "auto",
        *,
        topology: Topology | None = None,
        update: str | Sharded = "replicated",
        average: LocalSGD | None = None,
        compress: Given = None,
        buckets: Buckets = DEFAULT_BUCKETS,
        transforms: Sequence[Listed] = (),
        trace: str | os.PathLike[str] | Trace | None = None,
    ) -> None:
        options = Options(allreduce, topology, update, average, compress, buckets, transforms, trace)
        self.optimizer, self.model, self.update = optimizer, model, options.update_name
        self._parts = Assembly(optimizer, model, options)
        weakref.finalize(self, self._parts.dropped).atexit = False
        # creates the hooks of torch.optim.Optimizer; all other attributes are the wrapped optimizer's
        Optimizer.__setstate__(self, {})
        malloc.keep_freed_memory()

    # Attributes of the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's param_groups; changes take effect."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state by parameter, without the sharded parameters' (`state_dict` gathers it)."""
        return self.optimizer.state

    # A step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless backward has done so, and update the parameters. Collective.

        closure: as in torch.optim.Optimizer.step. Returns the mean of its losses over the ranks.
        """
        with self._parts.usable():
            return self._parts.owners.step(closure)

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. model.zero_grad() works as well, except with update="sharded" and set_to_none=False."""
        self._parts.reducer.forget(release=False)
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def synchronize(self) -> None:
        """Make `.grad` of every parameter the average over the ranks, unless it is already. Collective.

        Call it before clipping if a rank may not have called backward, and always with update="sharded". With LocalSGD
        it ends the round, and `.grad` stays this rank's.
        """
        with self._parts.usable():
            self._parts.owners.synchronize()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Average the gradients, and scale them so that their norm is at most `max_norm`. Collective.

        Returns the norm of all averages before that, the same on all ranks. Call it between backward and step(). With
        LocalSGD it scales this rank's own gradients. Raises OptionError for a `max_norm` that is not > 0.
        """
        if not (is_number(max_norm) or max_norm == float("inf")) or max_norm <= 0:
            raise OptionError(f"max_norm must be a number > 0, got {max_norm!r}")
        with self._parts.usable():
            return self._parts.owners.clip(max_norm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backward in the block adds up local gradients; the next one after it averages the sum.

        for x, y in parts[:-1]:
            with optimizer.no_sync():
                (loss(model(x), y) / len(parts)).backward()
        """
        reducer = self._parts.reducer
        before, reducer.enabled = reducer.enabled, False
        try:
            yield
        finally:
            self._parts.reducer.enabled = before

    def rows(self, number: float) -> None:
        """Set the number of rows of this rank's next step, before its backward. Collective.

        The average of the gradients is weighted by rows, so ranks train as one rank does on all rows. The number holds
        until step(), for all parts of an accumulation. Any weight >= 0 is allowed, such as the one that a loss has
        counted. An error in the numbers, and rates that differ between ranks, are raised by all ranks when they
        average. With LocalSGD it is the weight of this step in the round, and the call is local; make it on all ranks
        or on none.
        """
        with self._parts.usable():
            self._parts.owners.count_rows(number)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Context manager: ranks may have different numbers of batches, each one backward and one step. Collective.

        with optimizer.join():
            for x, y in share_of_this_rank:
                optimizer.rows(len(x))  # where batches differ in size
                ...

        A rank that reaches the end of the block takes part in the others' steps, with no rows, until all ranks have
        reached it. Then all ranks get the parameters and the state of one of the last ranks. `step` takes no closure.
        Raises OptionError on all ranks if their learning rates differ (with LocalSGD each rank has its own), or if
        there is a second MirroredOptimizer on these ranks.
        """
        with self._parts.usable():
            reducer = self._parts.reducer
            reducer.run_in_queue("enters join()", reducer.group.only_one)
        self._parts.reducer.joining = True
        try:
            yield
            with self._parts.reducer.group.surviving():
                self._parts.owners.join_others()
        finally:
            self._parts.reducer.joining = False

    # Parameters and state

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Context manager: edit parameters in any way; at its end all ranks get rank 0's parameters. Collective.

        with optimizer.editing(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        """
        with self._parts.usable():
            self._parts.owners.begin_change()
            yield
            self._parts.reducer.run_in_queue("edits parameters", self._take_edits)

    def _take_edits(self) -> None:
        """Copy rank 0's parameters to all ranks. Runs in the queue."""
        if self._parts.reducer.comm.size > 1:
            broadcast_tensors(self._parts.reducer.comm, self.model.parameters())
        self._parts.owners.synchronize_state()

    def state_dict(self) -> dict[str, Any]:
        """The state_dict of the plain optimizer, equal on all ranks. Collective when sharded.

        With LocalSGD it is collective, ends the round, and is this rank's own, with the outer momentum; the plain
        optimizer loads it too.
        """
        owners = self._parts.owners
        with nullcontext() if owners.kind == "replicated" else self._parts.usable():
            return owners.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Load a state_dict of the plain optimizer: rank 0's, which all ranks get. Collective.

        state_dict: may be None on other ranks than 0, so that only one needs to read the file. With LocalSGD a rank
            that passes its own `state_dict` loads that one; the outer momentum is rank 0's.
        """
        with self._parts.usable():
            self._parts.owners.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises OptionError: the memory of gradients is laid out once. The plain optimizer can't add any either."""
        raise OptionError(GROUP_ADDED)

    # Ranks, cost, closing

    @property
    def topology(self) -> Topology:
        """The ranks; after a failure, the remaining ones."""
        return self._parts.topology

    @property
    def backend(self) -> AllReduce:
        """The backend that reduces the gradients."""
        return self._parts.backend

    @property
    def steps(self) -> int:
        """The number of steps that this optimizer has done, the same on all ranks; this rank's own with LocalSGD."""
        return self._parts.owners.steps

    @property
    def steps_skipped(self) -> int:
        """The number of steps that all ranks have left out, with SkipNotFinite."""
        return self._parts.owners.skipped

    @property
    def measured(self) -> dict[str, float]:
        """The numbers that the transforms have measured in the last step that was taken, NaN before the first one:
        {"grad_norm": 2.5} with ClipNorm. Local."""
        return {meter.name: float(meter.last) for meter in self._parts.transforms.meters}

    @property
    def closed(self) -> bool:
        """Whether this optimizer is closed, so that it can't be used any more."""
        return self._parts.closed

    def close(self) -> None:
        """Free memory and communicators. Collective; closing twice does nothing.

        The model keeps its parameters; `.grad` becomes None, and a backward through the model raises ClosedError. The
        optimizer state of a sharded update is dropped: call `state_dict()` first if you need it.
        """
        self._parts.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may not call the collective close
            self.close()

    def __repr__(self) -> str:
        return f"MirroredOptimizer({self.update} on {self.topology}, backend {self.backend.name}, {self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise CopyError(
            "a MirroredOptimizer can't be copied or pickled, because its communicators can't be; keep its state_dict()"
        )


MirroredOptimizer.__doc__ = f"{inspect.getdoc(MirroredOptimizer)}\n{inspect.getdoc(Options)}"
