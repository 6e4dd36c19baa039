"""What a trainer does when a rank is lost: it goes on with the ranks that are left, or stops in order.

A call of a trainer is made by all ranks together, and left by all together: in the end the survivors agree whether all
of them are through it. If not, they shrink to those that live, make anew what depends on the ranks (topology, backend,
buffers), take on the newest state that any of them has, and make the call again. A fit goes on where it was; other
calls begin anew. A rank that is lost meanwhile begins this again. Calls inside of calls, as callbacks make them, are
ended by a loss, and the outermost one goes on.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from allreduce import ending
from allreduce.errors import RankLostError
from allreduce.messages import losses
from allreduce.messages.agreement import all_values, everywhere, known
from allreduce.spares import NEWCOMER, Joining, Manned
from allreduce.topology import Topology

if TYPE_CHECKING:
    from trainers.base import Trainer

log = logging.getLogger("trainers")

ResultT = TypeVar("ResultT")


class Loss(NamedTuple):
    """ranks: of MPI.COMM_WORLD, that were lost. left: how many went on.

    during: the call that they were lost in, "fit: epoch 3, step 17" say. seconds: until the others had begun anew.
    """

    ranks: tuple[int, ...]
    left: int
    during: str
    seconds: float

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        return f"{ranks} of the job {'was' if len(self.ranks) == 1 else 'were'} lost in {self.during}"


class Call(Generic[ResultT]):
    """A collective call of a trainer. run: makes it; on other ranks once more when one was lost."""

    def __init__(self, name: str, run: Callable[[], ResultT]) -> None:
        self.name, self.run = name, run

    takes_newcomers = False  # whether spare ranks may come in during this call

    def open(self) -> bool:
        """Prepare to come into this call, which others are in the middle of; whether that can be. Local."""
        return False

    def go_back(self) -> bool:
        """Nobody has the whole state: have all ranks take on an earlier one, if there is any. Collective."""
        return False

    def rejoin(self) -> None:
        """The ranks are others now, and have equal states: those after `trainer.steps`. Collective."""

    def keep(self) -> None:
        """The job stops after this: write down what it can be gone on from. Collective."""

    def close(self) -> None:
        """The call is over, however it has ended. Local."""

    def __str__(self) -> str:
        return self.name


class Survival:
    """How the calls of one trainer survive lost ranks. goes_on: false where the job stops."""

    def __init__(self, trainer: "Trainer", goes_on: bool) -> None:
        self._trainer, self.goes_on = trainer, goes_on
        self._busy = self._known = False  # inside of a call; all ranks know that it is to be made again
        self._again = False  # ranks that have waited could not find the call that these are in
        trainer.replica.undoable = True

    def run(self, call: Call[ResultT]) -> ResultT:
        """What the call returns, or raises on all ranks. Collective.

        Raises RankLostError where the job stops, and where nobody has the newest state whole.
        """
        if self._busy:
            return call.run()
        self._busy = True
        try:
            self._say_who_comes(call)
            if isinstance(self._trainer.topology, Joining) and call.open():
                self._recover(call)
            return self._made(call)
        finally:
            self._busy = False
            self._again |= call.takes_newcomers

    def _made(self, call: Call[ResultT]) -> ResultT:
        while True:
            results, error, lost = self._attempt(call)
            if not self._known and self._trainer.topology.finished(lost is None):
                if error is not None:
                    raise error
                return results[0]
            self._known = False
            self._recover(call)

    def _say_who_comes(self, call: Call[ResultT]) -> None:
        """Before a fit: why nobody takes the place of a rank that is lost in it, where that was asked for. Local."""
        again = call.takes_newcomers and self._again
        if again and self._trainer.rank == 0 and isinstance(self._trainer.topology, Manned):
            log.warning(
                "trainers: a rank that is lost in this fit leaves its place empty: ranks that wait take places in the "
                "first fit only"
            )

    def by_all(self, action: Callable[[], object]) -> None:
        """Do a part of a call that no rank that is left may have done without the others. Collective.

        Raises RankLostError on all of them when a rank is lost meanwhile: then none of them counts it as done.
        """
        topology, error, lost = self._trainer.topology, None, None
        try:
            action()
        except Exception as met:
            error, lost = met, losses.lost(met)
            if lost is not None:
                topology.revoke()
            elif not everywhere(met, self._trainer._comm):
                raise
        if not topology.finished(lost is None):
            self._known = True
            raise lost or RankLostError("a rank was lost before the others had done the same")
        if error is not None:
            raise error

    def _attempt(self, call: Call[ResultT]) -> tuple[list[ResultT], Exception | None, RankLostError | None]:
        """What the call returns, if it does; the error that it ends in; what this rank has heard of a loss."""
        trainer = self._trainer
        try:
            return [call.run()], None, None
        except Exception as met:
            lost = losses.lost(met)
            if lost is not None:
                trainer.topology.revoke()
            elif not everywhere(met, trainer._comm):
                raise  # the others don't know of it: it ends the job
            return [], met, lost

    def _recover(self, call: Call[ResultT]) -> None:
        """Go on with those that are left, whoever is lost meanwhile. Collective over them."""
        trainer, begin = self._trainer, time.monotonic()
        before, during = ending.world_ranks(trainer.topology.world), str(call)
        arrives = isinstance(trainer.topology, Joining)
        while True:
            error: Exception | None = None
            lost = None
            trainer._let_go_of_ranks()
            topology = next_topology(trainer.topology, call.takes_newcomers and not self._again)
            trainer.topology = topology
            try:
                self._find_newcomers(arrives)
                trainer._reconnect(topology)
                if not trainer._restore() and not call.go_back():
                    raise self._incomplete(call)
                trainer._share_again()
                call.rejoin()
                before, during = self._tell_newcomers(before, during)
                if not self.goes_on:
                    call.keep()
            except Exception as met:
                error = met
                if not everywhere(met, topology.world):  # or else they know that the state is lost, say
                    lost = losses.lost(met)
                    if lost is None:
                        raise
                    topology.revoke()
            if topology.finished(lost is None):
                break
        trainer._go_on()
        note(trainer, before, during, time.monotonic() - begin, self.goes_on)
        if error is not None:
            raise error
        if not self.goes_on:
            why = trainer.losses[-1] if trainer.losses else f"ranks did not come together in {during}, but none is lost"
            raise known(RankLostError(f'{why}; the job stops (on_failure="stop")'), topology.world)

    def _find_newcomers(self, arrives: bool) -> None:
        """Who has joined, and had nothing when another rank was lost, has nothing now. Collective."""
        topology = self._trainer.topology
        new = all_values(topology.world, arrives, "see who joins")
        topology.former = tuple(NEWCOMER if new[rank] else old for rank, old in enumerate(topology.former))

    def _tell_newcomers(self, before: tuple[int, ...], during: str) -> tuple[tuple[int, ...], str]:
        """Which ranks there were, and what they did: those that join hear it from the others. Collective."""
        trainer = self._trainer
        if NEWCOMER not in trainer.topology.former:
            return before, during
        told = [before, during, trainer.losses]
        heard = all_values(trainer._comm, told, "tell ranks that join what was lost")
        sides = zip(heard, trainer.topology.former, strict=True)
        ranks, during, lost = next(side for side, old in sides if old >= 0)
        if trainer.topology.former[trainer.rank] == NEWCOMER:
            trainer.losses = [Loss(tuple(gone), *rest) for gone, *rest in lost]
        return tuple(ranks), during

    def _incomplete(self, call: Call[ResultT]) -> RankLostError:
        way = "this fit has no checkpoint to go back to; fit(..., checkpoint=...) writes some"
        if not call.takes_newcomers:
            way = (
                "only a fit goes back to its last checkpoint: go on with fit(..., checkpoint=folder, resume=True), by "
                "another trainer on trainer.topology, or by another job"
            )
        text = f"a rank was lost in {call} that alone had a part of the optimizer's state, and {way}"
        return known(RankLostError(text), self._trainer.topology.world)


def note(trainer: "Trainer", before: tuple[int, ...], during: str, seconds: float, goes_on: bool = True) -> None:
    """Note who of the ranks `before`, of MPI.COMM_WORLD, is lost, and say so where the others go on. Local."""
    left = ending.world_ranks(trainer.topology.world)
    gone = tuple(rank for rank in before if rank not in left)
    if gone:
        trainer.losses.append(Loss(gone, len(left), during, seconds))
    if trainer.rank == 0 and goes_on:
        rest = f"{len(left)} rank{'s' * (len(left) != 1)} go on" if len(left) > 1 else "one rank goes on alone"
        if gone:
            log.warning("trainers: %s; %s (after %.3f s)", trainer.losses[-1], rest, seconds)
        if joined := [rank for rank in left if rank not in before]:
            log.warning("trainers: rank%s %s joined", "s" * (len(joined) > 1), ", ".join(map(str, joined)))


def next_topology(old: Topology, takes_newcomers: bool) -> Topology:
    """The ranks with which a training goes on: those of `old` that live. Collective over them.

    The one place where this is decided: ranks that join in the place of lost ones come in here.
    """
    if isinstance(old, Manned):
        old.admits = takes_newcomers
    return old.survivors()
