"""A Keras optimizer on the variables of a model, or on a slice of the flat parameters; its state as named arrays."""

from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np

from trainers.errors import ArgumentError, ModelFileError
from trainers.replica import reserved
from trainers.replicas.keras.computing import array_of, assign, stepper

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
"""Keras' optimizers that treat every element apart from all others."""


class State:
    """An optimizer and what it keeps.

    slots: by name, what has one number for each element of `variables`: variables, in their order.
    others: by name, the rest: step, learning rate.
    """

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        self.optimizer, self.variables = optimizer, variables
        if not optimizer.built:
            optimizer.build(variables)
        self.slots = _slots(optimizer, variables)
        taken = {id(variable) for slot in self.slots.values() for variable in slot}
        self.others = _named(optimizer, [each for each in optimizer.variables if id(each) not in taken])
        self.step = stepper(optimizer, variables)


class Optimizer:
    """The optimizer of a replica. names, elementwise: of its state's arrays. part: the slice whose state is here.

    places: the parts of the flat parameters, in the order of the variables. Raises ArgumentError.
    """

    def __init__(self, optimizer: Any, variables: list[Any], places: list[slice], dtype: str) -> None:
        _check(optimizer, variables)
        self._places, self._dtype, self.length = places, dtype, places[-1].stop
        self.whole = self._state = State(optimizer, variables)
        self.part: slice | None = None
        self.elementwise = tuple(f"optimizer.{name}" for name in self.whole.slots)
        self.names = (*self.elementwise, *(f"optimizer.{name}" for name in self.whole.others))

    def refusal(self) -> str:
        """Why it can't work on slices, or ""."""
        optimizer = self.whole.optimizer
        kind, why = type(optimizer), ""
        if not kind.__module__.startswith("keras.") or kind.__name__ not in ELEMENTWISE:
            why = f"{kind.__name__} is none of {', '.join(ELEMENTWISE)}"
        elif optimizer.clipnorm or optimizer.global_clipnorm:
            why = "clipnorm and global_clipnorm need whole arrays"
        elif getattr(optimizer, "_exclude_from_weight_decay", None) or getattr(
            optimizer, "_exclude_from_weight_decay_pattern", None
        ):
            why = "exclude_from_weight_decay needs whole arrays"
        elif any(variable.constraint is not None for variable in self.whole.variables):
            why = "constraints need whole arrays"
        return why and (
            f"this optimizer can't work on slices of the parameters, which the ranks would divide: {why}. "
            'Use update="replicated", or another optimizer'
        )

    def update(self, gradients: np.ndarray) -> None:
        """Update the model's variables by flat gradients."""
        self.widen()
        shapes = [variable.shape for variable in self.whole.variables]
        self.whole.step([gradients[place].reshape(shape) for place, shape in zip(self._places, shapes, strict=True)])

    def update_slice(self, part: slice, parameters: np.ndarray, gradients: np.ndarray) -> None:
        """Update a slice of flat parameters in place. part: clipped to them."""
        if self.part != part:
            self.widen()
            self._narrow(part)
        (variable,) = self._state.variables
        assign(variable, parameters[part])
        self._state.step([gradients[part]])
        parameters[part] = array_of(variable)

    def widen(self) -> None:
        """Have the state of all parameters again; of other slices than this one's it is zero."""
        if self.part is not None:
            self.load(self.pack({}))

    def _narrow(self, part: slice) -> None:
        plain = self.whole.optimizer
        made = type(plain).from_config(plain.get_config())
        flat = keras.Variable(np.zeros(part.stop - part.start, self._dtype), dtype=self._dtype, name="slice")
        state, held = State(made, [flat]), self.pack({})
        for name, (variable,) in state.slots.items():
            assign(variable, held[f"optimizer.{name}"][part])
        for name, variable in state.others.items():
            assign(variable, held[f"optimizer.{name}"])
        self._state, self.part = state, part

    def pack(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """The state as copies in `memory`, by name; of a slice's the rest is zero."""
        held = {}
        for name, variables in self._state.slots.items():
            name = f"optimizer.{name}"
            if name in without:
                continue
            held[name] = whole = reserved(memory, name, (self.length,), np.dtype(self._dtype))
            if self.part is not None:
                whole[:] = 0
            for place, variable in zip(self._places if self.part is None else [self.part], variables, strict=True):
                whole[place] = array_of(variable).reshape(-1)
        for name, variable in self._state.others.items():
            held[f"optimizer.{name}"] = np.array(array_of(variable))
        return held

    def elements(self, name: str) -> np.ndarray:
        """An elementwise entry, of the slice alone."""
        (variable,) = self._state.slots[name.removeprefix("optimizer.")]
        return array_of(variable)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take on what `pack` gave, for all parameters. ModelFileError when it is another one's."""
        for name in self.names:
            plain = name.removeprefix("optimizer.")
            shape = (self.length,) if name in self.elementwise else tuple(self.whole.others[plain].shape)
            if name not in arrays or arrays[name].shape != shape:
                found = f"{arrays[name].shape}" if name in arrays else "missing"
                raise ModelFileError(f"the saved model is another one: {name} is {found} there and {shape} here")
        for name, variables in self.whole.slots.items():
            flat = arrays[f"optimizer.{name}"]
            for place, variable in zip(self._places, variables, strict=True):
                assign(variable, flat[place])
        for name, variable in self.whole.others.items():
            assign(variable, arrays[f"optimizer.{name}"])
        self._state, self.part = self.whole, None

    @property
    def learning_rate(self) -> float | None:
        """None where it is a schedule's."""
        rate = self._state.optimizer._learning_rate
        return float(array_of(rate)) if isinstance(rate, keras.Variable) else None

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for state in (self.whole, self._state):
            state.optimizer.learning_rate = rate


def _check(optimizer: Any, variables: list[Any]) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise ArgumentError(
            f"KerasReplica takes an optimizer of Keras' (keras.optimizers.Adam(1e-3), say), not {kind.__module__}."
            f"{kind.__qualname__}"
        )
    if hasattr(optimizer, "topology"):
        raise ArgumentError("MirroredOptimizer is for model.fit; KerasReplica takes the plain optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ArgumentError("KerasReplica scales no losses: give the optimizer inside of the LossScaleOptimizer")
    if optimizer.use_ema:
        raise ArgumentError("KerasReplica does not put the averages of use_ema=True into the model: leave it out")
    if optimizer.built and {id(each) for each in optimizer._trainable_variables} != {id(each) for each in variables}:
        raise ArgumentError("this optimizer was built for another model: make a new one")


def _slots(optimizer: Any, variables: list[Any]) -> dict[str, list[Any]]:
    own, shapes = {id(each) for each in optimizer.variables}, [tuple(each.shape) for each in variables]
    found = {}
    for name, value in vars(optimizer).items():
        if not isinstance(value, list | tuple) or name in ("_variables", "_trainable_variables"):
            continue
        if all(id(each) in own for each in value) and [tuple(each.shape) for each in value] == shapes:
            found[name.lstrip("_")] = list(value)
    return found


def _named(optimizer: Any, variables: list[Any]) -> dict[str, Any]:
    """By the attributes of the optimizer that hold them: the names of variables are numbered by Keras."""
    held = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, keras.Variable):
            held[id(value)] = name.lstrip("_")
        elif isinstance(value, list | tuple) and name != "_variables":
            held |= {id(each): f"{name.lstrip('_')}.{number}" for number, each in enumerate(value)}
    return {held.get(id(each), f"other.{number}"): each for number, each in enumerate(variables)}
