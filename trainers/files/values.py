"""Values as JSON, without pickle: nested lists, tuples, sets and dicts of numbers, text, bytes, arrays and tensors.

A value that JSON has itself is written as it is. Any other value is a list whose first element names its type.
"""

import base64
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

PLAIN = (bool, int, float, str, type(None))
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
DICT, BYTES, ARRAY, SCALAR, TENSOR, COMPLEX = "dict", "bytes", "array", "scalar", "tensor", "complex"
NUMBERED, DTYPE, DEVICE = "numbered tensor", "dtype", "device"
KINDS = "biufcSU"  # of NumPy's dtypes; other dtypes may hold objects, or need more than a name
TAKEN = "None, numbers, texts, bytes, dense tensors, NumPy arrays, and lists, tuples, sets and dicts of them"


def encode(value: Any) -> np.ndarray:
    """Return `value` as an array of bytes, for a file. Raises TypeError as `to_json`."""
    return np.frombuffer(json.dumps(to_json(value)).encode(), np.uint8)


def decode(content: np.ndarray) -> Any:
    """Return the value of an `encode`. Raises ValueError if `content` is anything else; runs no code that it names."""
    try:
        return from_json(json.loads(np.asarray(content, np.uint8).tobytes()))
    except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise ValueError(f"it holds no values: {type(error).__name__}: {error}") from error


def to_json(value: Any, tensors: list[Any] | None = None, named_tuples: bool = False, where: str = "") -> Any:
    """Return `value` as json.dumps accepts it, for `from_json`. Raises TypeError, which names the first part of another
    type.

    tensors: the tensors of `value` are appended to it, and the result has their numbers; None: it has their content,
        and those of a GPU are refused. named_tuples: convert them to plain tuples.
    where: the keys that lead to this part of a value, for an error.
    """

    def part(each: Any, key: str = "") -> Any:
        return to_json(each, tensors, named_tuples, where + key)

    if type(value) in PLAIN:
        return value
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind) and (named_tuples or not hasattr(value, "_fields")):
            return [name, *[part(each, f"[{at}]") for at, each in enumerate(value)]]
    if isinstance(value, dict):
        return [DICT, *[[part(key), part(each, f"[{key!r}]")] for key, each in value.items()]]
    found = _of_torch(value, tensors) or _of_numpy(value)
    if found is not None:
        return found
    if isinstance(value, complex):
        return [COMPLEX, value.real, value.imag]
    for number in (int, float, str):
        if isinstance(value, number):  # a member of an enumeration, for example
            return number(value)
    of = f"a {type(value).__module__}.{type(value).__qualname__}" + (f" at {where}" if where else "")
    raise TypeError(f"{of} can't be sent or written, because no pickle is read; take {TAKEN}")


def _of_torch(value: Any, tensors: list[Any] | None) -> list[Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        if tensors is not None:
            tensors.append(value)
            return [NUMBERED, len(tensors) - 1]
        if value.device.type == "cpu":
            whole = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())  # also of a view
            flat = whole.reshape(-1)
            return [TENSOR, str(value.dtype), list(value.shape), _text(flat.view(torch.uint8).numpy().tobytes())]
    for name in (DTYPE, DEVICE):
        if isinstance(value, getattr(torch, name)):
            return [name, str(value).removeprefix("torch.")]
    return None


def _of_numpy(value: Any) -> list[Any] | None:
    """Return bytes, arrays and their elements as JSON, None for other values."""
    numbers = isinstance(value, np.generic | np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    if numbers and value.dtype.kind in KINDS:
        shape = [list(value.shape)] if isinstance(value, np.ndarray) else []
        return [ARRAY if shape else SCALAR, value.dtype.str, *shape, _text(np.ascontiguousarray(value).tobytes())]
    return [BYTES, _text(value)] if isinstance(value, bytes | bytearray) else None


def from_json(value: Any, tensors: Sequence[Any] = ()) -> Any:
    """Return the value that `to_json` converted, with these tensors. Raises many types of exceptions for anything else;
    runs no code that it names."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("a JSON object")
        return value
    kind, *rest = value
    if kind in CONTAINERS:
        return CONTAINERS[kind](from_json(each, tensors) for each in rest)
    if kind == DICT:
        return {from_json(key, tensors): from_json(each, tensors) for key, each in rest}
    if kind == NUMBERED:
        return tensors[rest[0]]
    if kind not in LEAVES:
        raise ValueError(f"a value of the unknown type {kind!r}")
    return LEAVES[kind](*rest)


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


def _torch() -> Any:
    """Return PyTorch. The program that wrote a tensor has imported it; this one may not have."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ValueError(f"a tensor, and PyTorch can't be imported: {error}") from error


def _dtype_of_torch(name: str) -> Any:
    torch = _torch()
    dtype = getattr(torch, str(name).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype {name!r}")
    return dtype


def _tensor(name: str, shape: list[Any], text: str) -> Any:
    torch, dtype, content = _torch(), _dtype_of_torch(name), bytearray(_bytes(text))
    if not content:
        if 0 not in _shape(shape):
            raise ValueError(f"no content for the shape {shape!r}")
        return torch.empty(_shape(shape), dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(_shape(shape)).clone()


LEAVES: dict[str, Callable[..., Any]] = {
    BYTES: _bytes,
    SCALAR: lambda dtype, text: np.frombuffer(_bytes(text), _dtype(dtype)).reshape(())[()],
    ARRAY: lambda dtype, shape, text: np.frombuffer(_bytes(text), _dtype(dtype)).reshape(_shape(shape)).copy(),
    TENSOR: _tensor,
    COMPLEX: complex,
    DTYPE: _dtype_of_torch,
    DEVICE: lambda name: _torch().device(name),
}
