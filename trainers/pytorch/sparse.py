"""Sparse gradients: only the rows of an embedding that a batch has used are averaged and updated."""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.optim import Optimizer

from allreduce import notices
from trainers.pytorch.buckets import GradientError, changed
from trainers.replicas.pytorch.tensors import as_bytes, as_tensor, numpy_dtype

TAKES_SPARSE: set[type[Optimizer]] = {torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad}
"""Optimizers that update from sparse gradients. Add a class of your own if it is one of them."""

Found = tuple[np.ndarray, np.ndarray]  # indices of rows, ascending or not, and the rows
Reduce = Callable[[np.ndarray, np.ndarray, int], Found]
Check = Callable[[np.ndarray, np.ndarray], object]  # of indices and rows

# Of tensors that are not coalesced too, for which PyTorch has no public name.
_indices_of, _values_of = methodcaller("_indices"), methodcaller("_values")


def sparse_parameters(optimizer: Optimizer, model: Module) -> set[int]:
    """The ids of the optimizer's parameters whose gradients stay sparse. Local."""
    groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    return {number for number in given_sparse(model) if number in groups and takes(optimizer, groups[number])}


def given_sparse(model: Module) -> set[int]:
    """The ids of parameters with sparse gradients: those that only sparse embeddings use."""
    sparse: dict[int, bool] = {}
    for module in model.modules():
        is_sparse = isinstance(module, Embedding | EmbeddingBag) and module.sparse
        for parameter in module.parameters(recurse=False):
            sparse[id(parameter)] = sparse.get(id(parameter), True) and is_sparse
    return {number for number, is_sparse in sparse.items() if is_sparse}


def takes(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer with these hyperparameters takes sparse gradients."""
    dense = any(group.get(key) for key in ("momentum", "weight_decay", "fused", "foreach", "differentiable"))
    return type(optimizer) in TAKES_SPARSE and not dense


def warn_of_dense(rank: int, optimizer: Optimizer, model: Module, trained: dict[str, Parameter]) -> None:
    """Say once which sparse gradients are made dense for an optimizer that takes no others. Local."""
    lost = given_sparse(model) - sparse_parameters(optimizer, model)
    names = [name for name, each in trained.items() if id(each) in lost]
    if names:
        kinds = ", ".join(sorted(each.__name__ for each in TAKES_SPARSE))
        text = (
            f"the sparse gradients of {', '.join(names)} are averaged as dense ones, all rows of the table: "
            f"{type(optimizer).__name__} as it is takes no sparse ones; {kinds} without momentum and weight_decay do"
        )
        notices.once(rank, text)


class SparseGradients:
    """The sparse gradients of some parameters, and their averages.

    parameters: by name, of two dimensions. reduce: of a backend: the average over the ranks of rows of a table.

    Each parameter is a bucket of its own, and has its number here. Of each: `prepare`, then `average` in the queue,
    then `hand_over` of all.
    """

    def __init__(self, parameters: dict[str, Parameter], reduce: Reduce) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.shapes = [(tuple(each.shape), each.dtype) for each in self.parameters]
        self._reduce = reduce
        self._mine: list[Found] = [_nothing(each) for each in self.parameters]
        self.averages: list[Found] = list(self._mine)

    def prepare(self, number: int) -> bool:
        """Take this rank's gradient of a parameter. False when there is none."""
        parameter = self.parameters[number]
        grad, (shape, dtype) = parameter.grad, self.shapes[number]
        self._mine[number] = _nothing(parameter)
        if grad is None:
            return False
        if (tuple(grad.shape), grad.dtype) != (shape, dtype):
            raise GradientError(changed(self.names[number], grad, shape, dtype))
        if not grad.is_sparse:  # it was used as another parameter too
            grad = grad.to_sparse(1)
        elif dtype.itemsize > 2:  # sums of 16 bits are rounded once, with those of the other ranks
            grad = grad.coalesce()
        values = _values_of(grad).detach().cpu().contiguous()
        array = as_bytes(values).view(numpy_dtype(dtype)).reshape(values.shape)
        self._mine[number] = _indices_of(grad)[0].cpu().numpy(), array
        return True

    def average(self, number: int, weight: float, check: Check | None) -> None:
        """Average a gradient over the ranks. Runs in the queue.

        weight: of this rank's gradient. check: sees this rank's rows, where checks are asked for.
        """
        indices, values = self._mine[number]
        if weight == 0.0:
            indices, values = indices[:0], values[:0]
        elif weight != 1.0:
            values = values * values.dtype.type(weight)
        if check is not None:
            check(indices, values)
        self.averages[number] = self._reduce(indices, values, self.shapes[number][0][0])
        self._mine[number] = _nothing(self.parameters[number])

    def hand_over(self, used: np.ndarray) -> None:
        """Make .grad of each parameter that any rank has used the average. Local."""
        for number, (parameter, (shape, dtype)) in enumerate(zip(self.parameters, self.shapes, strict=True)):
            indices, values = self.averages[number]
            self.averages[number] = _nothing(parameter)
            if used[number]:
                table = torch.from_numpy(indices).unsqueeze(0), as_tensor(values, dtype)
                grad = torch.sparse_coo_tensor(*table, shape, check_invariants=False, is_coalesced=True)
                parameter.grad = grad.to(parameter.device)


def _nothing(parameter: Tensor) -> Found:
    return np.empty(0, np.int64), np.empty((0, *parameter.shape[1:]), numpy_dtype(parameter.dtype))
