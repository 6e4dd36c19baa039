"""PyTorch's fused optimizers on the CPU: one pass over the memory, used only where a trial gave the right numbers.

PyTorch 2.13's fused SGD leaves bfloat16 and float16 parameters as they are, but for the last elements of a tensor.
"""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

KINDS: set[type[Optimizer]] = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}  # the classes that have one

ELEMENTS = 131  # of a trial: whole vectors of every instruction set, and a rest
STEPS = 3  # of a trial: the first one makes the state, the others use it
ROUNDINGS = 8  # by which the results may differ: times the dtype's epsilon, of parameters between -2 and 2
# Stand in for the user's numbers, by which parameters may move too little, or too far, for a comparison.
NUMBERS: dict[str, Any] = {
    "lr": 0.125, "momentum": 0.875, "dampening": 0.25, "weight_decay": 0.0625, "betas": (0.875, 0.96875), "eps": 1e-3,
}  # fmt: skip

Key = tuple[Any, ...]
_tried: dict[Key, bool] = {}


def key_of(kind: type[Optimizer], group: dict[str, Any], dtype: torch.dtype) -> Key:
    """What decides how a kernel works: class, dtype, and which options of a parameter group are not zero. Local."""
    options = ((name, bool(value)) for name, value in group.items() if name in NUMBERS or isinstance(value, bool))
    return (kind, dtype, *(each for each in options if each[0] not in ("lr", "fused", "foreach")))


def works(kind: type[Optimizer], group: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the fused implementation gives what the plain one gives, in this process's PyTorch on the CPU. Local.

    kind: of KINDS. group: a parameter group: which options are used. Tried once for each `key_of`.
    """
    key = key_of(kind, group, dtype)
    if key not in _tried:
        _tried[key] = _try(kind, dict(key[2:]), dtype)
    return _tried[key]


def replace_broken(optimizer: Optimizer) -> str:
    """Have groups that were made with fused=True take the plain implementation where the fused one is wrong. Local.

    Only parameters on the CPU are tried. Returns what to tell the user, "" for nothing.
    """
    text = ""
    for group in optimizer.param_groups:
        if group.get("fused") and (wrong := _wrong(type(optimizer), group)) is not None:
            group["fused"] = None
            text = REPLACED.format(type(optimizer).__name__, torch.__version__, wrong)
    return text


def replace_and_warn(optimizer: Optimizer) -> None:
    """As `replace_broken`, with a warning in each process."""
    if text := replace_broken(optimizer):
        warnings.warn(text, stacklevel=2)


REPLACED = (
    "{}(fused=True) of PyTorch {} updates {} parameters wrongly on this CPU (tried on a few elements); the plain "
    "implementation is used"
)


def _wrong(kind: type[Optimizer], group: dict[str, Any]) -> torch.dtype | None:
    """The first dtype of a group's parameters for which the fused implementation gives wrong numbers."""
    dtypes = dict.fromkeys(each.dtype for each in group["params"] if each.device.type == "cpu")
    return next((each for each in dtypes if kind in KINDS and not works(kind, group, each)), None)


def _try(kind: type[Optimizer], used: dict[str, bool], dtype: torch.dtype) -> bool:
    known = inspect.signature(kind).parameters
    options = {
        name: NUMBERS.get(name, True) if truth else type(NUMBERS.get(name, True))()
        for name, truth in used.items()
        if name in known
    } | {"lr": NUMBERS["lr"]}
    try:
        plain, fused = (_moved(kind, options | each, dtype) for each in ({"foreach": False}, {"fused": True}))
    except RuntimeError:  # this PyTorch has none for the dtype
        return False
    tolerance = ROUNDINGS * torch.finfo(dtype).eps
    return bool(((plain - fused).abs() <= tolerance).all())


@torch.no_grad()
def _moved(kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Where an optimizer's steps bring parameters, float64."""
    at = torch.arange(ELEMENTS)
    parameter = (at % 7 / 4 - 0.75).to(dtype)
    optimizer = kind([parameter], **options)
    for step in range(STEPS):
        parameter.grad = ((at + step) % 5 / 2 - 0.75).to(dtype)
        optimizer.step()
    return parameter.double()
