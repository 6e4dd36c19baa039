"""Import this before PyTorch in a program that compiles nothing: its optimizers then do without torch._dynamo, whose
import takes about as long as that of PyTorch."""

import sys
from types import ModuleType
from typing import Any


class Dynamo(ModuleType):
    """In the place of torch._dynamo."""

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function, or the decorator that does."""
        return function or (lambda decorated: decorated)

    @staticmethod
    def graph_break() -> None:
        """There is no graph."""


sys.modules.setdefault("torch._dynamo", Dynamo("torch._dynamo"))
