"""PyTorch's fused optimizers on the CPU: they read memory once, and are used only if a trial gave right results.

PyTorch 2.13's fused SGD does not update bfloat16 and float16 parameters, except for the last elements of a tensor.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

KINDS: set[type[Optimizer]] = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}  # those with a fused kernel

ELEMENTS = 131  # of a trial: whole vectors of every instruction set, and a remainder
STEPS = 3  # of a trial: the first makes the state, the others use it
ROUNDINGS = 8  # the largest allowed difference, in multiples of the dtype's epsilon
# Used in the trial. With the user's values the changes may be too small or too large to compare.
NUMBERS: dict[str, Any] = {
    "lr": 0.125, "momentum": 0.875, "dampening": 0.25, "weight_decay": 0.0625, "betas": (0.875, 0.96875), "eps": 1e-3,
}  # fmt: skip

Key = tuple[Any, ...]
_tried: dict[Key, bool] = {}


def key_of(kind: type[Optimizer], group: dict[str, Any], dtype: torch.dtype) -> Key:
    """Return the key that selects a kernel's code: class, dtype, and which options of the group are nonzero. Local."""
    options = ((name, bool(value)) for name, value in group.items() if name in NUMBERS or isinstance(value, bool))
    return (kind, dtype, *(each for each in options if each[0] not in ("lr", "fused", "foreach")))


def is_correct(kind: type[Optimizer], group: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the fused implementation gives the same results as the plain one on this CPU, to rounding. Local.

    kind: one of KINDS. group: a parameter group, for its options. Each `key_of` is tested once per process.
    """
    key = key_of(kind, group, dtype)
    if key not in _tried:
        _tried[key] = _try(kind, dict(key[2:]), dtype)
    return _tried[key]


def replace_broken(optimizer: Optimizer, right: Callable[[dict[str, Any], torch.dtype], bool] | None = None) -> str:
    """Set `fused` to None in groups with fused=True whose fused implementation is wrong. Local.

    right: right(group, dtype) says whether the kernel is correct; default `is_correct`. Returns a warning, or "".
    """
    text, kind = "", type(optimizer)
    for group in optimizer.param_groups:
        if group.get("fused") and kind in KINDS:
            wrong = [each for each in dtypes_of(group) if not (right or partial(is_correct, kind))(group, each)]
            if wrong:
                group["fused"] = None
                text = REPLACED.format(kind.__name__, torch.__version__, wrong[0])
    return text


def dtypes_of(group: dict[str, Any]) -> list[torch.dtype]:
    """Return the dtypes of a group's floating-point parameters on the CPU, which need a trial. Local."""
    tried = {each.dtype for each in group["params"] if each.device.type == "cpu" and each.is_floating_point()}
    return sorted(tried, key=str)


def replace_and_warn(optimizer: Optimizer) -> None:
    """As `replace_broken`, and warn."""
    if text := replace_broken(optimizer):
        warnings.warn(text, stacklevel=2)


REPLACED = (
    "{}(fused=True) of PyTorch {} failed a test with these options and {} parameters on this CPU or on another "
    "rank's (it may leave parameters unchanged); the plain implementation is used"
)


def _try(kind: type[Optimizer], used: dict[str, bool], dtype: torch.dtype) -> bool:
    accepted = inspect.signature(kind).parameters
    options = {
        name: NUMBERS.get(name, True) if truth else type(NUMBERS.get(name, True))()
        for name, truth in used.items()
        if name in accepted
    } | {"lr": NUMBERS["lr"]}
    try:
        plain, fused = (
            _parameters_after_steps(kind, options | each, dtype) for each in ({"foreach": False}, {"fused": True})
        )
    except RuntimeError:  # this PyTorch has no fused implementation for the dtype
        return False
    tolerance = ROUNDINGS * torch.finfo(dtype).eps
    return bool(((plain - fused).abs() <= tolerance).all())


@torch.no_grad()
def _parameters_after_steps(kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the parameters after STEPS steps of an optimizer, as float64."""
    at = torch.arange(ELEMENTS, device="cpu")
    parameter = (at % 7 / 4 - 0.75).to(dtype)
    optimizer = kind([parameter], **options)
    for step in range(STEPS):
        parameter.grad = ((at + step) % 5 / 2 - 0.75).to(dtype)
        optimizer.step()
    return parameter.double()
