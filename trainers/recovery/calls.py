"""The calls of a trainer that go on where they were, or from what was before: a fit, and an edit."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from allreduce.elastic.retry import attempt
from allreduce.elastic.standby import JOINED
from allreduce.errors import RankLostError
from allreduce.transport.control import all_values, root_value
from trainers.errors import DivergedError
from trainers.fit.loop import Fit
from trainers.group import broadcast_arrays
from trainers.recovery.recovery import Call
from trainers.state.pieces import EVENTS, STEPS, Begun, Piece, Place
from trainers.strategies.interface import Strategy
from trainers.watching.history import Epoch, History

HOW_FAR = "hear how far the ranks are in a fit"
HAND_OVER = "hand a fit to a rank that joins"
VALUES = "trainer.values"


class FitCall(Call[History]):
    """A fit, which goes on where it was when a rank is lost. begin: makes it; collective.

    Ranks are a part of a step or of what follows an epoch apart at the most, since they do all of it together. Who is
    behind takes from who is ahead what all ranks would have come to know there, and tells its callbacks.
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
        self._strategy.group.rank = JOINED  # until `replace` numbers it: callbacks must not take it for rank 0
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
        """Come to the position of the rank that is farthest. Collective."""
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
    """What this rank tells of a fit: something that JSON can hold. Local."""
    return {
        "place": fit.place,
        "logs": fit.logs,
        "stop": [fit.stopped, fit.strategy.stop_training],
        "heard": fit.callbacks.heard(),
        "asks": fit.callbacks.asks,
        "saver": None if fit.saver is None else fit.saver.side(),
    }


def move(fit: Fit, gained: int) -> None:
    """This rank has the state after so many more updates, and `measured` of the last. Local."""
    if gained > 0:
        fit.hear_flags()
        with suppress(DivergedError):  # which all ranks see together, at the end
            fit.end_step()
    elif gained < 0:
        fit.step_back()


def catch_up(fit: Fit, sides: list[dict[str, Any]]) -> None:
    """Come to the place of who is farthest. sides: what all ranks have `side_of`. Local, the same on all ranks."""
    ahead = max(sides, key=lambda side: side["place"])
    place = Place(*ahead["place"])
    if fit.place < place:
        fit.place = place
        if place.stage != STEPS:
            fit.logs = ahead["logs"]
        fit.stopped, fit.strategy.stop_training = ahead["stop"]
    fit.asks = any(side["asks"] for side in sides)
    fit.callbacks.tell_again((tuple(event), heard) for event, heard in (side["heard"] for side in sides))


def hand_over(fit: Fit, previous: tuple[int, ...]) -> None:
    """Joining ranks get what the others have of the fit besides their position. Collective.

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
        place, epochs = fit.place, [Epoch.of_dict(epoch) for epoch in history]
        fit.history[:] = epochs[: place.epoch] if place.stage <= EVENTS else epochs  # or the event is told once more
        fit.join(Begun(place.epoch, place.step, seconds, arrays.pop(VALUES), rows))
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
