"""Recovery of a trainer after a failure: the remaining ranks continue, or the job stops after a checkpoint.

All ranks make a call of a trainer together, and they agree at its end whether all of them have completed it. If not,
the remaining ranks form the next topology, create backend and buffers again, load the newest state that they hold
together, and make the call again. A fit continues at its position; other calls begin again. A failure ends a call
inside another one (made by a callback); the outermost call is made again.
"""

import logging
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from allreduce.elastic.retry import attempt, recover, retry
from allreduce.elastic.standby import JOINED, ElasticWorld, JoiningRank
from allreduce.errors import RankLostError
from allreduce.topology import Closeable, Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.control import all_values, everywhere, on_all_ranks
from trainers.arguments import name_error
from trainers.arrays import average
from trainers.errors import ArgumentError
from trainers.files.checkpoint import BEGIN
from trainers.fit.loop import POSITION, Fit
from trainers.group import RankGroup
from trainers.replica import undo_batch
from trainers.strategies.interface import Strategy, outlives_ranks
from trainers.watching.history import History

log = logging.getLogger("trainers")

ResultT = TypeVar("ResultT")
ON_FAILURE = ("stop", "continue")


class Failure(NamedTuple):
    """Ranks that have failed together.

    ranks: their ranks in MPI.COMM_WORLD. left: the number of ranks that remained. during: the call in which they
    failed, for example "fit, epoch 3, step 17". seconds: the duration of the recovery.
    """

    ranks: tuple[int, ...]
    left: int
    during: str
    seconds: float

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        return f"{ranks} of the job failed in {self.during}"


class Call(Generic[ResultT]):
    """A collective call of a trainer. run: makes the call; after a failure the remaining ranks run it again."""

    admits_ranks = False  # whether standby ranks may join during this call

    def __init__(self, name: str, run: Callable[[], ResultT]) -> None:
        self.name, self.run = name, run

    def open(self) -> bool:
        """Prepare this rank to join a call that other ranks have begun. Returns False if no rank can join it. Local."""
        return False

    def go_back(self) -> bool:
        """Load an earlier state, because the ranks do not have a complete one. Returns False if there is none.
        Collective."""
        return False

    def rejoin(self) -> None:
        """Bring this rank to the call's position. All ranks have loaded the state after `strategy.steps` steps.
        Collective."""

    def save_before_stop(self) -> None:
        """Write a checkpoint, from which another job can resume, before the job stops. Collective."""

    def close(self) -> None:
        """Release the resources of the call, after it has returned or raised. Local."""

    def __str__(self) -> str:
        return self.name


class Recovery:
    """Makes a trainer and its calls survive failed ranks.

    failures: the failures so far, the same on all ranks. owns_topology: whether the topology was created here.
    """

    def __init__(self, strategy: Strategy, on_failure: str | None) -> None:
        self._strategy, self._on_failure = strategy, on_failure
        self._continues = on_failure == "continue"
        self._active = False  # whether the other ranks survive a failed one
        self._busy = False  # inside of a call
        self._admitted = False  # a call that admits standby ranks has ended; later calls admit none
        self.failures: list[Failure] = []
        self.owns_topology = False

    @property
    def goes_on(self) -> bool:
        """Whether the remaining ranks continue after a failure; otherwise the job stops."""
        return self._active and self._continues

    # Construction of the trainer

    def make(self, topology: Topology | None, owner: Closeable) -> RankGroup:
        """Compare the arguments of all ranks and connect the strategy; returns the group. Collective. With
        on_failure="continue" all remaining ranks raise RankLostError if one fails meanwhile.

        topology: given by the user, or None for all ranks. owner: the trainer.
        """
        strategy = self._strategy
        self.owns_topology = topology is None
        ranks = topology or (Topology.of_survivors() if self._continues else Topology())
        try:
            outcome = attempt(ranks, partial(self._connected, owner, ranks))
            agrees = self._continues and not isinstance(ranks, JoiningRank)  # whom the others admit in a fit
            if agrees and not ranks.finished(outcome.failure is None):
                raise outcome.failure or RankLostError("a rank failed while the trainer was made")
            group = outcome.result()
        except Exception as error:
            if not everywhere(error, ranks.world):
                strategy.closed = True
                ranks.unregister(owner)  # the topology must not close an incomplete trainer
            elif self.owns_topology:
                ranks.close()
            raise
        self._active = outlives_ranks(strategy) and (ranks.size > 1 or isinstance(ranks, JoiningRank | ElasticWorld))
        if self._active:
            strategy.recoverable = strategy.replica.undoable = True
        return group

    def _connected(self, owner: Closeable, ranks: Topology) -> RankGroup:
        """Connect the strategy. Raises an error in any rank's arguments on all ranks, and leaves nothing behind."""
        strategy = self._strategy
        group: RankGroup | None = None
        row = f"{strategy.describe()}, on_failure={self._on_failure!r}"
        error = strategy.argument_error(ranks) or self._on_failure_error(ranks)
        try:
            ranks.agree([zlib.crc32(row.encode())], row, error)
            group = RankGroup(ranks, owner)
            strategy.connect(group)
            group.close_owner_first()
        except Exception as met:
            # all ranks have this error, so `close` can be collective
            if group is not None and everywhere(met, ranks.world):
                strategy.closed = True
                group.release()
                strategy.close()
            raise
        return group

    def _on_failure_error(self, ranks: Topology) -> ArgumentError | None:
        """Return the error if `on_failure` is invalid or not possible on these ranks, or None. Local."""
        on_failure, replica = self._on_failure, self._strategy.replica
        if text := name_error("on_failure", on_failure, ON_FAILURE, optional=True):
            return ArgumentError(text)
        if on_failure != "continue" or ranks.size == 1:
            return None
        if not ulfm.in_force():
            return ArgumentError(
                'on_failure="continue" needs an MPI in which the other ranks survive a failed one: Open MPI 5, '
                "started as mpirun --with-ft ulfm -n 4 python ...; otherwise leave it out, and resume from a "
                "checkpoint (resume=True)"
            )
        if replica.device != "cpu":
            return ArgumentError(f'on_failure="continue" works on the CPU, and this replica is on {replica.device}')
        if not self._strategy.rebuildable:
            return ArgumentError(
                f'on_failure="continue": {self._strategy.describe()}: its backend has no config from which it can be '
                "created on other ranks; make it with allreduce.create(), or give its name"
            )
        return None

    # Calls

    def run(self, call: Call[ResultT]) -> ResultT:
        """Make a call, with recovery after failures, and return its result. An error is raised on all ranks.
        Collective.

        Raises RankLostError if the job stops, or if the remaining ranks do not hold a complete state.
        """
        if not self._active or self._busy:
            return call.run()
        self._busy = True
        try:
            topology = self._strategy.group.topology
            if isinstance(topology, JoiningRank) and call.open():
                topology = self._recover(call, topology)
            return retry(topology, lambda _: call.run(), partial(self._recover, call))
        finally:
            self._busy = False
            self._admitted |= call.admits_ranks

    def _recover(self, call: Call[ResultT], topology: Topology) -> Topology:
        """Recover from a failure on the remaining and joining ranks; returns their topology. Collective."""
        strategy, begin = self._strategy, time.monotonic()
        joins, admit = isinstance(topology, JoiningRank), call.admits_ranks and not self._admitted
        before, during = processes.world_ranks(topology.world), str(call)

        def repair(topology: Topology) -> None:
            nonlocal before, during
            before, during = self._meet(topology, joins, before, during)
            self._repair(call, topology)
            if not self._continues:
                call.save_before_stop()

        def end(continues: bool) -> None:
            strategy.saved, strategy.carried = None, {}
            self._record_failure(before, during, time.monotonic() - begin, continues)

        try:
            topology = recover(topology, repair, partial(self._advance, admit))
        except Exception as error:
            # all ranks have this error: the recovery worked, the call did not
            if everywhere(error, strategy.group.topology.world):
                end(False)
            raise
        end(self._continues)
        if not self._continues:
            why = self.failures[-1] if self.failures else f"not all ranks completed {during}, but none has failed"
            raise on_all_ranks(RankLostError(f'{why}; the job stops (on_failure="stop")'), topology.world)
        return topology

    def _advance(self, admit: bool, topology: Topology) -> Topology:
        """Keep this rank's pieces of the state, and form the next topology. Collective."""
        group, strategy = self._strategy.group, self._strategy
        group.abandon()
        undo_batch(strategy.replica)  # undo a batch whose step was not finished
        strategy.replica.use_parameters()  # in an evaluation the average may be in their place
        strategy.rescue()
        group.topology = topology.survivors(admit)
        strategy.follow(group.previous)
        self.owns_topology = True
        return group.topology

    def _meet(
        self, topology: Topology, joins: bool, before: tuple[int, ...], during: str
    ) -> tuple[tuple[int, ...], str]:
        """Mark the ranks that join. Return the ranks before the failure and their call, as a rank that was there knows
        them; ranks that join also receive the failures so far. Collective.

        joins: this rank has joined since the call began, so it has no state if another rank fails during the recovery.
        """
        rows = all_values(topology.world, [joins, before, during, self.failures], "learn which ranks join")
        marked = zip(rows, topology.previous_ranks, strict=True)
        topology.previous_ranks = tuple(JOINED if row[0] else old for row, old in marked)
        _, ranks, during, failures = min(rows, key=lambda row: bool(row[0]))
        if joins:
            self.failures = [Failure(tuple(failed), *rest) for failed, *rest in failures]
        return tuple(ranks), during

    def _repair(self, call: Call[ResultT], topology: Topology) -> None:
        """Load the newest state, and bring all ranks to the call's position. Collective."""
        strategy, group = self._strategy, self._strategy.group
        group.replace(topology)
        try:
            whole = strategy.rebuild(call.go_back)
        finally:
            group.close_owner_first()
        if not whole:
            way = "this fit has no checkpoint to go back to; fit(..., checkpoint=...) writes checkpoints"
            if not call.admits_ranks:
                way = (
                    "only a fit goes back to its last checkpoint: continue with fit(..., checkpoint=folder, "
                    "resume=True), by another trainer on trainer.topology, or by another job"
                )
            text = f"a rank that failed in {call} had the only copy of a part of the optimizer's state, and {way}"
            raise on_all_ranks(RankLostError(text), topology.world)
        call.rejoin()

    def _record_failure(self, before: tuple[int, ...], during: str, seconds: float, continues: bool) -> None:
        """Add the failure to `failures`, and log it if the remaining ranks continue. Local.

        before: the ranks before the failure, in MPI.COMM_WORLD. during: the call. seconds: of the recovery.
        """
        group = self._strategy.group
        left = processes.world_ranks(group.topology.world)
        gone = tuple(rank for rank in before if rank not in left)
        if gone:
            self.failures.append(Failure(gone, len(left), during, seconds))
        if group.rank == 0 and continues:
            rest = f"{len(left)} ranks continue" if len(left) > 1 else "one rank continues alone"
            if gone:
                log.warning("trainers: %s; %s (after %.3f s)", self.failures[-1], rest, seconds)
            if joined := [rank for rank in left if rank not in before]:
                log.warning("trainers: rank%s %s joined", "s" * (len(joined) > 1), ", ".join(map(str, joined)))


# Calls that a failure does not simply repeat


class FitCall(Call[History]):
    """A fit, which continues at its progress after a failure. begin: creates the Fit; collective."""

    admits_ranks = True

    def __init__(self, strategy: Strategy, begin: Callable[[], Fit]) -> None:
        super().__init__("fit", self._run)
        self._strategy, self._begin = strategy, begin
        self._fit: Fit | None = None
        self._ranks = 0  # at the beginning, or after the last failure

    def _run(self) -> History:
        if self._fit is None:
            self._ranks = self._strategy.group.size
            self._fit = self._begin()
        return self._fit.run()

    def open(self) -> bool:
        self._strategy.group.rank = JOINED  # until `RankGroup.replace`, so that callbacks do not treat it as rank 0
        self._fit = self._begin()
        self._fit.open_to_join()
        return True

    def close(self) -> None:
        average.end(self._strategy.replica)
        if self._fit is not None:
            self._fit.close()

    def __str__(self) -> str:
        if self._fit is None or self._fit.progress.stage == BEGIN:
            return "fit, before its first epoch"
        return f"fit, epoch {self._fit.progress.epoch + 1}, step {self._fit.progress.step + 1}"

    def rejoin(self) -> None:
        fit, strategy, group = self._fit, self._strategy, self._strategy.group
        # a rank has no fit yet, so nothing was trained: begin again
        if not all(all_values(group.comm, fit is not None and fit.begun, POSITION)):
            self.close()
            self._fit = None
            return
        assert fit is not None
        fit.batches.set_part(strategy.part, strategy.parts)
        if group.rank == 0 and group.size < self._ranks:
            fit.batches.lose_ranks()
        self._ranks = group.size
        fit.rejoin()

    def go_back(self) -> bool:
        fits = all_values(self._strategy.group.comm, self._fit is not None and self._fit.begun, POSITION)
        return all(fits) and self._fit is not None and self._fit.go_back()

    def save_before_stop(self) -> None:
        if self._fit is not None:
            self._fit.save_now()
