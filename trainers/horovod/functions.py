"""What scripts do before training: the same parameters, optimizer state and objects on all ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainers.horovod import objects
from trainers.horovod.differentiable import allgather, broadcast_
from trainers.horovod.errors import ArgumentError, NotSendableError
from trainers.horovod.handles import synchronize
from trainers.horovod.operations import broadcast_async_
from trainers.horovod.process_sets import ProcessSet, global_process_set
from trainers.horovod.session import members, rank


def broadcast_parameters(
    params: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]", root_rank: int
) -> None:
    """Overwrite tensors, those of `model.state_dict()` or `model.named_parameters()`, by the root's. Collective."""
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, str) or not isinstance(params, Iterable):
        raise ArgumentError(f"broadcast_parameters takes model.state_dict(), not {type(params).__name__}")
    else:
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the state and the hyperparameters of the root's optimizer. Collective.

    As with Horovod, gradients are zeros afterwards where the root's optimizer has no state yet. model: Horovod's; of
    no use here.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"broadcast_optimizer_state takes an optimizer of torch.optim, not {type(optimizer).__name__}"
        )
    state = broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank)
    if not state["state"]:
        _give_gradients(optimizer)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def _give_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on all ranks; what the others bring is not looked at. Collective.

    None, numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them. Anything else is a
    NotSendableError on all ranks: nobody takes a pickle from the network.
    """
    size_name, name = (None, None) if name is None else (f"{name}.size", f"{name}.bytes")
    packed, error = torch.empty(0, dtype=torch.uint8), None
    if rank() == root_rank:
        packed, error = _packed(obj)
    length = broadcast_(torch.tensor([packed.numel()]), root_rank, size_name, process_set)
    if rank() != root_rank:
        packed = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(packed, root_rank, name, process_set)
    if error is not None:
        raise error
    return obj if rank() == root_rank else objects.unpack(packed)[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, by rank; as broadcast_object. Collective."""
    packed, error = _packed(obj)
    everyone = allgather(packed, name, process_set)
    if error is not None:
        raise error
    values = []
    for _ in members(process_set).ranks:
        value, length = objects.unpack(everyone)
        values.append(value)
        everyone = everyone[length:]
    return values


def _packed(obj: Any) -> tuple[torch.Tensor, NotSendableError | None]:
    """An object's bytes, or those of the error that all ranks raise instead."""
    try:
        return objects.pack(obj), None
    except NotSendableError as error:
        return objects.pack_error(error), error
