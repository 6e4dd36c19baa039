"""Is this backend what a framework communicates by? For those that choose a process group by themselves."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allreduce.errors import UnavailableError
from allreduce.torch_backend.arguments import NAME
from allreduce.torch_backend.process_group import AllReduceProcessGroup

_FIRST = f'call torch.distributed.init_process_group("{NAME}") before the framework makes a process group of its own'


def require(model: torch.nn.Module | None = None) -> str:
    """Make sure that torch.distributed runs on this backend. Local: nothing is sent.

    model: what the framework trains; then its DistributedDataParallel must be there, and use this backend too.
    Returns one line to print: the backend in force and its ranks. Raises UnavailableError, which says what is in
    force instead: no process group, gloo, a model that is not wrapped.
    """
    if not dist.is_initialized():
        raise UnavailableError(f"torch.distributed has no process group; {_FIRST}")
    group, name = dist.group.WORLD, dist.get_backend()
    if not isinstance(group, AllReduceProcessGroup):
        raise UnavailableError(f'torch.distributed runs on "{name}", not on "{NAME}"; {_FIRST}')
    if model is not None:
        _check(model)
    return f"torch.distributed: {NAME}, {group.in_words}"


def _check(model: torch.nn.Module) -> None:
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not wrapped and dist.get_world_size() > 1:
        raise UnavailableError(
            f"{type(model).__name__} holds no DistributedDataParallel, so its gradients are not averaged; give what "
            "the framework has prepared (Accelerate: what prepare() returned; Transformers: trainer.model_wrapped)"
        )
    for module in wrapped:
        name = dist.get_backend(module.process_group)
        if name != NAME:
            raise UnavailableError(f'the model\'s DistributedDataParallel averages over "{name}", not over "{NAME}"')
