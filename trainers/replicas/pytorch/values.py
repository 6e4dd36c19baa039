"""Values with tensors as JSON, and as bytes for other ranks. Reading them executes no code, unlike a pickle."""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.replica import reserved
from trainers.replicas.pytorch.tensors import as_bytes

SENDABLE = "None, numbers, texts, bytes, dense tensors, NumPy arrays, and lists, tuples, sets and dicts of them"
HEAD = 8  # bytes with the length of the JSON
TEXT_BYTES = 1024  # the length of the JSON is a multiple of this, so that it stays the same while counters grow

CONTAINERS = {kind.__name__: kind for kind in (tuple, set, frozenset)}
LEAVES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {  # type, to JSON, from JSON
    "array": (
        np.ndarray,
        lambda array: [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()],
        lambda held: np.frombuffer(base64.b64decode(held[2]), np.dtype(held[0])).reshape(held[1]).copy(),
    ),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "complex": (complex, lambda value: [value.real, value.imag], lambda held: complex(*held)),
    "dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), lambda held: getattr(torch, held)),
    "device": (torch.device, str, torch.device),
}


def to_json(value: Any, tensors: list[Tensor], named_tuples: bool = False) -> Any:
    """Return `value` as json.dumps accepts it, for `from_json`. A type that JSON lacks becomes a dict {type: content}.

    tensors: the tensors of `value` are appended to it; the result has their indices. named_tuples: convert them to
        plain tuples. Raises TypeError for a value that is not SENDABLE.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor) and value.layout == torch.strided:
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, dict):
            return {"dict": [[plain(key), plain(held)] for key, held in value.items()]}
        for name, container in CONTAINERS.items():
            if isinstance(value, container) and (named_tuples or not hasattr(value, "_fields")):
                return {name: [plain(each) for each in value]}
        return _leaf(value)

    return plain(value)


def _leaf(value: Any) -> Any:
    if not (isinstance(value, np.ndarray) and (value.dtype.hasobject or value.dtype.kind == "V")):
        for name, (kind, write, _) in LEAVES.items():
            if isinstance(value, kind):
                return {name: write(value)}
    for number in (int, float, str):
        if isinstance(value, number):  # a member of an enumeration, for example
            return number(value)
    raise TypeError(
        f"a {type(value).__module__}.{type(value).__qualname__} can't be sent to other ranks, because no pickle is "
        f"read from the network; send {SENDABLE}"
    )


def from_json(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that `to_json` converted, with these tensors."""
    if isinstance(value, list):
        return [from_json(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {from_json(key, tensors): from_json(entry, tensors) for key, entry in held}
    if kind in CONTAINERS:
        return CONTAINERS[kind](from_json(each, tensors) for each in held)
    return LEAVES[kind][2](held)


def layouts(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the shapes and dtypes of tensors as JSON, for `empty`."""
    return [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in tensors]


def empty(layouts: Sequence[Any]) -> list[Tensor]:
    """Return uninitialised tensors of these shapes and dtypes, on the host."""
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in layouts]


def pack(
    value: Any, named_tuples: bool = False, memory: dict[str, np.ndarray] | None = None, name: str = ""
) -> np.ndarray:
    """Return a value as bytes: the length of its JSON, the JSON, and its tensors. Raises TypeError as `to_json`.

    memory, name: where the bytes are kept; see Replica.snapshot.
    """
    tensors: list[Tensor] = []
    plain = to_json(value, tensors, named_tuples)
    text = json.dumps([plain, layouts(tensors)]).encode()
    text = text.ljust(-(-len(text) // TEXT_BYTES) * TEXT_BYTES)
    head = np.frombuffer(len(text).to_bytes(HEAD, "little") + text, np.uint8)
    parts = [head, *map(as_bytes, tensors)]
    whole = reserved({} if memory is None else memory, name, (sum(part.size for part in parts),), head.dtype)
    return np.concatenate(parts, out=whole)


def unpack(packed: np.ndarray) -> tuple[Any, int]:
    """Return the value at the beginning of `packed`, and the number of its bytes."""
    end = HEAD + int.from_bytes(packed[:HEAD].tobytes(), "little")
    plain, shapes = json.loads(packed[HEAD:end].tobytes())
    tensors = empty(shapes)
    for tensor in tensors:
        as_bytes(tensor)[:] = packed[end : end + tensor.nbytes]
        end += tensor.nbytes
    return from_json(plain, tensors), end
