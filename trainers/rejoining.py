"""A fit whose ranks have changed: where the others are, what they have and this rank lacks."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from allreduce.messages.agreement import all_values, root_value
from allreduce.spares import NEWCOMER
from trainers.errors import DivergedError
from trainers.exchange import sent
from trainers.fitting import Begun, Fit
from trainers.stepping import EVENTS, STEPS, Place
from trainers.surviving import Call
from trainers.watching.history import Epoch, History

if TYPE_CHECKING:
    from trainers.base import Trainer


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
