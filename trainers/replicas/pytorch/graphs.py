"""Modules as ONNX graphs, by PyTorch's own exporter. No MPI."""

import contextlib
import copy
import io
from typing import Any

import torch
from torch import nn

from trainers.data import Tree, leaves, mapped
from trainers.errors import ExportError, needing
from trainers.files.onnx_graph import FREE, INSTALL, quiet


def converted(module: nn.Module, x: Tree) -> Any:
    """Return a module in evaluation mode as an onnx.ModelProto, in float32. x: rows, tensors on the CPU.

    The module itself is not changed. Raises ExportError without onnxscript, and the exporter's error for an operator
    that ONNX lacks.
    """
    with needing(f"torch.onnx needs onnxscript, which can't be imported ({{}}): {INSTALL}", ExportError):
        import onnxscript  # noqa: F401, torch.onnx needs it
    copied = _Flat(copy.deepcopy(module).cpu().float().eval(), mapped(lambda _: None, x)).eval()
    inputs = tuple(each.float() if each.is_floating_point() else each for each in leaves(x))
    axes = {"arrays": tuple({0: torch.export.Dim(FREE)} for _ in inputs)}
    with torch.no_grad(), quiet("torch.onnx"), contextlib.redirect_stdout(io.StringIO()):  # its progress
        program = torch.onnx.export(copied, inputs, dynamic_shapes=axes, dynamo=True, verbose=False)
    assert program is not None
    return program.model_proto


def called(module: nn.Module, x: Tree) -> Any:
    """Return a module's output for these inputs: module(x), module(a, b) of a tuple, or module(image=a) of a dict."""
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


class _Flat(nn.Module):
    """A module that takes the arrays of a tree one by one, and returns those of its output in the order of `leaves`."""

    def __init__(self, module: nn.Module, structure: Tree) -> None:
        super().__init__()
        self.module, self.structure = module, structure

    def forward(self, *arrays: Any) -> tuple[Any, ...]:
        rest = iter(arrays)
        return _flat(called(self.module, mapped(lambda _: next(rest), self.structure)))


def _flat(output: Any) -> tuple[Any, ...]:
    if isinstance(output, dict):
        return tuple(each for key in sorted(output) for each in _flat(output[key]))
    return tuple(each for part in output for each in _flat(part)) if isinstance(output, tuple | list) else (output,)
