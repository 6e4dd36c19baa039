"""The sharded update: every rank updates only the slice of the parameters whose gradients it has finished.

reduce_scatter -> the user's own optimizer on the flat slice -> all_gather of the parameters. Optimizer
state exists once in all, divided by the ranks. Where ranks that together own everything share a node,
the parameters live in one window of the node, so every rank writes where all read, and nothing is gathered.
S. Rajbhandari et al.: ZeRO: Memory optimizations toward training trillion parameter models, 2020 (stage 1).
"""

import inspect
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.optim import Optimizer

from allreduce import dtypes
from allreduce.base import TwoPhase
from allreduce.errors import OptionError
from allreduce.window import CommonWindow
from trainers.pytorch.averaging import Averager
from trainers.pytorch.layout import Piece, pieces
from trainers.replicas.torch_tensors import DTYPES, TORCH, as_tensor

BLOCK = 1 << 16  # elements that are updated at a time: parameters, gradients and state of a block fit the cache

SCALARS = {"step", "eta", "mu", "mu_product"}  # state that optimizers keep once for a tensor; all else is elementwise

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
"""Optimizers that treat every element alike and apart from all others, so that they work on any slice.
Add a class of your own if it is one of them."""


def refusal(optimizer: Optimizer) -> OptionError | None:
    """Why an optimizer can't work on slices, if it can't."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return None
    names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
    return OptionError(
        f'{kind.__name__} can\'t be used with update="sharded": it needs whole tensors, or is not known to treat '
        f'every element apart from all others. Use update="replicated", or one of {names}; an elementwise class '
        "of your own is let in by trainers.pytorch.ELEMENTWISE.add(YourClass)"
    )


class ShardedUpdate:
    """Moves the parameters into flat memory, and updates this rank's pieces of them.

    face: the user's optimizer: the source of the hyperparameters; its own state stays empty.
    comm: a communicator of all ranks, for `state_dict`.
    """

    def __init__(self, face: Optimizer, averager: Averager, backend: TwoPhase, comm: MPI.Intracomm) -> None:
        self._face, self._averager, self._backend, self._comm = face, averager, backend, comm
        self._groups = _groups(face, averager)
        owned = [backend.owned(bucket.array.size) for bucket in averager.buckets]
        self._windows: list[CommonWindow] = []
        self._arrays = self._allocate(owned)
        self.flats = {dtype: as_tensor(array, TORCH[dtype]) for dtype, array in self._arrays.items()}
        self._move_in()
        self.pieces = pieces(averager.plan, owned, self._groups, BLOCK)
        self._parts = [self.flats[each.dtype][each.start : each.stop] for each in self.pieces]
        self.optimizer = self._rebuild()
        for piece, part in zip(self.pieces, self._parts, strict=True):
            part.grad = averager.flats[piece.dtype][piece.start : piece.stop]
        self.load()

    @property
    def in_common(self) -> bool:
        """True when the parameters live in memory that the ranks of the node have in common."""
        return bool(self._windows)

    def _allocate(self, owned: list[slice]) -> dict[str, np.ndarray]:
        node = self._backend.topology.node
        mine = sum(each.stop - each.start for each in owned)
        together = node.allreduce(mine) == sum(bucket.array.size for bucket in self._averager.buckets)
        lengths = {dtype: flat.numel() for dtype, flat in self._averager.flats.items()}
        if self._comm.allreduce(together, MPI.LAND):
            made = {dtype: CommonWindow(node, length, _numpy(dtype)) for dtype, length in lengths.items()}
            self._windows = list(made.values())
            return {dtype: window.array for dtype, window in made.items()}
        return {dtype: self._backend.allocate(length, dtype) for dtype, length in lengths.items()}

    @torch.no_grad()
    def _move_in(self) -> None:
        """Make every parameter a view of the flat memory, with its values, which are equal on all ranks."""
        writes = not self.in_common or self._backend.topology.node_rank == 0
        for index, parameter in enumerate(self._averager.parameters):
            view = self._averager.place(index, self.flats)
            if writes:
                view.copy_(parameter)
            parameter.data = view
        self._fence()

    def _fence(self) -> None:
        for window in self._windows:
            window.fence()

    def _rebuild(self) -> Optimizer:
        """An optimizer of the user's class and with the user's hyperparameters, on this rank's pieces."""
        kind = type(self._face)
        known = inspect.signature(kind).parameters
        defaults = {key: value for key, value in self._face.defaults.items() if key in known}
        groups: list[dict[str, Any]] = [
            {**_hyperparameters(group), "params": [part for _, part in self._of_group(at)]}
            for at, group in enumerate(self._face.param_groups)
        ]
        return kind(groups, **defaults)

    def _of_group(self, group: int) -> list[tuple[Piece, Tensor]]:
        return [(piece, part) for piece, part in zip(self.pieces, self._parts, strict=True) if piece.group == group]

    def step(self) -> None:
        """Update this rank's pieces, and let all ranks see all of them. Collective.

        Before the first write all ranks must have stopped reading the parameters (a roll call sees to it).
        """
        for mine, group in zip(self.optimizer.param_groups, self._face.param_groups, strict=True):
            mine.update(_hyperparameters(group))  # schedulers change the user's groups
        self.optimizer.step()
        self._face._opt_called = True  # type: ignore[attr-defined]  # schedulers warn when it never was
        if self.in_common:
            self._fence()
            return
        for bucket in self._averager.plan:
            self._backend.all_gather(self._arrays[bucket.dtype][bucket.start : bucket.stop])

    def close(self) -> None:
        """Give every rank parameters of its own again. Collective."""
        for parameter in self._averager.parameters:
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        self.optimizer.param_groups.clear()
        self._parts.clear()
        self.flats.clear()
        self._arrays.clear()
        for window in self._windows:
            window.free()

    # State, in the format of the plain optimizer

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state_dict, gathered from all ranks, on every rank. Collective."""
        state: dict[Tensor, dict[str, Any]] = {}
        for group in range(len(self._face.param_groups)):
            members = [at for at, each in enumerate(self._groups) if each == group]
            for dtype in sorted({DTYPES[self._averager.parameters[at].dtype] for at in members}):
                here = [at for at in members if DTYPES[self._averager.parameters[at].dtype] == dtype]
                self._gather_state(group, dtype, here, state)
        result = self._face.state_dict()
        numbers = {
            parameter: number
            for packed, group in zip(result["param_groups"], self._face.param_groups, strict=True)
            for number, parameter in zip(packed["params"], group["params"], strict=True)
        }
        result["state"] = dict(sorted((numbers[parameter], each) for parameter, each in state.items()))
        return result

    def _gather_state(self, group: int, dtype: str, members: list[int], state: dict[Tensor, dict[str, Any]]) -> None:
        own = [(piece, part) for piece, part in self._of_group(group) if piece.dtype == dtype]
        for key, value in self._keys(own).items():
            if not isinstance(value, torch.dtype):
                for at in members:
                    copy = value.clone() if isinstance(value, Tensor) else value
                    state.setdefault(self._averager.parameters[at], {})[key] = copy
                continue
            whole = self._gather_flat(own, key, dtype, value)
            for at in members:
                copy = self._averager.place(at, whole).clone(memory_format=torch.preserve_format)
                state.setdefault(self._averager.parameters[at], {})[key] = copy

    def _keys(self, own: list[tuple[Piece, Tensor]]) -> dict[str, Any]:
        """What the state holds of a group, on whichever rank: for flat tensors their dtype, otherwise the value.

        A rank that owns nothing of a small group has no state of it, so the ranks tell each other.
        """
        found: dict[str, Any] = {}
        for _, part in own[:1]:
            for key, value in self.optimizer.state[part].items():
                found[key] = value.dtype if isinstance(value, Tensor) and key not in SCALARS else value
        merged: dict[str, Any] = {}
        for each in self._comm.allgather(found):
            merged = {**each, **merged}
        return merged

    def _gather_flat(self, own: list[tuple[Piece, Tensor]], key: str, dtype: str, of: torch.dtype) -> dict[str, Tensor]:
        array = np.zeros(self.flats[dtype].numel(), _numpy(DTYPES[of]))
        flat = as_tensor(array, of)
        for piece, part in own:
            flat[piece.start : piece.stop] = self.optimizer.state[part][key]
        for bucket in self._averager.plan:
            if bucket.dtype == dtype:
                self._backend.all_gather(array[bucket.start : bucket.stop])
        return {dtype: flat}

    @torch.no_grad()
    def load(self) -> None:
        """Take this rank's part of the state that the user's optimizer holds, and empty that."""
        self.optimizer.state.clear()
        for group in range(len(self._face.param_groups)):
            for dtype in {piece.dtype for piece, _ in self._of_group(group)}:
                self._load_group(group, dtype)
        self._face.state.clear()

    def _load_group(self, group: int, dtype: str) -> None:
        members = [
            (at, self._face.state[each])
            for at, each in enumerate(self._averager.parameters)
            if self._groups[at] == group and DTYPES[each.dtype] == dtype and self._face.state.get(each)
        ]
        for key, sample in members[0][1].items() if members else ():
            flat: Tensor | None = None
            if key not in SCALARS and isinstance(sample, Tensor):
                flat = torch.zeros(self.flats[dtype].numel(), dtype=sample.dtype)
                for at, held in members:
                    self._averager.place(at, {dtype: flat}).copy_(held[key])
            for piece, part in self._of_group(group):
                if piece.dtype == dtype:
                    value = sample if flat is None else flat[piece.start : piece.stop]
                    self.optimizer.state[part][key] = value.clone() if isinstance(value, Tensor) else value


def _groups(optimizer: Optimizer, averager: Averager) -> list[int]:
    """For each averaged parameter the number of its parameter group."""
    number = {id(each): at for at, group in enumerate(optimizer.param_groups) for each in group["params"]}
    return [number[id(each)] for each in averager.parameters]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _numpy(dtype: str) -> np.dtype:
    return dtypes.parse(dtype)
