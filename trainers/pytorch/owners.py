"""The owners of a MirroredOptimizer's parameters: the ranks that update them, and hold the optimizer's state.

Here all ranks are owners, each of its whole replica. In trainers.pytorch.sharded each rank updates its own part; in
trainers.pytorch.local_sgd it takes steps of its own, and the ranks average their changes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from allreduce import notices
from allreduce.arrays import gpu
from allreduce.elastic.retry import Commit
from allreduce.errors import OptionError, UnavailableError
from allreduce.transport.control import all_values, raise_together
from trainers.arrays import squares
from trainers.checks import check_equal
from trainers.pytorch.reducer import Reducer
from trainers.pytorch.state import (
    broadcast_state,
    broadcast_tensors,
    comparable,
    load_root_state,
    receive,
)
from trainers.replica import Slices
from trainers.replicas.pytorch import fused
from trainers.replicas.pytorch.replica import Buffers
from trainers.replicas.pytorch.tensors import as_array, is_dense
from trainers.state.owners import Owners
from trainers.strategies.transforms.clip import Clipping
from trainers.strategies.transforms.transform import AppliedTransforms

Closure = Callable[[], Any]
ResultT = TypeVar("ResultT")


class TorchOwners(Owners):
    """All ranks update all parameters by averaged gradients. It has the methods of MirroredOptimizer.

    plain: the user's optimizer, of `model`. reducer: averages the gradients of its parameters.
    buffers: restores the model's buffers when a step is left out. transforms: change the averages in a step.
    before: the owners before a failure.
    The constructor is collective.

    skipped: the number of steps that were left out. lost: whether parts of the state could not be recovered.
    recovered: during a recovery, the complete state of all ranks.
    """

    def __init__(
        self,
        plain: Optimizer,
        model: Module,
        reducer: Reducer,
        buffers: Buffers,
        transforms: AppliedTransforms,
        before: "TorchOwners | None",
    ) -> None:
        self.plain, self.model, self.reducer, self.buffers, self.transforms = plain, model, reducer, buffers, transforms
        self.trained, self.options = reducer.trained, reducer.options
        reducer.rates = partial(rates_of, plain)
        self.skipped: int = 0 if before is None else before.skipped
        self.lost: bool = before is not None and before.lost
        self.recovered: Any = None if before is None else before.recovered

    @property
    def steps(self) -> int:
        """The number of steps that the optimizer has done."""
        return self.reducer.steps

    def replace_kernels(self) -> None:
        """Set `fused` to None in the plain optimizer's groups whose kernel is wrong. Local."""
        if text := fused.replace_wrong(self.plain):
            notices.once(self.reducer.comm.rank, text)

    # A step

    def step(self, closure: Closure | None) -> Any:
        if closure is not None and self.reducer.joining:
            raise OptionError("step(closure) is not for join(): a rank that has no batches left has no closure to call")
        self.reducer.in_closure = closure is not None
        self.replace_kernels()
        try:
            loss = self._step_with(None if closure is None else partial(self._mean_loss, closure))
        finally:
            self.reducer.in_closure = False
        self._end_step()
        return loss

    def _step_with(self, closure: Closure | None) -> Any:
        """Average and update; return the loss of the closure, which averages its gradients itself. Collective."""
        if closure is not None:
            return self.plain.step(partial(self._transformed, closure))
        self.apply()
        return None

    def reduce(self) -> bool:
        """As Owners.reduce, unless backward has averaged. Every step comes here before it updates. Collective."""
        self.reducer.average()
        return not self.reducer.leaves_out()

    def update(self) -> None:
        with self.reducer.clock.span("update"):
            self.plain.step()

    def transform(self) -> None:
        """As Owners.transform; all ranks raise the error of one. Collective."""
        if self.transforms.applied:
            error = self._changed_by(self.transforms)
            self._agreed("transforms gradients", partial(raise_together, self.reducer.comm, error))

    def _agreed(self, call: str, check: Callable[[], ResultT]) -> ResultT:
        """Return the result of a check of all ranks, after the transforms. Collective. If it raises, the gradients that
        some ranks have transformed are dropped."""
        try:
            with self.reducer.clock.span("wait"):
                return self.reducer.run_in_queue(call, check)
        except Exception:
            if self.transforms.applied:
                self.reducer.forget(release=True)
            raise

    def _transformed(self, closure: Closure) -> Any:
        """Call a closure that averages its gradients, and let the transforms change these. Collective."""
        loss = closure()
        self.transform()
        return loss

    @torch.no_grad()
    def _changed_by(self, transforms: AppliedTransforms) -> Exception | None:
        """Let these transforms change the averages that this rank is to read; return the error of one. Collective if
        one needs the squares of a sharded update."""
        if not transforms.applied:
            return None
        transforms.take_kept()  # of a step that another error has ended
        tensors, device = [each for each in [*self._dense(), *self._sparse()] if each.numel()], self.reducer.device
        if device.kind == "cuda" and not has_cupy():
            transforms.transform([each.data for each in tensors], self._part(), self.squares)
        else:
            device.cupy_after_torch()
            arrays = list(map(device.array, tensors))
            transforms.transform(arrays, self._part(), device.ordered_with_cupy()(self.squares))
            device.torch_after_cupy()
        return transforms.take_kept()

    def _mean_loss(self, closure: Closure) -> Any:
        """Call a closure, average its gradients, and return the mean of its losses over the ranks. Collective.

        The mean, because the plain optimizer may branch on the loss and must branch alike on all ranks. Returns a new
        tensor of the same shape for a tensor, a float for a number, None for None.
        """
        reducer, loss = self.reducer, closure()
        self.reduce()
        if loss is None or reducer.comm.size == 1:
            return loss
        value = loss.item() if isinstance(loss, Tensor) else float(loss)
        weight = 1.0 if reducer.rows is None else reducer.rows.weight
        call = "averages the loss of a closure"
        losses = reducer.run_in_queue(call, partial(all_values, reducer.comm, value * weight, call))
        mean = sum(losses) / reducer.comm.size
        return torch.full_like(loss.detach(), mean) if isinstance(loss, Tensor) else mean

    def _end_step(self) -> None:
        """End a step: count it, restore buffers when it was left out, and compare replicas when due. Collective."""
        reducer, every, left_out = self.reducer, self.options.divergence.every, self.reducer.leaves_out()
        self.skipped += left_out
        if left_out:
            self.buffers.restore()
            self.set_steps(reducer.steps + 1)
        else:
            self.buffers.forget()
        # Inside join(), ranks without batches left have old parameters until the end, so they are not compared.
        rows = reducer.rows if reducer.joining and self.kind == "replicated" else None
        some_are_behind = rows is not None and rows.ranks() < reducer.comm.size
        reducer.end_step(release=self.kind != "replicated")
        if every and reducer.steps % every == 0 and not some_are_behind:
            reducer.run_in_queue("compares the replicas", self._compare)

    def set_steps(self, steps: int) -> None:
        """Take note that `steps` steps are done, and nothing was updated in the last one. Local."""

    # Gradients

    def synchronize(self) -> None:
        self.reduce()

    def clip(self, max_norm: float) -> float:
        self.reduce()
        clipping = Clipping(max_norm)
        if (error := self._changed_by(AppliedTransforms([clipping]))) is not None:
            raise error
        return float(clipping.meter.last)

    def squares(self) -> float:
        return self._dense_squares() + sum(map(square, self._sparse()))

    def _dense_squares(self) -> float:
        """Return the sum of the squares of the averages of all dense gradients. Collective."""
        return sum(map(square, self._dense()))

    def _dense(self) -> list[Tensor]:
        """Return the averages of the dense gradients that this rank is to read, 1-D, in their memory. Local."""
        found = []
        for each in self.trained.values():
            if each.grad is not None and not each.grad.is_sparse:
                if not is_dense(each.grad):
                    each.grad = each.grad.contiguous()
                found.append(flat(each.grad))
        return found

    def _sparse(self) -> list[Tensor]:
        """Return the rows of the sparse averages, 1-D, in their memory. Local."""
        found = []
        for each in self.trained.values():
            if each.grad is not None and each.grad.is_sparse:
                each.grad = each.grad.coalesce()
                found.append(flat(each.grad.values()))
        return found

    def _part(self) -> Slices | None:
        """Return a slice for each tensor of `_dense`, of all elements in the order of the buckets; None if it returns
        all. Local."""
        return None

    def count_rows(self, number: float) -> None:
        self.reducer.count_rows(number)

    def join_others(self) -> None:
        """Take part in the steps of ranks that have batches left, until no rank has. Collective."""
        reducer, mine = self.reducer, self.reducer.steps
        while reducer.count_rows(0, active=False).ranks():
            reducer.forget(release=True)
            self._follow()
            self._end_step()
        reducer.rows = None
        reducer.run_in_queue("leaves join()", partial(self._catch_up, mine))

    def _follow(self) -> None:
        """Take part in a step without batches. Collective."""
        if self.reduce():
            self.transform()

    def _catch_up(self, mine: int) -> None:
        """Load the replica of a rank that has done the most steps; this rank did `mine`. Runs in the queue."""
        steps = all_values(self.reducer.comm, mine, "learn which rank has done the most steps")
        if min(steps) < max(steps):
            self._copy_from(steps.index(max(steps)))

    # Replicas

    def _compare(self) -> None:
        """Compare the replicas. Runs in the queue."""
        check_equal(self.reducer.comm, partial(comparable, self.plain, *self._replicated()))

    def _replicated(self) -> tuple[Mapping[str, Any], Mapping[str, Parameter]]:
        """Return the tensors, and the parameters whose state is on every rank, which must be equal on all. Local."""
        return self.trained, self.trained

    def _copy_from(self, root: int) -> None:
        """Broadcast the parameters, hyperparameters and state of rank `root`. Collective, in the queue."""
        broadcast_tensors(self.reducer.comm, self.trained.values(), root)
        broadcast_state(self.reducer.comm, self.plain, root)

    # State

    def state_dict(self) -> dict[str, Any]:
        """See MirroredOptimizer.state_dict. Collective if `kind` is not "replicated"."""
        return self.gather_state(self.plain.state_dict())

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        load = partial(load_root_state, self.reducer.comm, self.plain, state)
        self.reducer.run_in_queue("loads the optimizer's state", load)

    # Recovery, end

    def newest(self, comm: MPI.Intracomm) -> Commit:
        """Receive the newest state of the ranks of `comm`; returns a function that loads it, locally. Collective."""
        everyone = all_values(comm, self.steps, "continue without a failed rank")
        steps, own = max(everyone), [*self.model.parameters(), *self.model.buffers()]
        load = receive(comm, own, self.plain, everyone.index(steps))

        def commit() -> None:
            load()
            self.reducer.steps = steps

        return commit

    def end_round(self) -> None:
        """End a round of local SGD. Collective."""


def rates_of(optimizer: Optimizer) -> str:
    """Return the learning rates of all groups as text; 0 for one that has none, or None. Local."""
    return ", ".join(f"{float(group.get('lr') or 0.0):.9g}" for group in optimizer.param_groups)


def square(tensor: Tensor) -> float:
    """Return the sum of the squares of a 1-D tensor; on the host the same bits on all processors."""
    if tensor.is_cuda:
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
    return float(squares.sum_of_squares(as_array(tensor)))


def has_cupy() -> bool:
    try:
        return gpu.cupy() is not None
    except UnavailableError:
        return False


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of its memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
