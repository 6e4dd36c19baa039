"""The losses and metrics of an epoch's steps: kept where they were computed, looked at now and then."""

from typing import Any

import numpy as np

from allreduce.arrays import gpu
from trainers.errors import DivergedError

LOOK_EVERY = 32  # steps; looking makes the host wait for a GPU


class Meter:
    """One row of values a step, the loss first.

    device: where the values are, "cpu" or "cuda".
    """

    def __init__(self, metrics: tuple[str, ...], steps: int, dtype: str, device: str) -> None:
        self._metrics = metrics
        self._rows = (gpu.cupy() if device == "cuda" else np).empty((steps, len(metrics)), dtype)
        self._steps = steps
        self._seen = 0

    def note(self, step: int, values: Any, epoch: int) -> None:
        """Keep the values of one step of an epoch; every LOOK_EVERY steps, and at the end, look at the loss.

        Raises DivergedError, on all ranks since all have the same values.
        """
        if step == 0:
            self._seen = 0
        self._rows[step] = values
        if (step + 1) % LOOK_EVERY and step + 1 < self._steps:
            return
        losses = self._host(self._rows[self._seen : step + 1, 0])
        wrong = np.flatnonzero(~np.isfinite(losses))
        if wrong.size:
            raise _diverged(float(losses[wrong[0]]), epoch, self._seen + int(wrong[0]) + 1)
        self._seen = step + 1

    def means(self, weights: np.ndarray) -> dict[str, float]:
        """The means over an epoch's steps, weighted by the steps' rows."""
        values = weights @ self._host(self._rows).astype(np.float64) / weights.sum()
        return dict(zip(self._metrics, values.tolist(), strict=True))

    @staticmethod
    def _host(array: Any) -> np.ndarray:
        return array.get() if gpu.is_gpu_array(array) else array


def _diverged(loss: float, epoch: int, step: int) -> DivergedError:
    return DivergedError(
        f"the loss became {loss} in epoch {epoch}, step {step}: lower the learning rate, scale the features, "
        "or look for NaN and very large values in the data"
    )
