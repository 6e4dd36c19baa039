"""Broadcast and allgather of parameters, optimizer state and objects."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from allreduce.errors import OptionError
from trainers.horovod.calls import synchronize
from trainers.horovod.collectives import allgather, broadcast_, broadcast_async_
from trainers.horovod.session import ProcessSet, global_process_set, members, rank
from trainers.replicas.pytorch import values


def broadcast_parameters(
    params: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]", root_rank: int
) -> None:
    """Broadcast the root's tensors of `model.state_dict()` or `model.named_parameters()`, in place. Collective."""
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, str) or not isinstance(params, Iterable):
        raise OptionError(f"broadcast_parameters takes model.state_dict(), not {type(params).__name__}")
    else:
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the state and the hyperparameters of the root's optimizer to all ranks. Collective.

    As with Horovod, if the root's optimizer has no state yet, missing gradients are set to zeros. model: ignored.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"broadcast_optimizer_state takes an optimizer of torch.optim, not {type(optimizer).__name__}"
        )
    state = broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank)
    if not state["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on all ranks; `obj` of other ranks is ignored. Collective.

    obj: None, numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them. For anything
    else all ranks raise OptionError: no pickle is sent.
    """
    size_name, name = (None, None) if name is None else (f"{name}.size", f"{name}.bytes")
    packed, error = torch.empty(0, dtype=torch.uint8), None
    if rank() == root_rank:
        packed, error = pack(obj)
    length = broadcast_(torch.tensor([packed.numel()]), root_rank, size_name, process_set)
    if rank() != root_rank:
        packed = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(packed, root_rank, name, process_set)
    if error is not None:
        raise error
    return obj if rank() == root_rank else unpack(packed)[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, in rank order. obj: as in broadcast_object. Collective."""
    packed, error = pack(obj)
    everyone = allgather(packed, name, process_set)
    if error is not None:
        raise error
    objects = []
    for _ in members(process_set).ranks:
        found, length = unpack(everyone)
        objects.append(found)
        everyone = everyone[length:]
    return objects


def pack(value: Any) -> tuple[torch.Tensor, OptionError | None]:
    """Serialize `value` to a uint8 tensor. If it can't be sent: an error, and bytes for which `unpack` raises it."""
    error = None
    try:
        packed = values.pack([None, value], named_tuples=True)
    except Exception as refused:  # of any type: the other ranks wait for these bytes
        error = OptionError(str(refused) or type(refused).__name__)
        error.__cause__ = refused
        packed = values.pack([str(error), None])
    return torch.from_numpy(packed), error


def unpack(packed: torch.Tensor) -> tuple[Any, int]:
    """Deserialize the first value in `packed`; returns it and its number of bytes. Raises OptionError."""
    (refusal, value), length = values.unpack(packed.numpy())
    if refusal is not None:
        raise OptionError(refusal)
    return value, length
