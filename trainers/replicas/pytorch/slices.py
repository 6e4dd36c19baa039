"""The user's optimizer at work on one slice of the flat parameters."""

import sys
from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.replicas.pytorch import fused
from trainers.replicas.pytorch.alike import hyperparameters, optimizer_like
from trainers.replicas.pytorch.tensors import flat_array

BLOCK = 1 << 17  # elements that are updated at a time: parameters, gradients and state of a block fit the cache


def block_on(device: str) -> int:
    """How many elements are updated at a time: on a GPU all of a tensor, since every operation is a launch."""
    return BLOCK if device == "cpu" else sys.maxsize


class SliceOptimizer:
    """An optimizer of the user's class, on the elements of `part` alone; it takes the state over from the user's.

    optimizer: the user's: the source of the hyperparameters in every step.
    trained: its parameters, one after the other in `parameters`, a flat tensor; `gradients` is laid out alike.
    part: start and stop of the slice.
    elementwise: which entries of the optimizer's state have a number for each element.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trained: list[nn.Parameter],
        parameters: Tensor,
        gradients: Tensor,
        part: slice,
        elementwise: set[str],
    ) -> None:
        self.part = part
        self._elementwise = elementwise
        self._user, self._trained = optimizer, trained
        self._firsts, self._spans = _spans(trained, part, block_on(parameters.device.type))
        self._pieces = [[parameters[start:stop] for start, stop in spans] for spans in self._spans]
        for spans, pieces in zip(self._spans, self._pieces, strict=True):
            for (start, stop), piece in zip(spans, pieces, strict=True):
                piece.grad = gradients[start:stop]
        pieces_of = {id(parameter): pieces for parameter, pieces in zip(trained, self._pieces, strict=True)}
        groups = [
            [p for each in group["params"] for p in pieces_of.get(id(each), [])] for group in optimizer.param_groups
        ]
        self._own = optimizer_like(optimizer, groups)
        self._take()

    def step(self) -> None:
        """Update the slice; schedules have changed the user's groups, so their numbers come from there."""
        fused.replace_and_warn(self._user)
        for own, group in zip(self._own.param_groups, self._user.param_groups, strict=True):
            own.update(hyperparameters(group))
        self._own.step()
        self._user._opt_called = True  # type: ignore[attr-defined]  # schedulers warn when it never was

    def _take(self) -> None:
        """Move this slice of the user's optimizer's state here, and drop the rest."""
        for parameter, first, spans, pieces in self._places():
            for key, value in self._user.state.pop(parameter, {}).items():
                for (start, stop), piece in zip(spans, pieces, strict=True):
                    if key in self._elementwise and isinstance(value, Tensor):
                        held = value.reshape(-1)[start - first : stop - first].clone()
                    else:
                        held = value.clone() if isinstance(value, Tensor) else value
                    self._own.state[piece][key] = held

    def elements(self, key: str) -> np.ndarray:
        """An elementwise entry of the state, in the slice; zeros before the first step."""
        held = [self._own.state[piece].get(key) for pieces in self._pieces for piece in pieces]
        filled = [
            torch.zeros_like(piece) if each is None else each
            for piece, each in zip([piece for pieces in self._pieces for piece in pieces], held, strict=True)
        ]
        return flat_array(filled)

    @torch.no_grad()
    def give_back(self, without: Collection[str] = ()) -> None:
        """Fill the user's optimizer's state: elements of other slices are zero. `forget` drops it again.

        without: elementwise entries ("optimizer.exp_avg") that are None instead.
        """
        for parameter, first, spans, pieces in self._places():
            for key, value in self._own.state.get(pieces[0], {}).items():
                if not (key in self._elementwise and isinstance(value, Tensor)):
                    self._user.state[parameter][key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                if f"optimizer.{key}" in without:
                    self._user.state[parameter][key] = None
                    continue
                whole = torch.zeros(parameter.numel(), dtype=value.dtype, device=value.device)
                for (start, stop), piece in zip(spans, pieces, strict=True):
                    whole[start - first : stop - first] = self._own.state[piece][key]
                self._user.state[parameter][key] = whole.view(parameter.shape)

    def forget(self) -> None:
        """Drop what `give_back` has given."""
        for parameter in self._trained:
            self._user.state.pop(parameter, None)

    def _places(self) -> Iterator[tuple[nn.Parameter, int, list[tuple[int, int]], list[Tensor]]]:
        """Every parameter, where it begins in the flat memory, and its blocks."""
        return zip(self._trained, self._firsts, self._spans, self._pieces, strict=True)


def _spans(trained: list[nn.Parameter], part: slice, block: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Where each parameter begins, and the blocks of it that lie in the slice; an empty one when none does.

    Every parameter has one, so that what an optimizer counts for a whole parameter is counted on every rank.
    """
    firsts, spans, first = [], [], 0
    for parameter in trained:
        last = first + parameter.numel()
        start, stop = min(max(first, part.start), last), min(last, part.stop)
        firsts.append(first)
        spans.append([(at, min(at + block, stop)) for at in range(start, stop, block)] or [(start, start)])
        first = last
    return firsts, spans
