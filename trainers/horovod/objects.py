"""Objects as bytes that other ranks can read without running what is in them, as they would with a pickle."""

import base64
import json
from typing import Any

import numpy as np
import torch

from allreduce.torch_backend.tensors import as_bytes, readable
from trainers.horovod.arguments import layout
from trainers.horovod.errors import NotSendableError

_HEAD = 8  # bytes that hold the length of the text

SENDABLE = "None, numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them"


def pack(value: Any) -> torch.Tensor:
    """`value` as a tensor of bytes. Raises NotSendableError."""
    tensors: list[torch.Tensor] = []
    text = json.dumps([_plain(value, tensors), [layout(each) for each in tensors]]).encode()
    parts = [np.frombuffer(len(text).to_bytes(_HEAD, "little") + text, np.uint8), *map(as_bytes, tensors)]
    return torch.from_numpy(np.concatenate(parts))


def pack_error(error: Exception) -> torch.Tensor:
    """What `unpack` raises as a NotSendableError, on all ranks that read it."""
    text = json.dumps([{"error": str(error)}, []]).encode()
    return torch.from_numpy(np.frombuffer(len(text).to_bytes(_HEAD, "little") + text, np.uint8).copy())


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


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` as JSON: containers, and what JSON does not know, as a dict of one kind; tensors go to the list."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(each, tensors) for each in value]
    if isinstance(value, torch.Tensor):
        tensors.append(readable(value))
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, np.generic):
        return _plain(value.item(), tensors)
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, tensors), _plain(held, tensors)] for key, held in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [_plain(each, tensors) for each in value]}
    for number in (int, float, str):
        if isinstance(value, number):  # an enumeration's member, say
            return number(value)
    raise NotSendableError(
        f"a {type(value).__module__}.{type(value).__qualname__} can't be sent to other ranks, because no pickle is "
        f"taken from the network; send {SENDABLE}"
    )


def _refuse(text: str) -> None:
    raise NotSendableError(text)


def _value(plain: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_value(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {_value(key, tensors): _value(entry, tensors) for key, entry in held}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_value(each, tensors) for each in held)
    return _MAKE[kind](held)


_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAKE: dict[str, Any] = {
    "array": lambda held: np.frombuffer(base64.b64decode(held[2]), np.dtype(held[0])).reshape(held[1]).copy(),
    "bytes": base64.b64decode,
    "complex": lambda held: complex(*held),
    "dtype": lambda held: getattr(torch, held),
    "device": torch.device,
    "error": _refuse,
}
