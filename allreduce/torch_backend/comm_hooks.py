"""DDP's built-in communication hooks, which its reducer runs in C++ on a backend in C++."""

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from allreduce.torch_backend.arguments import not_offered
from allreduce.torch_backend.process_group import AllReduceProcessGroup


def refuse_builtin_comm_hooks() -> None:
    """Have DDP refuse its built-in hooks on a group of ours by name; PyTorch would end in an internal assert."""
    original: Any = DistributedDataParallel._register_builtin_comm_hook
    if getattr(original, "refuses", False):
        return

    @functools.wraps(original)
    def register(model: DistributedDataParallel, comm_hook_type: Any) -> None:
        if isinstance(model.process_group, AllReduceProcessGroup):
            raise not_offered(
                f"the built-in comm hook {comm_hook_type}",
                "use model.register_comm_hook with a hook of torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
            )
        original(model, comm_hook_type)

    register.refuses = True  # type: ignore[attr-defined]
    DistributedDataParallel._register_builtin_comm_hook = register  # type: ignore[method-assign]
