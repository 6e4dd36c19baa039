"""The moving average of the parameters (EMA): after each update decay * average + (1 - decay) * parameters."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

AVERAGE = "ema"  # its name in the state of a replica
BLOCK = 1 << 16  # elements averaged at a time, so that they stay in the cache
Spans = tuple[slice, ...]
"""Slices of the parameters, in order."""
Parameters = Any
"""A trainers.replica.Replica, whose module imports this one."""


def flat_arrays(replica: Parameters) -> Sequence[Any]:
    """Replica.arrays: the parameters in the memory of `bind`; binds memory if there is none yet."""
    if replica.memory is None:
        kind = importlib.import_module("cupy" if replica.device == "cuda" else "numpy")
        parameters, gradients = kind.zeros((2, replica.gradient_length), replica.gradient_dtype)
        replica.bind(parameters, gradients)
        replica.memory = parameters
    return [replica.memory[: replica.parameter_count]]


def set_flat(replica: Parameters, spans: Spans, values: Any) -> None:
    """Replica.put: set the parameters in these slices, in the memory of `bind`."""
    flat_arrays(replica)  # binds memory if there is none yet
    put_in(replica.memory, spans, on_device(values, replica.memory))
    replica.refresh()


def put_in(flat: Any, spans: Spans, values: Any) -> None:
    """Set the elements of a 1-D array in these slices, one slice after the other."""
    start = 0
    for each in spans:
        flat[each] = values[start : start + each.stop - each.start]
        start += each.stop - each.start


def read(replica: Parameters, flat: Any) -> None:
    """Copy all parameters of a replica into `flat`, on the host or on their device."""
    start = 0
    for each in replica.arrays():
        flat[start : start + len(each)] = on_host(each) if isinstance(flat, np.ndarray) else each
        start += len(each)


class Average:
    """The moving average of the parameters, or of the slices of them that this rank updates.

    array: the average, 1-D, on the replica's device, in float32 or float64: the elements of `spans`, one slice after
        the other.
    saved: the whole average in a saved state; by default it begins with the parameters.
    decay: of the fit that moves it; None between fits, which leave it as it is.
    """

    def __init__(self, replica: Parameters, saved: np.ndarray | None = None, decay: float | None = None) -> None:
        self._replica, self.decay = replica, decay
        self._all: Spans = (slice(0, replica.parameter_count),)
        self._held: Any = None  # the parameters in `spans`, while the average is in their place
        self._dtype = np.dtype("float64" if replica.gradient_dtype == "float64" else "float32")
        self._set(self._all, np.concatenate([*map(on_host, replica.arrays())]) if saved is None else saved)

    def _set(self, spans: Spans, array: np.ndarray) -> None:
        self.spans, self.array = spans, on_device(np.array(array, self._dtype), self._replica.arrays()[0])

    def restrict(self, spans: Spans | None = None) -> None:
        """Keep the average of these slices; zeros where it was not known. None: of all parameters."""
        spans = spans or self._all
        if spans != self.spans:
            whole = self.whole()
            self._set(spans, np.concatenate([whole[each] for each in spans]))

    def move(self, spans: Spans | None = None) -> None:
        """Move the average of these slices, which were updated, towards the parameters. None: of all parameters."""
        if self.decay is None:
            return
        self.restrict(spans)
        start = 0
        for each in self._parameters():
            _move(self.array[start : start + len(each)], each, self.decay)
            start += len(each)

    def _parameters(self) -> Sequence[Any]:
        """Return the parameters in `spans`, as 1-D arrays."""
        arrays = self._replica.arrays()
        return arrays if self.spans == self._all else [arrays[0][each] for each in self.spans]

    def use(self, spans: Spans | None = None) -> None:
        """Put the average of these slices in the place of the parameters, until `stop_using`. None: of all."""
        self.stop_using()
        self.restrict(spans)
        self._held = np.concatenate(self._parameters())
        self._replica.put(self.spans, self.array)

    def stop_using(self) -> None:
        """Undo `use`, if it was called."""
        if self._held is not None:
            self._replica.put(self.spans, self._held)
            self._held = None

    def whole(self, memory: np.ndarray | None = None) -> np.ndarray:
        """Return the average on the host, in `memory` if given, with zeros outside of `spans`."""
        array = np.empty(self._all[0].stop, self._dtype) if memory is None else memory
        if self.spans != self._all:
            array[:] = 0
        put_in(array, self.spans, on_host(self.array))
        return array

    def elements(self, spans: Spans) -> np.ndarray:
        """Return the average of these slices on the host, one slice after the other; perhaps a view."""
        whole = on_host(self.array) if spans == self.spans else self.whole()
        return whole if spans == self.spans else np.concatenate([whole[each] for each in spans])


def keep(replica: Parameters, decay: float | None) -> None:
    """Keep an average of a replica's parameters from now on, with this decay; None: drop it. Local.

    It begins with the current parameters, unless there is one.
    """
    if replica.average is not None:
        replica.average.stop_using()
    replica.average = None if decay is None else replica.average or Average(replica)
    if replica.average is not None:
        replica.average.decay = decay


def end(replica: Parameters) -> None:
    """Move the average of a replica no more: the fit has ended. Local."""
    if replica.average is not None:
        replica.average.decay = None


def on_host(array: Any) -> np.ndarray:
    """Return a NumPy array unchanged, or a CuPy array copied to the host."""
    return array if isinstance(array, np.ndarray) else array.get()


def on_device(array: Any, like: Any) -> Any:
    """Return an array on the device of `like`: a NumPy array is copied to a GPU's."""
    given = isinstance(array, np.ndarray) and not isinstance(like, np.ndarray)
    return sys.modules["cupy"].asarray(array) if given else array


def _move(average: Any, parameters: Any, decay: float) -> None:
    if not isinstance(average, np.ndarray):
        average *= decay
        average += parameters.astype(average.dtype) * (1 - decay)
        return
    scratch = np.empty(min(BLOCK, average.size), average.dtype)
    for start in range(0, average.size, BLOCK):
        block = average[start : start + BLOCK]
        moved = parameters[start : start + BLOCK].astype(average.dtype, copy=False)
        added = np.multiply(moved, block.dtype.type(1 - decay), out=scratch[: block.size])
        block *= block.dtype.type(decay)
        block += added
