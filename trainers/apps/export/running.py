"""Runs exported models by onnxruntime, on rows as `predict` takes them; compares their outputs with a replica's."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.apps.export.metadata import LABEL, PROBABILITIES, Exported
from trainers.data import Tree, leaves, row_count, sliced
from trainers.datasets.columns import Category, Columns
from trainers.errors import ExportError, explained, needing
from trainers.files.onnx_graph import INSTALL

SUM_TOLERANCE = 1e-3  # how far the probabilities of a row may be from 1 in sum, in 16-bit floats
QUIET = 4  # onnxruntime prints nothing: its errors are raised
NUMBERS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
           "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int8)": np.int8,
           "tensor(uint8)": np.uint8}  # fmt: skip
DTYPES = {**NUMBERS, "tensor(bool)": np.bool_, "tensor(string)": np.object_}


def need_onnxruntime() -> Any:
    """Return the package onnxruntime. Raises ExportError if it is not installed."""
    with needing(f"ONNX files are computed by onnxruntime, which can't be imported ({{}}): {INSTALL}", ExportError):
        import onnxruntime
    return onnxruntime


class Session:
    """A model in onnxruntime, on the CPU. It computes rows as `predict` takes them.

    model: a file, or its content. threads: more take the cores of other ranks. Raises ExportError without onnxruntime,
    and a dozen types of errors of onnxruntime's, as `run` does.

    inputs, outputs: onnxruntime's descriptions. metadata: texts by name. columns: of the table on which the model was
    trained, whose cells are its inputs; None, unless the user sets it.
    """

    def __init__(self, model: str | bytes, threads: int = 1) -> None:
        runtime = need_onnxruntime()
        options = runtime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads, options.inter_op_num_threads = QUIET, threads, 1
        self._session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = self._session.get_inputs(), self._session.get_outputs()
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        self.columns: Columns | None = None

    def feeds(self, x: Tree) -> dict[str, np.ndarray]:
        """Return rows as the inputs of the model. Rows of samples of any shape become flat, if the only input is."""
        if self.columns is not None:
            return cells_of(self.columns, x)
        found: dict[str, np.ndarray] = {}
        for each, array in zip(self.inputs, map(np.asarray, leaves(x)), strict=True):
            flat = len(self.inputs) == 1 and len(each.shape) == 2 and array.ndim != 2
            rows = array.reshape(len(array), math.prod(array.shape[1:])) if flat else array
            found[each.name] = np.ascontiguousarray(rows, DTYPES.get(each.type, np.float32))
        return found

    def run(self, x: Tree, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the outputs of these names for rows. The others are not computed."""
        return dict(zip(names, self._session.run(names, self.feeds(x)), strict=True))


def softmax(values: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits, over the last axis."""
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def are_probabilities(outputs: np.ndarray) -> bool:
    """Whether the outputs of each row are probabilities of classes."""
    return bool((outputs >= 0).all() and (np.abs(outputs.sum(axis=-1) - 1) < SUM_TOLERANCE).all())


def cells_of(columns: Columns, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the cells of a table's rows by the names of the columns: numbers (NaN if missing), and texts.

    x: features.
    """
    found = {}
    for column, values in zip(columns.columns, columns.values_of(x), strict=True):
        if isinstance(column, Category):
            values = np.array(["", *column.values], np.object_)[values]
        found[column.name] = values
    return found


def as_in_table(columns: Columns | None, x: Tree) -> Tree:
    """Return features as the nearest cells of a table have them; without columns, x itself."""
    if columns is None:
        return x
    return columns.features_of(columns.values_of(x), lambda row: f"row {row}")


def sample(x: Tree, most: int, seed: int = 0) -> np.ndarray:
    """Return the places of at most so many rows, drawn from all rows, in order."""
    rows = row_count(x)
    return np.sort(np.random.default_rng(seed).choice(rows, min(most, rows), replace=False, shuffle=False))


def compared(session: Session, about: Exported, x: Tree, outputs: Tree, tolerance: float) -> float:
    """Return the largest difference between the file's outputs and a replica's, for all rows at once and for one alone.
    Raises ExportError if it is above the tolerance, relative to the largest output if that is above 1.

    outputs: of the replica for x; of a classifier the probabilities.
    """
    expected = [np.asarray(each) for each in leaves(outputs)]
    if not all(np.isfinite(each).all() for each in expected):
        raise ExportError(
            "the model's outputs are not finite for the rows on which the export is checked: has it diverged?"
        )
    worst = 0.0
    for rows in sorted({row_count(x), 1}):
        with explained(ExportError, "onnxruntime can't run the exported model"):
            found = session.run(sliced(x, slice(rows)), [each.name for each in session.outputs])
        given = [found[PROBABILITIES]] if about.classifies else found.values()
        worst = max([worst, *(_difference(one, other[:rows]) for one, other in zip(given, expected, strict=True))])
        if about.classifies:
            _check_classes(about, found[LABEL], expected[0][:rows], tolerance)
    if not worst <= tolerance:
        raise ExportError(
            f"the exported model differs from this one by {worst:.3g} on {row_count(x)} rows; at most {tolerance:g} is "
            "accepted: does the model compute something else in training, or with other numbers of rows?"
        )
    return worst


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        raise ExportError(f"the exported model returns the shape {one.shape}, and this one {other.shape}")
    apart = np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0)
    return float(apart / max(1.0, np.abs(other.astype(np.float64)).max(initial=0)))


def _check_classes(about: Exported, labels: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Raise ExportError if a label is not that of the largest probability, or of one as large within the tolerance."""
    names = np.array(about.classes or range(expected.shape[1]), object)
    close = expected >= expected.max(axis=1, keepdims=True) - 2 * tolerance
    wrong = np.flatnonzero(~(close & (names[None] == labels[:, None])).any(axis=1))
    if len(wrong):
        row = int(wrong[0])
        right = names[expected[row].argmax()]
        raise ExportError(f"the exported model answers {labels[row]!r} for a row, and this one {right!r}")
