"""What a way of training must offer: `Strategy`; what it sees of a fit: `EpochRun`; how Mirrored updates: `Update`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from allreduce.arrays import dtypes
from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from allreduce.transport import ulfm
from allreduce.transport.control import together
from trainers import stopwatch
from trainers.data import Batch, Batches
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Hold, Replica, Rows
from trainers.state.adopt import RATES, Arrays, Piece
from trainers.stopwatch import Stopwatch
from trainers.watching.meter import Meter

FLAGS = ("left_out", "stop", "save", "failed")  # behind the metrics of every step: on how many ranks it is so


class EpochRun(Protocol):
    """What a strategy sees of the fit whose epoch it runs; see trainers.fit.loop.Fit for the methods.

    batches: of the fit. fetches_ahead: whether rows are fetched before they are needed.
    error: this rank's, until the other ranks have heard of it; it is raised after the epoch.
    """

    batches: Batches
    fetches_ahead: bool
    error: Exception | None

    @property
    def first_step(self) -> int: ...

    def together(self, number: int) -> None: ...

    def guarded(self, action: Callable[[], Any]) -> Any: ...

    def begin_batch(self, step: int) -> None: ...

    def end_batch(self, step: int) -> None: ...

    def checked(self, batch: Batch) -> Batch: ...

    def unusable(self, gradients: Any, replica: Replica) -> bool: ...


def untraced(kind: str) -> AbstractContextManager[None]:
    """A span of no trace."""
    return nullcontext()


class Strategy:
    """A way to train a replica on the ranks of a group: how a step is computed and applied, and who has which state.

    replica: this rank's. name: of the trainer, for messages. part, parts: which part of every batch this rank takes,
        None for none, and how many there are.
    steps: that were taken together. measured: the metrics of the last step, and behind them the sums of FLAGS.
    stop_training: set by a callback of this rank. cut_short: the last epoch has ended before its last step.
    recoverable: whether the other ranks outlive a failed one in this job, so that pieces of the state are needed.

    The class says: synchronous, whether ranks take every step together, so that checkpoints may be written between two
    steps; mirrors, after what all ranks have the same parameters, each "step" or each "epoch"; divides_state, whether
    ranks may have parts of the state that others lack, until it is closed; rebuildable, whether it can be made again
    on the ranks that are left.
    """

    synchronous = True
    mirrors = "step"
    divides_state = True
    rebuildable = True
    saved: list[Piece] | None = None  # this rank's of the state, maybe none, while a failure is repaired
    group: RankGroup
    clock: Stopwatch  # of the seconds in which this rank waits for others

    def __init__(self, replica: Replica, name: str) -> None:
        self.replica, self.name = replica, name
        self.part: int | None = 0
        self.parts = 1
        self.steps = 0
        self.measured: Any = None
        self.stop_training = self.cut_short = self.closed = self.recoverable = False
        self.trace: Trace | None = None

    # Its making

    def describe(self) -> str:
        """The arguments in words, the same on all ranks. Local."""
        raise NotImplementedError

    def refusal(self, ranks: Topology, goes_on: bool) -> Exception | None:
        """What is wrong with the arguments on these ranks, if anything. Local.

        goes_on: whether the training goes on without failed ranks, so that one may be what is left of several.
        """
        raise NotImplementedError

    def renumber(self, previous: tuple[int, ...]) -> None:
        """The ranks are others before the strategy was made: change arguments that name ranks. Local.

        previous: the rank that each rank had before.
        """

    def connect(self, group: RankGroup) -> None:
        """Make what depends on the ranks, and make the replicas equal. Collective.

        Its error leaves a strategy that `close` gives back, or, when it tells of a failed rank, `abandon`.
        """
        self.closed = False
        self.group = group
        self.part, self.parts = group.rank, group.size
        self.clock = stopwatch.make(self.replica.device)
        self.replica.hold = Hold(self)

    def close(self) -> None:
        """Give back what `connect` has made; the replica has its whole state, in memory of its own. Collective."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Let go of everything without the other ranks, of which some may have failed. Local."""
        raise NotImplementedError

    @property
    def holds_replica(self) -> bool:
        """Whether no other trainer was made on the replica since this one. Local."""
        return self.replica.hold.holder is self

    # A step

    @property
    def errors_in_step(self) -> bool:
        """Whether `step` sees on all ranks, before it updates, that one of them has failed."""
        return True

    def compute(self, batch: Batch | None) -> None:
        """Compute this rank's part of a step: the gradients of `batch`, or zeros. Local; may raise anything."""
        raise NotImplementedError(f"the steps of a {self.name} are run by run_epoch")

    def step(self, flags: tuple[float, ...]) -> Any:
        """Train on one global batch, of which each rank has computed its part. Collective.

        flags: this rank's FLAGS. The last one says that it has failed: where `errors_in_step`, nothing is updated then.
        Returns the means over the global batch of the replica's metrics, and behind them the sums of the ranks'
        flags: the same bits on all ranks, of at least 32 bits a number, on the replica's device. Runs `clock` while it
        waits for other ranks.
        """
        raise NotImplementedError(f"the steps of a {self.name} are run by run_epoch")

    def count_step(self) -> None:
        """A step was taken, or left out by all ranks. Local."""
        self.steps += 1

    @property
    def fresh_gradients(self) -> Any:
        """The gradients that this rank has computed in this step, 1-D, while they are not averaged; None for none."""
        return None

    @property
    def fresh_rows(self) -> Sequence[Rows]:
        """For each of the replica's `tables` the sparse gradient of this rank and step, not averaged yet."""
        return ()

    @property
    def fresh_measured(self) -> Any:
        """This rank's part of the metrics of this step, and what is behind them, while they are not added up."""
        return self.measured

    @property
    def sent_dtype(self) -> np.dtype:
        """The dtype in which gradients reach the other ranks."""
        return dtypes.parse(self.replica.gradient_dtype)

    # An epoch

    def begin_fit(self) -> None:
        """A fit begins, of which nothing is done. Local."""

    def run_epoch(self, run: EpochRun, number: int) -> None:
        """Do this rank's part of the steps of epoch `number`. Collective; errors that `run` keeps are raised later."""
        run.together(number)

    def end_epoch(self) -> dict[str, Any]:
        """All ranks have done the steps of an epoch, without an error; what the logs say of it. Collective."""
        return {}

    def meter(self, batches: Batches) -> Any:
        """What measures the epochs of a fit, as a Meter does."""
        return Meter(self.replica.metrics, batches.sizes(), self.measured.dtype, self.replica.device)

    def choices(self) -> dict[str, str]:
        """What was chosen for this job, by name, for checkpoints. Collective."""
        return {}

    def record(self, trace: Trace | None) -> None:
        """Record what this rank does in `trace` from now on, or, with None, no more. Local."""
        self.trace = self.clock.trace = trace

    def span(self, kind: str) -> AbstractContextManager[None]:
        """What is done inside is "data", "compute", "update", ... in the trace, if there is one. Local."""
        return untraced(kind) if self.trace is None else self.trace.span(kind)

    # The state that ranks hold together

    def whole(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A state of the replica with what other ranks have of it. Collective."""
        raise NotImplementedError

    def complete(self) -> None:
        """Have rank 0's replica hold its whole state. Collective."""
        state = self.whole(together(self.group.comm, self.replica.state))
        self.group.on_one(lambda: self.replica.load_state(state))

    def snapshot(self, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A copy of the whole state on rank 0, in `memory` as of Replica.snapshot; of nothing elsewhere. Collective."""
        self.complete()
        return together(self.group.comm, lambda: {} if self.group.rank else self.replica.snapshot(memory))

    def apart(self) -> dict[str, str]:
        """The parts of the replica's state that are no copies of what other ranks have, by name, and why. Local."""
        return {}

    def check_edits(self) -> None:
        """Raise, on this rank, when the replica was edited in a way that several ranks may have done."""

    def take_on(self, step: int, state: Arrays) -> None:
        """Take on the whole state after `step` steps, which all ranks take on. Local, and `share` follows."""
        rates = state.pop(RATES, None)
        self.replica.load_state(state)
        if rates is not None and rates.tolist() != self.replica.learning_rates:
            self.replica.learning_rates = rates.tolist()

    def share(self) -> None:
        """The state was changed otherwise than by a step: go on when all ranks have done so. Collective."""

    def edit(self, change: Callable[[], object], before: list[Piece] | None = None) -> None:
        """Change the parameters by `change()`, on all ranks or once a node. Collective.

        before: takes this rank's pieces of the state as it is before any rank changes it, for `saved`.
        """
        raise ArgumentError(f"a {self.name} has no edit(); change the model before the trainer is made, or load one")

    # When ranks have failed

    @property
    def outlives_ranks(self) -> bool:
        """Whether a failed rank leaves the others alive here, and this can be made again on those."""
        return self.rebuildable and ulfm.in_force()

    @property
    def any_rank_may_fail(self) -> bool:
        """Whether the ranks that are left have the whole state, whichever one fails."""
        return True

    def rescue(self) -> None:
        """Drop what the ranks share, and keep this rank's pieces of the state. Local.

        Called again when another rank fails before `commit`.
        """
        raise NotImplementedError

    def rebuild(self) -> None:
        """Make again on the group's new ranks what depends on them. Collective."""
        raise NotImplementedError

    def restore(self) -> bool:
        """Take on the newest state and its `steps`; false when these ranks don't have it whole. Collective."""
        raise NotImplementedError

    def divide(self) -> None:
        """All ranks have the same state: divide what they divide. Collective."""

    def commit(self) -> None:
        """All ranks have what they need to go on: drop the pieces. Local."""


def replica_refusal(replica: Replica, strategy: Strategy) -> ArgumentError | None:
    """Why `strategy` can't be made on this replica now, if it can't. Local."""
    if not isinstance(replica, Replica):
        found = replica if isinstance(replica, type) else type(replica)
        return ArgumentError(
            "a trainer takes a replica, such as NumpyNetwork(sizes), TorchReplica(module, loss, optimizer), "
            "JaxReplica(apply, loss, params, optimizer) or one of your own (trainers.replica.Replica), not "
            f"{found.__module__}.{found.__qualname__}"
        )
    holder = replica.hold.holder
    if holder is None or holder.closed or holder is strategy or not holder.divides_state:
        return None
    kind = type(replica).__name__
    return ArgumentError(
        f"this {kind} has a {holder.name} already, in whose memory it is, and with it other ranks may have parts of "
        f"its state: close() that first, on all ranks (`with {holder.name}(...) as trainer:` does), or make another "
        f"{kind}"
    )
