"""Objects as bytes that other ranks can read without running what is in them, as they would with a pickle."""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from allreduce.torch_backend.tensors import as_bytes, readable
from trainers.horovod.arguments import dtype_name, layout
from trainers.horovod.errors import NotSendableError

_HEAD = 8  # bytes that hold the length of the text

SENDABLE = "None, numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them"


def pack(value: Any) -> torch.Tensor:
    """`value` as a tensor of bytes. Raises NotSendableError."""
    tensors: list[torch.Tensor] = []
    plain = _plain(value, tensors)
    return _packed(plain, tensors)


def pack_error(error: Exception) -> torch.Tensor:
    """What `unpack` raises as a NotSendableError, on all ranks that read it."""
    return _packed({"error": str(error)}, [])


def _packed(plain: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    text = json.dumps([plain, [layout(each) for each in tensors]]).encode()
    head = np.frombuffer(len(text).to_bytes(_HEAD, "little") + text, np.uint8)
    return torch.from_numpy(np.concatenate([head, *map(as_bytes, tensors)]))


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
