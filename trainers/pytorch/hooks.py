"""Hooks on the user's module and parameters, and the owner of each parameter: the object that averages its gradient."""

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from allreduce.errors import ClosedError


class Hook:
    """A module's hook that calls a bound method, without keeping the method's object alive.

    Copying or pickling the module replaces the hook by a function that does nothing.
    """

    def __init__(self, method: Callable[..., object]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: object) -> None:
        method = self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (logging.NullHandler, "handle")


CLOSED = (
    "backward after close(): the MirroredOptimizer of this model is closed, so its gradients are not "
    "averaged any more; make a new MirroredOptimizer, or train a copy.deepcopy(model)"
)

# By parameter: a weak reference to its owner, and the hook that makes backward raise after the owner is closed.
# They are not attributes of the parameter, since these would be pickled with its model.
_OWNERS = WeakTensorKeyDictionary()
_REFUSALS = WeakTensorKeyDictionary()


def owner_of(parameter: Parameter) -> Any:
    """The owner of this parameter, closed or not; None if it has none."""
    return _OWNERS[parameter]() if parameter in _OWNERS else None


def take_over(parameters: Iterable[Parameter], owner: object) -> None:
    """Make `owner` the owner of these parameters, and remove the hooks of `refuse`."""
    for parameter in parameters:
        _OWNERS[parameter] = weakref.ref(owner)
        if parameter in _REFUSALS:
            _REFUSALS.pop(parameter).remove()


def refuse(parameters: Iterable[Parameter], why: str) -> None:
    """Make a backward through these parameters raise ClosedError, until `take_over`."""
    for parameter in parameters:
        if parameter.requires_grad:  # a parameter that was frozen meanwhile accepts no hook
            _REFUSALS[parameter] = parameter.register_post_accumulate_grad_hook(partial(_refuse, why))


def _refuse(why: str, parameter: Tensor) -> None:
    raise ClosedError(why)
