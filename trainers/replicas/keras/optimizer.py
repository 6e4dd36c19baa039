"""A Keras optimizer on the variables of a model, or on a slice of the flat parameters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from trainers.errors import ArgumentError
from trainers.replica import Slices, single
from trainers.replicas.flat import FlatOptimizer, Layout
from trainers.replicas.keras.computing import array_of, assign, stepper

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
"""Keras optimizers that update every element independently of the others."""


class State:
    """A Keras optimizer built for `variables`, with its own variables by name.

    slots: name -> the state variables with one number per element, in the order of `variables`.
    others: name -> the other variables, such as the step and the learning rate.
    """

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        self.optimizer, self.variables = optimizer, variables
        if not optimizer.built:
            optimizer.build(variables)
        self.slots = {f"optimizer.{name}": slot for name, slot in _slots(optimizer, variables).items()}
        taken = {id(variable) for slot in self.slots.values() for variable in slot}
        rest = [each for each in optimizer.variables if id(each) not in taken]
        self.others = {f"optimizer.{name}": [each] for name, each in _named(optimizer, rest).items()}
        self.step = stepper(optimizer, variables)


class Optimizer(FlatOptimizer):
    """A Keras optimizer as a FlatOptimizer. variables: the trained ones. Raises ArgumentError."""

    how_to_set_rates = "; create the optimizer with a number as its learning rate, not a schedule, to have one"

    def __init__(self, optimizer: Any, variables: list[Any], dtype: str) -> None:
        _check(optimizer, variables)
        self._dtype = dtype
        self.whole = self._state = State(optimizer, variables)
        layout = Layout(variable.shape for variable in variables)
        super().__init__(layout, [*self.whole.slots, *self.whole.others], self.whole.slots)

    def slice_error(self) -> str:
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
            f"this optimizer can't update slices of the parameters, one on each rank: {why}. "
            'Use update="replicated", or another optimizer'
        )

    def update(self, gradients: np.ndarray, still: np.ndarray) -> None:
        """Update the model's variables with flat gradients, except the `still` variables."""
        self.extend()
        state, numbers = self.whole, np.flatnonzero(still)
        held = [of[number] for of in (state.variables, *state.slots.values()) for number in numbers]
        before = [np.array(array_of(each)) for each in held]
        state.step(self.layout.views(gradients))
        for variable, array in zip(held, before, strict=True):
            assign(variable, array)

    def update_slice(self, part: slice, parameters: np.ndarray, gradients: np.ndarray, still: np.ndarray) -> None:
        """Update a slice of flat parameters in place, except the `still` ones. part: clipped to the parameters."""
        self.restrict(part)
        mask = np.zeros(part.stop - part.start, bool)
        for number in np.flatnonzero(still):
            own = self.layout.parts[number]
            mask[max(0, own.start - part.start) : max(0, own.stop - part.start)] = True
        held = (
            [*self._state.variables, *(each for slot in self._state.slots.values() for each in slot)]
            if mask.any()
            else []
        )
        (variable,) = self._state.variables
        assign(variable, parameters[part])
        before = [np.array(array_of(each)) for each in held]
        self._state.step([gradients[part]])
        for each, array in zip(held, before, strict=True):
            assign(each, np.where(mask, array, array_of(each)))
        parameters[part] = array_of(variable)

    def entries(self, names: Collection[str]) -> dict[str, list[Any]]:
        return {name: held for name, held in (self._state.slots | self._state.others).items() if name in names}

    on_host = staticmethod(array_of)

    def write(self, part: Slices | None, entries: Mapping[str, list[np.ndarray]]) -> None:
        state = self.whole
        if part is not None:
            zeros = np.zeros(single(part).stop - single(part).start, self._dtype)
            state = State(self.new_optimizer(), [keras.Variable(zeros, dtype=self._dtype, name="slice")])
        for name, variables in (state.slots | state.others).items():
            for variable, array in zip(variables, entries[name], strict=True):
                assign(variable, array)
        self._state, self.part = state, part

    def new_optimizer(self) -> Any:
        """Return a new Keras optimizer like this one, without state."""
        plain = self.whole.optimizer
        return type(plain).from_config(plain.get_config())

    @property
    def learning_rates(self) -> list[float]:
        """[the rate], or [] if the optimizer has a schedule."""
        rate = vars(self._state.optimizer)["_learning_rate"]
        return [float(array_of(rate))] if isinstance(rate, keras.Variable) else []

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        for rate in rates:
            self.whole.optimizer.learning_rate = self._state.optimizer.learning_rate = rate


def _check(optimizer: Any, variables: list[Any]) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise ArgumentError(
            f"KerasReplica takes a Keras optimizer (for example keras.optimizers.Adam(1e-3)), not {kind.__module__}."
            f"{kind.__qualname__}"
        )
    if hasattr(optimizer, "topology"):
        raise ArgumentError("MirroredOptimizer is for model.fit; KerasReplica takes the plain optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ArgumentError("KerasReplica does not scale losses: pass the optimizer inside of the LossScaleOptimizer")
    if optimizer.use_ema:
        raise ArgumentError("KerasReplica does not put the averages of use_ema=True into the model: leave it out")
    if optimizer.built and {id(each) for each in vars(optimizer)["_trainable_variables"]} != {
        id(each) for each in variables
    }:
        raise ArgumentError("this optimizer was built for another model: create a new one")


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
    """Name variables by the optimizer's attribute that holds them, because Keras numbers variable names."""
    held = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, keras.Variable):
            held[id(value)] = name.lstrip("_")
        elif isinstance(value, list | tuple) and name != "_variables":
            held |= {id(each): f"{name.lstrip('_')}.{number}" for number, each in enumerate(value)}
    return {held.get(id(each), f"other.{number}"): each for number, each in enumerate(variables)}
