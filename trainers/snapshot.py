"""The state of a model in training, kept in memory and taken on again."""

import logging
from typing import TYPE_CHECKING

import numpy as np

from allreduce.transport.control import root_value, together

if TYPE_CHECKING:
    from trainers.base import Trainer

State = dict[str, np.ndarray]
log = logging.getLogger("trainers")


def take(trainer: "Trainer") -> State:
    """A copy of the replica's whole state, as `save` would write it, on rank 0; nothing on the others. Collective.

    Where rank 0 may be lost and the others go on, all of them get one.
    """
    trainer._enter("a copy of the state")
    if trainer.goes_on:
        return _copied(trainer._whole(together(trainer._comm, trainer.replica.state)))
    trainer._complete()
    return together(trainer._comm, lambda: {} if trainer.rank else _copied(trainer.replica.state()))


def give_back(trainer: "Trainer", state: State) -> None:
    """All ranks take on what `take` returned on rank 0. Collective."""
    trainer._enter("a state is taken on")
    if not root_value(trainer._comm, bool(state), "a state is taken on"):
        if trainer.rank == 0:
            log.warning("trainers: the state that was kept is lost with its rank; the model stays as it is")
        return
    trainer._on_one(lambda: trainer.replica.load_state(state))
    trainer._mirror(whole=False)


def _copied(state: State) -> State:
    return {name: np.array(array) for name, array in state.items()}
