"""The loss that a closure returns, as an optimizer gets it: it decides by it, and must decide alike on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from allreduce.messages.agreement import all_values
from trainers.pytorch.averaging import Averager


def mean_loss(averager: Averager, closure: Callable[[], Any]) -> Any:
    """Call a closure, average its gradients, and return the mean of its losses over the ranks. Collective.

    A tensor comes back as a new one of the same shape, a number as a float, and None as None.
    """
    loss = closure()
    averager.average()
    if loss is None or averager.ranks == 1:
        return loss
    value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
    mean = averager.together("averages the loss of a closure", partial(_mean, averager, value))
    return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean


def _mean(averager: Averager, value: float) -> float:
    """The mean of a number over all ranks, or over all rows, the same bits on each. Runs in the lane."""
    weight = 1.0 if averager.rows is None else averager.rows.weight
    return sum(all_values(averager.comm, value * weight, "average the loss of a closure")) / averager.ranks
