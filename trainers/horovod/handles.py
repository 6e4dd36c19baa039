"""Handles: what asynchronous calls return, numbers for poll and synchronize."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allreduce.errors import AllReduceError
from allreduce.messages.lanes import Pending
from allreduce.messages.named import Side, Sides
from trainers.horovod import timeline
from trainers.horovod.errors import ArgumentError, internal
from trainers.horovod.members import Members
from trainers.horovod.working import Run

_numbers = itertools.count()
_last = -1
_open: dict[int, tuple[Pending, Run]] = {}  # of calls whose results nobody has asked for


def submit(
    members: Members, name: str, side: Side, tensors: Sequence[torch.Tensor], work: Callable[[Sides], object]
) -> int:
    """Have `work` called when all members have come to this name; a handle for what it returns. Local."""
    global _last
    run = Run(work, tensors, timeline.begin(name))
    pending = members.submit(name, side._replace(what=f"{name}: {side.what}"), run)
    _last = next(_numbers)
    _open[_last] = pending, run
    return _last


def poll(handle: int) -> bool:
    """Whether a call has ended, so that `synchronize` returns at once. Local."""
    return handle not in _open or _open[_checked(handle)][0].done()


def synchronize(handle: int) -> Any:
    """Wait for a call, and return its result: a tensor, or several. None for a handle that was synchronized before.

    Raises HorovodInternalError when the call failed.
    """
    if _checked(handle) not in _open:
        return None
    pending, run = _open.pop(handle)
    try:
        pending.wait()
    except AllReduceError as error:
        raise internal(error) from error
    return run.result


def _checked(handle: int) -> int:
    if not isinstance(handle, int) or not 0 <= handle <= _last:
        raise ArgumentError(f"{handle!r} is no handle: asynchronous calls return them")
    return handle


def forget() -> None:
    """Drop all handles: their session has ended."""
    _open.clear()
