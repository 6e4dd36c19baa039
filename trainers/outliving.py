"""What of a MirroredTrainer is made anew when a rank was lost, and how the ranks that are left become equal again."""

from functools import partial
from typing import Any

import numpy as np

from allreduce import create
from allreduce.base import AllReduce, Recipe
from allreduce.messages.agreement import all_values, together
from allreduce.topology import Topology
from trainers.backends import backend_for
from trainers.base import Trainer
from trainers.exchange import sent

MEASURED, RATES = "trainer.measured", "trainer.learning_rates"  # what ranks hand each other besides a replica's state
NEWEST = "take on the newest state of the ranks that are left"


class Outliving(Trainer):
    """A trainer with a backend that outlives some of its ranks.

    asked: the name of its backend, or the recipe of the one that was given.
    """

    allreduce: AllReduce
    _asked: str | Recipe | None
    _update: str
    _measured: Any
    _last: np.ndarray  # what the last step has measured
    _owns_backend: bool
    _owns_topology: bool

    def _make_buffer(self) -> None:
        """Have the backend allocate what is reduced in every step, and bind the replica to it. Collective."""
        raise NotImplementedError

    def _drop(self) -> None:
        """Let go of the backend, without the other ranks. Local."""
        raise NotImplementedError

    def note_step(self) -> None:
        super().note_step()
        if self._survival is not None:
            self._last = np.array(self.measured)

    def _let_go_of_ranks(self) -> None:
        super()._let_go_of_ranks()
        if self.trace is not None:
            self.topology.let_go(self.trace)  # which goes on
        self._drop()
        self._owns_backend = self._owns_topology = True  # those that are made now

    def _reconnect(self, topology: Topology) -> None:
        self.allreduce = self._make_backend(topology)
        super()._reconnect(topology)
        self._make_buffer()

    def _make_backend(self, topology: Topology) -> AllReduce:
        if isinstance(self._asked, str):
            return backend_for(self._asked, topology, self._update)
        assert self._asked is not None  # or it was refused
        return create(self._asked.name, topology, **self._asked.options)

    def _restore(self) -> None:
        taken = all_values(self._comm, self.steps, NEWEST)
        newest = max(taken)
        together(
            self._comm, partial(self._take_on, newest, sent(self._comm, self._held(), taken.index(newest), NEWEST))
        )

    def _held(self) -> dict[str, np.ndarray]:
        """What makes other ranks equal to this one."""
        held = {**self.replica.state(), MEASURED: self._last, RATES: np.array(self.replica.learning_rates)}
        return {name: np.asarray(array, order="C") for name, array in held.items()}

    def _take_on(self, steps: int, held: dict[str, np.ndarray]) -> None:
        """Local, and so done or not when a loss is heard of."""
        self.steps, self._last = steps, held.pop(MEASURED)
        self._measured[:] = self._last
        rates = held.pop(RATES).tolist()
        self.replica.load_state(held)
        if rates != self.replica.learning_rates:
            self.replica.learning_rates = rates
