"""A PyTorch optimizer on the parameters of a module, or on a slice of them in flat memory."""

import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.errors import ArgumentError
from trainers.replicas.flat import FlatOptimizer, Layout
from trainers.replicas.pytorch import fused
from trainers.replicas.pytorch.tensors import host_view

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
"""Optimizers that update each element alike and independently of the others, so that they work on any slice.
Add a class of your own if it is one of them."""

BLOCK = 1 << 17  # elements that are updated at a time: parameters, gradients and state of a block fit the cache
TRIED = (2, 3)  # the shape of parameters that an optimizer is tried out on
PRESENT = "optimizer.present"  # which parameters have state: after the first step


class TorchOptimizer(FlatOptimizer):
    """The user's optimizer, or one of its class on blocks of a slice, with the user's hyperparameters in every step.

    trained: the parameters that it trains, in the order of the module. Raises ArgumentError when its state does not
    have the parameters' shapes.
    """

    def __init__(self, optimizer: Optimizer, trained: list[nn.Parameter]) -> None:
        tried = _tried(optimizer, trained[0].device)
        self._devices = {f"optimizer.{key}": value.device for key, value in tried.items()}  # some count on a GPU
        elementwise = sorted(f"optimizer.{key}" for key, value in tried.items() if value.shape == TRIED)
        super().__init__(Layout(each.shape for each in trained), [PRESENT, *sorted(self._devices)], elementwise)
        self._user, self._trained = optimizer, trained
        self._parameters: Tensor | None = None
        self._blocks: list[list[Tensor]]
        self._work_on(None)

    def bind(self, parameters: Tensor | None, gradients: Tensor) -> None:
        """Set the memory of the trained parameters and their gradients. parameters: None for their own memory."""
        self.widen()
        self._parameters, self._gradients = parameters, gradients

    def refusal(self) -> str:
        return slice_refusal(self._user)

    def step(self, part: slice | None) -> None:
        """Update all parameters, or a slice of the bound memory."""
        fused.replace_and_warn(self._user)
        if part is None:
            self.widen()
            self._user.step()
            return
        self.narrow(part)
        for own, group in zip(self._own.param_groups, self._user.param_groups, strict=True):
            own.update(hyperparameters(group))  # schedules have changed the user's groups
        self._own.step()
        vars(self._user)["_opt_called"] = True  # schedulers warn when it never was

    def entries(self, names: Collection[str]) -> dict[str, list[Any]]:
        states = [[self._own.state.get(block, {}) for block in blocks] for blocks in self._blocks]
        found: dict[str, list[Any]] = {}
        for name in names:
            key = name.removeprefix("optimizer.")
            if name == PRESENT:
                found[name] = [np.array([bool(each[0]) for each in states], np.uint8)]
            elif name in self.elementwise:
                arrays = [
                    _zeros(block) if state.get(key) is None else state[key]
                    for blocks, of_blocks in zip(self._blocks, states, strict=True)
                    for block, state in zip(blocks, of_blocks, strict=True)
                ]
                found[name] = arrays if self.part is None else [torch.cat(arrays)]
            else:
                found[name] = [np.array([float(each[0].get(key, 0.0)) for each in states])]
        return found

    on_host = staticmethod(host_view)

    @torch.no_grad()
    def write(self, part: slice | None, entries: Mapping[str, list[np.ndarray]]) -> None:
        for parameter in self._trained:
            self._user.state.pop(parameter, None)
        self._work_on(part)
        ends = np.cumsum([block.numel() for blocks in self._blocks for block in blocks])[:-1]
        pieces = {
            name: iter(np.split(np.concatenate([each.reshape(-1) for each in entries[name]]), ends))
            for name in self.elementwise
        }
        for number, (blocks, present) in enumerate(zip(self._blocks, entries[PRESENT][0], strict=True)):
            for block in blocks:
                state = {}
                for name, device in self._devices.items():
                    if name in self.elementwise:
                        value = torch.empty_like(block, memory_format=torch.preserve_format)
                        value.copy_(torch.from_numpy(next(pieces[name])).reshape(block.shape))
                    else:
                        value = torch.tensor(float(entries[name][0][number]), device=device)
                    state[name.removeprefix("optimizer.")] = value
                if present:
                    self._own.state[block] = state

    def _work_on(self, part: slice | None) -> None:
        """Use an optimizer without state on the blocks of a slice, or the user's."""
        self.part = part
        if part is None:
            self._own, self._blocks = self._user, [[each] for each in self._trained]
            return
        assert self._parameters is not None
        parameters, gradients = self._parameters, self._gradients
        self._blocks = []
        for spans in _spans(self.layout.parts, part, block_on(parameters.device.type)):
            self._blocks.append([parameters[span] for span in spans])
            for block, span in zip(self._blocks[-1], spans, strict=True):
                block.grad = gradients[span]
        blocks_of = {id(parameter): blocks for parameter, blocks in zip(self._trained, self._blocks, strict=True)}
        groups = (
            [block for each in group["params"] for block in blocks_of.get(id(each), [])]
            for group in self._user.param_groups
        )
        self._own = optimizer_like(self._user, groups)

    # The learning rates are in the user's groups

    @property
    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._user.param_groups if "lr" in group]

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self._user.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def slice_refusal(optimizer: Optimizer) -> str:
    """Why an optimizer can't work on slices, or ""."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return ""
    names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
    return (
        f'{kind.__name__} can\'t be used with update="sharded": it needs whole tensors, or is not known to treat '
        f'every element apart from all others. Use update="replicated", or one of {names}; an elementwise class '
        "of your own is let in by trainers.pytorch.ELEMENTWISE.add(YourClass)"
    )


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group."""
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


def block_on(device: str) -> int:
    """The number of elements updated at a time: on a GPU all of a tensor, since every operation is a launch."""
    return BLOCK if device == "cpu" else sys.maxsize


def _spans(parts: list[slice], part: slice, block: int) -> list[list[slice]]:
    """The blocks of each parameter that lie in the slice; an empty one when none does.

    Every parameter has one, so that what an optimizer counts for a whole parameter is counted on every rank.
    """
    spans = []
    for each in parts:
        start, stop = min(max(each.start, part.start), each.stop), min(each.stop, part.stop)
        spans.append([slice(at, min(at + block, stop)) for at in range(start, stop, block)] or [slice(start, start)])
    return spans


def _zeros(like: Tensor) -> Tensor:
    """Zeros without memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _tried(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Tensor]:
    """The optimizer's state for a parameter of shape TRIED: one number for each element, or one for all.

    Optimizers make their state in the first step, but a saved model must have the same entries before and after it. So
    an optimizer of the same kind takes a step on parameters of its own, one a group, on the same device.
    """
    kind = type(optimizer)
    trials = [nn.Parameter(torch.ones(TRIED, device=device)) for _ in optimizer.param_groups]
    for trial in trials:
        trial.grad = torch.ones_like(trial)
    try:
        tried = optimizer_like(optimizer, ([trial] for trial in trials))
        tried.step()
        states = [tried.state[trial].items() for trial in trials]
        found = {key: torch.as_tensor(value) for state in states for key, value in state if value is not None}
    except Exception as error:
        raise ArgumentError(
            f"{kind.__name__} can't be used by TorchReplica: {type(error).__name__}: {error}"
        ) from error
    strange = [key for key, value in found.items() if value.shape not in ((), TRIED)]
    if strange:
        raise ArgumentError(
            f"{kind.__name__} can't be used by TorchReplica: its state {strange[0]!r} is not of the parameter's shape"
        )
    return found
