"""Replacements of functions of PyTorch that do not work with a process group written in Python."""

import functools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from allreduce.torch_backend.checks import not_offered
from allreduce.torch_backend.process_group import AllReduceProcessGroup

Function = Callable[..., Any]
_works: Any = weakref.WeakKeyDictionary()  # of DDP's reducers


def apply() -> None:
    """Replace the functions. With groups of other backends they work as before. A second call changes nothing."""
    _replace(_monitored_barrier, "monitored_barrier", dist, distributed_c10d)
    _replace(_attach_flight_recorder, "_maybe_attach_flight_recorder", distributed_c10d)
    _replace(_register_builtin_comm_hook, "_register_builtin_comm_hook", DistributedDataParallel)
    _replace(_set_forward_pass_work_handle, "_set_forward_pass_work_handle", dist.Reducer)


def _replace(replacement: Function, name: str, *owners: Any) -> None:
    """Replace the function `name` of `owners` by `replacement(original, ...)`, if this PyTorch has it."""
    original = getattr(owners[0], name, None)
    if original is None or hasattr(original, "_replaced_by_allreduce"):
        return

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    vars(call)["_replaced_by_allreduce"] = True
    for owner in owners:
        setattr(owner, name, call)


def _monitored_barrier(
    original: Function, group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Call our group's monitored_barrier: PyTorch's function refuses every backend but gloo.

    A program that has imported the function by its name before this backend was loaded keeps PyTorch's.
    """
    asked = dist.group.WORLD if group is None else group
    if isinstance(asked, AllReduceProcessGroup):
        asked.monitored_barrier(timeout, wait_all_ranks)
    else:
        original(group, timeout, wait_all_ranks)


def _attach_flight_recorder(original: Function, group: Any, *args: Any, **options: Any) -> Any:
    """Skip the flight recorder for our groups.

    PyTorch 2.15 and later asks a C++ backend for the group's name, and raises without one.
    """
    return None if isinstance(group, AllReduceProcessGroup) else original(group, *args, **options)


def _register_builtin_comm_hook(original: Function, model: DistributedDataParallel, comm_hook_type: Any) -> None:
    """Refuse DDP's built-in comm hooks for our groups: without a C++ backend they fail in an internal assert."""
    if isinstance(model.process_group, AllReduceProcessGroup):
        raise not_offered(
            f"the built-in comm hook {comm_hook_type}",
            "use model.register_comm_hook with a hook of torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        )
    original(model, comm_hook_type)


def _set_forward_pass_work_handle(original: Function, reducer: Any, work: Any, use_static_world_size: bool) -> None:
    """Keep the Work that DDP's `join` gives to its reducer in C++ as long as the reducer may use it.

    An object of a Python subclass of a PyTorch class loses its Python methods when no Python reference is left, even
    though C++ still holds it. PyTorch prevents this where C++ gets a Work from a group, but not here.
    """
    _works[reducer] = work  # a reducer uses one at a time
    original(reducer, work, use_static_world_size)
