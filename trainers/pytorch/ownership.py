"""Who averages the gradient of a parameter, so that no two do, and none that is closed is silently missed."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from allreduce.errors import ClosedError

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
