"""Models that answer: a Model predicts rows. No MPI."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from trainers.apps.export.metadata import Exported
from trainers.apps.export.running import NUMBERS, Session, need_onnxruntime
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError, ModelFileError, explained
from trainers.replicas.numpy.network import NumpyNetwork

ENDINGS = (".npz", ".onnx")


class Model(ABC):
    """A loaded model. Not for several threads at a time.

    kind: the class of the saved model, or "onnx".
    shape: of a row of the input, without the number of rows; None stands for any number.
    dtype: of the input.
    columns: of the table on which the model was trained: `rows_of` makes rows of its cells; None for arrays.
    classes: the names of the outputs; () without names.
    members: the number of models whose answers are combined; 1 for a single model.
    outputs: the number of outputs of a row; None if it is not known.
    probabilities: whether `predict` is known to return the probabilities of classes.
    stamp: of the content of the file, see versions.load_whole; "" before.
    """

    kind: str
    shape: tuple[int | None, ...]
    dtype: np.dtype
    columns: Columns | None = None
    classes: tuple[str, ...] = ()
    members = 1
    outputs: int | None = None
    probabilities: bool = False
    stamp = ""

    @abstractmethod
    def check(self, rows: np.ndarray, y: None = None) -> None:
        """Raise ArgumentError if the model can't predict these rows. May run beside `predict` in another thread."""

    @abstractmethod
    def predict(self, rows: np.ndarray) -> np.ndarray:
        """Return the outputs, a new array of shape (rows, ...): probabilities if the model is a classifier."""

    def rows_of(self, cells: Sequence[Sequence[str]]) -> np.ndarray:
        """Return the rows of a table as the model takes them. cells: for each row its cells as text, in the order of
        the columns. Raises DataError, and ArgumentError for a model that was not trained on a table."""
        if self.columns is None:
            raise ArgumentError("this model was not trained on a table: give rows of numbers")
        if not cells:
            return np.empty((0, self.columns.features), np.float32)
        by_column = [list(column) for column in zip(*cells, strict=True)]
        return self.columns.encode(by_column, lambda row: f"row {row}")


class NetworkModel(Model):
    """A NumpyNetwork or CategoryNetwork. With a moving average of the parameters it predicts by that."""

    def __init__(self, network: NumpyNetwork) -> None:
        self._network = network
        self.kind = type(network).__name__
        self.shape = (int(network.features or network.sizes[0]),)
        self.dtype, self.outputs = np.dtype(np.float32), network.sizes[-1]
        self.columns = network.columns
        self.classes = () if network.columns is None else network.columns.classes
        self.probabilities = network.probabilities
        if network.average:
            network.use_average()

    def check(self, rows: np.ndarray, y: None = None) -> None:
        self._network.check(rows, None)

    def predict(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # the outputs show it
            return self._network.predict(rows)


class OnnxModel(Model):
    """An ONNX file, computed by onnxruntime in one thread, or in OMP_NUM_THREADS. Of several outputs the last one is
    taken that has numbers.

    The metadata of a file of `trainer.export` tell its columns and classes. A file of a table takes cells, made here
    of features.
    """

    kind = "onnx"

    def __init__(self, path: str) -> None:
        need_onnxruntime()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        with explained(ModelFileError, f"{path} is not an ONNX file, or it is damaged"):
            self._session = Session(path, int(threads) if threads.isdecimal() and int(threads) else 1)
        inputs, outputs, metadata = self._session.inputs, self._session.outputs, self._session.metadata
        numbers = [each.name for each in outputs if each.type in NUMBERS]
        widths = [each.shape[1] for each in outputs if each.type in NUMBERS and len(each.shape) == 2]
        self.outputs = widths[-1] if widths and isinstance(widths[-1], int) else None
        if Exported.wrote(metadata):
            about = Exported.read(path, metadata)
            self.columns, self.classes, self.probabilities = about.columns, about.classes, about.classifies
            self._session.columns = about.columns
        if self.columns is not None and numbers:
            self._output, self.dtype, self.shape = numbers[-1], np.dtype(np.float32), (self.columns.features,)
            return
        if len(inputs) != 1 or inputs[0].type not in NUMBERS or not numbers:
            found = ", ".join(f"{each.name}: {each.type}" for each in [*inputs, *outputs])
            raise ModelFileError(
                f"{path}: a model with one input and outputs of numbers is expected, and it has {found}"
            )
        self._output = numbers[-1]
        self.dtype = np.dtype(NUMBERS[inputs[0].type])
        self.shape = tuple(size if isinstance(size, int) else None for size in inputs[0].shape[1:])

    def check(self, rows: np.ndarray, y: None = None) -> None:
        own = rows.shape[1:]
        if len(self.shape) == 1 and len(own) != 1:
            own = (math.prod(own),)  # see Session.feeds
        fits = rows.ndim > 0 and len(own) == len(self.shape)
        fits = fits and all(size in (None, given) for size, given in zip(self.shape, own, strict=True))
        if rows.dtype.kind not in "iuf" or not fits:
            shape = ", ".join("any" if size is None else str(size) for size in self.shape)
            raise ArgumentError(f"x must be numbers of shape (rows, {shape}), not {rows.dtype} of shape {rows.shape}")
        with np.errstate(invalid="ignore"):
            if self.dtype.kind in "iu" and rows.dtype != self.dtype and (rows.astype(self.dtype) != rows).any():
                raise ArgumentError(f"x must be whole numbers that fit into {self.dtype}, as the model takes them")

    def predict(self, rows: np.ndarray) -> np.ndarray:
        with explained(ArgumentError, "onnxruntime can't compute the outputs of these rows"):
            return self._session.run(np.asarray(rows, self.dtype), [self._output])[self._output]
