"""The losses of single rows, from a loss that returns their mean: to weigh them."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.data import mapped
from trainers.errors import ArgumentError

Loss = Callable[[Any, Any], Tensor]
CHECKED = 8  # rows whose losses are compared with the mean loss
CLOSE = 1e-2  # the largest relative difference
IGNORED = -100  # PyTorch's default ignore_index


def of_rows(loss: Loss) -> Loss:
    """Return a function of output and target: the loss of each row, (rows,).

    A module with an attribute `reduction`, or a function with such an argument, as those of PyTorch, is called with
    reduction="none". Any other function is called for each row, by torch.vmap. The function raises ArgumentError if
    that is not possible.
    """
    if (isinstance(loss, nn.Module) and hasattr(loss, "reduction")) or _has_reduction(loss):
        each = _with_reduction(loss, "none")
    else:
        first = lambda tree: mapped(lambda leaf: leaf[None], tree)  # noqa: E731
        each = torch.vmap(lambda output, target: loss(first(output), first(target)))

    def losses(output: Any, target: Any) -> Tensor:
        rows = len(target) if isinstance(target, Tensor) else None
        try:
            found = each(output, target)
        except Exception as error:  # whatever torch.vmap, or the user's function, raises
            raise ArgumentError(f"{_ADVICE}; {name_of(loss)} can't be called for single rows: {error}") from error
        if not isinstance(found, Tensor) or not found.dim() or rows not in (None, len(found)):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ArgumentError(f"{_ADVICE}; {name_of(loss)} of {rows} rows gave {shape}")
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    return losses


def counts(loss: Loss) -> bool:
    """Whether a loss is PyTorch's cross entropy or NLL: the mean over targets, each with the weight of its class, and
    without those of `ignore_index`."""
    return type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) or loss in (functional.cross_entropy, functional.nll_loss)


def class_weights(loss: Any) -> Tensor | None:
    """Return the weights of the classes, if the loss has them."""
    return getattr(loss, "weight", None)


def is_mean(loss: Any) -> bool:
    """Whether a loss is one of PyTorch's that are means over all elements."""
    module = getattr(type(loss) if isinstance(loss, nn.Module) else loss, "__module__", None)
    return module in ("torch.nn.modules.loss", "torch.nn.functional")


def counted(loss: Any, target: Tensor) -> float:
    """Return the weight of all targets, by which a loss that `counts` divides. target: labels, or probabilities."""
    if target.is_floating_point():
        return target.numel() / target.shape[1]
    kept = target != getattr(loss, "ignore_index", IGNORED)
    weight = class_weights(loss)
    if weight is None:
        return float(kept.sum())
    kept &= (target >= 0) & (target < len(weight))  # others are an error of the loss
    return float(weight.double().to(target.device)[target[kept]].sum())


def total(loss: Any, output: Tensor, target: Tensor, weights: np.ndarray | None) -> Tensor:
    """Return the sum of the losses of rows by a loss which `counts`. weights: of the rows, or None."""
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()  # sums of many rows would be too large
    try:
        if weights is None:
            return _with_reduction(loss, "sum")(output, target)
        losses = _with_reduction(loss, "none")(output, target)
        factors = torch.from_numpy(weights).to(losses.device, torch.promote_types(losses.dtype, torch.float32))
        return (losses.flatten(1).sum(1) if losses.dim() > 1 else losses).mul(factors).sum()
    except IndexError:
        check_labels(loss, target.cpu().numpy(), output.shape[1] if output.dim() > 1 else len(output))
        raise


def check_labels(loss: Any, y: np.ndarray, classes: int) -> None:
    """Raise ArgumentError if a label is neither one of the classes nor ignored by a loss which `counts`."""
    if y.dtype.kind not in "iu":
        return
    wrong = (y < 0) | (y >= classes)
    if not wrong.any():
        return
    wrong &= y != getattr(loss, "ignore_index", IGNORED)
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        raise ArgumentError(
            f"row {place[0]} of y has the label {int(y[place])}, and the model's output has {classes} classes: labels "
            f"are 0 to {classes - 1}, or ignore_index={getattr(loss, 'ignore_index', IGNORED)} for targets without one"
        )


def check_mean(loss: Loss, output: Any, target: Any) -> None:
    """Raise ArgumentError unless the loss of these rows is the mean of the losses of each."""
    rows = of_rows(loss)(output, target).float()
    mean, found = float(loss(output, target)), float(rows.mean())
    if abs(mean - found) > CLOSE * max(abs(mean), float(rows.abs().mean())):
        raise ArgumentError(
            f"{_ADVICE}; {name_of(loss)} of the first rows is {mean:.6g}, and the mean over single rows is {found:.6g} "
            "(CrossEntropyLoss(weight=...) divides by the sum of its weights: give fit class_weight= instead)"
        )


_ADVICE = (
    "sample_weight and class_weight need the loss of each row: use a loss of torch.nn, or of torch.nn.functional, or a "
    "function that is the mean over the rows"
)


def _with_reduction(loss: Any, reduction: str) -> Loss:
    """Return a loss of PyTorch with another reduction."""
    if not isinstance(loss, nn.Module):
        return lambda output, target: loss(output, target, reduction=reduction)
    made: Any = copy.copy(loss)
    made.reduction = reduction
    return made


def _has_reduction(loss: Loss) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # it has no signature
        return False


def name_of(loss: Loss) -> str:
    """Return the name of a loss, for messages."""
    return getattr(loss, "__name__", type(loss).__name__)
