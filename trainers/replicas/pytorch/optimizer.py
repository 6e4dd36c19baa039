"""A PyTorch optimizer on the parameters of a module, or on a slice of them in flat memory."""

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.arguments import name_error, require
from trainers.errors import ArgumentError, explained
from trainers.options.average import SHARDS
from trainers.replica import Slices, single, slices_of
from trainers.replicas.flat import FlatOptimizer, Layout
from trainers.replicas.pytorch.division import (
    AUTO,
    ELEMENTS,
    ELEMENTWISE,
    TENSORS,
    TENSORWISE,
    Trial,
    division_of,
    optimizer_like,
    optimizer_on,
    split,
    step_like,
)
from trainers.replicas.pytorch.fused import Kernels
from trainers.replicas.pytorch.tensors import host_view

BLOCK = 1 << 17  # elements updated at a time: their parameters, gradients and state fit into the cache
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
        self.kernels = Kernels(optimizer)
        self._parameters: Tensor | None = None
        self._blocks: list[list[Tensor]]  # of each parameter; empty if a slice of whole tensors lacks it
        self._firsts: list[Tensor]  # for each parameter a tensor that has its state of numbers, such as the step
        self._set_part(None)

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
        if text := self.kernels.replace_broken():
            warnings.warn(text, stacklevel=2)
        if part is None:
            self.extend()
        else:
            self.restrict(part)
        with self._without(still):
            if part is None:
                self._user.step()
            else:
                step_like(self._user, self._own)

    @contextmanager
    def _without(self, still: np.ndarray) -> Iterator[None]:
        """Context manager: the optimizer finds no gradients of the parameters that are `still`."""
        held = []
        for number in np.flatnonzero(still):
            held += [(each, each.grad) for each in [*self._blocks[number], self._firsts[number]]]
        for block, _ in held:
            block.grad = None
        try:
            yield
        finally:
            for block, gradient in reversed(held):
                block.grad = gradient

    def entries(self, names: Collection[str]) -> dict[str, list[Any]]:
        states = [[self._own.state.get(block, {}) for block in blocks] for blocks in self._blocks]
        firsts = [self._own.state.get(first, {}) for first in self._firsts]
        found: dict[str, list[Any]] = {}
        for name in names:
            key = name.removeprefix("optimizer.")
            if name == PRESENT:
                found[name] = [np.array([bool(each) for each in firsts], np.uint8)]
            elif name in self.elementwise:
                arrays = [
                    _zeros(block) if state.get(key) is None else state[key]
                    for blocks, of_blocks in zip(self._blocks, states, strict=True)
                    for block, state in zip(blocks, of_blocks, strict=True)
                ]
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
        for parameter in self._trained:
            self._user.state.pop(parameter, None)
        self._set_part(part)
        ends = np.cumsum([block.numel() for blocks in self._blocks for block in blocks])[:-1]
        pieces = {
            name: iter(np.split(np.concatenate([each.reshape(-1) for each in entries[name]]), ends))
            for name in self.elementwise
        }
        for number, (blocks, first, present) in enumerate(
            zip(self._blocks, self._firsts, entries[PRESENT][0], strict=True)
        ):
            for block in blocks or [first]:
                state = {}
                for name, device in self._devices.items():
                    if name in self.elementwise and not blocks:
                        value = torch.zeros_like(first)
                    elif name in self.elementwise:
                        value = torch.empty_like(block, memory_format=torch.preserve_format)
                        value.copy_(torch.from_numpy(next(pieces[name])).reshape(block.shape))
                    else:
                        value = torch.tensor(float(entries[name][0][number]), device=device)
                    state[name.removeprefix("optimizer.")] = value
                if present:
                    self._own.state[block] = state

    def _set_part(self, part: Slices | None) -> None:
        """Use the user's optimizer (part=None), or a new one without state on the blocks of a slice."""
        self.part = part
        if part is None:
            self._own, self._blocks, self._firsts = self._user, [[each] for each in self._trained], list(self._trained)
            return
        assert self._parameters is not None
        if self._division[0] == TENSORS:
            self._take_tensors(self._parameters, part)
        else:
            self._take_slices(self._parameters, single(part))
        self._firsts = [
            blocks[0] if blocks else first for blocks, first in zip(self._blocks, self._firsts, strict=True)
        ]
        pairs = zip(self._trained, self._blocks, self._firsts, strict=True)
        self._own = optimizer_on(self._user, {id(parameter): blocks or [first] for parameter, blocks, first in pairs})

    def _take_slices(self, parameters: Tensor, part: slice) -> None:
        """Make the blocks of a slice that may begin and end inside of tensors."""
        self._blocks = []
        for spans in _spans(self.layout.parts, part, block_on(parameters.device.type), self._cuts):
            self._blocks.append([parameters[span] for span in spans])
            for block, span in zip(self._blocks[-1], spans, strict=True):
                block.grad = self._gradients[span]

    def _take_tensors(self, parameters: Tensor, part: Slices) -> None:
        """Make the blocks of a part of whole tensors, and for each other tensor a small one without gradient.

        The optimizer updates the small ones too, so every rank has the numbers that it keeps for each tensor.
        """
        self._blocks, self._firsts, owned = [], [], slices_of(part)
        for own, like in zip(self.layout.parts, self._trained, strict=True):
            small = parameters.new_zeros([1] * like.dim())
            small.grad = torch.zeros_like(small)
            self._firsts.append(small)
            self._blocks.append([])
            if own.start < own.stop and any(each.start <= own.start and own.stop <= each.stop for each in owned):
                block = parameters[own].view(like.shape)
                block.grad = self._gradients[own].view(like.shape)
                self._blocks[-1].append(block)

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


def block_on(device: str) -> int:
    """Return the number of elements updated at a time: on a GPU a whole tensor, because each operation is a launch."""
    return BLOCK if device == "cpu" else sys.maxsize


def _spans(parts: list[slice], part: slice, block: int, cuts: Sequence[int]) -> list[list[slice]]:
    """Return the blocks of each parameter in the slice, at least one (empty) block for each parameter.

    A block is at most `block` elements long, and a cut is between two blocks.

    So every rank has the entries that an optimizer keeps once per parameter, such as its number of steps.
    """
    spans = []
    for each in parts:
        start, stop = min(max(each.start, part.start), each.stop), min(each.stop, part.stop)
        spans.append(split(slice(start, stop), cuts, block) or [slice(start, start)])
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
