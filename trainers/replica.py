"""Seam 2: what a framework gives a trainer. It knows arrays and no MPI."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from trainers.errors import ModelFileError
from trainers.files import model_file


class Replica(ABC):
    """One rank's copy of a model, with its loss and its optimizer.

    device: "cpu" or "cuda", where the gradients are.
    metrics: what `gradients` and `evaluate` measure; the loss comes first.
    gradient_length, gradient_dtype: the buffer that `bind` wants.
    essentials: names in `config` whose values a saved model must share to be restored here.

    x and y are NumPy arrays whose first axis is the sample; what the other axes mean is the replica's
    business. They are valid during a call only: the trainer fills the same memory again for the next batch.
    """

    device: str = "cpu"
    metrics: tuple[str, ...] = ("loss",)
    gradient_length: int
    gradient_dtype: str = "float32"
    essentials: tuple[str, ...] = ()

    @abstractmethod
    def bind(self, buffer: Any) -> None:
        """From now on, leave the gradients in `buffer`: 1-D, `gradient_length` elements, on `device`.

        A framework whose gradients can be views makes them views of it; others copy into it.
        """

    @abstractmethod
    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        """Overwrite the bound buffer with `share` times the gradient of the mean loss over these rows.

        share: these rows as a fraction of the global batch. The SUM of the buffers of all ranks is then
            the gradient of the mean over the global batch, however unevenly the rows are divided. A
            replica scales where that is cheap, at the derivative of the loss, so nothing is scaled later.

        There may be no rows: the buffer becomes zero then, and so do the values.
        Returns one number for each of `metrics`, means over these rows, as an array on `device` or a
        sequence; it is valid until the next call.
        """

    @abstractmethod
    def update(self) -> None:
        """Change the parameters by the gradients in the bound buffer. Equal input must give equal bits."""

    @abstractmethod
    def evaluate(self, x: np.ndarray, y: np.ndarray) -> Any:
        """One number for each of `metrics`, SUMS over these rows (at least one): sums of counts stay exact.

        Leaves the gradients alone.
        """

    @abstractmethod
    def predict(self, x: np.ndarray) -> np.ndarray:
        """One row of output for each row of `x`, on the host; no rows give an array of shape (0, ...)."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """All that must be equal on all ranks and is saved, on the host.

        "parameters" is the 1-D array of all trained parameters, in the order of the gradients; other
        names are the replica's own (optimizer state, statistics). No arrays of Python objects. They may be
        live views that training changes: copy what you keep.
        """

    @abstractmethod
    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take on what `state` returned, here or elsewhere. ModelFileError when it is of another model."""

    def config(self) -> dict[str, Any]:
        """What rebuilds this replica, for `save`; only what JSON can hold."""
        return {}

    def check(self, x: np.ndarray, y: np.ndarray | None) -> None:  # noqa: B027, a replica may take anything
        """Raise ArgumentError when the model can't be fed with such data; y is None for a prediction."""

    def save(self, path: str) -> None:
        """Write the model to `path` (.npz, no pickle), aside and then renamed."""
        model_file.write(path, type(self).__name__, self.config(), self.state())

    def restore(self, path: str) -> None:
        """Take on the state in `path`, which `save` wrote. Raises ModelFileError."""
        saved, state = model_file.read(path, type(self).__name__)
        here = self.config()
        for name in self.essentials:
            if saved.get(name) != here[name]:
                raise ModelFileError(
                    f"{path} holds a model with {name}={saved.get(name)!r}, and this one has {name}={here[name]!r}"
                )
        self.load_state(state)
