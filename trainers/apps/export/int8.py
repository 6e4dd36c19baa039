"""Converts the matrices of an exported model to 8-bit integers, by onnxruntime's static quantisation."""

import os
import tempfile
from typing import Any

import numpy as np

from trainers.apps.export.running import Session, batches_of, sample, taken
from trainers.data import Tree
from trainers.errors import ExportError
from trainers.files.onnx_graph import need_onnx, quiet

OPERATORS = ["MatMul", "Gemm", "Conv"]
CALIBRATED = 512  # rows on which the ranges are measured


class _Reader:
    """Gives the inputs of batches, one after the other, as onnxruntime's calibration asks for them."""

    def __init__(self, session: Session, x: Tree) -> None:
        self._feeds = iter([session.feeds(part) for part in batches_of(x)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def quantized(model: Any, session: Session, x: Tree, large: bool = False) -> Any:
    """Return a model, an onnx.ModelProto, with matrices of 8-bit integers. Raises ExportError.

    session: of `model`. x: training rows; the ranges of activations are measured on a sample of them.
    large: whether one file can't hold the model.
    """
    from onnxruntime import quantization

    onnx = need_onnx()
    rows = taken(x, sample(x, CALIBRATED))
    kinds = {node.op_type for node in model.graph.node}
    if not kinds & {*OPERATORS}:
        raise ExportError(f"int8: the graph has no operator of {', '.join(OPERATORS)}, only {', '.join(sorted(kinds))}")
    with tempfile.TemporaryDirectory() as folder, quiet(""):
        path = os.path.join(folder, "model.onnx")
        try:
            quantization.quantize_static(
                model,
                path,
                _Reader(session, rows),
                op_types_to_quantize=OPERATORS,
                per_channel=True,
                reduce_range=True,  # else products may overflow on processors without VNNI
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                use_external_data_format=large,
            )
            return onnx.load(path)
        except Exception as error:  # of onnxruntime or onnx
            raise ExportError(f"int8: onnxruntime can't convert this model: {type(error).__name__}: {error}") from error
