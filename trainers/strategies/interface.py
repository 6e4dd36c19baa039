"""The `Strategy` interface, and `EpochRun`, the part of a fit that a strategy uses."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from allreduce import notices
from allreduce.backend import AllReduce
from allreduce.topology import Topology
from allreduce.transport import ulfm
from trainers import stopwatch
from trainers.data import Batch, BatchSource
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.options.average import Average, Exact
from trainers.replica import Hold, Replica
from trainers.state.adopt import OUTER, RATES, Arrays, Piece
from trainers.state.owners import Owners
from trainers.stopwatch import Stopwatch
from trainers.strategies.rule import UpdateRule
from trainers.watching.meter import Meter


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

    def check_batch(self, batch: Batch) -> Batch: ...

    def discard_if_unusable(self, gradients: Any, replica: Replica) -> bool: ...


class Strategy:
    """Computes and applies training steps on the ranks of a group, and knows which rank holds which part of the state.

    replica: this rank's replica. name: the trainer's class name. parts: into which every batch is divided. part: that
        this rank computes, or None. steps: the number of steps that the ranks have taken together. measured: 1-D array
        on the replica's device, of 32 bits or more: after a step the metrics of all ranks, then the sums of FLAGS.
    stop_training: a callback has asked to end the fit. cut_short: the last epoch ended before its last step. rule:
        computes gradients and updates. recoverable: ranks survive the failure of another one, so each must be able to
        return its pieces of the state at any time.

    Class attributes: synchronous: all ranks take every step together. rates_follow_batches: a rank has the learning
        rates of a step when it begins a batch of it. mirrors: "step" or "epoch", after which all ranks have equal
        parameters. divides_state: a rank may lack a part of the state until `close`. rebuildable: it can be made again
        on the ranks that remain after a failure.
    """

    synchronous = True
    rates_follow_batches = True
    mirrors = "step"
    divides_state = True
    rebuildable = True
    core: Any = None  # the Step (strategies.step) of a strategy whose ranks take every step together, while connected
    # this rank's pieces of the state during a recovery (the list may be empty); None otherwise
    saved: list[Piece] | None = None
    carried: Mapping[str, np.ndarray] = {}  # during a recovery: the backend's state on the old ranks
    average: Average | None = None  # the argument of MirroredTrainer
    allreduce: AllReduce = None  # type: ignore[assignment]  # sums the gradients of all ranks; None if none does
    group: RankGroup
    clock: Stopwatch  # adds up the seconds that this rank waits for other ranks; has the trace of a fit

    def __init__(self, replica: Replica, name: str) -> None:
        self.replica, self.name = replica, name
        self.rule = UpdateRule(replica)
        self.part: int | None = 0
        self.parts = 1
        self.steps = 0
        self.measured: Any = None
        self.stop_training = self.cut_short = self.closed = self.recoverable = False

    # Construction

    def describe(self) -> str:
        """Return the arguments as text, which must be equal on all ranks. Local."""
        raise NotImplementedError

    def argument_error(self, ranks: Topology) -> Exception | None:
        """Return the error if the arguments are invalid on these ranks, or None. Local."""
        raise NotImplementedError

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
    def micro_batch(self) -> int | None:
        """The rows of the parts of a batch whose gradients are summed exactly, if they are."""
        return self.average.micro_batch if isinstance(self.average, Exact) else None

    # A step

    def count_step(self) -> None:
        """Count one step that all ranks have taken or left out. Local."""
        self.steps += 1

    # An epoch

    def rows_error(self, rows: str) -> str:
        """Return why this strategy can't train with a loader of these rows, as text; "" if it can. Local."""
        return ""

    def run_epoch(self, run: EpochRun, number: int) -> None:
        """Run the steps of epoch `number` (0, 1, ...) on this rank. Collective. The fit raises errors kept in
        `run.error` later."""
        run.run_steps(number)

    def end_epoch(self) -> dict[str, Any]:
        """Return this strategy's logs of an epoch, after all ranks have finished its steps. Collective."""
        return {}

    def make_meter(self, batches: BatchSource) -> Any:
        """Create the object that accumulates the metrics of an epoch: a Meter, or an object like it. Called at the
        beginning of a fit. Local."""
        return Meter(self.replica.metrics, batches.sizes, self.measured.dtype, self.replica.device)

    # State distributed over the ranks

    def load_state(self, step: int, state: Arrays) -> None:
        """Load the complete state after `step` steps into the replica. Local; all ranks load the same state. Removes
        RATES and OUTER from `state`."""
        state.pop(OUTER, None)
        rates = state.pop(RATES, None)
        self.replica.load_state(state)
        if rates is not None and rates.tolist() != self.replica.learning_rates:
            self.replica.learning_rates = rates.tolist()

    # Recovery after failures

    def rescue(self) -> None:
        """Keep this rank's pieces of the state, and drop everything made on the old ranks. Local.

        Called again when another rank fails during the recovery, after which `saved` and `carried` are dropped.
        """
        raise NotImplementedError

    def follow(self, previous: tuple[int, ...]) -> None:
        """Translate the numbers of ranks that this strategy keeps, once for each topology after a failure. Local.

        previous: previous[r] is the old number of rank r; JOINED for a rank that has joined.
        """

    def rebuild(self, go_back: Callable[[], bool]) -> bool:
        """Create again, on the group's new ranks, everything that depends on the ranks; load the newest state that they
        hold completely, and set `steps`. If there is none, call `go_back`, which loads an earlier one; returns False if
        it can't. Collective."""
        raise NotImplementedError


def outlives_ranks(strategy: Strategy) -> bool:
    """Whether the other ranks survive a failed one, and `strategy` can be created again on them. Local."""
    return strategy.rebuildable and ulfm.in_force()


def replica_error(replica: Replica, strategy: Strategy) -> ArgumentError | None:
    """Return the error if `strategy` can't be created on this replica now, or None. Local."""
    if not isinstance(replica, Replica):
        found = replica if isinstance(replica, type) else type(replica)
        return ArgumentError(
            "a trainer takes a replica, such as NumpyNetwork(sizes), TorchReplica(module, loss, optimizer), "
            "JaxReplica(apply, loss, params, optimizer) or one of your own (trainers.replica.Replica), not "
            f"{found.__module__}.{found.__qualname__}"
        )
    kind = type(replica).__name__
    if tuple(replica.metrics[:1]) != ("loss",):
        return ArgumentError(f'this {kind} has the metrics {replica.metrics!r}: the first one must be the loss, "loss"')
    holder = replica.hold.holder
    if holder is None or holder.closed or holder is strategy or not holder.divides_state:
        return None
    return ArgumentError(
        f"this {kind} belongs to a {holder.name} already, which holds its parameters, and other ranks may hold parts "
        f"of its state: close() that trainer first, on all ranks (`with {holder.name}(...) as trainer:` does), or make "
        f"another {kind}"
    )
