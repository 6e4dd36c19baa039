"""CheckDivergence: compare the bits of the replicas every so many steps."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.transport.control import root_value
from trainers.checks import LEARNING_RATES, MAJORITY, Compared, Source, check_equal, refusal
from trainers.errors import ArgumentError
from trainers.state.adopt import mirror
from trainers.watching.callback import Callback, Logs


class CheckDivergence(Callback):
    """Compares all that must be equal on all ranks: parameters, optimizer state, learning rates. On all ranks or none.

    every: how many steps lie between two checks. Where the ranks have the same parameters only when an epoch ends
        (trainers with servers), they are compared after each epoch.
    on_divergence: "raise": all ranks raise the same DivergenceError, which names ranks and parameters. "copy": say so,
        give all of them the replica of one rank again, and go on.
    source: whose replica is copied: "majority", the one that most ranks have (of the lowest rank where several are as
        frequent), or a rank of those with which the fit begins. When that rank is lost and the others go on, it is the
        majority from then on, which a line says.

    A check costs one reading of the state (a CRC-32, some 4 GB/s) and a message of 16 bytes. With update="sharded" and
    central storage, what the ranks have in common, or each a slice of, has no copies that could differ; it is left
    out, which is said when the training begins.

    Raises ArgumentError on all ranks when the fit begins.
    """

    collective = True
    reads_batches = False

    def __init__(self, every: int = 100, on_divergence: str = "raise", source: str | int = MAJORITY) -> None:
        self.every, self.on_divergence, self.source = every, on_divergence, source
        self._source: Source | None = None  # in a fit
        self._joins = False  # this rank joins, and has not heard the others' source yet
        self.copies = 0  # how often replicas were made equal again
        self._steps = 1  # of an epoch

    def set_params(self, params: dict[str, Any]) -> None:
        self._steps = params["steps"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        trainer = self.trainer
        what = f"CheckDivergence(every={self.every!r}, on_divergence={self.on_divergence!r}, source={self.source!r})"
        self._joins = trainer.rank < 0
        wrong = refusal(self.every, self.on_divergence, self.source, None if self._joins else trainer.size)
        trainer.group.agree(what, ArgumentError(f"CheckDivergence: {wrong}") if wrong else None)
        self._source = Source(MAJORITY if self._joins else self.source, trainer.group.comm)
        apart = trainer.strategy.apart()
        if apart:
            texts = [f"{name} ({why})" for name, why in apart.items()]
            notices.once(trainer.rank, f"CheckDivergence leaves out what can't differ: {', '.join(texts)}")

    def on_ranks_change(self) -> None:
        if self._source is not None:
            self._source.move(self.trainer.group.comm)
        self._joins = False

    def state(self) -> dict[str, Any]:
        number = None if self._source is None else self._source.number
        return {"source": -1 if number is None else number}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        if self._joins and self._source is not None and state["source"] >= 0:  # a resumed fit has ranks of its own
            self._source.number = int(state["source"])

    def between_steps(self, epoch: int, batch: int) -> None:
        taken = epoch * self._steps + batch + 1  # counted so, all ranks come to it, also when one was lost
        if self.trainer.strategy.mirrors == "step" and taken % self.every == 0:
            self._check(f"after step {batch + 1} of epoch {epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.trainer.strategy.mirrors == "epoch":
            self.trainer.group.enter("CheckDivergence")
            self._check(f"after epoch {epoch + 1}")

    def _check(self, when: str) -> None:
        """Compare the replicas, and do what `on_divergence` says. Collective."""
        assert self._source is not None
        trainer = self.trainer
        read = partial(_compared, trainer.replica, trainer.strategy.apart())
        answer = self.on_divergence, self._source.rank
        self.copies += check_equal(trainer.group.comm, read, *answer, self._copy, f"{when} ")

    def _copy(self, root: int) -> None:
        """Give all ranks the replica of one. Collective."""
        trainer = self.trainer
        own = [*map(float, trainer.replica.learning_rates)]
        rates = root_value(trainer.group.comm, own, "take on learning rates", root)
        if rates and trainer.rank != root:
            trainer.replica.learning_rates = rates
        mirror(trainer.strategy, root=root)


def _compared(replica: Any, apart: Mapping[str, str]) -> Compared:
    """What must be equal on all ranks by name: the state, its parameters one by one, and the learning rates."""
    held: dict[str, np.ndarray | str] = {}
    for name, array in sorted(replica.state().items()):
        if name in apart:
            continue
        if name == "parameters":
            held |= _cut(array, replica.shapes())
        else:
            held[name] = np.asarray(array)
    if LEARNING_RATES not in apart:
        held[LEARNING_RATES] = ", ".join(map(repr, replica.learning_rates))
    return held


def _cut(parameters: np.ndarray, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """The flat parameters by the names that their replica has for them; those without one by "parameters"."""
    held, start = {}, 0
    for name, shape in shapes.items():
        end = start + int(np.prod(shape))
        held[name] = parameters[start:end]
        start = end
    return held | ({"parameters": parameters[start:]} if start < parameters.size else {})
