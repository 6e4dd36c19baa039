"""State that all ranks take from one rank, or exchange: parameters, the state of optimizers, objects."""

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from allreduce.torch_backend.tensors import as_bytes, readable
from trainers.horovod.arguments import dtype_name, layout
from trainers.horovod.calls import synchronize
from trainers.horovod.collectives import allgather, broadcast_, broadcast_async_
from trainers.horovod.errors import ArgumentError, NotSendableError
from trainers.horovod.session import ProcessSet, global_process_set, members, rank


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
        packed, error = pack(obj)
    length = broadcast_(torch.tensor([packed.numel()]), root_rank, size_name, process_set)
    if rank() != root_rank:
        packed = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(packed, root_rank, name, process_set)
    if error is not None:
        raise error
    return obj if rank() == root_rank else unpack(packed)[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, by rank; as broadcast_object. Collective."""
    packed, error = pack(obj)
    everyone = allgather(packed, name, process_set)
    if error is not None:
        raise error
    values = []
    for _ in members(process_set).ranks:
        value, length = unpack(everyone)
        values.append(value)
        everyone = everyone[length:]
    return values


# Objects as bytes. To read them runs none of their contents, as it would with a pickle.

_HEAD = 8  # bytes that hold the length of the text
SENDABLE = "None, numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them"


def pack(value: Any) -> tuple[torch.Tensor, NotSendableError | None]:
    """`value` as a tensor of bytes; where it can't be sent, an error, and bytes by which `unpack` raises the error."""
    tensors: list[torch.Tensor] = []
    error = None
    try:
        plain = _plain(value, tensors)
    except NotSendableError as refused:
        plain, tensors, error = {"error": str(refused)}, [], refused
    text = json.dumps([plain, [layout(each) for each in tensors]]).encode()
    head = np.frombuffer(len(text).to_bytes(_HEAD, "little") + text, np.uint8)
    return torch.from_numpy(np.concatenate([head, *map(as_bytes, tensors)])), error


def unpack(packed: torch.Tensor) -> tuple[Any, int]:
    """The value that some bytes begin with, and how many these are. Raises NotSendableError."""
    memory = packed.numpy()
    end = _HEAD + int.from_bytes(memory[:_HEAD].tobytes(), "little")
    plain, layouts = json.loads(memory[_HEAD:end].tobytes())
    tensors = []
    for shape, dtype in layouts:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        as_bytes(tensor)[:] = memory[end : end + tensor.nbytes]
        tensors.append(tensor)
        end += tensor.nbytes
    return _value(plain, tensors), end


def _refuse(text: str) -> None:
    raise NotSendableError(text)


_CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_LEAVES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {  # type, to JSON, from JSON
    "array": (
        np.ndarray,
        lambda array: [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()],
        lambda held: np.frombuffer(base64.b64decode(held[2]), np.dtype(held[0])).reshape(held[1]).copy(),
    ),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "complex": (complex, lambda value: [value.real, value.imag], lambda held: complex(*held)),
    "dtype": (torch.dtype, dtype_name, lambda held: getattr(torch, held)),
    "device": (torch.device, str, torch.device),
    "error": ((), str, _refuse),
}


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` as JSON: containers, and what JSON does not know, as a dict of one kind; tensors go to the list."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(readable(value))
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, tensors), _plain(held, tensors)] for key, held in value.items()]}
    for name, container in _CONTAINERS.items():
        if isinstance(value, container):
            return {name: [_plain(each, tensors) for each in value]}
    return _leaf(value)


def _leaf(value: Any) -> Any:
    if not (isinstance(value, np.ndarray) and (value.dtype.hasobject or value.dtype.names is not None)):
        for name, (kind, write, _) in _LEAVES.items():
            if isinstance(value, kind):
                return {name: write(value)}
    for number in (int, float, str):
        if isinstance(value, number):  # an enumeration's member, say
            return number(value)
    raise NotSendableError(
        f"a {type(value).__module__}.{type(value).__qualname__} can't be sent to other ranks, because no pickle is "
        f"taken from the network; send {SENDABLE}"
    )


def _value(plain: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {_value(key, tensors): _value(entry, tensors) for key, entry in held}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_value(each, tensors) for each in held)
    return _LEAVES[kind][2](held)
