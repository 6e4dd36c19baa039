"""Accumulate the metrics of an epoch: Meter for steps that all ranks take together, Tally for ranks that compute on
their own."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.transport.control import combine, on_all_ranks, together
from trainers.errors import DivergedError
from trainers.watching.callback import Callback, Logs

CHECK_EVERY = 32  # steps between checks of the loss, for which the host waits for a GPU


def diverged(what: str) -> DivergedError:
    """Return the error of a fit that has diverged. what: which value became NaN or infinite, and where."""
    return DivergedError(
        f"{what}: lower the learning rate, scale the features, or look for NaN and very large values in the data"
    )


class Meter(Callback):
    """Stores the metrics of every step of an epoch, and checks that the loss is finite.

    The values stay on their device and are read every CHECK_EVERY steps. Rows that took part in no update are in no
    mean.

    metrics: the names of the first elements of `measured`; the next element is at least 1 if the step was left out.
    sizes: returns the rows of each batch of the epoch; of a stream those of the batches that are known so far.
    device: where the values are, "cpu" or "cuda".
    """

    reads_batches = reads_model = False

    def __init__(self, metrics: tuple[str, ...], sizes: Callable[[], np.ndarray], dtype: np.dtype, device: str) -> None:
        self._metrics, self._sizes = metrics, sizes
        self._arrays = gpu.cupy() if device == "cuda" else np
        self._rows = self._arrays.empty((len(sizes()), len(metrics) + 1), dtype)
        self._done = self._seen = self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._done, self._seen, self._epoch = 0, 0, epoch + 1

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Store the values; every CHECK_EVERY steps check the loss, as `check_loss` does."""
        self._make_room(batch + 1)
        self._rows[batch] = self.trainer.measured[: len(self._metrics) + 1]
        self._done = batch + 1
        if self._done % CHECK_EVERY == 0:
            self.check_loss()

    def _make_room(self, steps: int) -> None:
        """Grow the memory if it has fewer than `steps` rows: the batches of a stream are not known in advance."""
        if steps > len(self._rows):
            grown = self._arrays.empty((2 * steps, self._rows.shape[1]), self._rows.dtype)
            grown[: self._done] = self._rows[: self._done]
            self._rows = grown

    def _host(self, first: int = 0) -> np.ndarray:
        """The rows of the epoch so far, from `first` on, on the host."""
        return gpu.on_host(self._rows[first : self._done])

    def last(self) -> np.ndarray:
        """The values of the last step of the epoch that was taken, on the host; NaN where none was."""
        rows = self._host()
        taken = rows[rows[:, -1] < 1]
        return taken[-1, :-1] if len(taken) else np.full(len(self._metrics), np.nan)

    def values(self) -> np.ndarray:
        """The values of the epoch's steps so far, and the part of each step's rows that took part in no update, (steps,
        metrics + 1), a copy on the host. A loss that became NaN is given as infinity."""
        rows = np.array(self._host())
        rows[np.isnan(rows[:, 0]), 0] = np.inf
        return rows

    def load_values(self, values: np.ndarray) -> None:
        """Load the values of the first steps of an epoch, as `values` returns them."""
        self._make_room(len(values))
        self._done = self._seen = len(values)
        gpu.write(self._rows[: self._done], values.astype(self._rows.dtype))

    def check_all(self) -> None:
        """Check all losses of this epoch again, as `check_loss` does."""
        self._seen = 0
        self.check_loss()

    def check_loss(self) -> None:
        """Raise DivergedError if the loss of a step since the last check is not finite. All ranks raise it, because all
        have the same values."""
        rows = self._host(self._seen)
        wrong = np.flatnonzero(~np.isfinite(rows[:, 0]) & (rows[:, -1] < 1))
        if wrong.size:
            step = self._seen + int(wrong[0]) + 1
            error = diverged(f"the loss became {float(rows[wrong[0], 0])} in epoch {self._epoch}, step {step}")
            raise on_all_ranks(error, self.trainer.group.comm)  # the loss is the global batch's: all ranks raise it now
        self._seen = self._done

    @property
    def rows(self) -> int:
        """The rows of the batches of this epoch so far."""
        return int(self._sizes()[: self._done].sum())

    @property
    def taken(self) -> int:
        """The number of this epoch's steps so far that were taken, also before a checkpoint."""
        return int((self._host()[:, -1] < 1).sum())

    def means(self) -> dict[str, float]:
        """The means over the rows of this epoch's steps so far that took part in an update; NaN if there are none."""
        rows = self._host().astype(np.float64)
        taken = rows[:, -1] < 1
        weights = (self._sizes()[: self._done] * (1 - rows[:, -1]))[taken]
        values = weights @ rows[taken, :-1] / weights.sum() if taken.any() else np.full(len(self._metrics), np.nan)
        return dict(zip(self._metrics, values.tolist(), strict=True))


class NormMeter(Callback):
    """Adds up a number of each step of an epoch, such as the norm of the gradients, as this rank knows it. name: in
    logs."""

    reads_batches = reads_model = False

    def __init__(self, name: str = "grad_norm") -> None:
        self.name = name
        self._epoch = -1
        self._sums: tuple[Any, int] = 0.0, 0  # the sum of the norms, perhaps on the GPU, and their number
        self._before = self._sums  # without the last step that ended
        self.last: Any = math.nan  # the norm of the last step, a number, perhaps on the GPU
        self._pending = False  # whether `last` is of a step that has not ended

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._sums = self._before = 0.0, 0

    def set(self, norm: Any) -> None:
        """Set the norm of a step, a number, perhaps on the GPU. It counts when the step ends."""
        self.last, self._pending = norm, True

    @property
    def of_step(self) -> Any:
        """The norm of the step that is about to end; None if it was left out."""
        return self.last if self._pending else None

    def on_train_batch_end(self, batch: int = 0, logs: Logs | None = None) -> None:
        """Count the norm of a step that has ended, if there is one."""
        self._before = self._sums
        if self._pending:
            self._sums, self._pending = (self._sums[0] + self.last, self._sums[1] + 1), False

    def step_back(self) -> None:
        """Forget the last step, which will be taken once more."""
        self._sums, self._pending = self._before, False

    def sums(self) -> np.ndarray:
        """The sum of the norms, and their number."""
        return np.array([float(self._sums[0]), self._sums[1]])

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "sums": self.sums()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._epoch = int(state["epoch"])
        self._sums = self._before = float(state["sums"][0]), int(state["sums"][1])


class RoundMeter(Meter):
    """A Meter for ranks that take steps on their own, and add up the metrics of several steps at once."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Does nothing: `add` stores the values."""

    def add(self, sums: np.ndarray) -> None:
        """Store the values of the next steps. Local, the same on all ranks.

        sums: (steps, metrics + 2): the sums over the ranks of each metric times the rank's share of the batch, of these
            shares, and of the shares of all ranks. A rank that discarded its rows is in the last sum alone.
        """
        self._make_room(self._done + len(sums))
        taken, rows = sums[:, -2], self._rows[self._done : self._done + len(sums)]
        with np.errstate(invalid="ignore", divide="ignore"):
            rows[:, :-1] = sums[:, :-2] / taken[:, np.newaxis]
        rows[:, -1] = np.where(taken > 0, 1 - taken / np.maximum(sums[:, -1], taken), 1)
        self._done += len(sums)


class Tally(Callback):
    """Sums the metrics over the rows that this rank computes; `collect` sums them over all ranks.

    metrics: their names; the loss comes first.
    """

    reads_batches = reads_model = False

    def __init__(self, metrics: tuple[str, ...]) -> None:
        self._metrics = metrics
        self._sums = np.zeros(len(metrics) + 1)  # the rows come last
        self._totals = self._sums  # of all ranks
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._epoch == epoch + 1:  # the epoch continues after a failure
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
        combine(comm, totals, "sum the metrics of an epoch")
        self._totals = totals

    def _check(self, finite: bool) -> None:
        if not finite:
            raise diverged(f"parameters became NaN or infinite in epoch {self._epoch}")

    def check_loss(self) -> None:
        """Does nothing: `add` checks every loss."""

    def check_all(self) -> None:
        """Does nothing: a rank keeps the error that `add` has raised."""

    @property
    def rows(self) -> int:
        """The rows of the epoch, of all ranks."""
        return round(self._totals[-1])

    def means(self) -> dict[str, float]:
        """Means over the rows of the epoch; NaN when there were none."""
        with np.errstate(invalid="ignore"):
            return dict(zip(self._metrics, (self._totals[:-1] / self._totals[-1]).tolist(), strict=True))
