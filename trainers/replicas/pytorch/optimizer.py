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
"""Optimizer classes that update every element alike and independently of the others, so that they work on any slice.
Add your own class if it does."""

BLOCK = 1 << 17  # elements updated at a time: their parameters, gradients and state fit into the cache
TRIED = (2, 3)  # shape of the parameters in the trial step
PRESENT = "optimizer.present"  # entry: which parameters have state; optimizers create it in the first step


class TorchOptimizer(FlatOptimizer):
    """The user's optimizer; for a slice, another one of the same class and hyperparameters on blocks of the slice.

    trained: the parameters that it trains, in the order of the module. Raises ArgumentError if its state has other
        shapes than the parameters.
    """

    def __init__(self, optimizer: Optimizer, trained: list[nn.Parameter]) -> None:
        tried = _trial_state(optimizer, trained[0].device)
        self._devices = {f"optimizer.{key}": value.device for key, value in tried.items()}  # `step` may be on the host
        elementwise = sorted(f"optimizer.{key}" for key, value in tried.items() if value.shape == TRIED)
        super().__init__(Layout(each.shape for each in trained), [PRESENT, *sorted(self._devices)], elementwise)
        self._user, self._trained = optimizer, trained
        self._parameters: Tensor | None = None
        self._blocks: list[list[Tensor]]
        self._set_part(None)

    def bind(self, parameters: Tensor | None, gradients: Tensor) -> None:
        """Set the memory of the trained parameters and their gradients. parameters: None for their own memory."""
        self.extend()
        self._parameters, self._gradients = parameters, gradients

    def slice_error(self) -> str:
        return slice_error_of(self._user)

    def step(self, part: slice | None) -> None:
        """Update all parameters, or a slice of the bound memory."""
        fused.replace_and_warn(self._user)
        if part is None:
            self.extend()
            self._user.step()
            return
        self.restrict(part)
        for own, group in zip(self._own.param_groups, self._user.param_groups, strict=True):
            own.update(hyperparameters(group))  # schedulers change the user's groups
        self._own.step()
        vars(self._user)["_opt_called"] = True  # otherwise schedulers warn that it was never called

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
        self._set_part(part)
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

    def _set_part(self, part: slice | None) -> None:
        """Use the user's optimizer (part=None), or a new one without state on the blocks of a slice."""
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


def slice_error_of(optimizer: Optimizer) -> str:
    """Return why an optimizer can't work on slices, as text; "" if it can."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return ""
    names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
    return (
        f'{kind.__name__} can\'t be used with update="sharded": it needs whole tensors, or is not known to update '
        f'every element independently of the others. Use update="replicated", or one of {names}; add an elementwise '
        "class of your own with trainers.pytorch.ELEMENTWISE.add(YourClass)"
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


def block_on(device: str) -> int:
    """Return the number of elements updated at a time: on a GPU a whole tensor, because each operation is a launch."""
    return BLOCK if device == "cpu" else sys.maxsize


def _spans(parts: list[slice], part: slice, block: int) -> list[list[slice]]:
    """Return the blocks of each parameter in the slice, at least one (empty) block for each parameter.

    So every rank has the entries that an optimizer keeps once per parameter, such as its number of steps.
    """
    spans = []
    for each in parts:
        start, stop = min(max(each.start, part.start), each.stop), min(each.stop, part.stop)
        spans.append([slice(at, min(at + block, stop)) for at in range(start, stop, block)] or [slice(start, start)])
    return spans


def _zeros(like: Tensor) -> Tensor:
    """Return zeros of the shape of `like`, expanded from one element."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _trial_state(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Tensor]:
    """Return the state that the optimizer creates for a parameter of shape TRIED, by a trial step on other parameters.

    Optimizers create their state in the first step, but a saved model must have the same entries before and after it.
    So an optimizer of the same class takes a step on other parameters, one per group, on the same device.
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
            f"{kind.__name__} can't be used by TorchReplica: its state {strange[0]!r} is not shaped like the parameter"
        )
    return found
