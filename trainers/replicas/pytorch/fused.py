"""PyTorch's fused optimizers on the CPU: they read memory once, and are used only if a trial gave right results.

PyTorch 2.13's fused SGD does not update bfloat16 and float16 parameters, except for the last elements of a tensor.
"""

import inspect
from collections.abc import Callable, Sequence
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


class Kernels:
    """The fused kernels of an optimizer: used if they compute correctly here, and after `test` on all ranks. Local."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._kind = optimizer, type(optimizer)
        self._correct: set[Key] | None = None  # None: not tested on all ranks

    def test(self, agree: Callable[[list[bool]], Sequence[bool]]) -> None:
        """Test the kernels for the optimizer's current options, which are equal on all ranks. agree: see
        Replica.kernels."""
        if self._kind not in KINDS:
            return
        needed = [(group, dtype) for group in self._optimizer.param_groups for dtype in _dtypes_of(group)]
        right = agree([is_correct(self._kind, *each) for each in needed])
        # without the results of an earlier test, in which other ranks may have taken part
        self._correct = {key_of(self._kind, *each) for each, is_right in zip(needed, right, strict=True) if is_right}

    def correct(self, group: dict[str, Any], dtype: torch.dtype) -> bool:
        """Whether the kernel is correct with these options; False if it had to be tested on all ranks and was not."""
        if self._correct is None:
            return is_correct(self._kind, group, dtype)
        return key_of(self._kind, group, dtype) in self._correct

    def replace_broken(self) -> str:
        """Set `fused` to None in the groups whose kernel is not correct. Returns a warning, or ""."""
        text = ""
        for group in self._optimizer.param_groups:
            if group.get("fused") and self._kind in KINDS:
                wrong = [each for each in _dtypes_of(group) if not self.correct(group, each)]
                if wrong:
                    group["fused"] = None
                    text = REPLACED.format(self._kind.__name__, torch.__version__, wrong[0])
        return text


def _dtypes_of(group: dict[str, Any]) -> list[torch.dtype]:
    """Return the dtypes of a group's floating-point parameters on the CPU, which need a trial."""
    tried = {each.dtype for each in group["params"] if each.device.type == "cpu" and each.is_floating_point()}
    return sorted(tried, key=str)


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
