"""Another optimizer of the user's class, with the user's hyperparameters, for other tensors."""

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group holds besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def optimizer_like(optimizer: Optimizer, groups: Iterable[list[Tensor]]) -> Optimizer:
    """An optimizer of the same class with the same hyperparameters and no state. groups: what its groups train."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    made = [
        {**hyperparameters(group), "params": tensors}
        for group, tensors in zip(optimizer.param_groups, groups, strict=True)
    ]
    return kind(made, **{key: value for key, value in optimizer.defaults.items() if key in known})
