"""Builds ONNX graphs node by node. Needs the package onnx (the extra "export"), which is imported on use."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trainers.errors import ExportError, needing

OPSETS = {"": 18, "ai.onnx.ml": 3}  # of graphs that are built here
IR_VERSION = 9  # that belongs to these opsets
FREE = "batch"  # the name of the axis of the rows
INSTALL = 'pip install ".[export]" in the checkout'


def need_onnx() -> Any:
    """Return the package onnx. Raises ExportError if it is not installed."""
    with needing(f"an export needs onnx, which can't be imported ({{}}): {INSTALL}", ExportError):
        import onnx
    return onnx


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Context manager: these loggers ("" for all) log only errors. Exporters warn of packages that are not used."""
    levels = {name: logging.getLogger(name or None).level for name in loggers}
    try:
        for name in levels:
            logging.getLogger(name or None).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name or None).setLevel(level)


class Graph:
    """An ONNX graph that grows. nodes, constants: in the order in which they were added.

    prefix: of the names that it gives to values.
    """

    def __init__(self, prefix: str = "") -> None:
        self._onnx = need_onnx()
        self._prefix = prefix
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, array: Any) -> str:
        """Add a constant: an array of numbers or of texts. Returns its name."""
        array, name = np.asarray(array), f"{self._prefix}constant_{len(self.constants)}"
        if array.dtype.kind in "UO":
            texts = [str(each).encode() for each in array.reshape(-1).tolist()]
            made = self._onnx.helper.make_tensor(name, self._onnx.TensorProto.STRING, array.shape, texts)
        else:
            made = self._onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        self.constants.append(made)
        return name

    def add(self, operator: str, *inputs: Any, domain: str = "", output: str = "", **attributes: Any) -> str:
        """Add a node with one output; returns the name of the output.

        inputs: names of values, and arrays, which become constants. output: the name; "" for a new one.
        """
        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        made = output or f"{self._prefix}{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(operator, names, [made], domain=domain, **attributes))
        return made

    def cast(self, value: str, dtype: Any) -> str:
        """Add a conversion to a dtype of NumPy; returns the name of the output."""
        return self.add("Cast", value, to=self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def value(self, name: str, dtype: Any, shape: Sequence[Any]) -> Any:
        """Return the description of an input or an output. dtype: of NumPy, or str. shape: None where it is unknown."""
        texts = self._onnx.TensorProto.STRING
        kind = texts if dtype is str else self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self._onnx.helper.make_tensor_value_info(name, kind, shape)

    def model(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Return the graph as an onnx.ModelProto. inputs, outputs: results of `value`."""
        helper = self._onnx.helper
        graph = helper.make_graph(self.nodes, "model", inputs, outputs, self.constants)
        opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
