"""What a trainer does when a rank is lost: it goes on with the ranks that are left, or stops in order.

A call of a trainer is made by all ranks together, and left by all together: in the end the survivors agree whether all
of them are through it. If not, they shrink to those that live, make anew what depends on the ranks (topology, backend,
buffers), take on the newest state that any of them has, and make the call again. A fit goes on where it was; other
calls begin anew. A rank that is lost meanwhile begins this again. Calls inside of calls, as callbacks make them, are
ended by a loss, and the outermost one goes on.
"""

import functools
import inspect
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np

from allreduce import create, keywords
from allreduce.backend import AllReduce
from allreduce.elastic.standby import NEWCOMER, Joining, Manned
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.control import all_values, everywhere, known, root_value
from trainers.errors import ArgumentError, DivergedError
from trainers.fit.loop import Fit
from trainers.group import sent
from trainers.replica import Replica
from trainers.state.fit_state import EVENTS, STEPS, Begun, Place
from trainers.watching.history import Epoch, History

if TYPE_CHECKING:
    from trainers.trainer import Trainer


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
            error, lost = met, ulfm.lost(met)
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
            lost = ulfm.lost(met)
            if lost is not None:
                trainer.topology.revoke()
            elif not everywhere(met, trainer._comm):
                raise  # the others don't know of it: it ends the job
            return [], met, lost

    def _recover(self, call: Call[ResultT]) -> None:
        """Go on with those that are left, whoever is lost meanwhile. Collective over them."""
        trainer, begin = self._trainer, time.monotonic()
        before, during = processes.world_ranks(trainer.topology.world), str(call)
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
                    lost = ulfm.lost(met)
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
    left = processes.world_ranks(trainer.topology.world)
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


P = ParamSpec("P")
MAKING = "the making of the trainer"


def outlives_losses(init: Callable[P, None]) -> Callable[P, None]:
    """A trainer's constructor, called again by the ranks that are left when one is lost in it. Collective.

    With on_failure="continue", where MPI lets the others live; otherwise the constructor as it is.
    """
    signature = inspect.signature(init)

    @keywords.known_only
    @functools.wraps(init)
    def make(*args: P.args, **options: P.kwargs) -> None:
        try:
            given = signature.bind(*args, **options)
        except TypeError:
            init(*args, **options)  # raises Python's own error, which names the class
            raise
        trainer = given.arguments["self"]
        inside = trainer.being_made  # the constructor of a kind of trainer has called that of its base
        if inside or given.arguments.get("on_failure") != "continue" or not ulfm.in_force():
            init(*args, **options)
            return
        trainer.being_made = True
        try:
            _make(init, trainer, given)
        finally:
            trainer.being_made = False

    return make


def _make(init: Callable[..., None], trainer: "Trainer", given: inspect.BoundArguments) -> None:
    arguments, begin = given.arguments, time.monotonic()
    backend = arguments.get("allreduce")
    recipe = None
    if isinstance(backend, AllReduce):
        ranks, owned, recipe = backend.topology, False, backend.recipe
    else:
        owned = arguments.get("topology") is None
        ranks = arguments["topology"] = Topology.of_survivors() if owned else arguments["topology"]
    before, first = processes.world_ranks(ranks.world), ranks
    if isinstance(ranks, Joining):  # the others are in the middle of a fit
        init(*given.args, **given.kwargs)
        trainer._owns_topology |= owned
        trainer._owns_backend |= owned
        return
    while True:
        error, lost = None, None
        try:
            if recipe is not None and ranks is not first:
                arguments["allreduce"] = create(recipe.name, ranks, **recipe.options)
            init(*given.args, **given.kwargs)
        except Exception as met:
            error, lost = met, ulfm.lost(met)
            if lost is not None:
                ranks.revoke()
            elif not everywhere(met, ranks.world):
                raise  # the others don't know of it: it ends the job
        if ranks.finished(lost is None):
            break
        trainer._unmake()
        ranks = next_topology(ranks, takes_newcomers=False)
        if recipe is None:
            arguments["topology"] = ranks
        trainer._renumber(arguments, ranks.former)
    remade = ranks is not first
    if error is not None:
        if owned or remade:
            ranks.close()
        raise error
    trainer._owns_topology = owned or remade
    if remade:
        trainer._owns_backend |= recipe is not None
        note(trainer, before, MAKING, time.monotonic() - begin)


HOW_FAR = "hear how far the ranks are in a fit"
HAND_OVER = "hand a fit to a rank that joins"
VALUES = "trainer.values"


class FitCall(Call[History]):
    """A fit, which goes on where it was when a rank is lost. begin: makes it; collective.

    Ranks are a part of a step or of what follows an epoch apart at the most, since they do all of it together. Who is
    behind takes from who is ahead what all ranks would have come to know there, and tells its callbacks.
    """

    takes_newcomers = True

    def __init__(self, trainer: "Trainer", begin: Callable[[], Fit]) -> None:
        super().__init__("fit", self._run)
        self._trainer, self._begin = trainer, begin
        self._fit: Fit | None = None

    def _run(self) -> History:
        if self._fit is None:
            self._fit = self._begin()
        return self._fit.run()

    def open(self) -> bool:
        self._trainer.rank = NEWCOMER  # until `_connect` numbers it: callbacks must not take it for rank 0
        self._fit = self._begin()
        self._fit.open_to_join()
        return True

    def close(self) -> None:
        if self._fit is not None:
            self._fit.close()

    def __str__(self) -> str:
        if self._fit is None or not self._fit.place.epoch >= 0:
            return "fit, before its first epoch"
        return f"fit, epoch {self._fit.place.epoch + 1}, step {self._fit.place.step + 1}"

    def rejoin(self) -> None:
        """Come to the place where the rank is that is farthest. Collective."""
        fit, comm = self._fit, self._trainer._comm
        if not all(all_values(comm, fit is not None and fit.begun, HOW_FAR)):  # nothing was trained: begin anew
            self.close()
            self._fit = None
            return
        assert fit is not None
        fit.batches.divide(self._trainer.part, self._trainer.parts)
        former = self._trainer.topology.former
        if former[self._trainer.rank] != NEWCOMER:
            move(fit, self._trainer.steps - fit.taken)
        fit.taken = self._trainer.steps
        sides = all_values(comm, told(fit), HOW_FAR)
        catch_up(fit, sides)
        if NEWCOMER in former:
            hand_over(fit, former)
        fit.guarded(fit.callbacks.ranks_change)
        if fit.saver is not None:
            fit.saver.rejoin([side["saver"] for side in sides])
        fit.meter.look_again()

    def go_back(self) -> bool:
        fits = all_values(self._trainer._comm, self._fit is not None and self._fit.begun, HOW_FAR)
        return all(fits) and self._fit is not None and self._fit.go_back()

    def keep(self) -> None:
        if self._fit is not None:
            self._fit.save_now()


def told(fit: Fit) -> dict[str, Any]:
    """What this rank tells of a fit: something that JSON can hold. Local."""
    return {
        "place": fit.place,
        "logs": fit.logs,
        "stop": [fit.stopped, fit.trainer.stop_training],
        "heard": fit.callbacks.heard(),
        "asks": fit.callbacks.asks,
        "saver": None if fit.saver is None else fit.saver.told(),
    }


def history_told(history: History) -> Any:
    """Something that JSON can hold. Local."""
    return json.loads(json.dumps([epoch.as_dict() for epoch in history], default=np.ndarray.tolist))


def move(fit: Fit, gained: int) -> None:
    """This rank has the state after so many more updates, and `trainer.measured` of the last. Local."""
    if gained > 0:
        fit.hear_flags()
        with suppress(DivergedError):  # which all ranks see together, at the end
            fit.end_step()
    elif gained < 0:
        fit.step_back()


def catch_up(fit: Fit, sides: list[dict[str, Any]]) -> None:
    """Come to the place of who is farthest. sides: what all ranks have `told`. Local, the same on all ranks."""
    ahead = max(sides, key=lambda side: side["place"])
    place = Place(*ahead["place"])
    if fit.place < place:
        fit.place = place
        if place.stage != STEPS:
            fit.logs = ahead["logs"]
        fit.stopped, fit.trainer.stop_training = ahead["stop"]
    fit.asks = any(side["asks"] for side in sides)
    fit.callbacks.tell_again((tuple(event), heard) for event, heard in (side["heard"] for side in sides))


def hand_over(fit: Fit, former: tuple[int, ...]) -> None:
    """Ranks that join get what others have of the fit besides their place in it. Collective. former: see Manned."""
    comm, joins = fit.trainer._comm, former[fit.trainer.rank] == NEWCOMER
    lead = next(rank for rank, old in enumerate(former) if old != NEWCOMER)
    begun = fit.epoch_so_far()
    told = [None if joins else history_told(fit.history), begun.seconds, begun.rows]
    history, seconds, rows = root_value(comm, told, HAND_OVER, lead)
    arrays = {} if joins else {VALUES: begun.measured, **fit.callbacks.state()}
    arrays = sent(comm, {name: np.asarray(array, order="C") for name, array in arrays.items()}, lead, HAND_OVER)
    if joins:
        place, epochs = fit.place, [Epoch.of_dict(epoch) for epoch in history]
        fit.history[:] = epochs[: place.epoch] if place.stage <= EVENTS else epochs  # or the event is told once more
        fit.join(Begun(place.epoch, place.step, seconds, arrays.pop(VALUES), rows))
        fit.guarded(lambda: fit.callbacks.load_state(arrays))


CHOICES = ("stop", "continue")


def refusal(
    on_failure: str | None, ranks: Topology, replica: Replica, backend: str | AllReduce | None = None
) -> ArgumentError | None:
    """What is wrong with on_failure=... here. Local."""
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
    if isinstance(backend, AllReduce) and backend.recipe is None:
        return ArgumentError(
            f'on_failure="continue": {backend!r} has no recipe by which it can be made again on other ranks; make '
            "it with allreduce.create(), or give its name"
        )
    return None


def in_words(trainer: "Trainer") -> str:
    """What happens when a rank is lost, for the start of a program."""
    if trainer.size == 1:
        return "there are no others to go on"
    if not ulfm.in_force():
        return "the job ends (mpirun --with-ft ulfm lets the others live)"
    if not trainer.goes_on:
        return "the others stop (--on-failure continue: they go on)"
    back = ", from the last checkpoint (--copies 2: without one)" if trainer.goes_back else ""
    return f"the others go on{back}"
