"""Modules as ONNX graphs, by PyTorch's own exporter. No MPI."""

import contextlib
import copy
import io
from typing import Any

import torch
from torch import nn

from trainers.data import Tree, mapped
from trainers.errors import ExportError
from trainers.files.onnx_graph import FREE, INSTALL, OPSETS


def converted(module: nn.Module, x: Tree) -> Any:
    """Return a module in evaluation mode as an onnx.ModelProto, in float32. x: rows, tensors on the CPU.

    The module itself is not changed. Raises ExportError without onnxscript, and the exporter's error for an operator
    that ONNX lacks.
    """
    try:
        import onnxscript  # noqa: F401, torch.onnx needs it
    except ImportError as error:
        raise ExportError(f"torch.onnx needs onnxscript, which can't be imported ({error}): {INSTALL}") from error
    copied = copy.deepcopy(module).cpu().float().eval()
    inputs = mapped(lambda each: each.float() if each.is_floating_point() else each, x)
    axes = mapped(lambda _: {0: torch.export.Dim(FREE)}, inputs)
    arguments: dict[str, Any] = {"args": inputs if isinstance(inputs, tuple) else (inputs,), "dynamic_shapes": axes}
    if isinstance(inputs, dict):
        arguments = {"args": (), "kwargs": inputs, "dynamic_shapes": axes}
    elif not isinstance(inputs, tuple):
        arguments["dynamic_shapes"] = (axes,)
    printed = io.StringIO()  # progress, and a report with paths of this machine
    with torch.no_grad(), contextlib.redirect_stdout(printed):
        program = torch.onnx.export(copied, **arguments, dynamo=True, opset_version=OPSETS[""], verbose=False)
    assert program is not None
    return program.model_proto
