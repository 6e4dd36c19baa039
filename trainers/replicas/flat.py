"""FlatOptimizer: a framework's optimizer, on all parameters or on a flat slice. FlatReplica: a replica with one.

With slices the ranks can divide the update: each has only the optimizer state of its own slice.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainers.arguments import name_error, require
from trainers.arrays.average import put_in, read
from trainers.errors import ArgumentError
from trainers.replica import Replica, Slices, check_buffers, consecutive, reserved, slices_of

PRECISIONS = ("float32", "bfloat16")  # of replicas with an option `precision`


class Layout:
    """Layout of arrays in flat memory. parts: the slice of each array. length: the total number of elements."""

    def __init__(self, shapes: Iterable[Sequence[int]]) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self.parts = consecutive(self._shapes)
        self.length = self.parts[-1].stop if self.parts else 0

    def views(self, flat: Any) -> list[Any]:
        """Return the arrays in `flat`: views of NumPy memory, or slices of a JAX array."""
        return [flat[part].reshape(shape) for part, shape in zip(self.parts, self._shapes, strict=True)]

    def write(self, arrays: Iterable[Any], flat: np.ndarray) -> None:
        """Copy arrays into flat NumPy memory; None is written as zeros. Waits for JAX arrays."""
        for array, view in zip(arrays, self.views(flat), strict=True):
            np.copyto(view, 0 if array is None else np.asarray(array))


class FlatOptimizer(ABC):
    """Base of optimizers on all arrays of a layout, or on a slice of the flat parameters. The state has named entries.

    names: of the entries. elementwise: the entries with one number per parameter: one array per array of the layout, or
        one array for the slice. Every other entry is a single array.
    part: the part whose state this object holds; None for all parameters.
    learning_rates: those that can be set.
    """

    part: Slices | None = None
    learning_rates: list[float]  # a property of each subclass
    how_to_set_rates = ""  # for an error
    whole_tensors: tuple[slice, ...] = ()  # see Replica

    def __init__(self, layout: Layout, names: Iterable[str], elementwise: Iterable[str]) -> None:
        self.layout, self.names, self.elementwise = layout, tuple(names), tuple(elementwise)

    @abstractmethod
    def slice_error(self) -> str:
        """Return why the optimizer can't work on slices, as text; "" if it can."""

    @abstractmethod
    def entries(self, names: Collection[str]) -> Mapping[str, list[Any]]:
        """Return the framework's arrays of these entries."""

    @staticmethod
    @abstractmethod
    def on_host(array: Any, /) -> np.ndarray:
        """Return one of the framework's arrays as a NumPy array for a file. It may be a view, and read-only."""

    @abstractmethod
    def write(self, part: Slices | None, entries: Mapping[str, list[np.ndarray]]) -> None:
        """Set the state of a slice, or of all parameters (None), to copies of these arrays."""

    def restrict(self, part: Slices) -> None:
        """Reduce the state to that of a slice."""
        if self.part != part:
            self.extend()
            entries = self.entries(self.names)
            self.write(part, {name: [self._cut(name, arrays, part)] for name, arrays in entries.items()})

    def _cut(self, name: str, arrays: list[Any], part: Slices) -> np.ndarray:
        """Return the elements of a slice, from an entry of all parameters."""
        if name not in self.elementwise:
            return self.on_host(arrays[0])
        pieces = [self.on_host(arrays[0]).reshape(-1)[:0]]
        for array, own in zip(arrays, self.layout.parts, strict=True):
            for each in slices_of(part):
                start, stop = max(own.start, each.start), min(own.stop, each.stop)
                if start < stop:
                    pieces.append(self.on_host(array).reshape(-1)[start - own.start : stop - own.start])
        return np.concatenate(pieces)

    def extend(self) -> None:
        """Extend the state to all parameters, with zeros outside of the current slice."""
        if self.part is not None:
            self.load(self.pack({}))

    def pack(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Return copies of the state by name, zero outside of the current slice. memory: see `snapshot_of`."""
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
                put_in(whole, slices_of(self.part), arrays[0])
        return held

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array that `pack` returns and `load` takes."""
        whole = (self.layout.length,)
        entries = self.entries(self.names).items()
        return {name: whole if name in self.elementwise else self.on_host(each[0]).shape for name, each in entries}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load a result of `pack` as the state of all parameters."""
        cut = {name: self.layout.views(arrays[name]) for name in self.elementwise}
        self.write(None, {name: cut.get(name) or [arrays[name]] for name in self.names})

    def elements(self, name: str, part: Slices) -> np.ndarray:
        """Return the elements `part` of an elementwise entry. This object holds the state of all parameters, or of
        `part`."""
        arrays = self.entries([name])[name]
        return self._cut(name, arrays, part) if self.part is None else self.on_host(arrays[0])


class FlatReplica(Replica):
    """A replica with a FlatOptimizer: the subclass sets `optimizer_state`, and `_buffer`, the memory of gradients."""

    keeps_memory = True
    optimizer_state: FlatOptimizer
    _buffer: Any

    @property
    def elementwise(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.optimizer_state.elementwise

    @property
    def updated(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.optimizer_state.names

    @property
    def learning_rates(self) -> list[float]:
        return self.optimizer_state.learning_rates

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        settable = len(self.learning_rates)
        if len(rates) != settable:
            raise ArgumentError(
                f"got {len(rates)} learning rates, and {settable} can be set{self.optimizer_state.how_to_set_rates}"
            )
        self.optimizer_state.learning_rates = list(rates)

    def bind(self, parameters: Any, gradients: Any) -> None:
        """Extend the state of the optimizer and the average to all parameters, and copy these into `parameters`; None:
        into memory of the replica's own."""
        check_buffers(self, parameters, gradients)
        self.optimizer_state.extend()
        if self.average is not None:
            self.average.restrict()
        if parameters is None:
            parameters = self._leave() if self.memory is not None else None
        else:
            read(self, parameters)
        self.memory, self._buffer = parameters, gradients

    def _leave(self) -> Any:
        """Copy the parameters out of `memory`. Returns flat memory of the replica's own, or None if the framework's
        arrays have them."""
        raise NotImplementedError

    @property
    def whole_tensors(self) -> tuple[slice, ...]:  # type: ignore[override]
        return self.optimizer_state.whole_tensors

    def slice_error(self) -> str:
        return self.optimizer_state.slice_error()


def lower_precision(precision: str | None, dtype: str) -> bool:
    """Return whether a replica is to compute with bfloat16. precision: its option. dtype: of the parameters.

    Raises ArgumentError for an unknown precision, and for one that does not suit the parameters.
    """
    if precision is None:
        return False
    if precision == "float16":
        raise ArgumentError(
            'precision="float16": gradients below 6e-8 become zero in float16 unless losses are scaled, which replicas '
            'do not do; use precision="bfloat16", which has the range of float32'
        )
    require(name_error("precision", precision, PRECISIONS))
    if dtype != "float32":
        raise ArgumentError(
            f'precision="{precision}" trains float32 parameters, and these are {dtype}: convert them to float32, or '
            "leave out precision, to compute with their dtype"
        )
    return precision == "bfloat16"
