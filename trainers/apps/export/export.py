"""write: a replica as an ONNX file, checked by onnxruntime before it replaces the file that was there. No MPI."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from allreduce.files import writable
from trainers.apps.export import graph
from trainers.apps.export.metadata import Exported
from trainers.apps.export.running import (
    Session,
    are_probabilities,
    as_in_table,
    compared,
    need_onnxruntime,
    sample,
    softmax,
)
from trainers.arguments import FLAG, require
from trainers.data import Tree, row_count, sliced
from trainers.errors import ArgumentError, ExportError, as_error, explained
from trainers.files.model_file import replacing
from trainers.files.onnx_graph import need_onnx
from trainers.replica import Replica

LARGEST = 2**31 - 2**24  # bytes of the constants: protobuf writes less than 2 GiB in all
CHECKED = 256  # rows on which a file is compared with the replica
DRAWN = 32
CLOSE = {"float16": 5e-3, "bfloat16": 4e-2}  # of models that compute in 16 bits; the file computes in float32
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal, in PyTorch's errors
CLOSEST = 1e-5  # the largest difference of others


def write(
    path: str,
    replica: Replica,
    x: Tree | None,
    *,
    classes: Sequence[str] | None = None,
    logits: bool = False,
    average: bool = False,
) -> Exported:
    """Write a replica's model to `path`, and return a description of the file. Local. Raises ExportError.

    x: rows as `predict` takes them; None for the replica's own.
    classes: the names of the classes; None for those of the table. logits: whether the outputs are logits of classes,
        for a replica that does not say so. average: whether the parameters are now those of the moving average.
    """
    check_path(path)
    need_onnx()
    need_onnxruntime()
    x = replica.drawn_rows(DRAWN) if x is None and replica.drawn_rows else x
    if x is None or not row_count(x):
        raise ArgumentError(f"export: there are no rows on which this {type(replica).__name__} can be checked: give x")
    if replica.columns is not None and isinstance(x, tuple | dict):
        raise ArgumentError("export: a model with the columns of a table takes one array as x, not several")
    rows = as_in_table(replica.columns, sliced(x, sample(x, CHECKED)))
    outputs = replica.predict(rows)
    about, is_logits = _described(replica, outputs, classes, logits)
    core = _core(replica, rows)
    model = graph.finished(graph.add_softmax(core) if is_logits else core, about, rows, outputs)
    del core
    tolerance = CLOSE.get(replica.config.get("precision", replica.gradient_dtype), CLOSEST)
    expected = softmax(outputs.astype(np.float64)) if is_logits else outputs
    size = sum(len(each.raw_data) for each in model.graph.initializer)
    if size > LARGEST:
        raise ExportError(
            f"the model has {size:,} bytes, and an ONNX file holds less than 2 GiB: export it by its framework, which "
            "writes a second file beside it"
        )
    with explained(ExportError, "onnxruntime does not take the exported model"):
        session = Session(model.SerializeToString())
    session.columns = about.columns
    difference = compared(session, about, rows, expected, tolerance)
    about = replace(about, average=average, rows=row_count(rows), difference=difference)
    del model.metadata_props[:]
    need_onnx().helper.set_model_props(model, about.as_properties())
    with as_error(ExportError, f"the export can't be written to {path}"), replacing(path) as file:
        file.write(model.SerializeToString())
    return about


def check_path(path: str) -> None:
    """Raise ExportError if no file can be written to `path`."""
    if not isinstance(path, str) or not writable(path):
        raise ExportError(
            f"the export can't be written to {path!r}: give a file, in a folder that exists and is writable"
        )


def _described(replica: Replica, outputs: Tree, classes: Sequence[str] | None, logits: bool) -> tuple[Exported, bool]:
    """Return the description of the file, and whether it needs a softmax: only if the replica or the user says that
    its outputs are logits of classes. Other outputs are never changed, so the file answers as `predict` does."""
    kind = type(replica).__name__
    require(FLAG.error("export: logits", logits))
    if logits and replica.scores == "probabilities":
        raise ArgumentError(f"export: logits=True, and the outputs of this {kind} are probabilities; leave it out")
    width = outputs.shape[1] if isinstance(outputs, np.ndarray) and outputs.ndim == 2 else 0
    if width < 2 and (classes is not None or logits):
        raise ArgumentError(
            f"export: a classifier has two outputs for each row, or more, and this {kind} has {width or 'several'}: "
            "leave out classes and logits, and the file answers as predict does"
        )
    learned = () if replica.columns is None else replica.columns.classes
    names = learned if classes is None else tuple(map(str, classes))
    if classes is not None and (len(names) != width or len({*names}) < width or isinstance(classes, str)):
        raise ArgumentError(
            f"export: classes must be {width} different names, one for each output of a row, and are {classes!r}"
        )
    known = "logits" if logits else replica.scores or ("probabilities" if width and are_probabilities(outputs) else "")
    if classes is not None and not known:
        raise ArgumentError(
            f"export: it is not known whether the outputs of this {kind} are logits of the classes, and they are no "
            "probabilities: give logits=True if a softmax makes probabilities of them, or leave out classes"
        )
    classifies = width > 0 and bool(known) and bool(replica.scores or logits or len(names) == width)
    about = Exported(kind, names if classifies and len(names) == width else (), classifies, replica.columns)
    return about, classifies and known == "logits"


def _core(replica: Replica, rows: Tree) -> Any:
    """Return the replica's graph. Raises ExportError, which names what a framework can't convert."""
    if replica.to_onnx is None:
        raise ExportError(
            f"a {type(replica).__name__} has no export to ONNX; NumpyNetwork, TorchReplica, JaxReplica and "
            "KerasReplica have one, and a replica of your own needs a method to_onnx(x)"
        )
    two = sliced(rows, np.arange(2) % row_count(rows))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return replica.to_onnx(two)
    except ExportError:
        raise
    except Exception as error:  # whatever a framework raises
        raise ExportError(f"this {type(replica).__name__} can't be exported: {_causes(error)}") from error


def _causes(error: BaseException) -> str:
    """Return an error and what caused it as text, the cause first: it names the operator."""
    texts: list[str] = []
    found: BaseException | None = error
    while found is not None and len(texts) < 5:
        lines = [line.strip() for line in COLOURS.sub("", str(found)).splitlines() if line.strip()]
        texts.insert(0, f"{type(found).__name__}: {lines[0] if lines else ''}")
        found = found.__cause__
    return "; ".join(texts)
