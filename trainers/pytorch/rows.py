"""Counts the rows of all ranks in a step, so that gradients are means over rows, not over ranks."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.call.queue import Future
from allreduce.errors import OptionError
from allreduce.transport.control import on_all_ranks, raise_together
from allreduce.transport.wait import waiting
from trainers.arguments import is_number

Submit = Callable[[Callable[[], object]], Future]
DIFFERENT = (
    "the learning rates of the ranks differ in this step. A rank that waits in join() does not step its schedulers: "
    "bring them up to date after join(); docs/api/optimizer_join.md says how"
)
CLOSE = 1e-10  # rounding of sums over the ranks
NO_ROWS = "no rank has rows in this step: rows(0) was called on all ranks; leave out the step on all of them"


def rows_error(number: Any) -> OptionError | None:
    """Return the error if `number` is no number of rows, or None. Local."""
    if is_number(number) and number >= 0:
        return None
    return OptionError(f"rows() takes the number of rows of this rank's batch, a number >= 0, got {number!r}")


def combined(
    comm: MPI.Intracomm, numbers: np.ndarray, error: Exception | None, what: str, op: MPI.Op = MPI.MAX
) -> np.ndarray:
    """All-reduce small numbers in place, the first of which tells whether a rank has an error; return the others.
    Collective. error: this rank's, raised on all ranks."""
    numbers[0] = error is not None
    if comm.size > 1:
        with waiting(comm, what):
            comm.Allreduce(MPI.IN_PLACE, numbers, op)
    if numbers[0]:
        raise_together(comm, error)
    return numbers[1:]


class Rows:
    """The rows of one step on all ranks. They are added up in the queue, before gradients are averaged.

    submit: submits a function to the queue. comm: a communicator, used only in the queue.
    mine: the number of rows of this rank's batch, or any weight >= 0. If the ranks' numbers differ, each rank
        multiplies its gradients by `weight` before they are averaged.
    active: False when this rank has no batches left (`join`). rates: the learning rates of this rank; all active
        ranks must have the same.
    """

    def __init__(self, submit: Submit, comm: MPI.Intracomm, mine: float, active: bool, rates: str) -> None:
        self._comm, self._mine, self._active = comm, mine, active
        self._rate = float(zlib.crc32(rates.encode())) if active else 0.0
        self._total, self._ranks = 0.0, 0
        self._error = rows_error(mine)
        self._future = submit(self._count)

    def wait(self) -> None:
        """Wait for the numbers of all ranks. Raises an OptionError on all ranks when one is not a number >= 0, or when
        the rates of active ranks differ."""
        self._future.wait()

    def ranks(self) -> int:
        """The number of ranks that still have batches; waits for their answers."""
        self.wait()
        return self._ranks

    @property
    def weight(self) -> float:
        """The factor that makes the mean over the ranks the mean over all rows. Known after `wait`."""
        return self._mine * self._comm.size / self._total if self._total else 0.0

    def _count(self) -> None:
        mine = self._mine if self._error is None else 0
        numbers = np.array([0, mine, self._active, self._rate, self._rate**2], np.float64)
        total, ranks, rates, squares = combined(self._comm, numbers, self._error, "count the rows of a step", MPI.SUM)
        self._total, self._ranks = float(total), int(ranks)
        variance = ranks * squares - rates**2  # times ranks**2; 0 if all active ranks have the same
        if abs(variance) > CLOSE * rates**2:
            raise on_all_ranks(OptionError(DIFFERENT), self._comm)
        if self._ranks and not self._total:
            raise on_all_ranks(OptionError(NO_ROWS), self._comm)
