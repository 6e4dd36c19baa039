"""The state of a model in training, kept in memory and taken on again."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainers.base import Trainer

State = dict[str, np.ndarray]


def take(trainer: "Trainer") -> State:
    """A copy of the replica's whole state, as `save` would write it, on rank 0; nothing on the others. Collective."""
    trainer._enter("a copy of the state")
    trainer._complete()
    kept: State = {}

    def copy() -> None:
        kept.update({name: np.array(array) for name, array in trainer.replica.state().items()})

    trainer._on_one(copy)
    return kept


def give_back(trainer: "Trainer", state: State) -> None:
    """All ranks take on what `take` returned on rank 0. Collective."""
    trainer._enter("a state is taken on")
    trainer._on_one(lambda: trainer.replica.load_state(state))
    trainer._mirror(whole=False)
