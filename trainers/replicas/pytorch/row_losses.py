"""The losses of single rows, from a loss that returns their mean: to weigh them."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainers.data import mapped
from trainers.errors import ArgumentError

Loss = Callable[[Any, Any], Tensor]
CHECKED = 8  # rows whose losses are compared with the mean loss
CLOSE = 1e-2  # the largest relative difference


def of_rows(loss: Loss) -> Loss:
    """Return a function of output and target: the loss of each row, (rows,).

    A module with an attribute `reduction`, or a function with such an argument, as those of PyTorch, is called with
    reduction="none". Any other function is called for each row, by torch.vmap. The function raises ArgumentError if
    that is not possible.
    """
    each = _unreduced(loss)

    def losses(output: Any, target: Any) -> Tensor:
        rows = len(target) if isinstance(target, Tensor) else None
        try:
            found = each(output, target)
        except Exception as error:  # whatever torch.vmap, or the user's function, raises
            raise ArgumentError(f"{_ADVICE}; {_name(loss)} can't be called for single rows: {error}") from error
        if not isinstance(found, Tensor) or not found.dim() or rows not in (None, len(found)):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ArgumentError(f"{_ADVICE}; {_name(loss)} of {rows} rows gave {shape}")
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    return losses


def check_mean(loss: Loss, output: Any, target: Any) -> None:
    """Raise ArgumentError unless the loss of these rows is the mean of the losses of each."""
    rows = of_rows(loss)(output, target).float()
    mean, found = float(loss(output, target)), float(rows.mean())
    if abs(mean - found) > CLOSE * max(abs(mean), float(rows.abs().mean())):
        raise ArgumentError(
            f"{_ADVICE}; {_name(loss)} of the first rows is {mean:.6g}, and the mean over single rows is {found:.6g} "
            "(CrossEntropyLoss(weight=...) divides by the sum of its weights: give fit class_weight= instead)"
        )


_ADVICE = (
    "sample_weight and class_weight need the loss of each row: use a loss of torch.nn, or of torch.nn.functional, or a "
    "function that is the mean over the rows"
)


def _unreduced(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        made: Any = copy.copy(loss)
        made.reduction = "none"
        return made
    if _has_reduction(loss):
        return lambda output, target: loss(output, target, reduction="none")  # type: ignore[call-arg]
    first = lambda tree: mapped(lambda leaf: leaf[None], tree)  # noqa: E731
    return torch.vmap(lambda output, target: loss(first(output), first(target)))


def _has_reduction(loss: Loss) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # it has no signature
        return False


def _name(loss: Loss) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
