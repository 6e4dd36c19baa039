"""A divided update (ZeRO-1) in PyTorch: a rank updates blocks of flat memory by an optimizer of the user's class.

`held_by` returns the elements that a rank updates, and `Blocks` has their optimizer. They serve TorchReplica and
MirroredOptimizer.
"""

import copy
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from trainers.options.buckets import Bucket
from trainers.replicas.pytorch.division import hyperparameters, optimizer_like
from trainers.replicas.pytorch.tensors import shaped

BLOCK = 1 << 17  # elements updated at a time: their parameters, gradients and state fit into the cache
SCALARS = {"step", "eta", "mu", "mu_product"}  # state entries that are scalars even for a 0-d parameter


class Held(NamedTuple):
    """Elements [start, stop) of the buckets, one bucket after the other, that this rank updates. They belong to one
    parameter: its elements from `offset` on are `blocks` of the buffer of `dtype`; a gap may follow."""

    start: int
    stop: int
    parameter: int
    dtype: str
    offset: int
    blocks: list[slice]


def held_by(
    buckets: Sequence[Bucket], owned: Sequence[Sequence[slice]], cuts: Sequence[Sequence[int]], most: int
) -> list[Held]:
    """Return the elements that this rank updates, in order: its parts of each bucket, split at parameter boundaries and
    at `cuts`.

    owned: for each bucket, the slices that this rank owns, relative to the bucket. most: the number of elements in a
        block.
    cuts: for each bucket, the starts of all ranks' parts, relative to the bucket. Nodes of different sizes own
        different parts, and a kernel may treat the last elements of a block differently. So all ranks split at the same
        positions, to get the same bits.
    """
    held, first = [], 0
    for bucket, parts, inside in zip(buckets, owned, cuts, strict=True):
        begins = [slot.start - bucket.start for slot in bucket.slots]
        for each in (piece for part in parts for piece in split(part, [*inside, *begins])):
            slot, start = bucket.slots[bisect_right(begins, each.start) - 1], bucket.start + each.start
            blocks = split(slice(start, min(bucket.start + each.stop, slot.stop)), (), most)
            place = first + each.start, first + each.stop
            held.append(Held(*place, slot.parameter, bucket.dtype, start - slot.start, blocks))
        first += bucket.stop - bucket.start
    return held


def split(part: slice, cuts: Iterable[int], most: int = sys.maxsize) -> list[slice]:
    """Return the parts of a slice between the cuts inside of it, each of at most `most` elements; [] if it is empty."""
    if part.start >= part.stop:
        return []
    ends = sorted({part.start, part.stop, *(cut for cut in cuts if part.start < cut < part.stop)})
    return [slice(at, min(at + most, end)) for begin, end in pairwise(ends) for at in range(begin, end, most)]


def largest_block(device: str, tensors: bool) -> int:
    """Return the number of elements updated at a time: on a GPU a whole tensor, because each operation is a launch."""
    return BLOCK if device == "cpu" and not tensors else sys.maxsize


class Blocks:
    """An optimizer of the user's class, with the hyperparameters of the user's, on the elements that this rank updates.

    user: the user's optimizer. parameters: laid out in the buckets of `held`. flats, gradients: the memory of all
    parameters and gradients, by dtype. tensors: the blocks are whole tensors, with their shapes; else they are 1-D.
    numbers: the names of the state's entries with one number for each parameter, such as its steps, if this rank is to
    have them for all parameters. A parameter of which it updates nothing then has an empty block, or with `tensors` one
    of one element.

    optimizer: of the blocks. parts, grads: the blocks of each `held`, and their gradients. firsts: for each parameter a
    block with its numbers, if there are `numbers`.
    """

    def __init__(
        self,
        user: Optimizer,
        parameters: Sequence[Tensor],
        held: Sequence[Held],
        flats: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        tensors: bool,
        numbers: Collection[str] | None = None,
    ) -> None:
        self._user, self._parameters, self._tensors = user, parameters, tensors
        self._numbers = SCALARS if numbers is None else numbers
        self.parts = [self._of(flats, each) for each in held]
        self.grads = [self._of(gradients, each) for each in held]
        self._of_parameters: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in parameters]  # offset, part, gradient
        for each, own, grads in zip(held, self.parts, self.grads, strict=True):
            offsets = accumulate((part.numel() for part in own), initial=each.offset)
            self._of_parameters[each.parameter] += zip(offsets, own, grads, strict=False)
        self.firsts: list[Tensor] = []
        for parameter, blocks in zip(parameters, self._of_parameters, strict=True) if numbers is not None else ():
            if not blocks:
                small = parameter.detach().new_zeros([1] * parameter.dim() if tensors else [0])
                blocks.append((0, small, torch.zeros_like(small)))
            self.firsts.append(blocks[0][1])
        pairs = zip(parameters, self._of_parameters, strict=True)
        parts = {id(parameter): [part for _, part, _ in blocks] for parameter, blocks in pairs}
        self.optimizer = optimizer_like(
            user,
            ([part for each in group["params"] for part in parts.get(id(each), [])] for group in user.param_groups),
        )

    def _of(self, flats: Mapping[str, Tensor], held: Held) -> list[Tensor]:
        flat = flats[held.dtype]
        if self._tensors:
            return [shaped(flat, each.start, self._parameters[held.parameter]) for each in held.blocks]
        return [flat[each] for each in held.blocks]

    def step(self, used: np.ndarray, more: Callable[[int], dict[str, Any]] = lambda group: {}) -> None:
        """Update the blocks of the parameters that are `used`, with the user's hyperparameters. more: returns further
        ones of a group, by its number."""
        for is_used, blocks in zip(used, self._of_parameters, strict=True):
            for _, part, grad in blocks:
                part.grad = grad if is_used else None
        pairs = zip(self.optimizer.param_groups, self._user.param_groups, strict=True)
        for number, (group, users) in enumerate(pairs):
            group.update(hyperparameters(users) | more(number))  # schedulers change the user's groups
        self.optimizer.step()
        vars(self._user)["_opt_called"] = True  # otherwise schedulers warn that it was never called

    @torch.no_grad()
    def load(self) -> None:
        """Take the state of the parameters out of the user's optimizer, and keep that of the blocks. Local."""
        self.optimizer.state.clear()
        for parameter, blocks in zip(self._parameters, self._of_parameters, strict=True):
            for key, value in self._user.state.pop(parameter, {}).items():
                divided = isinstance(value, Tensor) and value.shape == parameter.shape
                divided &= bool(parameter.dim()) or key not in self._numbers
                flat = in_memory_order(value, parameter) if divided and not self._tensors else None
                for offset, part, _ in blocks:
                    if flat is not None:
                        own = flat[offset : offset + part.numel()].clone()
                    elif divided and part.shape != parameter.shape:
                        own = torch.zeros_like(part, dtype=value.dtype)
                    else:
                        own = copy.deepcopy(value)
                    self.optimizer.state[part][key] = own

    def clear(self) -> None:
        """Drop the blocks and their state. Local."""
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()
        for held in (self.parts, self.grads, self._of_parameters, self.firsts):
            held.clear()


def in_memory_order(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of numbers for the elements of a parameter, in the order of flat memory."""
    flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
    shaped(flat, 0, parameter).copy_(value)
    return flat
