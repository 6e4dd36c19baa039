"""What an epoch is measured by when its ranks do not take every step together: sums, added up when it is over."""

import numpy as np
from mpi4py import MPI

from allreduce.transport.control import combine, together
from trainers.errors import DivergedError
from trainers.watching.callback import Callback, Logs


class Tally(Callback):
    """Sums of the metrics over the rows that this rank has measured; after `collect` those of all ranks.

    metrics: their names; the loss comes first.
    """

    reads_batches = False

    def __init__(self, metrics: tuple[str, ...]) -> None:
        self._metrics = metrics
        self._sums = np.zeros(len(metrics) + 1)  # the rows come last
        self._totals = self._sums  # of all ranks
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._epoch == epoch + 1:  # it goes on, without a rank that was lost
            return
        self._sums[:], self._epoch = 0, epoch + 1
        self._totals = self._sums

    def add(self, means: np.ndarray, rows: float, step: int) -> None:
        """Means over some rows, of one batch or a part of it. Raises DivergedError when the loss is no number."""
        self._sums[:-1] += means * rows
        self._sums[-1] += rows
        if not np.isfinite(means[0]):
            raise DivergedError(
                f"the loss became {float(means[0])} in epoch {self._epoch}, step {step + 1}: lower the learning rate, "
                "scale the features, or look for NaN and very large values in the data"
            )

    def collect(self, comm: MPI.Intracomm, finite: bool) -> None:
        """Add up what the ranks have. Collective; DivergedError on all of them when one has lost its numbers.

        finite: whether the parameters that this rank has updated are numbers.
        """
        together(comm, lambda: self._check(finite))
        totals = self._sums.copy()
        combine(comm, totals, "add up what an epoch has measured")
        self._totals = totals

    def _check(self, finite: bool) -> None:
        if not finite:
            raise DivergedError(
                f"parameters became NaN or infinite in epoch {self._epoch}: lower the learning rate, scale the "
                "features, or look for NaN and very large values in the data"
            )

    def look(self) -> None:
        """Every loss is looked at when it is added."""

    def look_again(self) -> None:
        """Its ranks are others now: who has seen a loss that is no number has kept the error."""

    @property
    def rows(self) -> int:
        return round(self._totals[-1])

    def means(self) -> dict[str, float]:
        """Means over the rows of the epoch; NaN when there were none."""
        with np.errstate(invalid="ignore"):
            return dict(zip(self._metrics, (self._totals[:-1] / self._totals[-1]).tolist(), strict=True))
