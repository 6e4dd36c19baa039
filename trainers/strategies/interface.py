"""The `Strategy` interface, and `EpochRun`, the part of a fit that a strategy uses."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport import ulfm
from allreduce.transport.control import combine, together
from trainers import stopwatch
from trainers.data import Batch, BatchSource
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Hold, Replica, Rows, form_error
from trainers.state.adopt import OUTER, RATES, Arrays, Piece
from trainers.state.owners import Owners
from trainers.stopwatch import Stopwatch
from trainers.strategies.rule import StepOptions, UpdateRule
from trainers.watching.meter import Meter

INNER = "inner."  # prefix, in a rank's local state, of the optimizer's state that differs between ranks (local SGD)


class EpochRun(Protocol):
    """The part of a fit that a strategy uses in `run_epoch`; trainers.fit.loop.Fit documents the methods.

    batches: the fit's batches.
    error: an error of this rank that the other ranks do not know yet; all ranks raise it when they next agree.
    stopped: all ranks know that the fit ends here.
    """

    batches: BatchSource
    error: Exception | None
    stopped: bool

    @property
    def first_step(self) -> int: ...

    def run_steps(self, number: int) -> None: ...

    def begin_stream(self, number: int, step: int) -> None: ...

    def shares(self, number: int) -> AbstractContextManager[Iterator[Batch]]: ...

    def end_steps(self, steps: int) -> None: ...

    def flags(self, *, steps: int = 1) -> tuple[float, ...]: ...

    def check_alike(self) -> None: ...

    def read_flags(self, steps: int = 1) -> None: ...

    def keep_error(self, action: Callable[[], Any]) -> Any: ...

    def begin_batch(self, step: int) -> None: ...

    def end_batch(self, step: int) -> None: ...

    def idle(self) -> None: ...

    def check_batch(self, batch: Batch) -> Batch: ...

    def discard_if_unusable(self, gradients: Any, replica: Replica) -> bool: ...


class Strategy:
    """Computes and applies training steps on the ranks of a group, and knows which rank holds which part of the state.

    replica: this rank's replica. name: the trainer's class name, for messages. parts: the number of parts into which
        every batch is divided. part: the part that this rank computes; None if it computes none.
    steps: the number of steps that the ranks have taken together. measured: 1-D array on the replica's device, with
        elements of at least 32 bits: after `compute` this rank's metrics of the step, after `step` those of all ranks,
        then the sums of FLAGS over the ranks.
    stop_training: whether a callback has asked to end the fit. cut_short: whether the last epoch ended before its last
        step.
    rule: computes gradients and updates the replica, with the options of the fit.
    recoverable: whether ranks survive the failure of another rank. Each rank must then be able to return its pieces of
        the state at any time.

    Class attributes:
    synchronous: whether all ranks take every step together, so that a checkpoint can be written between two steps.
    mirrors: "step" or "epoch": all ranks have equal parameters after each step, or after each epoch.
    divides_state: whether a rank may hold a part of the state that other ranks lack, until `close`.
    rebuildable: whether the strategy can be created again on the remaining ranks after a failure.
    """

    synchronous = True
    mirrors = "step"
    divides_state = True
    rebuildable = True
    # this rank's pieces of the state during a recovery (the list may be empty); None otherwise
    saved: list[Piece] | None = None
    micro_batch: int | None = None  # rows of the parts of a batch whose gradients are summed exactly, if they are
    group: RankGroup
    clock: Stopwatch  # adds up the seconds that this rank waits for other ranks

    def __init__(self, replica: Replica, name: str) -> None:
        self.replica, self.name = replica, name
        self.rule = UpdateRule(replica)
        self.part: int | None = 0
        self.parts = 1
        self.steps = 0
        self.measured: Any = None
        self.stop_training = self.cut_short = self.closed = self.recoverable = False
        self.trace: Trace | None = None

    # Construction

    def describe(self) -> str:
        """Return the arguments as text, which must be equal on all ranks. Local."""
        raise NotImplementedError

    def argument_error(self, ranks: Topology, goes_on: bool) -> Exception | None:
        """Return the error if the arguments are invalid on these ranks, or None. Local.

        goes_on: whether the training continues after failures. A single rank is then accepted where two are needed,
            because all others may have failed.
        """
        raise NotImplementedError

    def renumber(self, previous: tuple[int, ...]) -> None:
        """Translate arguments that are rank numbers, after ranks failed while the trainer was being made. Local.

        previous: previous[r] is the old number of rank r.
        """

    def connect(self, group: RankGroup) -> None:
        """Create everything that depends on the ranks, and make the replicas equal. Collective.

        After an error the caller calls `close`, or `abandon` if the error reports a failed rank.
        """
        self.closed = False
        self.group = group
        self.replica.use_parameters()  # a trainer trains them, also after `network.use_average()`
        self.part, self.parts = group.rank, group.size
        self.clock = stopwatch.make(self.replica.device)
        self.replica.hold = Hold(self)
        for text in self.replica.notices:
            notices.once(group.rank, text)

    def close(self) -> None:
        """Free what `connect` created. Afterwards the replica holds its complete state in memory of its own.
        Collective."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Drop everything without communication, because other ranks may have failed. Local."""
        raise NotImplementedError

    @property
    def owners(self) -> Owners:
        """The ranks that hold the parameters; between `connect` and `close`."""
        raise NotImplementedError

    @property
    def holds_replica(self) -> bool:
        """Whether this strategy's trainer is the last one that was made on the replica. Local."""
        return self.replica.hold.holder is self

    # A step

    def compute(self, batch: Batch | None) -> None:
        """Compute the gradients of `batch`, or zeros if `batch` is None. Local; may raise any exception."""
        raise NotImplementedError(f"the steps of a {self.name} are run by run_epoch")

    def step(self, flags: tuple[float, ...]) -> None:
        """Combine the gradients that `compute` left on each rank, and update the parameters. Collective.

        flags: this rank's values of FLAGS, in that order. On the CPU nothing is updated when a rank sets "failed".

        Leaves in `measured` the metrics, averaged over the global batch, then the sums of the flags over the ranks: the
        same bits on all ranks. `clock` runs while this rank waits for others.
        """
        raise NotImplementedError(f"the steps of a {self.name} are run by run_epoch")

    def count_step(self) -> None:
        """Count one step that all ranks have taken or left out. Local."""
        self.steps += 1

    @property
    def local_gradients(self) -> Any:
        """This rank's gradients of the current step, 1-D, before they are averaged; None if it computes none."""
        return None

    @property
    def local_rows(self) -> Sequence[Rows]:
        """This rank's sparse gradients of the current step, one for each of the replica's `tables`, before they are
        averaged."""
        return ()

    @property
    def sent_dtype(self) -> np.dtype:
        """The dtype in which gradients are sent to other ranks."""
        return dtypes.parse(self.replica.gradient_dtype)

    # An epoch

    def options_error(self, options: StepOptions) -> str:
        """Return why this strategy can't train with these options of a fit, as text; "" if it can. Local."""
        return ""

    def begin_step(self, total: int) -> None:
        """Set the learning rates of the step after `total` steps of the training. Local."""
        self.rule.begin_step(total)

    def loader_error(self, divided: bool) -> str:
        """Return why this rank can't train with a loader, as text; "" if it can. divided: each rank has its own rows.
        Local."""
        return ""

    def begin_fit(self) -> None:
        """Reset the state of the last fit; called once, before the first epoch of a fit. Local."""

    def run_epoch(self, run: EpochRun, number: int) -> None:
        """Run the steps of epoch `number` (0, 1, ...) on this rank. Collective. The fit raises errors kept in
        `run.error` later."""
        run.run_steps(number)

    def end_epoch(self) -> dict[str, Any]:
        """Return this strategy's logs of an epoch, after all ranks have finished its steps. Collective."""
        return {}

    def add_up(self, terms: np.ndarray, count: int) -> np.ndarray:
        """Return the sum of the rows of all ranks, float64. terms: (k, length), this rank's rows; count: of rows of all
        ranks, for exact sums. Collective."""
        return combine(self.group.comm, terms.sum(axis=0), "sum metrics")

    def make_meter(self, batches: BatchSource) -> Any:
        """Create the object that accumulates the metrics of an epoch: a Meter, or an object like it. Local."""
        return Meter(self.replica.metrics, batches.sizes, self.measured.dtype, self.replica.device)

    def selections(self) -> dict[str, str]:
        """Return the backend and update that this job uses, {"allreduce": "ring", ...}, for checkpoints. Collective."""
        return {}

    def record(self, trace: Trace | None) -> None:
        """Record this rank's spans in `trace` from now on; None ends the recording. Local."""
        self.trace = self.clock.trace = trace

    def span(self, kind: str) -> AbstractContextManager[None]:
        """Context manager: record the block as a span of this kind ("data", "compute", "update", ...) if a trace is
        set. Local."""
        return nullcontext() if self.trace is None else self.trace.span(kind)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager: all replicas have the moving average of the parameters in their place. Collective."""
        try:
            together(self.group.comm, lambda: self.replica.use_average(self.owners.own_part))
            self.owners.share_parameters()
            yield
        except BaseException as error:
            self.replica.use_parameters()
            if self.group.all_raise(error):
                self.owners.share_parameters()
            raise
        self.replica.use_parameters()
        self.owners.share_parameters()

    def end_round(self) -> None:
        """Make the parameters of all ranks equal, if ranks have taken steps on their own since they were. Called before
        anything looks at the model. Collective."""

    # State distributed over the ranks

    def shared_state(self) -> Arrays:
        """Return copies of the state of the strategy itself, equal on all ranks, for checkpoints; `load_state` takes it
        with the replica's. Local."""
        return {}

    def local_state(self) -> Arrays:
        """Return the state that differs between ranks, for checkpoints: the replica's, and the strategy's. Local."""
        return self.replica.local_state()

    def load_local_state(self, state: Arrays) -> None:
        """Load a result of `local_state`, of any strategy. Raises ModelFileError if it is of another model. Local."""
        self.replica.load_local_state({name: array for name, array in state.items() if not name.startswith(INNER)})

    def reset(self) -> None:
        """Reset the state of the strategy itself, because another model was loaded. Local, called on all ranks."""
        self.load_own_state({})

    def complete(self) -> None:
        """Load the complete state into rank 0's replica. Collective."""
        state = self.owners.gather_state(together(self.group.comm, self.replica.state))
        self.group.on_one(lambda: self.replica.load_state(state))

    def snapshot(self, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a copy of the complete state on rank 0, and {} on other ranks. Collective. memory: see
        Replica.snapshot."""
        self.complete()
        return together(self.group.comm, lambda: {} if self.group.rank else self.replica.snapshot(memory))

    def own_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the state that differs between ranks and is not the replica's: error feedback. Local."""
        return {}

    def load_own_state(self, state: dict[str, np.ndarray]) -> None:
        """Load a result of `own_state`; {} resets it. Local. Raises OptionError if it is of another model."""

    def load_state(self, step: int, state: Arrays) -> None:
        """Load the complete state after `step` steps into the replica. Local; all ranks load the same state. Removes
        RATES and OUTER from `state`."""
        state.pop(OUTER, None)
        rates = state.pop(RATES, None)
        self.replica.load_state(state)
        if rates is not None and rates.tolist() != self.replica.learning_rates:
            self.replica.learning_rates = rates.tolist()

    def edit(self, change: Callable[[], object], before: list[Piece] | None = None) -> None:
        """Call `change()`, which edits the parameters in place, on every rank, or on one rank per node if its ranks
        share them. Collective.

        before: a list; this rank's pieces of the state before the change are appended to it.
        """
        raise ArgumentError(f"a {self.name} has no edit(); change the model before you make the trainer, or use load()")

    # Recovery after failures

    @property
    def outlives_ranks(self) -> bool:
        """Whether the other ranks survive a failed one, and this strategy can be created again on them."""
        return self.rebuildable and ulfm.in_force()

    def rescue(self) -> None:
        """Keep this rank's pieces of the state, and drop everything made on the old ranks. Local.

        Called again when another rank fails before `commit`.
        """
        raise NotImplementedError

    def rebuild(self) -> None:
        """Create again, on the group's new ranks, everything that depends on the ranks. Collective."""
        raise NotImplementedError

    def restore(self) -> bool:
        """Load the newest state that the ranks hold completely, and set `steps`. Returns False if there is none.
        Collective."""
        raise NotImplementedError

    def divide(self) -> None:
        """Divide the state among the ranks again, after all ranks have loaded the same one. Collective."""

    def commit(self) -> None:
        """Drop the pieces that `rescue` kept: the recovery is over. Local."""


def replica_error(replica: Replica, strategy: Strategy) -> ArgumentError | None:
    """Return the error if `strategy` can't be created on this replica now, or None. Local."""
    if not isinstance(replica, Replica):
        found = replica if isinstance(replica, type) else type(replica)
        return ArgumentError(
            "a trainer takes a replica, such as NumpyNetwork(sizes), TorchReplica(module, loss, optimizer), "
            "JaxReplica(apply, loss, params, optimizer) or one of your own (trainers.replica.Replica), not "
            f"{found.__module__}.{found.__qualname__}"
        )
    if text := form_error(replica):
        return ArgumentError(text)
    holder = replica.hold.holder
    if holder is None or holder.closed or holder is strategy or not holder.divides_state:
        return None
    kind = type(replica).__name__
    return ArgumentError(
        f"this {kind} belongs to a {holder.name} already, which holds its parameters, and other ranks may hold parts "
        f"of its state: close() that trainer first, on all ranks (`with {holder.name}(...) as trainer:` does), or make "
        f"another {kind}"
    )
