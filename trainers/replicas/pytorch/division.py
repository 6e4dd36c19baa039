"""How the update of an optimizer can be divided among ranks: by elements, by whole tensors, or not at all."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.options.average import AUTO, ELEMENTS, TENSORS

ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
}
"""Optimizer classes that update every element alike and independently of the others, so that they work on any slice.
Add your own class if it does."""

TENSORWISE: set[type[Optimizer]] = {
    getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name)
}
"""Optimizer classes that update every tensor independently of the others, and read whole tensors. Add your own class if
it does."""

TOGETHER: set[type[Optimizer]] = {torch.optim.LBFGS}  # they read all tensors


def division_of(optimizer: Optimizer, shard: str = AUTO) -> tuple[str, str]:
    """Return how ranks can divide the update of an optimizer, ELEMENTS or TENSORS; and why they can't, "" if they can.

    shard: the user's choice; AUTO decides by the class.
    """
    kind = type(optimizer)
    if kind in TOGETHER:
        return TENSORS, REFUSED.format(kind.__name__, 'it reads all parameters together. Use update="replicated"')
    if shard == ELEMENTS and kind in TENSORWISE:
        return ELEMENTS, REFUSED.format(
            kind.__name__, 'it reads whole tensors. Use shard="tensors", or leave out shard'
        )
    if shard != AUTO:
        return shard, ""
    if kind in ELEMENTWISE:
        return ELEMENTS, ""
    if kind in TENSORWISE:
        return TENSORS, ""
    return TENSORS, REFUSED.format(kind.__name__, UNKNOWN)


REFUSED = "{} can't be used where ranks divide the update: {}"
UNKNOWN = (
    "it is not known to update each element, or each tensor, independently of the others. If it does, add it to "
    'trainers.pytorch.ELEMENTWISE or TENSORWISE, or use shard="tensors"; otherwise use update="replicated"'
)


def foreign_error(module: nn.Module, optimizer: Optimizer) -> str:
    """Return why an optimizer is not of this module, as text; "" if it is."""
    inside = {id(each) for each in module.parameters()}
    chosen = [each for group in optimizer.param_groups for each in group["params"]]
    foreign = [each for each in chosen if id(each) not in inside]
    if not foreign:
        return ""
    return (
        f"the optimizer is of another model: {len(foreign)} of its {len(chosen)} parameters (the first of shape "
        f"{tuple(foreign[0].shape)}) are not in this {type(module).__name__}; make it from parameters() of the same "
        "model, after everything that replaces parameters"
    )


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def optimizer_like(optimizer: Optimizer, groups: Iterable[list[Tensor]]) -> Optimizer:
    """Return an optimizer of the same class and hyperparameters without state. groups: the tensors of each group."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    made = [
        {**hyperparameters(group), "params": tensors}
        for group, tensors in zip(optimizer.param_groups, groups, strict=True)
    ]
    return kind(made, **{key: value for key, value in optimizer.defaults.items() if key in accepted})
