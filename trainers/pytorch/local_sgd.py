"""MirroredOptimizer(average=LocalSGD(H)): inner steps of the plain optimizer, and rounds of averages."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter

from allreduce import notices
from allreduce.arrays.parts import Part
from allreduce.elastic.retry import Commit
from allreduce.errors import OptionError
from allreduce.transport.control import all_values, root_value, together
from trainers.errors import NotFiniteError
from trainers.local_sgd.rounds import Rounds
from trainers.pytorch.buckets import GradientError, allocate_flat
from trainers.pytorch.options import AGAIN
from trainers.pytorch.owners import Closure, TorchOwners, flat
from trainers.pytorch.rows import rows_error
from trainers.pytorch.state import broadcast_tensors, load_root_state
from trainers.replicas.pytorch.tensors import Placed

KEY = "local_sgd"  # the entry of a state_dict with the outer optimizer's state
REPLACED = (
    "the memory of {} was replaced (`p.data = ...`, module.to(...)) since MirroredOptimizer was made, so its changes "
    f"can't be averaged; {AGAIN}"
)
NOT_FINITE = (
    "rank {} has NaN or infinite gradients in its step {}: look at its rows of the batch, scale the features, or lower "
    "the learning rate"
)


class _BadError(Exception):
    """The step of this rank is left out, because of its gradients."""


class LocalSteps(TorchOwners):
    """The inner steps of this rank, and the rounds that it has with the others. The constructor is collective.

    given: the arguments of TorchOwners. reducer: runs the averages in its queue; it has no gradients.

    taken: the inner steps that this rank has taken. rows: of the next step; None: weight 1.
    """

    kind = "local"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        options, trained, backend, before = self.options, self.trained, self.reducer.backend, given[-1]
        self.taken = 0
        self.rows: float | None = None
        self._compared = 0.0  # mean inner steps of the ranks at the last comparison
        local = options.local
        assert local is not None
        length = sum(each.numel() for each in trained.values())
        wide = any(each.dtype == torch.float64 for each in trained.values())
        delta = allocate_flat(backend, length, "float64" if wide else "float32", self.reducer.device)
        parts, start = [], 0
        for name, each in trained.items():
            parts.append(Part(name, start, tuple(each.shape)))
            start += each.numel()
        backend.describe(delta.array, parts)
        self._spans = {part.name: slice(part.start, part.stop) for part in parts}
        memory = list(map(flat, trained.values()))
        self._placed = Placed(list(trained.values()), memory)
        self.rounds = Rounds(local, self.reducer.comm, memory, backend, delta, self._run)
        if isinstance(before, LocalSteps):
            self.rounds.load(before.rounds.momentum, before.rounds.done)
            self.taken = before.taken

    @property
    def steps(self) -> int:
        return self.taken

    def _run(self, work: Callable[[], object], name: str) -> None:
        """Run an average in the reducer's queue. Collective."""
        with self.reducer.clock.span("reduce"):
            self.reducer.submit(work, name).wait()

    # A step

    def step(self, closure: Closure | None) -> Any:
        """Take an inner step; run the round that is due. Returns the loss of this rank's closure. Collective at the end
        of a round.

        An error of the plain optimizer or the closure is raised on this rank alone; its step counts nothing, and a
        program that catches the error goes on in step with the other ranks.
        """
        self.replace_kernels()
        loss, failed = self._take(closure)
        taken = failed is None
        if taken:
            self.buffers.forget()
        else:
            self.buffers.restore()
        self.taken += taken
        weight, self.rows = 1.0 if self.rows is None else self.rows, None
        if self.rounds.left <= 1:
            self._check_memory()
        self.rounds.count_step(weight if taken else 0.0)
        if self.rounds.due:
            self.rounds.finish()
            self._compare_if_due()
        if failed is not None and not isinstance(failed, _BadError):
            raise failed  # only now: the other ranks count this rank's step too, and would wait for it
        return loss

    def _take(self, closure: Closure | None) -> tuple[Any, Exception | None]:
        """Return the loss of a step of the plain optimizer, and its error. Local."""
        try:
            if closure is None:
                self._prepare()
            checked = None if closure is None else partial(self._checked, closure)
            with self.reducer.clock.span("update"):
                return self.plain.step(checked), None
        except Exception as error:
            return None, error

    def _prepare(self) -> None:
        """Transform this rank's gradients. Raises _BadError where the step is left out, after it has kept an error for
        the end of the round. Local."""
        gradients = [*self._dense(), *self._sparse()]
        bad = self.options.on_bad is not None and not all(bool(torch.isfinite(each).all()) for each in gradients)
        text = NOT_FINITE.format(self.reducer.comm.rank, self.steps + 1)
        error = NotFiniteError(text) if bad else self._changed_by(self.transforms)
        if error is None:
            return
        if bad and self.options.on_bad == "skip":
            self.skipped += 1
            notices.log.warning("allreduce: %s; this rank leaves the step out", text)
        else:
            self.rounds.error = self.rounds.error or error
        raise _BadError

    def _checked(self, closure: Closure) -> Any:
        loss = closure()
        self._prepare()
        return loss

    def reduce(self) -> bool:
        """Do nothing: gradients are this rank's own."""
        return True

    def _check_memory(self) -> None:
        """Keep an error for the end of the round if the memory of a parameter was replaced. Local."""
        if left := self._placed.left():
            self.rounds.error = self.rounds.error or GradientError(REPLACED.format(list(self.trained)[left[0]]))

    def count_rows(self, number: float) -> None:
        """Set the weight of the next step; an error is raised by all ranks at the end of the round. Local."""
        self.rows, error = number, rows_error(number)
        if error is not None:
            self.rows, self.rounds.error = 0.0, self.rounds.error or error

    # Rounds

    def synchronize(self) -> None:
        self.end_round()

    def begin_change(self) -> None:
        """End the round: all ranks then have the same parameters. Collective."""
        self.end_round()

    def synchronize_state(self) -> None:
        self.rounds.restart()

    def end_round(self) -> None:
        """Average the parameters now. Collective."""
        self._check_memory()
        self.rounds.end()

    def join_others(self) -> None:
        """Take part in the rounds of ranks that have batches left, with no steps, until no rank has. Collective."""
        self.rounds.finish(active=False)
        self._compare_if_due()  # as the ranks do that have batches left
        while self.rounds.active:
            self.rounds.finish(active=False)
            self._compare_if_due()
        self.end_round()

    def _compare_if_due(self) -> None:
        """Compare `start` on all ranks if `every` steps were taken since the last time. Collective then."""
        every = self.options.divergence.every
        if every and self.rounds.steps - self._compared >= every:
            self._compared = self.rounds.steps
            self.reducer.run_in_queue("compares the replicas", self._compare)

    def _replicated(self) -> tuple[Mapping[str, Any], Mapping[str, Parameter]]:
        """Return the parameters after the last outer step. Local."""
        return {name: self.rounds.start[span] for name, span in self._spans.items()}, {}

    def _shared(self) -> list[Tensor]:
        """Return the tensors that are equal on all ranks after a round. Local."""
        start, momentum = self.rounds.start, self.rounds.momentum
        return [start] if momentum is None else [start, momentum]

    # State

    def state_dict(self) -> dict[str, Any]:
        """End the round; return this rank's state_dict of the plain optimizer, with the outer momentum. Collective."""
        self.end_round()
        momentum = self.rounds.momentum
        outer = {} if momentum is None else {"momentum": momentum.clone()}
        return {**self.plain.state_dict(), KEY: outer}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a result of `state_dict` or the plain optimizer's: this rank's, or rank 0's if it is None; the outer
        momentum is always rank 0's. Collective."""
        self.rounds.end()
        self.reducer.run_in_queue("loads the optimizer's state", partial(self._load_own, state))
        self.rounds.restart()

    def _load_own(self, state: dict[str, Any] | None) -> None:
        comm, momentum = self.reducer.comm, self.rounds.momentum
        load_root_state(comm, self.plain, state)
        together(comm, lambda: None if state is None else self.plain.load_state_dict(state))
        given = together(comm, lambda: self._given_momentum(state) if comm.rank == 0 else None)
        if not root_value(comm, given is not None, "learn whether there is an outer momentum"):
            self.rounds.load(None, self.rounds.done)
        elif momentum is not None:
            if given is not None:
                momentum.copy_(given)
            broadcast_tensors(comm, [momentum])

    def _given_momentum(self, state: dict[str, Any] | None) -> Tensor | None:
        """Return the outer momentum in a state_dict. Raises OptionError if it is of another model. Local."""
        found, own = (state or {}).get(KEY, {}).get("momentum"), self.rounds.momentum
        if found is not None and own is not None and found.shape != own.shape:
            sizes = f"{tuple(found.shape)}, and this one's {tuple(own.shape)}"
            raise OptionError(f"the outer momentum in this state_dict is of another model: its shape is {sizes}")
        return found

    # Recovery

    def newest(self, comm: MPI.Intracomm) -> Commit:
        """Receive `start` and the momentum of a rank that has done the most rounds; returns a function that goes back
        to them, locally. Collective."""
        done = all_values(comm, self.rounds.done, "continue without a failed rank")
        received = [each.clone() for each in self._shared()]
        broadcast_tensors(comm, received, done.index(max(done)))

        def commit() -> None:
            for here, there in zip(self._shared(), received, strict=True):
                here.copy_(there)
            self.rounds.done = max(done)
            self.rounds.rewind()

        return commit
