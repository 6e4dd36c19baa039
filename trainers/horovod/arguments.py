"""Checks and conversions of the arguments of collectives, before anything is sent."""

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from allreduce.errors import OptionError
from allreduce.torch_backend.reduce import Reduction, resolve
from trainers.horovod.errors import warn_deprecated


class Op(enum.IntEnum):
    """Reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


_OPS = {
    Op.Average: dist.ReduceOp.AVG,
    Op.Sum: dist.ReduceOp.SUM,
    Op.Min: dist.ReduceOp.MIN,
    Op.Max: dist.ReduceOp.MAX,
    Op.Product: dist.ReduceOp.PRODUCT,
}


@functools.cache
def reduction(op: Op, dtype: torch.dtype) -> Reduction:
    """Return the Reduction for `op` and `dtype`. Raises TypeError or NotImplementedError if there is none."""
    return resolve(_OPS[op], dtype)


_ADASUM = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def operation(op: int | None, average: bool | None) -> Op:
    """The operation that the arguments `op` and `average` select. Raises OptionError."""
    if op is not None and average is not None:
        raise OptionError("give op= only; average= is deprecated")
    if average is not None:
        warn_deprecated("average= is deprecated: use op=hvd.Average or op=hvd.Sum")
        return Op.Average if average else Op.Sum
    try:
        return Op.Average if op is None else Op(op)
    except ValueError:
        names = ", ".join(f"hvd.{each.name}" for each in Op)
        raise OptionError(f"op={op!r} is unknown; there are {names}") from None


def check_tensors(kind: str, given: Sequence[Any], rows: bool = False) -> None:
    """Raise OptionError unless all are dense tensors. rows: each must also have a first dimension."""
    if not given:
        raise OptionError(f"{kind} of no tensor: give at least one")
    for each in given:
        if not isinstance(each, torch.Tensor):
            raise OptionError(f"{kind} takes tensors of PyTorch, not {type(each).__name__}")
        if each.layout != torch.strided:
            raise OptionError(f"{kind} takes dense tensors, not {each.layout}; see hvd.sparse_allreduce_async")
        if rows and each.dim() == 0:
            raise OptionError(f"{kind}: a tensor without dimensions has no rows; give it one with tensor.view(1)")


def check_reduction(kind: str, op: Op, given: Sequence[torch.Tensor]) -> None:
    """Raise OptionError if the operation does not support a tensor's dtype."""
    for dtype in {each.dtype for each in given}:
        if op == Op.Adasum:
            if dtype not in _ADASUM:
                raise OptionError(f"{kind}: Adasum is for floating-point tensors, not {dtype}")
            continue
        try:
            reduction(op, dtype)
        except (TypeError, NotImplementedError) as error:
            raise OptionError(f"{kind}: {op.name} of {dtype}: {error}") from None


def check_factors(kind: str, scales: tuple[Any, Any]) -> tuple[float, float]:
    """The prescale and postscale factor as floats. Raises OptionError."""
    try:
        before, after = map(float, scales)
    except (TypeError, ValueError):
        raise OptionError(f"{kind}: prescale_factor and postscale_factor are numbers, not {scales}") from None
    if not (math.isfinite(before) and math.isfinite(after)):
        raise OptionError(f"{kind}: prescale_factor and postscale_factor must be finite, not {scales}")
    return before, after


def check_splits(tensor: torch.Tensor, given: Any, size: int) -> list[int]:
    """The number of rows that go to each of `size` ranks. Raises OptionError."""
    rows = len(tensor)
    if given is None:
        if rows % size:
            raise OptionError(f"alltoall: {rows} rows can't be divided equally among {size} ranks; give splits")
        return [rows // size] * size
    if isinstance(given, torch.Tensor):
        if given.dtype not in (torch.int32, torch.int64) or given.dim() != 1:
            raise OptionError(f"alltoall: splits are integers in one dimension, not {given.dtype} {given.shape}")
        given = given.tolist()
    found = list(given)
    if len(found) != size or not all(isinstance(each, int) and each >= 0 for each in found):
        raise OptionError(f"alltoall: splits={found}: give {size} integers, none below 0")
    if sum(found) > rows:
        raise OptionError(f"alltoall: splits={found} are more than the {rows} rows of the tensor")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in module torch."""
    return str(dtype).removeprefix("torch.")


def layout(tensor: torch.Tensor, rows: bool = False) -> list[Any]:
    """The shape and dtype of a tensor as JSON types. rows: the shape of one row instead."""
    return [list(tensor.shape[1:] if rows else tensor.shape), dtype_name(tensor.dtype)]


def describe(given: Sequence[torch.Tensor]) -> str:
    """Describe the dtypes and shapes of tensors, for messages."""
    few = ", ".join(f"{dtype_name(each.dtype)} {list(each.shape)}" for each in given[:4])
    return few + (f" and {len(given) - 4} more" if len(given) > 4 else "")
