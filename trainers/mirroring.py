"""All replicas take on the state of one rank's."""

import json
from typing import TYPE_CHECKING

import numpy as np

from allreduce.transport.control import together
from trainers.exchange import sent

if TYPE_CHECKING:
    from trainers.base import Trainer


def mirror(trainer: "Trainer", whole: bool = True, root: int = 0) -> None:
    """Give all replicas the state of `root`'s. Collective; DisagreementError when they are different models.

    whole: collect first what of that state other ranks have; false when the root has just loaded all of it.
    """
    replica, comm = trainer.replica, trainer._comm
    if whole:
        together(comm, trainer._check_edits)
    config, held = together(comm, lambda: (json.dumps(replica.config(), sort_keys=True), replica.state()))
    state = {
        name: np.asarray(array, order="C") for name, array in sorted((trainer._whole(held) if whole else held).items())
    }
    shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in state.items())
    trainer._agree(f"model: {shapes}; {config}")
    state = sent(comm, state, root, f"take on the state of rank {root}")
    together(comm, lambda: replica.load_state(state) if comm.rank != root else None)
    trainer._settle()
