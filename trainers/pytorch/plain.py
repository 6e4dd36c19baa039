"""The state of an optimizer as JSON, which other ranks can read without running what is in it, as a pickle would."""

from typing import Any

import numpy as np
import torch

from allreduce.errors import OptionError


class Place(int):
    """Stands for a tensor that travels by itself: its number in a list."""


def to_json(value: Any) -> Any:
    """What json.dumps takes: of numbers, texts, None, dtypes, lists, tuples, dicts of them and tensors without axes.

    Raises OptionError for anything else.
    """
    if isinstance(value, Place):
        return {"place": int(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return {"tensor": [to_json(value.dtype), value.item()]}
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(held)] for key, held in value.items()]}
    if isinstance(value, list):
        return [to_json(held) for held in value]
    if isinstance(value, tuple):
        return {"tuple": [to_json(held) for held in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(f"the optimizer's state has a {type(value).__qualname__}, which can't be sent to other ranks")


def from_json(value: Any) -> Any:
    """What `to_json` was given; tuples and dicts are plain ones."""
    if isinstance(value, list):
        return [from_json(held) for held in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    return _MAKE[kind](held)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


_MAKE: dict[str, Any] = {
    "place": Place,
    "dtype": _dtype,
    "device": torch.device,
    "tensor": lambda held: torch.tensor(held[1], dtype=from_json(held[0])),
    "dict": lambda held: {from_json(key): from_json(entry) for key, entry in held},
    "tuple": lambda held: tuple(map(from_json, held)),
}
