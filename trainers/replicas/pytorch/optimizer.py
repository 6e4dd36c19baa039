"""A PyTorch optimizer on the parameters of a module, or on a slice of them in flat memory."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.arguments import name_error, require
from trainers.errors import ArgumentError, explained
from trainers.options.average import SHARDS
from trainers.options.buckets import Bucket, Slot
from trainers.replica import Slices, slices_of
from trainers.replicas.flat import FlatOptimizer, Layout
from trainers.replicas.pytorch.blocks import Blocks, held_by, largest_block
from trainers.replicas.pytorch.division import (
    AUTO,
    ELEMENTS,
    ELEMENTWISE,
    TENSORS,
    TENSORWISE,
    Trial,
    division_of,
    optimizer_like,
)
from trainers.replicas.pytorch.fused import replace_wrong
from trainers.replicas.pytorch.tensors import from_array, host_view

TRIED = (2, 3)  # shape of the parameters in the trial step
PRESENT = "optimizer.present"  # entry: which parameters have state; optimizers create it in the first step


class TorchOptimizer(FlatOptimizer):
    """The user's optimizer; for a slice, another one of the same class and hyperparameters on blocks of the slice.

    trained: the parameters that it trains, in the order of the module. shard: how the update is divided, see
        division_of. Raises ArgumentError if the state has other shapes than the parameters.
    """

    def __init__(self, optimizer: Optimizer, trained: list[nn.Parameter], shard: str = AUTO) -> None:
        require(name_error("shard", shard, SHARDS))
        tried = _trial_state(optimizer, trained[0].device)
        self._devices = {f"optimizer.{key}": value.device for key, value in tried.items()}  # `step` may be on the host
        elementwise = sorted(f"optimizer.{key}" for key, value in tried.items() if value.shape == TRIED)
        super().__init__(Layout(each.shape for each in trained), [PRESENT, *sorted(self._devices)], elementwise)
        self._user, self._trained, self._shard = optimizer, trained, shard
        self._parameters: Tensor | None = None
        self._take_all()

    def _take_all(self) -> None:
        """Use the user's optimizer."""
        self.part, self._own = None, self._user
        self._blocks: Blocks | None = None
        self._parts: Sequence[Tensor] = self._trained  # the tensors that have state: parameters, or blocks of them
        self._firsts: Sequence[Tensor] = self._trained  # for each parameter the tensor that has its step

    def bind(self, parameters: Tensor | None, gradients: Tensor, cuts: Sequence[int]) -> None:
        """Set the memory of the trained parameters and their gradients. parameters: None for their own memory.

        cuts: see Replica.
        """
        self.extend()
        self._parameters, self._gradients, self._cuts = parameters, gradients, cuts

    @cached_property
    def _division(self) -> tuple[str, str]:
        return division_of(self._user, self._shard)

    def slice_error(self) -> str:
        division, why = self._division
        names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        return why or (division == TENSORS) * WHOLE_TENSORS.format(type(self._user).__name__, names)

    @cached_property
    def whole_tensors(self) -> tuple[slice, ...]:  # type: ignore[override]
        """See Replica.whole_tensors."""
        division, why = self._division
        if why or division == ELEMENTS:
            return ()
        if type(self._user) not in TENSORWISE | ELEMENTWISE and (name := Trial(self._user).uneven()):
            text = f"its state {name!r} is a number that depends on the gradients, so a rank needs it of all tensors"
            raise ArgumentError(f"{type(self._user).__name__} can't be divided by TorchReplica: {text}")
        return tuple(self.layout.parts)

    def step(self, part: Slices | None, still: np.ndarray) -> None:
        """Update all parameters, or a part of the bound memory, but not the parameters that are `still`."""
        if text := replace_wrong(self._user):
            warnings.warn(text, stacklevel=2)
        if part is None:
            self.extend()
        else:
            self.restrict(part)
        if self._blocks is not None:
            self._blocks.step(~still)
            return
        held = [(self._trained[number], self._trained[number].grad) for number in np.flatnonzero(still)]
        for parameter, _ in held:
            parameter.grad = None
        try:
            self._user.step()
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient

    def restrict(self, part: Slices) -> None:
        """As FlatOptimizer.restrict, without copies in NumPy: use another optimizer on the blocks of a slice."""
        if self.part == part:
            return
        self.extend()
        assert self._parameters is not None
        tensors, dtype, parts = self._division[0] == TENSORS, str(self._parameters.dtype), self.layout.parts
        slots = tuple(Slot(number, each.start, each.stop) for number, each in enumerate(parts))
        most = largest_block(self._parameters.device.type, tensors)
        held = held_by([Bucket(dtype, 0, self.layout.length, slots)], [slices_of(part)], [self._cuts], most)
        memory = {dtype: self._parameters}, {dtype: self._gradients}
        numbers = {name.removeprefix("optimizer.") for name in self._devices.keys() - set(self.elementwise)}
        self._blocks = Blocks(self._user, self._trained, held, *memory, tensors=tensors, numbers=numbers)
        self._blocks.load()
        self._own, self._firsts = self._blocks.optimizer, self._blocks.firsts
        self.part, self._parts = part, [*chain(*self._blocks.parts)]

    def entries(self, names: Collection[str]) -> dict[str, list[Any]]:
        firsts = [self._own.state.get(each, {}) for each in self._firsts]
        found: dict[str, list[Any]] = {}
        for name in names:
            key = name.removeprefix("optimizer.")
            if name == PRESENT:
                found[name] = [np.array([bool(each) for each in firsts], np.uint8)]
            elif name in self.elementwise:
                states = ((each, self._own.state.get(each, {}).get(key)) for each in self._parts)
                arrays = [_zeros(part) if state is None else state for part, state in states]
                if self.part is not None:
                    none = self._trained[0].detach().reshape(-1)[:0]
                    arrays = [torch.cat([none, *(each.reshape(-1) for each in arrays)])]
                found[name] = arrays
            else:
                found[name] = [np.array([float(each.get(key, 0.0)) for each in firsts])]
        return found

    on_host = staticmethod(host_view)

    @torch.no_grad()
    def write(self, part: Slices | None, entries: Mapping[str, list[np.ndarray]]) -> None:
        assert part is None, "`restrict` makes the state of a slice"
        self._take_all()
        for number, (parameter, present) in enumerate(zip(self._trained, entries[PRESENT][0], strict=True)):
            state = {}
            for name, device in self._devices.items():
                if name in self.elementwise:
                    value = torch.empty_like(parameter, memory_format=torch.preserve_format)
                    value.copy_(from_array(entries[name][number]).reshape(parameter.shape))
                else:
                    value = torch.tensor(float(entries[name][0][number]), device=device)
                state[name.removeprefix("optimizer.")] = value
            self._user.state.pop(parameter, None)
            if present:
                self._user.state[parameter] = state

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


WHOLE_TENSORS = (
    "{} can't be used here, where a rank updates a slice that may end inside of a tensor: its update reads whole "
    "tensors, or is not known to update every element independently of the others. Use MirroredTrainer, or one of {}; "
    "add an elementwise class of your own with trainers.pytorch.ELEMENTWISE.add(YourClass)"
)


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
    with explained(ArgumentError, f"{kind.__name__} can't be used by TorchReplica"):
        tried = optimizer_like(optimizer, ([trial] for trial in trials))
        tried.step()
        states = [tried.state[trial].items() for trial in trials]
        found = {key: torch.as_tensor(value) for state in states for key, value in state if value is not None}
    strange = [key for key, value in found.items() if value.shape not in ((), TRIED)]
    if strange:
        raise ArgumentError(
            f"{kind.__name__} can't be used by TorchReplica: its state {strange[0]!r} is not shaped like the parameter"
        )
    return found
