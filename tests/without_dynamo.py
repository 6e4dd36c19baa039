"""Import this before PyTorch in a program that compiles nothing: its optimizers and DDP then do without torch._dynamo,
whose import takes about as long as that of PyTorch, and without torch._meta_registrations, which only compiling and the
device "meta" need: a quarter of PyTorch's own import."""

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class Dynamo(ModuleType):
    """In the place of torch._dynamo."""

    trace_rules = SimpleNamespace(
        clear_lru_cache=int, LEGACY_MOD_INLINELIST=set(), get_legacy_mod_inlinelist=functools.cache(set)
    )
    utils = SimpleNamespace(get_optimize_ddp_mode=str)

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function, or the decorator that does."""
        return function or (lambda decorated: decorated)

    @staticmethod
    def graph_break() -> None:
        """There is no graph."""


sys.modules.setdefault("torch._dynamo", Dynamo("torch._dynamo"))
sys.modules.setdefault("torch._meta_registrations", ModuleType("torch._meta_registrations"))

import torch  # noqa: E402

if hasattr(torch._C, "_set_generator_metaclass"):  # in PyTorch 2.13 a module that is not imported now does so
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)
