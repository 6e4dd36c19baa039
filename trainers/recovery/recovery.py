"""What a trainer does when a rank fails: it goes on with the ranks that are left, or stops in order.

A call of a trainer is made by all ranks together, and left by all together: in the end the survivors agree whether all
of them are through it. If not, they shrink to those that live, make again what depends on the ranks (topology, backend,
buffers), take on the newest state that any of them has, and make the call again. A fit goes on where it was; other
calls begin again. A rank that fails meanwhile begins this again. Calls inside of calls, as callbacks make them, are
ended by a failure, and the outermost one goes on.
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
from allreduce.topology import Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.control import all_values, everywhere, known
from trainers.errors import ArgumentError
from trainers.group import Owner, RankGroup
from trainers.strategies.interface import Strategy

log = logging.getLogger("trainers")

ResultT = TypeVar("ResultT")
CHOICES = ("stop", "continue")
MAKING = "the making of the trainer"


class Failure(NamedTuple):
    """ranks: of MPI.COMM_WORLD, that have failed. left: how many went on.

    during: the call in which they failed, "fit: epoch 3, step 17" say. seconds: until the others had begun again.
    """

    ranks: tuple[int, ...]
    left: int
    during: str
    seconds: float

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        return f"{ranks} of the job {'was' if len(self.ranks) == 1 else 'were'} lost in {self.during}"


class Call(Generic[ResultT]):
    """A collective call of a trainer. run: makes it; on the ranks that are left once more when one has failed."""

    admits_ranks = False  # whether standby ranks may join during this call

    def __init__(self, name: str, run: Callable[[], ResultT]) -> None:
        self.name, self.run = name, run

    def open(self) -> bool:
        """Prepare to join this call, which other ranks are in the middle of; whether that can be. Local."""
        return False

    def go_back(self) -> bool:
        """No ranks have the whole state: have all of them take on an earlier one, if there is any. Collective."""
        return False

    def rejoin(self) -> None:
        """The ranks are others now, and have equal states: those after the strategy's `steps`. Collective."""

    def keep(self) -> None:
        """The job stops after this: write down what it can go on from. Collective."""

    def close(self) -> None:
        """The call is over, however it has ended. Local."""

    def __str__(self) -> str:
        return self.name


class Recovery:
    """How a trainer and its calls survive failed ranks.

    goes_on: whether the others go on; otherwise the job stops in order.
    failures: that were survived so far, the same on all ranks. owns_topology: the topology was made here.
    """

    def __init__(self, strategy: Strategy, on_failure: str | None) -> None:
        self._strategy, self._on_failure = strategy, on_failure
        self._continues = on_failure == "continue"
        self._active = False  # whether the ranks outlive a failed one
        self._busy = False  # inside of a call
        self._again = False  # ranks that have waited could not find the call that these are in
        self.failures: list[Failure] = []
        self.owns_topology = False

    @property
    def goes_on(self) -> bool:
        return self._active and self._continues

    # The making of the trainer

    def make(self, topology: Topology | None, owner: Owner) -> RankGroup:
        """Agree on the arguments, and connect the strategy. Collective over the ranks that are left when one fails.

        topology: given by the user, or None for all ranks. owner: the trainer.
        """
        strategy, begin = self._strategy, time.monotonic()
        retries = self._continues and ulfm.in_force()
        self.owns_topology = topology is None
        first = ranks = topology or (Topology.of_survivors() if retries else Topology())
        before = processes.world_ranks(first.world)

        def advance(topology: Topology) -> Topology:
            nonlocal ranks
            strategy.abandon()
            ranks = topology.survivors(admit=False)
            self.owns_topology = True
            strategy.renumber(ranks.previous_ranks)
            return ranks

        connect = partial(self._connected, owner)
        try:
            if retries and not isinstance(ranks, JoiningRank):  # the ranks that it joins are in the middle of a fit
                group = retry(ranks, connect, advance)
            else:
                group = attempt(ranks, partial(connect, ranks)).result()
        except Exception as error:
            if self.owns_topology and everywhere(error, ranks.world):
                ranks.close()
            raise
        self._active = strategy.outlives_ranks and (ranks.size > 1 or isinstance(ranks, JoiningRank | ElasticWorld))
        if self._active:
            strategy.recoverable = strategy.replica.undoable = True
        if ranks is not first:
            self._note(before, MAKING, time.monotonic() - begin)
        return group

    def _connected(self, owner: Owner, ranks: Topology) -> RankGroup:
        """Connect the strategy. Raises an error in any rank's arguments on all ranks, and leaves nothing behind."""
        strategy = self._strategy
        group: RankGroup | None = None
        row = f"{strategy.describe()}, on_failure={self._on_failure!r}"
        error = strategy.refusal(ranks, self._continues) or self._refusal(ranks)
        try:
            ranks.agree([zlib.crc32(row.encode())], row, error)
            group = RankGroup(ranks, owner)
            strategy.connect(group)
            group.close_owner_first()
        except Exception as met:
            if group is not None and everywhere(met, ranks.world):  # so all ranks come to the close
                strategy.closed = True
                group.release()
                strategy.close()
            raise
        return group

    def _refusal(self, ranks: Topology) -> ArgumentError | None:
        """What is wrong with on_failure=... here. Local."""
        on_failure, replica = self._on_failure, self._strategy.replica
        if on_failure is not None and on_failure not in CHOICES:
            return ArgumentError(f"on_failure={on_failure!r} is unknown; use one of {', '.join(CHOICES)}, or None")
        if on_failure != "continue" or ranks.size == 1:
            return None
        if not ulfm.in_force():
            return ArgumentError(
                'on_failure="continue" needs an MPI that lets the others live when a rank is lost: Open MPI 5, '
                "started as mpirun --with-ft ulfm -n 4 python ...; otherwise leave it out, and go on from a checkpoint "
                "(resume=True)"
            )
        if replica.device != "cpu":
            return ArgumentError(f'on_failure="continue" works on the CPU, and this replica is on {replica.device}')
        if not self._strategy.rebuildable:
            return ArgumentError(
                f'on_failure="continue": {self._strategy.describe()}: its backend has no recipe by which it can be '
                "made again on other ranks; make it with allreduce.create(), or give its name"
            )
        return None

    # Calls

    def run(self, call: Call[ResultT]) -> ResultT:
        """What the call returns, or raises on all ranks. Collective.

        Raises RankLostError where the job stops, and where the ranks that are left don't have the newest state whole.
        """
        if not self._active or self._busy:
            return call.run()
        self._busy = True
        try:
            self._warn_of_empty_places(call)
            topology = self._strategy.group.topology
            if isinstance(topology, JoiningRank) and call.open():
                topology = self._recover(call, topology)
            return retry(topology, lambda _: call.run(), partial(self._recover, call))
        finally:
            self._busy = False
            self._again |= call.admits_ranks

    def _warn_of_empty_places(self, call: Call[ResultT]) -> None:
        """Before a second fit: no standby rank takes the place of one that fails in it. Local."""
        group = self._strategy.group
        if call.admits_ranks and self._again and group.rank == 0 and isinstance(group.topology, ElasticWorld):
            log.warning(
                "trainers: a rank that is lost in this fit leaves its place empty: ranks that wait take places in the "
                "first fit only"
            )

    def _recover(self, call: Call[ResultT], topology: Topology) -> Topology:
        """Go on with the ranks that are left, and with those that join. Returns their topology. Collective."""
        strategy, begin = self._strategy, time.monotonic()
        joins, admit = isinstance(topology, JoiningRank), call.admits_ranks and not self._again
        before, during = processes.world_ranks(topology.world), str(call)

        def repair(topology: Topology) -> None:
            nonlocal before, during
            self._repair(call, topology, joins)
            before, during = self._tell_joining(before, during)
            if not self._continues:
                call.keep()

        try:
            topology = recover(topology, repair, partial(self._advance, admit))
        finally:
            strategy.commit()
            self._note(before, during, time.monotonic() - begin)
        if not self._continues:
            why = self.failures[-1] if self.failures else f"ranks did not come together in {during}, but none is lost"
            raise known(RankLostError(f'{why}; the job stops (on_failure="stop")'), topology.world)
        return topology

    def _advance(self, admit: bool, topology: Topology) -> Topology:
        """Keep this rank's pieces of the state, and form the next topology. Collective."""
        group, strategy = self._strategy.group, self._strategy
        group.abandon()
        strategy.replica.undo()  # a batch of a step that was not taken
        strategy.rescue()
        group.topology = topology.survivors(admit)
        self.owns_topology = True
        return group.topology

    def _repair(self, call: Call[ResultT], topology: Topology, joins: bool) -> None:
        """Take on the newest state, and come to the call's position. Collective.

        joins: this rank has joined since the call began, so it has no state when another rank fails in the repair.
        """
        strategy, group = self._strategy, self._strategy.group
        joined = all_values(topology.world, joins, "learn which ranks join")
        topology.previous_ranks = tuple(JOINED if joined[r] else old for r, old in enumerate(topology.previous_ranks))
        group.replace(topology)
        strategy.rebuild()
        group.close_owner_first()
        if not strategy.restore() and not call.go_back():
            raise self._incomplete(call)
        strategy.divide()
        call.rejoin()

    def _tell_joining(self, before: tuple[int, ...], during: str) -> tuple[tuple[int, ...], str]:
        """The ranks before the failure and their call; joining ranks learn both from the others. Collective."""
        group = self._strategy.group
        if JOINED not in group.previous:
            return before, during
        sides = all_values(group.comm, [before, during, self.failures], "tell joining ranks of the failures")
        ranks, during, failures = next(side for side, old in zip(sides, group.previous, strict=True) if old != JOINED)
        if group.previous[group.rank] == JOINED:
            self.failures = [Failure(tuple(failed), *rest) for failed, *rest in failures]
        return tuple(ranks), during

    def _incomplete(self, call: Call[ResultT]) -> RankLostError:
        way = "this fit has no checkpoint to go back to; fit(..., checkpoint=...) writes some"
        if not call.admits_ranks:
            way = (
                "only a fit goes back to its last checkpoint: go on with fit(..., checkpoint=folder, resume=True), by "
                "another trainer on trainer.topology, or by another job"
            )
        text = f"a rank was lost in {call} that alone had a part of the optimizer's state, and {way}"
        return known(RankLostError(text), self._strategy.group.topology.world)

    def _note(self, before: tuple[int, ...], during: str, seconds: float) -> None:
        """Note which of the ranks `before`, of MPI.COMM_WORLD, have failed; say so where the others go on. Local."""
        group = self._strategy.group
        left = processes.world_ranks(group.topology.world)
        gone = tuple(rank for rank in before if rank not in left)
        if gone:
            self.failures.append(Failure(gone, len(left), during, seconds))
        if group.rank == 0 and self._continues:
            rest = f"{len(left)} rank{'s' * (len(left) != 1)} go on" if len(left) > 1 else "one rank goes on alone"
            if gone:
                log.warning("trainers: %s; %s (after %.3f s)", self.failures[-1], rest, seconds)
            if joined := [rank for rank in left if rank not in before]:
                log.warning("trainers: rank%s %s joined", "s" * (len(joined) > 1), ", ".join(map(str, joined)))

    def __str__(self) -> str:
        """What happens when a rank fails, for the start of a program."""
        if self._strategy.group.size == 1:
            return "there are no others to go on"
        if not ulfm.in_force():
            return "the job ends (mpirun --with-ft ulfm lets the others live)"
        if not self.goes_on:
            return "the others stop (--on-failure continue: they go on)"
        back = "" if self._strategy.any_rank_may_fail else ", from the last checkpoint (--copies 2: without one)"
        return f"the others go on{back}"
