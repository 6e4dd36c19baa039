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
it does; other classes are tried on small tensors."""

TOGETHER: set[type[Optimizer]] = {torch.optim.LBFGS}  # they read all tensors


MOST = 3  # elements along each axis of a tensor in the trial
PER_GROUP = 4  # tensors of each group in the trial
SCALES = (1.0, 1e-6, 1e6, 1.0)  # of the gradients in each step of the trial: some optimizers change only large ones


def division_of(optimizer: Optimizer, shard: str = AUTO) -> tuple[str, str]:
    """Return how ranks can divide the update of an optimizer, ELEMENTS or TENSORS; and why they can't, "" if they can.

    shard: the user's choice; AUTO decides by the class, and by a trial for classes that are not known.
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
    why = Trial(optimizer).error()
    return TENSORS, why and REFUSED.format(kind.__name__, f"{why}. {REMEDY}")


REFUSED = '{} can\'t be used with update="sharded": {}'
REMEDY = (
    'Use update="replicated"; or, if the class updates each element or each tensor independently of the others, add it '
    "to trainers.pytorch.ELEMENTWISE or TENSORWISE"
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


class Trial:
    """Steps of an optimizer on small tensors: on all of them, on the first one alone, and on the others.

    optimizer: of the user; the trial makes others of its class and hyperparameters, on tensors with its parameters'
    dimensions, dtypes and devices.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._like = [
            (number, each)
            for number, group in enumerate(optimizer.param_groups)
            for each in (group["params"] * PER_GROUP)[:PER_GROUP]
        ]

    def error(self) -> str:
        """Return why ranks can't divide the update by tensors, as text; "" if they can."""
        kept = [hyperparameters(group) for group in self._optimizer.param_groups]
        everything = range(len(self._like))
        try:
            whole, optimizer = self._run(everything)
            if kept != [hyperparameters(group) for group in optimizer.param_groups]:
                return "its step() changes param_groups, which all ranks share"
            parts = self._run(everything[:1])[0] | self._run(everything[1:])[0]
        except Exception as error:  # whatever an optimizer raises
            return f"a trial on small tensors raised {type(error).__name__}: {error}"
        if not all(_close(tensor, parts[number]) for number, tensor in whole.items()):
            return "in a trial it changed tensors otherwise when it had only some of them"
        return ""

    def uneven(self) -> str:
        """Return the name of a number in the state that depends on the gradients; "" if there is none."""
        tensors, optimizer = self._run(range(len(self._like)))
        for number, tensor in tensors.items():
            first = optimizer.state[tensors[number - number % PER_GROUP]]
            for key, value in optimizer.state[tensor].items():
                # of a tensor without dimensions each entry is a number
                if tensor.dim() and _is_number(value) and float(value) != float(first[key]):
                    return key
        return ""

    def _run(self, numbers: range) -> tuple[dict[int, Tensor], Optimizer]:
        """Return some of the tensors, by number, after the steps of an optimizer, and this optimizer."""
        tensors = {number: self._tensor(number) for number in numbers}
        groups: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for number, tensor in tensors.items():
            groups[self._like[number][0]].append(tensor)
        optimizer = optimizer_like(self._optimizer, groups)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for step, scale in enumerate(SCALES):
                for number, tensor in tensors.items():
                    tensor.grad = (self._values(number, 1 + step) * scale).to(tensor)
                optimizer.step()
        return tensors, optimizer

    def _tensor(self, number: int) -> Tensor:
        like = self._like[number][1]
        return nn.Parameter(self._values(number, 0).to(like.device, like.dtype))

    def _values(self, number: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + step)
        return torch.randn([min(size, MOST) for size in self._like[number][1].shape], generator=generator)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())


def _close(one: Tensor, other: Tensor) -> bool:
    tolerance = 0.05 if one.element_size() == 2 else 1e-4
    return torch.allclose(one.detach(), other.detach(), rtol=tolerance, atol=0, equal_nan=True)
