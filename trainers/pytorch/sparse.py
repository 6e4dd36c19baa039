"""Sparse gradients: only the rows of an embedding that a batch has used are averaged and updated."""

from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.optim import Optimizer

from allreduce import notices
from allreduce.backend import AllReduce
from trainers import checks
from trainers.checks import GradientArray, GradientCheck
from trainers.pytorch.buckets import GradientError, changed
from trainers.replicas.pytorch.tensors import as_bytes, as_tensor, numpy_dtype

TAKES_SPARSE: set[type[Optimizer]] = {torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad}
"""Optimizer classes that accept sparse gradients. Add your own class if it accepts them too."""

# These also work on tensors that are not coalesced. PyTorch has no public names for them.
_indices_of, _values_of = methodcaller("_indices"), methodcaller("_values")


def sparse_parameters(optimizer: Optimizer, model: Module) -> set[int]:
    """The ids of the optimizer's parameters whose gradients stay sparse. Local."""
    groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    return {
        number for number in sparse_in_model(model) if number in groups and accepts_sparse(optimizer, groups[number])
    }


def sparse_in_model(model: Module) -> set[int]:
    """The ids of parameters with sparse gradients: those that only sparse embeddings use."""
    sparse: dict[int, bool] = {}
    for module in model.modules():
        is_sparse = isinstance(module, Embedding | EmbeddingBag) and module.sparse
        for parameter in module.parameters(recurse=False):
            sparse[id(parameter)] = sparse.get(id(parameter), True) and is_sparse
    return {number for number, is_sparse in sparse.items() if is_sparse}


def accepts_sparse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether this optimizer accepts sparse gradients for a parameter group."""
    dense = any(group.get(key) for key in ("momentum", "weight_decay", "fused", "foreach", "differentiable"))
    return type(optimizer) in TAKES_SPARSE and not dense


def warn_of_dense(rank: int, optimizer: Optimizer, model: Module, trained: dict[str, Parameter]) -> None:
    """Notify once about sparse gradients that become dense, because the optimizer does not accept them. Local."""
    made_dense = sparse_in_model(model) - sparse_parameters(optimizer, model)
    names = [name for name, each in trained.items() if id(each) in made_dense]
    if names:
        kinds = ", ".join(sorted(each.__name__ for each in TAKES_SPARSE))
        text = (
            f"the sparse gradients of {', '.join(names)} are averaged as dense ones, all rows of the table: "
            f"{type(optimizer).__name__} with these options does not accept sparse gradients; "
            f"{kinds} without momentum and weight_decay do"
        )
        notices.once(rank, text)


class SparseBucket:
    """The sparse gradient of one parameter, a bucket of its own. As DenseBucket, with `hand_over` after `reduce`.

    number: the index of the parameter, which is 2-D. backend: averages the gradient.
    """

    def __init__(self, number: int, name: str, parameter: Parameter, backend: AllReduce) -> None:
        self.name, self.parameter, self.parameters = name, parameter, [number]
        self._average = backend.sparse
        self._shape, self._dtype = tuple(parameter.shape), parameter.dtype  # must not change
        self._own = self._averages = self._no_rows()

    def gradient_array(self) -> GradientArray:
        """Describe the bucket to a GradientCheck. Local."""
        return checks.table(self.name, self.parameter.numel(), numpy_dtype(self._dtype))

    def prepare(self) -> list[int]:
        """Read this rank's gradient. Returns [the parameter's index] if it has none, else []. Local."""
        grad = self.parameter.grad
        self._own = self._no_rows()
        if grad is None:
            return self.parameters
        if (tuple(grad.shape), grad.dtype) != (self._shape, self._dtype):
            raise GradientError(changed(self.name, grad, self._shape, self._dtype))
        if not grad.is_sparse:  # a dense layer uses the parameter too
            grad = grad.to_sparse(1)
        # 16-bit values are not summed here: they are rounded only once, when they are summed over the ranks
        elif self._dtype.itemsize > 2:
            grad = grad.coalesce()
        values = _values_of(grad).detach().cpu().contiguous()
        array = as_bytes(values).view(numpy_dtype(self._dtype)).reshape(values.shape)
        self._own = _indices_of(grad)[0].cpu().numpy(), array
        return []

    def weigh(self, weight: float) -> None:
        """Multiply this rank's gradient by its weight."""
        indices, values = self._own
        if weight == 0.0:
            self._own = indices[:0], values[:0]
        elif weight != 1.0:
            self._own = indices, values * values.dtype.type(weight)

    def check(self, gradient_check: GradientCheck, number: int) -> None:
        """Check this rank's gradient. number: the index of this bucket in the check."""
        gradient_check.check_rows(number, *self._own)

    def reduce(self) -> None:
        """Average the gradient over the ranks. Collective."""
        self._averages = self._average(*self._own, self._shape[0])
        self._own = self._no_rows()

    def overflowed(self, comm: MPI.Intracomm) -> int:
        """The first element whose average is not finite on some rank; -1 for none. Collective."""
        indices, values = self._averages
        return checks.overflowed(comm, values.reshape(-1), partial(checks.element_of, indices, values))

    def hand_over(self, used: bool) -> None:
        """Make .grad the average, if any rank has used the parameter. Local."""
        indices, values = self._averages
        self._averages = self._no_rows()
        if used:
            table = torch.from_numpy(indices).unsqueeze(0), as_tensor(values, self._dtype)
            grad = torch.sparse_coo_tensor(*table, self._shape, check_invariants=False, is_coalesced=True)
            self.parameter.grad = grad.to(self.parameter.device)

    def _no_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices and the rows of a gradient without rows."""
        return np.empty(0, np.int64), np.empty((0, *self._shape[1:]), numpy_dtype(self._dtype))
