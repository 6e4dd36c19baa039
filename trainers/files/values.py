"""Nested lists, tuples and dicts of numbers, text, bytes, arrays and tensors, as JSON text. No pickle.

A value that JSON has itself is written as it is. Any other value is a list whose first element names its type.
"""

import base64
import json
import sys
from collections import OrderedDict
from typing import Any

import numpy as np

PLAIN = (bool, int, float, str, type(None))
LIST, TUPLE, DICT, BYTES, ARRAY, SCALAR, TENSOR = "list", "tuple", "dict", "bytes", "array", "scalar", "tensor"
KINDS = "biufcSU"  # of NumPy's dtypes; other dtypes may hold objects, or need more than a name


def encode(value: Any) -> np.ndarray:
    """Return `value` as an array of bytes, for a file. Raises TypeError, which names the first part of another type."""
    return np.frombuffer(json.dumps(_encoded(value, "")).encode(), np.uint8)


def decode(content: np.ndarray) -> Any:
    """Return the value of an `encode`. Raises ValueError if `content` is anything else; runs no code that it names."""
    try:
        return _decoded(json.loads(np.asarray(content, np.uint8).tobytes()))
    except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise ValueError(f"it holds no values: {error!r}") from error


def _encoded(value: Any, where: str) -> Any:
    """where: the keys that lead to this part of the value, for an error."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (list, tuple):
        return [LIST if kind is list else TUPLE, *[_encoded(part, f"{where}[{at}]") for at, part in enumerate(value)]]
    if kind in (dict, OrderedDict):
        pairs = value.items()
        return [DICT, *[[_encoded(key, where), _encoded(part, f"{where}[{key!r}]")] for key, part in pairs]]
    if kind in (bytes, bytearray):
        return [BYTES, _text(value)]
    if isinstance(value, np.generic) and value.dtype.kind in KINDS:
        return [SCALAR, value.dtype.str, _text(value.tobytes())]
    if kind is np.ndarray and value.dtype.kind in KINDS:
        return [ARRAY, value.dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes())]
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor and value.device.type == "cpu" and not value.is_sparse:
        flat = value.detach().contiguous().reshape(-1)
        return [TENSOR, str(value.dtype), list(value.shape), _text(flat.view(torch.uint8).numpy().tobytes())]
    of = f" at {where}" if where else ""
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}{of} can't be written without pickle")


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("a JSON object")
        return value
    kind, *rest = value
    if kind in (LIST, TUPLE):
        parts = [_decoded(part) for part in rest]
        return parts if kind == LIST else tuple(parts)
    if kind == DICT:
        return {_decoded(key): _decoded(part) for key, part in rest}
    if kind == BYTES:
        return _bytes(*rest)
    if kind == SCALAR:
        return np.frombuffer(_bytes(rest[1]), _dtype(rest[0])).reshape(())[()]
    if kind == ARRAY:
        return np.frombuffer(_bytes(rest[2]), _dtype(rest[0])).reshape(_shape(rest[1])).copy()
    if kind == TENSOR:
        return _tensor(*rest)
    raise ValueError(f"a value of the unknown type {kind!r}")


def _text(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _dtype(name: str) -> np.dtype:
    dtype = np.dtype(str(name))
    if dtype.kind not in KINDS:
        raise ValueError(f"the dtype {name!r}")
    return dtype


def _shape(shape: list[Any]) -> list[int]:
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"the shape {shape!r}")
    return shape


def _tensor(name: str, shape: list[Any], text: str) -> Any:
    torch = sys.modules["torch"]  # a loader whose state has tensors has imported it
    dtype = getattr(torch, str(name).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype {name!r}")
    content = bytearray(_bytes(text))
    if not content:
        if 0 not in _shape(shape):
            raise ValueError(f"no content for the shape {shape!r}")
        return torch.empty(_shape(shape), dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(_shape(shape)).clone()
