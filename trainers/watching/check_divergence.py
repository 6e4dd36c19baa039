"""CheckDivergence: compares the bits of the replicas every N steps."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from allreduce import notices
from trainers.arguments import integer
from trainers.checks import LEARNING_RATES, Compared, check_equal
from trainers.errors import ArgumentError
from trainers.replica import parameter_slices
from trainers.watching.callback import Callback, Logs


class CheckDivergence(Callback):
    """Compares all that must be equal on all ranks: parameters, optimizer state, learning rates. If some differ, all
    ranks raise the same DivergenceError, which names ranks and parameters. On all ranks or none.

    every: the number of steps between checks. Trainers with servers have equal parameters only at the end of an epoch;
        there the check follows each epoch.

    A check reads the state once (a CRC-32), and costs a message of 16 bytes. State of which there is one copy only
    (update="sharded", central storage) is left out; a notice at the beginning lists it. Raises ArgumentError on all
    ranks when the fit begins.
    """

    collective = True
    reads_batches = False

    def __init__(self, every: int = 100) -> None:
        self.every = every
        self._steps = 1  # of an epoch

    def __repr__(self) -> str:
        return f"CheckDivergence(every={self.every!r})"

    def set_params(self, params: dict[str, Any]) -> None:
        self._steps = params["steps"] or 0  # of a stream that are not known: each epoch is counted from its beginning

    def on_train_begin(self, logs: Logs | None = None) -> None:
        trainer = self.trainer
        wrong = integer(1).error("every", self.every)
        trainer.group.agree(repr(self), ArgumentError(f"CheckDivergence: {wrong}") if wrong else None)
        apart = trainer.strategy.owners.not_replicated()
        if apart:
            texts = [f"{name} ({why})" for name, why in apart.items()]
            notices.once(trainer.rank, f"CheckDivergence does not compare state without copies: {', '.join(texts)}")

    def between_steps(self, epoch: int, batch: int) -> None:
        # counted from the beginning of the fit, so that all ranks check after the same steps, also after a failure
        taken = epoch * self._steps + batch + 1
        if self.trainer.strategy.mirrors == "step" and taken % self.every == 0:
            self._check(f"after step {batch + 1} of epoch {epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.trainer.strategy.mirrors == "epoch":
            self.trainer.group.enter("CheckDivergence")
            self._check(f"after epoch {epoch + 1}")

    def _check(self, when: str) -> None:
        """Compare the replicas. Collective."""
        trainer = self.trainer
        read = partial(_compared, trainer.replica, trainer.strategy.owners.not_replicated())
        check_equal(trainer.group.comm, read, f"{when} ")


def _compared(replica: Any, apart: Mapping[str, str]) -> Compared:
    """Return the arrays and texts to compare: the state, each parameter by its name, and the learning rates."""
    held: dict[str, np.ndarray | str] = {}
    for name, array in sorted(replica.state().items()):
        if name in apart:
            continue
        if name == "parameters":
            slices = parameter_slices(replica)
            held |= {part: array[each] for part, each in zip(replica.shapes, slices, strict=True)}
            if (rest := array[slices[-1].stop if slices else 0 :]).size:
                held[name] = rest
        else:
            held[name] = np.asarray(array)
    if LEARNING_RATES not in apart:
        held[LEARNING_RATES] = ", ".join(map(repr, replica.learning_rates))
    return held
