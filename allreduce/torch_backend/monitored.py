"""torch.distributed.monitored_barrier for our groups too: PyTorch's own function refuses all backends but gloo."""

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from allreduce.torch_backend.process_group import AllReduceProcessGroup


def serve_monitored_barrier() -> None:
    """Have torch.distributed.monitored_barrier call the method of a group of ours, and PyTorch's own for others.

    A program that has imported the function by its name before this backend was loaded keeps PyTorch's.
    """
    original = distributed_c10d.monitored_barrier
    if getattr(original, "serves", False):
        return

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        asked = dist.group.WORLD if group is None else group
        if isinstance(asked, AllReduceProcessGroup):
            asked.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    monitored_barrier.serves = True  # type: ignore[attr-defined]
    for module in (dist, distributed_c10d):
        vars(module)["monitored_barrier"] = monitored_barrier
