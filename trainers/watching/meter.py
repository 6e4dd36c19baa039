"""The losses and metrics of an epoch: of the steps that all ranks take together, or summed by each rank alone."""

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.transport.control import combine, known, together
from trainers.errors import DivergedError
from trainers.watching.callback import Callback, Logs

LOOK_EVERY = 32  # steps; looking makes the host wait for a GPU


def diverged(what: str) -> DivergedError:
    """The error of a training that has diverged. what: became NaN or infinite, and where."""
    return DivergedError(
        f"{what}: lower the learning rate, scale the features, or look for NaN and very large values in the data"
    )


class Meter(Callback):
    """One row of values a step, the loss first: the trainer's `measured` after each step.

    The rows stay on the device where they were computed, and are looked at now and then. A step that all ranks have
    left out does not count: its row is NaN in `values`, and in no mean.

    metrics: the names of the first columns of `measured`; behind them is whether the step was left out.
    sizes: the rows of each batch of an epoch.
    device: where the values are, "cpu" or "cuda".
    """

    reads_batches = False

    def __init__(self, metrics: tuple[str, ...], sizes: np.ndarray, dtype: np.dtype, device: str) -> None:
        self._metrics, self._sizes = metrics, sizes
        self._rows = (gpu.cupy() if device == "cuda" else np).empty((len(sizes), len(metrics) + 1), dtype)
        self._done = self._seen = self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._done, self._seen, self._epoch = 0, 0, epoch + 1

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Keep the values; every LOOK_EVERY steps look at the loss. Raises DivergedError as `look` does."""
        self._rows[batch] = self.trainer.measured[: len(self._metrics) + 1]
        self._done = batch + 1
        if self._done % LOOK_EVERY == 0:
            self.look()

    def _host(self, first: int = 0) -> np.ndarray:
        """The rows of the epoch so far, from `first` on, on the host."""
        rows = self._rows[first : self._done]
        return rows.get() if gpu.is_gpu_array(rows) else rows

    def last(self) -> np.ndarray:
        """The values of the last step of the epoch that was taken, on the host; NaN where none was."""
        rows = self._host()
        taken = rows[rows[:, -1] == 0]
        return taken[-1, :-1] if len(taken) else np.full(len(self._metrics), np.nan)

    def values(self) -> np.ndarray:
        """The values of the epoch's steps so far, (steps, metrics), a copy on the host.

        NaN is a step that was left out; a loss that became NaN is infinite here.
        """
        rows = self._host()
        values, left_out = np.nan_to_num(rows[:, :-1], nan=np.inf, posinf=np.inf, neginf=-np.inf), rows[:, -1] > 0
        values[left_out] = np.nan
        return values

    def take_up(self, values: np.ndarray) -> None:
        """Go on with an epoch whose steps so far gave these `values`."""
        self._done = self._seen = len(values)
        rows = np.concatenate([values, np.isnan(values[:, :1])], axis=1).astype(self._rows.dtype)
        self._rows[: self._done] = rows if isinstance(self._rows, np.ndarray) else gpu.cupy().asarray(rows)

    def step_back(self) -> None:
        """Forget the last step, which will be taken once more."""
        self._done -= 1
        self._seen = min(self._seen, self._done)

    def look_again(self) -> None:
        """Look at all values of this epoch, as `look` does."""
        self._seen = 0
        self.look()

    def look(self) -> None:
        """Raise DivergedError, on all ranks since all have the same values, when a new loss is not finite."""
        rows = self._host(self._seen)
        wrong = np.flatnonzero(~np.isfinite(rows[:, 0]) & (rows[:, -1] == 0))
        if wrong.size:
            step = self._seen + int(wrong[0]) + 1
            error = diverged(f"the loss became {float(rows[wrong[0], 0])} in epoch {self._epoch}, step {step}")
            raise known(error, self.trainer.group.comm)  # it is the global batch's: all ranks find it in this step
        self._seen = self._done

    @property
    def rows(self) -> int:
        """The rows of the batches of this epoch so far."""
        return int(self._sizes[: self._done].sum())

    def means(self) -> dict[str, float]:
        """The means over this epoch's steps so far that were taken, weighted by their rows; NaN where none was."""
        rows = self._host().astype(np.float64)
        taken = rows[:, -1] == 0
        weights = self._sizes[: self._done][taken]
        values = weights @ rows[taken, :-1] / weights.sum() if taken.any() else np.full(len(self._metrics), np.nan)
        return dict(zip(self._metrics, values.tolist(), strict=True))


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
        """Add means over some rows, of a batch or a part of it. Raises DivergedError when the loss is not finite."""
        self._sums[:-1] += means * rows
        self._sums[-1] += rows
        if not np.isfinite(means[0]):
            raise diverged(f"the loss became {float(means[0])} in epoch {self._epoch}, step {step + 1}")

    def collect(self, comm: MPI.Intracomm, finite: bool) -> None:
        """Add up the sums of all ranks. Collective; DivergedError on all ranks when one of them is not `finite`.

        finite: whether the parameters that this rank has updated are finite.
        """
        together(comm, lambda: self._check(finite))
        totals = self._sums.copy()
        combine(comm, totals, "add up what an epoch has measured")
        self._totals = totals

    def _check(self, finite: bool) -> None:
        if not finite:
            raise diverged(f"parameters became NaN or infinite in epoch {self._epoch}")

    def look(self) -> None:
        """Nothing: every loss is looked at when it is added."""

    def look_again(self) -> None:
        """Nothing: a rank that has seen a loss that is not finite has kept the error."""

    @property
    def rows(self) -> int:
        """The rows of the epoch, of all ranks."""
        return round(self._totals[-1])

    def means(self) -> dict[str, float]:
        """Means over the rows of the epoch; NaN when there were none."""
        with np.errstate(invalid="ignore"):
            return dict(zip(self._metrics, (self._totals[:-1] / self._totals[-1]).tolist(), strict=True))
