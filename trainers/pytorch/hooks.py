"""Hooks that a module keeps of ours."""

import logging
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from allreduce.errors import ClosedError
from trainers.replicas.pytorch.state import Buffers

UserT = TypeVar("UserT")


class Hook(Generic[UserT]):
    """A module's hook for `user`, which it does not keep alive.

    It stays behind when the module is copied or pickled: there the hook is a function that does nothing.
    """

    def __init__(self, user: UserT) -> None:
        self._user = weakref.ref(user)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (logging.NullHandler, "handle")


CLOSED = (
    "backward after close(): the MirroredOptimizer of this model is closed, so its gradients are averaged "
    "no longer; make a new MirroredOptimizer, or train a copy.deepcopy(model)"
)

# By parameter: a weak reference to its owner, and the hook that refuses backward after the owner was closed.
# They are kept here, as attributes of a parameter would be pickled with its model.
_OWNERS = WeakTensorKeyDictionary()
_REFUSALS = WeakTensorKeyDictionary()


def owner_of(parameter: Parameter) -> Any:
    """What averages the gradient of this parameter, closed or not; None when nothing does."""
    return _OWNERS[parameter]() if parameter in _OWNERS else None


def take_over(parameters: Iterable[Parameter], owner: object) -> None:
    """Note who averages these parameters, and free them from the refusal that a closed owner has left."""
    for parameter in parameters:
        _OWNERS[parameter] = weakref.ref(owner)
        if parameter in _REFUSALS:
            _REFUSALS.pop(parameter).remove()


def refuse(parameters: Iterable[Parameter], why: str) -> None:
    """From now on a backward through these parameters raises ClosedError, until somebody takes them over."""
    for parameter in parameters:
        if parameter.requires_grad:  # torch takes no hook of one that was frozen meanwhile
            _REFUSALS[parameter] = parameter.register_post_accumulate_grad_hook(partial(_refuse, why))


def _refuse(why: str, parameter: Tensor) -> None:
    raise ClosedError(why)


class Forwards:
    """Those of one model that is trained, since the last step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before, self._begun = Buffers(model), False

    def begin(self) -> None:
        """A forward begins. Local."""
        if not self._begun:
            self._begun = True
            self._before.keep()

    def stepped(self, left_out: bool) -> None:
        """A step has ended; left_out: the buffers become what they were before its first forward. Local."""
        self._begun = False
        if left_out:
            self._before.restore()
        else:
            self._before.forget()


class OnForward(Hook[Forwards]):
    """A model's, before it is called."""

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        forwards = self._user()
        if forwards is not None and module.training:
            forwards.begin()
