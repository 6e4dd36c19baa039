"""What a module and its optimizer hold, as named arrays and back: for files, for other ranks, and to undo a batch."""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainers.errors import ModelFileError
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.optimizer import TorchOptimizer
from trainers.replicas.pytorch.tensors import flat_array, host_view

HYPERPARAMETER = "hyperparameter."


class TorchState:
    """Packs the state of a module and its optimizer for a model file, and loads it.

    trained: the parameters that the optimizer trains, in the order of the module; `averaged` are buffers that ranks
    have in common. Other buffers, and random states, are a rank's own.
    """

    def __init__(
        self,
        module: nn.Module,
        user: torch.optim.Optimizer,
        optimizer: TorchOptimizer,
        trained: list[nn.Parameter],
        averaged: list[Tensor],
    ) -> None:
        self._module, self._user, self._optimizer, self._trained = module, user, optimizer, trained
        self._averaged = averaged  # not their ids: a copy of a replica has tensors of its own

    def _others(self) -> dict[str, Tensor]:
        """All tensors of the module that are not trained."""
        trained = {id(each) for each in self._trained}
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {f"module.{name}": each for name, each in named if id(each) not in trained}

    def pack(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Copies, which look alike before and after the optimizer's first step.

        memory: arrays of earlier copies, used again and kept there. without: names to leave out.
        """
        held = {} if "parameters" in without else {"parameters": flat_array(self._trained, memory, "parameters")}
        held |= {name: np.array(host_view(each)) for name, each in self._others().items()}
        return held | self._optimizer.pack(memory, without) | _hyperparameters(self._user)

    @torch.no_grad()
    def load(self, state: dict[str, np.ndarray]) -> None:
        """Overwrite module and optimizer with what `pack` gave; ModelFileError when it is of another model."""
        here = self.pack({})
        different = [
            name for name in sorted({*here, *state}, key=lambda each: each != "parameters")
            if name not in here or name not in state or here[name].shape != state[name].shape
        ]  # fmt: skip
        if different:
            name = different[0]
            sides = [f"{side[name].shape}" if name in side else "missing" for side in (state, here)]
            raise ModelFileError(f"the saved model is another one: {name} is {sides[0]} there and {sides[1]} here")
        for parameter, array in zip(self._trained, self._optimizer.layout.views(state["parameters"]), strict=True):
            parameter.copy_(torch.from_numpy(np.array(array)))
        for name, each in self._others().items():
            each.copy_(torch.from_numpy(np.array(state[name])))
        self._optimizer.load(state)
        for name in state:
            if name.startswith(HYPERPARAMETER):
                key = name.removeprefix(HYPERPARAMETER)
                for group, value in zip(self._user.param_groups, state[name].tolist(), strict=True):
                    group[key] = tuple(value) if isinstance(value, list) else _number(value, group[key])

    def _own_buffers(self) -> dict[str, Tensor]:
        named, averaged = self._module.named_buffers(), {id(each) for each in self._averaged}
        return {f"module.{name}": each for name, each in named if id(each) not in averaged}

    def pack_own(self, place: Host) -> dict[str, np.ndarray]:
        """A rank's own state, copies: PyTorch's random states, and the buffers that are not averaged."""
        return place.random_states() | {name: np.array(host_view(each)) for name, each in self._own_buffers().items()}

    @torch.no_grad()
    def load_own(self, state: dict[str, np.ndarray], place: Host) -> None:
        """Take on what `pack_own` gave, of the same model; raises ModelFileError."""
        here = self._own_buffers()
        shapes = [
            {name: tuple(each.shape) for name, each in side.items() if not name.startswith("random")}
            for side in (state, here)
        ]
        if "random" not in state or shapes[0] != shapes[1]:
            raise ModelFileError(f"the local state is of another model: {shapes[0]} there and {shapes[1]} here")
        place.set_random_states(state)
        for name, each in here.items():
            each.copy_(torch.from_numpy(np.array(state[name])))


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """The optimizer's own (not a schedule's notes) that are numbers, one row a group: a schedule changes them."""
    found = {}
    for key in optimizer.defaults:
        values = [group.get(key) for group in optimizer.param_groups]
        if all(map(_is_numeric, values)):
            found[f"{HYPERPARAMETER}{key}"] = np.array(values, np.float64)
    return found


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float, like: Any) -> float | int:
    """An int where there was one and it still is: a schedule turns lr=1 into 0.5."""
    return int(value) if isinstance(like, int) and value.is_integer() else value


class Buffers:
    """The buffers of a module (the running statistics of batch norm, say) as they were before a batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, Tensor] | None = None

    def save(self) -> None:
        """A batch begins."""
        self._before = {name: each.detach().clone() for name, each in self._module.named_buffers()}

    def before_forward(self, module: nn.Module, *_: object) -> None:
        """Save the buffers before the first forward in training since the last `forget`. A hook of the module."""
        if module.training and self._before is None:
            self.save()

    def forget(self) -> None:
        """The model has been updated from the batch."""
        self._before = None

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers their values before the batch, unless these are forgotten."""
        for name, before in (self._before or {}).items():
            self._module.get_buffer(name).copy_(before)
        self.forget()
