"""Keeps torch.compile away from what communicates: Dynamo traces Python, and a process group in Python too."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

ClassT = TypeVar("ClassT", bound=type)


def untraced(kind: ClassT) -> ClassT:
    """Have the methods of a class run as they are when compiled code calls them: the graph breaks there."""
    for name, value in list(vars(kind).items()):
        if callable(value) and not isinstance(value, type) and not name.startswith("__"):
            setattr(kind, name, _hidden(value))
    return kind


def _hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    hidden = torch._disable_dynamo(method)  # imports Dynamo when it is called: seconds that plain programs save

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (hidden if "torch._dynamo" in sys.modules else method)(*args, **kwargs)

    return call
