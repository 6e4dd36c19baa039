"""A framework's optimizer on all parameters, or on a slice of them in flat memory; and a replica with one.

So the ranks can divide the update: each has the optimizer's state of its own slice only.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainers.errors import ArgumentError, ModelFileError
from trainers.replica import Replica, reserved


class Layout:
    """Arrays one after the other in flat memory. parts: the slice of each; length: of all of them."""

    def __init__(self, shapes: Iterable[Sequence[int]]) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        ends = list(itertools.accumulate(map(math.prod, self._shapes), initial=0))
        self.parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        self.length = ends[-1]

    def views(self, flat: Any) -> list[Any]:
        """The arrays in `flat`: views of NumPy memory, or slices of a JAX array."""
        return [flat[part].reshape(shape) for part, shape in zip(self.parts, self._shapes, strict=True)]

    def write(self, arrays: Iterable[Any], flat: np.ndarray) -> None:
        """Copy arrays into flat NumPy memory, once; JAX's are waited for. None stands for zeros."""
        for array, view in zip(arrays, self.views(flat), strict=True):
            np.copyto(view, 0 if array is None else np.asarray(array))


class FlatOptimizer(ABC):
    """An optimizer on the arrays of a layout, or on a slice of the flat parameters; its state has named entries.

    names: of the entries. elementwise: those with one number for each parameter; a framework has such an entry as one
        array for each of the layout's, or as one array for the slice. All other entries are one array.
    part: the slice whose state is here; None when it is that of all parameters.
    """

    part: slice | None = None
    how_to_set_rates = ""  # for an error

    def __init__(self, layout: Layout, names: Iterable[str], elementwise: Iterable[str]) -> None:
        self.layout, self.names, self.elementwise = layout, tuple(names), tuple(elementwise)

    @abstractmethod
    def refusal(self) -> str:
        """Why the optimizer can't work on slices; "" if it can."""

    @abstractmethod
    def entries(self, names: Collection[str]) -> Mapping[str, list[Any]]:
        """The framework's arrays of these entries."""

    @staticmethod
    @abstractmethod
    def on_host(array: Any, /) -> np.ndarray:
        """One of the framework's arrays as a file can hold it; may be a view, and read-only."""

    @abstractmethod
    def write(self, part: slice | None, entries: Mapping[str, list[np.ndarray]]) -> None:
        """Make the state that of a slice, or of all parameters, from copies of these arrays."""

    @property
    @abstractmethod
    def learning_rates(self) -> list[float]:
        """Those that can be set."""

    @learning_rates.setter
    @abstractmethod
    def learning_rates(self, rates: Sequence[float]) -> None: ...

    def narrow(self, part: slice) -> None:
        """Reduce the state to that of a slice."""
        if self.part != part:
            self.widen()
            entries = self.entries(self.names)
            self.write(part, {name: [self._cut(name, arrays, part)] for name, arrays in entries.items()})

    def _cut(self, name: str, arrays: list[Any], part: slice) -> np.ndarray:
        """The elements of a slice, of an entry of all parameters."""
        if name not in self.elementwise:
            return self.on_host(arrays[0])
        pieces = [self.on_host(arrays[0]).reshape(-1)[:0]]
        for array, own in zip(arrays, self.layout.parts, strict=True):
            start, stop = max(own.start, part.start), min(own.stop, part.stop)
            if start < stop:
                pieces.append(self.on_host(array).reshape(-1)[start - own.start : stop - own.start])
        return np.concatenate(pieces)

    def widen(self) -> None:
        """Have the state of all parameters again, zero outside of this slice."""
        if self.part is not None:
            self.load(self.pack({}))

    def pack(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Copies of the state in `memory`, by name; zero outside of this slice."""
        held = {}
        for name, entry in self.entries([name for name in self.names if name not in without]).items():
            arrays = [self.on_host(array) for array in entry]
            shape = (self.layout.length,) if name in self.elementwise else arrays[0].shape
            whole = held[name] = reserved(memory, name, shape, arrays[0].dtype)
            if name not in self.elementwise:
                whole[...] = arrays[0]
            elif self.part is None:
                self.layout.write(arrays, whole)
            else:
                whole[:] = 0
                whole[self.part] = arrays[0]
        return held

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load what `pack` gave, as the state of all parameters. ModelFileError when it is of another model."""
        made = {}
        for name, entry in self.entries(self.names).items():
            elementwise = name in self.elementwise
            shape = (self.layout.length,) if elementwise else self.on_host(entry[0]).shape
            if name not in arrays or arrays[name].shape != shape:
                found = f"{arrays[name].shape}" if name in arrays else "missing"
                raise ModelFileError(f"the saved model is another one: {name} is {found} there and {shape} here")
            made[name] = self.layout.views(arrays[name]) if elementwise else [arrays[name]]
        self.write(None, made)

    def elements(self, name: str) -> np.ndarray:
        """An elementwise entry, of the slice alone."""
        return self.on_host(self.entries([name])[name][0])


class FlatReplica(Replica):
    """A replica with a FlatOptimizer. The subclass makes the optimizer and `_buffer`, the memory of the gradients."""

    _optimizer: FlatOptimizer
    _buffer: Any

    @property
    def elementwise(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._optimizer.elementwise

    @property
    def updated(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._optimizer.names

    @property
    def learning_rates(self) -> list[float]:
        return self._optimizer.learning_rates

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        settable = len(self.learning_rates)
        if len(rates) != settable:
            raise ArgumentError(
                f"{len(rates)} learning rates for {settable} that can be set{self._optimizer.how_to_set_rates}"
            )
        self._optimizer.learning_rates = list(rates)

    def bind(self, buffer: Any) -> None:
        self._check_buffer("gradient", buffer)
        self._optimizer.widen()
        self._buffer = buffer

    def bind_parameters(self, buffer: Any) -> None:
        self._check_buffer("parameter", buffer)
        if reason := self._optimizer.refusal():
            raise ArgumentError(reason)
        self._optimizer.widen()
        self._move(buffer)

    @abstractmethod
    def _move(self, buffer: Any) -> None:
        """Leave the parameters in `buffer`, and train them there from now on."""

    def state(self) -> dict[str, np.ndarray]:
        return self.snapshot({})

    def elements(self, name: str, part: slice) -> np.ndarray:
        if self._optimizer.part == self._own(part):
            return self._optimizer.elements(name)
        return super().elements(name, part)

    def _own(self, part: slice) -> slice:
        """The part of a slice that lies in the optimizer's parameters, which statistics follow."""
        return slice(*(min(end, self._optimizer.layout.length) for end in (part.start, part.stop)))

    def _statistics_in(self, part: slice) -> slice:
        """The rest of the slice."""
        return slice(*(max(end, self._optimizer.layout.length) for end in (part.start, part.stop)))
