"""CheckGradients: NaN and infinite gradients are found before they are averaged, and their rank is named."""

import math
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.arrays import dtypes, gpu
from allreduce.transport.control import known
from trainers import checks
from trainers.checks import Findings, Place, Problem
from trainers.errors import ArgumentError, NotFiniteError
from trainers.watching.callback import Callback, Logs


class CheckGradients(Callback):
    """Looks at every rank's own gradients in every step, sparse ones of `tables` too. Given on all ranks or on none.

    on_bad: "raise": all ranks raise the same NotFiniteError, which names the ranks that have brought gradients that
        are no numbers, and the parameters. "skip": say so, and leave the step out on all ranks: nothing is updated, it
        does not count in the means of its epoch (NaN where no step was taken), and a PyTorch module's buffers (batch
        norm's statistics) are as before the batch. Where steps are not taken together (trainers with servers that do
        not wait) the rank leaves its gradients out.

    Gradients that are too large for the dtype in which they are sent (65504 is the largest of compress="float16") count
    as those that are no numbers. Gradients that are numbers on every rank, but whose sum overflows, are told as that.
    It is counted by absolute values, since the order in which a backend adds them decides whether huge ones that cancel
    overflow. Costs a message of 16 bytes a step, and one reading of the gradients, a dot product: 1.1 ms for 10 million
    float32, whose average over two ranks takes 12.

    Raises ArgumentError on all ranks when the fit begins.
    """

    collective = agrees = True
    reads_batches = False

    def __init__(self, on_bad: str = "raise") -> None:
        self.on_bad = on_bad
        self.skipped = 0  # steps that were left out
        self._places: list[Place] = []  # of the dense gradients
        self._tables: list[Place] = []  # of the sparse ones

    def on_train_begin(self, logs: Logs | None = None) -> None:
        trainer, error = self.trainer, None
        if self.on_bad not in checks.ANSWERS:
            error = ArgumentError(f'CheckGradients: on_bad={self.on_bad!r} is unknown; use "raise" or "skip"')
        trainer.group.agree(f"CheckGradients(on_bad={self.on_bad!r})", error)
        trainer.replica.undoable |= self.on_bad == "skip"
        self._places = _places(trainer.replica)
        self._tables = [Place(each.name, 0, each.rows * math.prod(each.shape)) for each in trainer.replica.tables]

    def before_update(self, epoch: int, batch: int) -> bool:
        trainer, gradients = self.trainer, self.trainer.strategy.fresh_gradients
        own, dtype, sent = Findings(), dtypes.parse(trainer.replica.gradient_dtype), trainer.strategy.sent_dtype
        if gradients is not None:
            own.add(gradients, self._places, most=checks.most(dtype, sent))
        for number, (table, brought) in enumerate(zip(self._tables, trainer.strategy.fresh_rows, strict=True)):
            own.add_rows(table, len(self._places) + number, *brought)
        rows, norms = checks.exchange(trainer.group.comm, own)
        problem = None if rows is None else checks.told(rows, [*self._places, *self._tables], sent)
        if rows is None:
            problem = self._overflow(norms, dtype, sent)
        if problem is None:
            return False
        text = f"in epoch {epoch + 1}, step {batch + 1}, {problem.text}"
        if self.on_bad == "raise":
            raise known(NotFiniteError(f"{text}: {problem.advice}"), trainer.group.comm)
        self.skipped += 1
        if trainer.rank == 0:
            notices.log.warning("allreduce: %s; no rank takes this step", text)
        return True

    def _overflow(self, norms: float, own: np.dtype, sent: np.dtype) -> Problem | None:
        """What is wrong when every rank's gradients are numbers, and a sum of them may be none. Collective.

        norms: the sum of the ranks'. own, sent: the dtypes of gradients, and in which they are sent.
        """
        trainer = self.trainer
        if checks.may_overflow(norms, sent):
            length, gradients = trainer.replica.gradient_length, trainer.strategy.fresh_gradients
            if where := checks.overflowing(trainer.group.comm, gradients, self._places, length, sent):
                return checks.overflow_told(where, own, sent)
        for table, place, rows in zip(trainer.replica.tables, self._tables, trainer.strategy.fresh_rows, strict=True):
            dtype = dtypes.parse(table.dtype)
            if checks.may_overflow(norms, dtype):
                whole = _whole(place.size, *rows)
                if where := checks.overflowing(trainer.group.comm, whole, [place], place.size, dtype):
                    return checks.overflow_told(where, dtype, dtype)
        return None

    def unusable(self, gradients: Any) -> bool:
        own = Findings()
        own.add(gradients, self._places)
        if own.finite:
            return False
        rows = np.zeros((self.trainer.size, checks.COLUMNS), np.int64)
        rows[self.trainer.rank] = own.row()
        problem = checks.told(rows, self._places, self.trainer.strategy.sent_dtype)
        if self.on_bad == "raise":
            raise NotFiniteError(f"{problem.text}: {problem.advice}")
        self.skipped += 1
        notices.log.warning("allreduce: %s; it leaves them out", problem.text)
        return True


def _places(replica: Any) -> list[Place]:
    """Where the gradients of which parameter are; behind them may be what a replica averages beside."""
    places, start = [], 0
    for name, shape in replica.shapes().items():
        places.append(Place(name, start, int(np.prod(shape))))
        start += places[-1].size
    if start < replica.gradient_length:
        places.append(Place("statistics" if places else "parameters", start, replica.gradient_length - start))
    return places


def _whole(size: int, indices: Any, values: Any) -> np.ndarray:
    """The absolute values of a sparse gradient as a dense one, 1-D, of float64; a row may be there several times."""
    if gpu.is_gpu_array(values):
        indices, values = indices.get(), values.get()
    whole = np.zeros((size // max(1, math.prod(values.shape[1:])), *values.shape[1:]))
    np.add.at(whole, indices, np.abs(values.astype(np.float64)))
    return whole.reshape(-1)
