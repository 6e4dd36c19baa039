"""What a trainer does when a rank fails: it goes on with the ranks that are left, or the job stops in order.

All ranks make a call of a trainer together, and they agree at its end whether all of them have completed it. If not,
the ranks that are left form the next topology, make backend and buffers again, take on the newest state that they have
together, and make the call again. A fit goes on where it was; other calls begin again. A call inside of another one, as
callbacks make them, is ended by a failure, and the outermost call goes on.
"""

import json
import logging
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from allreduce.elastic.retry import attempt, recover, retry
from allreduce.elastic.standby import JOINED, ElasticWorld, JoiningRank
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.control import all_values, everywhere, known, root_value
from trainers.errors import ArgumentError, DivergedError
from trainers.fit.loop import EVENTS, STEPS, Fit, PartialEpoch, Position
from trainers.group import Owner, RankGroup, broadcast_arrays
from trainers.state.adopt import Piece
from trainers.strategies.interface import Strategy
from trainers.watching.history import Epoch, History

log = logging.getLogger("trainers")

ResultT = TypeVar("ResultT")
CHOICES = ("stop", "continue")
MAKING = "the making of the trainer"
HOW_FAR = "learn the positions of the ranks in a fit"
HAND_OVER = "hand a fit to a joining rank"
VALUES = "trainer.values"


class Failure(NamedTuple):
    """Ranks that have failed together.

    ranks: their ranks in MPI.COMM_WORLD. left: how many ranks went on. during: the call in which they failed, for
    example "fit, epoch 3, step 17". seconds: until the ranks that are left had repaired.
    """

    ranks: tuple[int, ...]
    left: int
    during: str
    seconds: float

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        return f"{ranks} of the job {'was' if len(self.ranks) == 1 else 'were'} lost in {self.during}"


class Call(Generic[ResultT]):
    """A collective call of a trainer. run: makes the call; after a failure the ranks that are left run it again."""

    admits_ranks = False  # whether standby ranks may join during this call

    def __init__(self, name: str, run: Callable[[], ResultT]) -> None:
        self.name, self.run = name, run

    def open(self) -> bool:
        """Prepare this rank to join a call that other ranks have begun. False where no rank can join it. Local."""
        return False

    def go_back(self) -> bool:
        """The ranks do not have the whole state: take on an earlier one. False if there is none. Collective."""
        return False

    def rejoin(self) -> None:
        """Come to the call's position. The ranks have equal states, those after the strategy's `steps`. Collective."""

    def keep(self) -> None:
        """The job stops after this: write a checkpoint from which another job can go on. Collective."""

    def close(self) -> None:
        """The call has ended, in a result or an error. Local."""

    def __str__(self) -> str:
        return self.name


class Recovery:
    """Makes a trainer and its calls survive failed ranks.

    failures: those so far, the same on all ranks. owns_topology: the topology was made here.
    """

    def __init__(self, strategy: Strategy, on_failure: str | None) -> None:
        self._strategy, self._on_failure = strategy, on_failure
        self._continues = on_failure == "continue"
        self._active = False  # whether the ranks outlive a failed one
        self._busy = False  # inside of a call
        self._again = False  # a call that admits standby ranks has ended; they could not find a later one
        self.failures: list[Failure] = []
        self.owns_topology = False

    @property
    def goes_on(self) -> bool:
        """Whether the ranks that are left go on after a failure; otherwise the job stops in order."""
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
        """Why on_failure=... can't be had on these ranks, if it can't. Local."""
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
        """The result of a call; its error is raised on all ranks. Collective.

        Raises RankLostError where the job stops, and where the ranks that are left do not have a whole state.
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
        """Warn before a second fit, in which no standby rank takes the place of a failed rank. Local."""
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

        def end() -> None:
            strategy.commit()
            self._note(before, during, time.monotonic() - begin)

        try:
            topology = recover(topology, repair, partial(self._advance, admit))
        except Exception as error:
            if everywhere(error, strategy.group.topology.world):  # the ranks go on; it is the call that has failed
                end()
            raise
        end()
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
        """Add the failure to `failures`, and log it where the ranks that are left go on. Local.

        before: the ranks before the failure, in MPI.COMM_WORLD. during: the call. seconds: that the repair took.
        """
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
        """What happens when a rank fails, in words that the command line prints at the start."""
        if self._strategy.group.size == 1:
            return "there are no others to go on"
        if not ulfm.in_force():
            return "the job ends (mpirun --with-ft ulfm lets the others live)"
        if not self.goes_on:
            return "the others stop (--on-failure continue: they go on)"
        back = "" if self._strategy.any_rank_may_fail else ", from the last checkpoint (--copies 2: without one)"
        return f"the others go on{back}"


# The calls that a failure does not simply repeat


class FitCall(Call[History]):
    """A fit, which goes on where it was when a rank fails. begin: makes the fit; collective.

    - The ranks do all parts of a step, and of the end of an epoch, together. So they are at most one part apart.
    - A rank that is behind takes the logs and flags of the part from a rank that has done it, and calls its callbacks.
    """

    admits_ranks = True

    def __init__(self, strategy: Strategy, begin: Callable[[], Fit]) -> None:
        super().__init__("fit", self._run)
        self._strategy, self._begin = strategy, begin
        self._fit: Fit | None = None

    def _run(self) -> History:
        if self._fit is None:
            self._fit = self._begin()
        return self._fit.run()

    def open(self) -> bool:
        self._strategy.group.rank = JOINED  # until `replace` numbers it, so that callbacks do not take it for rank 0
        self._fit = self._begin()
        self._fit.open_to_join()
        return True

    def close(self) -> None:
        if self._fit is not None:
            self._fit.close()

    def __str__(self) -> str:
        if self._fit is None or not self._fit.position.epoch >= 0:
            return "fit, before its first epoch"
        return f"fit, epoch {self._fit.position.epoch + 1}, step {self._fit.position.step + 1}"

    def rejoin(self) -> None:
        """Come to the position of the rank that is ahead of all others. Collective."""
        fit, strategy, group = self._fit, self._strategy, self._strategy.group
        if not all(all_values(group.comm, fit is not None and fit.begun, HOW_FAR)):  # nothing was trained: begin again
            self.close()
            self._fit = None
            return
        assert fit is not None
        fit.batches.divide(strategy.part, strategy.parts)
        if group.previous[group.rank] != JOINED:
            move(fit, strategy.steps - fit.taken)
        fit.taken = strategy.steps
        sides = all_values(group.comm, side_of(fit), HOW_FAR)
        catch_up(fit, sides)
        if JOINED in group.previous:
            hand_over(fit, group.previous)
        fit.guarded(fit.callbacks.ranks_change)
        if fit.saver is not None:
            fit.saver.rejoin([side["saver"] for side in sides])
        fit.meter.look_again()

    def go_back(self) -> bool:
        fits = all_values(self._strategy.group.comm, self._fit is not None and self._fit.begun, HOW_FAR)
        return all(fits) and self._fit is not None and self._fit.go_back()

    def keep(self) -> None:
        if self._fit is not None:
            self._fit.save_now()


def side_of(fit: Fit) -> dict[str, Any]:
    """What this rank tells the others of a fit, as JSON can hold it. Local."""
    return {
        "position": fit.position,
        "logs": fit.logs,
        "stop": [fit.stopped, fit.strategy.stop_training],
        "heard": fit.callbacks.heard(),
        "asks": fit.callbacks.asks,
        "saver": None if fit.saver is None else fit.saver.side(),
    }


def move(fit: Fit, gained: int) -> None:
    """Count `gained` more steps, of which this rank has the state and `measured` of the last one. Local."""
    if gained > 0:
        fit.hear_flags()
        with suppress(DivergedError):  # which all ranks see together, at the end
            fit.end_step()
    elif gained < 0:
        fit.step_back()


def catch_up(fit: Fit, sides: list[dict[str, Any]]) -> None:
    """Come to the position of the rank that is ahead. sides: `side_of` of all ranks. Local, the same on all ranks."""
    ahead = max(sides, key=lambda side: side["position"])
    position = Position(*ahead["position"])
    if fit.position < position:
        fit.position = position
        if position.part != STEPS:
            fit.logs = ahead["logs"]
        fit.stopped, fit.strategy.stop_training = ahead["stop"]
    fit.asks = any(side["asks"] for side in sides)
    fit.callbacks.tell_again((tuple(event), heard) for event, heard in (side["heard"] for side in sides))


def hand_over(fit: Fit, previous: tuple[int, ...]) -> None:
    """Give joining ranks the history and the callbacks' state of the other ranks. Collective.

    previous: as of RankGroup.
    """
    comm = fit.strategy.group.comm
    joins = previous[comm.rank] == JOINED
    lead = next(rank for rank, old in enumerate(previous) if old != JOINED)
    begun = fit.epoch_so_far()
    epochs = (
        [] if joins else json.loads(json.dumps([each.as_dict() for each in fit.history], default=np.ndarray.tolist))
    )
    told = [epochs, begun.seconds, begun.rows]
    history, seconds, rows = root_value(comm, told, HAND_OVER, lead)
    arrays = {} if joins else {VALUES: begun.measured, **fit.callbacks.state()}
    arrays = broadcast_arrays(comm, arrays, lead, HAND_OVER)
    if joins:
        position, epochs = fit.position, [Epoch.of_dict(epoch) for epoch in history]
        ended = position.part > EVENTS  # and the callbacks were told
        fit.history[:] = epochs if ended else epochs[: position.epoch]
        fit.join(PartialEpoch(position.epoch, position.step, seconds, arrays.pop(VALUES), rows))
        fit.guarded(lambda: fit.callbacks.load_state(arrays))


class EditCall(Call[None]):
    """A change of the parameters, made on all ranks that are left or on none. change: of the user's."""

    def __init__(self, strategy: Strategy, change: Callable[[], object]) -> None:
        super().__init__("edit", self._run)
        self._strategy, self._change = strategy, change

    def _run(self) -> None:
        strategy, topology = self._strategy, self._strategy.group.topology
        if not strategy.recoverable:
            strategy.edit(self._change)
            return
        before: list[Piece] = []
        outcome = attempt(topology, lambda: strategy.edit(self._change, before))
        if topology.finished(outcome.failure is None):
            outcome.result()
            return
        if before:
            strategy.saved = before
        raise outcome.failure or RankLostError("a rank failed before all ranks had made the change")
