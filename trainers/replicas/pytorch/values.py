"""Values with tensors as bytes for other ranks. Reading them executes no code, unlike a pickle."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.files.values import from_json, to_json
from trainers.replica import reserved
from trainers.replicas.pytorch.tensors import as_bytes

HEAD = 8  # bytes with the length of the JSON
TEXT_BYTES = 1024  # the length of the JSON is a multiple of this, so that it stays the same while counters grow


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

    memory, name: where the bytes are kept; see trainers.replica.snapshot_of.
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
