"""The state of a TorchReplica as named arrays, and back: parameters, other tensors of the module, the optimizer's."""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainers.errors import ArgumentError, ModelFileError
from trainers.replicas.pytorch.alike import optimizer_like
from trainers.replicas.pytorch.tensors import flat_array

TRIED = (2, 3)  # the shape of parameters that an optimizer is tried out on


class TorchState:
    """Packs the state of a module and its optimizer for a model file, and loads it.

    trained: the parameters that the optimizer trains, in the order of the module. Raises ArgumentError when
    the optimizer's state is not of the parameters' shapes.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
        self._module, self._optimizer, self._trained = module, optimizer, trained
        tried = _tried(optimizer, trained[0].device)
        self._keys = {key: value.shape == TRIED for key, value in tried.items()}
        self._places = {key: value.device for key, value in tried.items()}  # some optimizers count steps on a GPU
        self.elementwise = {key for key, is_elementwise in self._keys.items() if is_elementwise}
        self.updated = ("optimizer.present", *(f"optimizer.{key}" for key in sorted(self._keys)))

    def pack(self, memory: dict[str, np.ndarray] | None = None, without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Copies, which look alike before and after the optimizer's first step.

        memory: arrays of earlier copies, used again and kept there. without: elementwise entries, and
            "parameters", to leave out.
        """
        memory = {} if memory is None else memory
        held = {} if "parameters" in without else {"parameters": flat_array(self._trained, memory, "parameters")}
        trained = {id(each) for each in self._trained}
        for name, each in [*self._module.named_parameters(), *self._module.named_buffers()]:
            if id(each) not in trained:
                held[f"module.{name}"] = array_of(each)
        states = [self._optimizer.state.get(each, {}) for each in self._trained]
        held["optimizer.present"] = np.array([bool(each) for each in states], np.uint8)
        for key, elementwise in self._keys.items():
            name = f"optimizer.{key}"
            if name in without:
                continue
            if elementwise:
                filled = [
                    state[key] if state.get(key) is not None else torch.zeros_like(each)
                    for each, state in zip(self._trained, states, strict=True)
                ]
                held[name] = flat_array(filled, memory, name)
            else:
                held[name] = np.array([float(state.get(key, 0.0)) for state in states])
        return held | {f"hyperparameter.{key}": value for key, value in self._hyperparameters().items()}

    @torch.no_grad()
    def load(self, state: dict[str, np.ndarray]) -> None:
        """Overwrite module and optimizer with what `pack` gave; ModelFileError when it is of another model."""
        here = self.pack()
        different = [
            name for name in sorted({*here, *state}, key=lambda each: each != "parameters")
            if name not in here or name not in state or here[name].shape != state[name].shape
        ]  # fmt: skip
        if different:
            name = different[0]
            sides = [f"{side[name].shape}" if name in side else "missing" for side in (state, here)]
            raise ModelFileError(f"the saved model is another one: {name} is {sides[0]} there and {sides[1]} here")
        _unpack(state["parameters"], self._trained)
        others = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        for name in state:
            if name.startswith("module."):
                others[name.removeprefix("module.")].copy_(torch.from_numpy(np.array(state[name])))
        self._load_optimizer(state)

    def _load_optimizer(self, state: dict[str, np.ndarray]) -> None:
        present = state["optimizer.present"]
        restored: list[dict[str, Any]] = [{} for _ in self._trained]
        for key, elementwise in self._keys.items():
            saved = state[f"optimizer.{key}"]
            if elementwise:
                fresh = [torch.zeros_like(each, memory_format=torch.preserve_format) for each in self._trained]
                _unpack(saved, fresh)
                for held, tensor in zip(restored, fresh, strict=True):
                    held[key] = tensor
            else:
                for held, value in zip(restored, saved, strict=True):
                    held[key] = torch.tensor(float(value), device=self._places[key])
        for parameter, held, is_present in zip(self._trained, restored, present, strict=True):
            self._optimizer.state.pop(parameter, None)
            if is_present:
                self._optimizer.state[parameter] = held
        for name in state:
            if name.startswith("hyperparameter."):
                key = name.removeprefix("hyperparameter.")
                for group, value in zip(self._optimizer.param_groups, state[name].tolist(), strict=True):
                    group[key] = tuple(value) if isinstance(value, list) else _number(value, group[key])

    def _hyperparameters(self) -> dict[str, np.ndarray]:
        """The optimizer's own (not a schedule's notes) that are numbers, one row a group: a schedule changes them."""
        groups = self._optimizer.param_groups
        found = {}
        for key in self._optimizer.defaults:
            values = [group.get(key) for group in groups]
            if all(_is_numeric(value) for value in values):
                found[key] = np.array(values, np.float64)
        return found


def _tried(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter of shape TRIED: one number for each element, or one for all.

    Optimizers make their state in the first step, and a saved model has to look alike before and after;
    so one of the same kind is tried out on parameters of its own, one a group, on the device of the others.
    """
    kind = type(optimizer)
    trials = [nn.Parameter(torch.ones(TRIED, device=device)) for _ in optimizer.param_groups]
    for trial in trials:
        trial.grad = torch.ones_like(trial)
    try:
        tried = optimizer_like(optimizer, ([trial] for trial in trials))
        tried.step()
        states = [tried.state[trial].items() for trial in trials]
        found = {key: torch.as_tensor(value) for state in states for key, value in state if value is not None}
    except Exception as error:
        raise ArgumentError(
            f"{kind.__name__} can't be used by TorchReplica: {type(error).__name__}: {error}"
        ) from error
    strange = [key for key, value in found.items() if value.shape not in ((), TRIED)]
    if strange:
        raise ArgumentError(
            f"{kind.__name__} can't be used by TorchReplica: its state {strange[0]!r} is not of the parameter's shape"
        )
    return found


def _number(value: float, like: Any) -> float | int:
    """An int where there was one and it still is: a schedule turns lr=1 into 0.5."""
    return int(value) if isinstance(like, int) and value.is_integer() else value


def array_of(tensor: Tensor) -> np.ndarray:
    """A copy on the host; bfloat16, which .npz files don't know, as float32."""
    whole = tensor.detach()
    whole = whole if whole.device.type == "cpu" else whole.cpu()
    return (whole.float() if whole.dtype == torch.bfloat16 else whole.clone()).contiguous().numpy()


def _unpack(packed: np.ndarray, tensors: list[Any]) -> None:
    start = 0
    for each in tensors:
        piece = torch.from_numpy(np.array(packed[start : start + each.numel()]))
        each.copy_(piece.reshape(each.shape))
        start += each.numel()


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_numeric(each) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
