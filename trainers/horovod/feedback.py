"""The memory in which the backend compresses the gradients of an optimizer, and keeps the values it has not sent."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from allreduce.arrays import compression as compressions
from allreduce.arrays.compression import Given, check_parts
from allreduce.arrays.parts import Part
from allreduce.backend import AllReduce
from allreduce.errors import OptionError
from trainers.horovod.errors import ArgumentError
from trainers.replicas.pytorch.tensors import DTYPES, as_tensor

COMPRESSED = (torch.float32, torch.float64)  # the dtypes that backends compress
ABOUT = "about"  # the last part of a name in a state: JSON, as bytes

Scales = tuple[float, float]  # factors before and after a reduction


class Flat:
    """Gradients of one dtype in one array of the backend, on the host. parts: the parameters.

    The array is made at the first reduction, and again after hvd.init or a failure, with the state of before. Its
    address is what the backend knows its error feedback by.
    """

    def __init__(self, dtype: torch.dtype, parts: Sequence[Part]) -> None:
        self.dtype, self.parts = dtype, parts
        self._array: Any = None
        self._backend: AllReduce | None = None
        self._loaded: dict[str, np.ndarray] = {}  # what `array` loads

    def array(self, backend: AllReduce) -> Any:
        """Return the array. Collective at its first use with `backend`: then all ranks raise the OptionError of a rank
        whose loaded state does not fit.
        """
        if self._backend is not backend:
            state, error = self.state(), None
            array = backend.allocate(self.parts[-1].stop, DTYPES[self.dtype], "cpu")
            backend.describe(array, self.parts, whole=False)
            self._array, self._backend, self._loaded = array, backend, {}
            try:
                backend.load_state(state, array)
            except OptionError as wrong:
                error = wrong
            backend.topology.agree([], "load the state of a compression", error)
        return self._array

    def state(self) -> dict[str, np.ndarray]:
        if self._backend is None:
            return {name: array.copy() for name, array in self._loaded.items()}
        return self._backend.state(self._array)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        if self._backend is not None and not self._backend.closed:
            try:
                self._backend.load_state(state, self._array)
            except OptionError as error:
                raise ArgumentError(str(error)) from error
        else:
            self._array = self._backend = None  # of ranks before a failure
            self._loaded = {name: np.array(array) for name, array in state.items()}


class Feedback:
    """Error feedback of gradients, by the names of their parameters. compress: as in allreduce.create.

    Every gradient has a place in the memory, by whose address the backend finds its error feedback, and PowerSGD its
    factors. PyTorch may put the gradients themselves anywhere; they are copied there and back.
    """

    def __init__(self, compress: Given) -> None:
        self.compress = compress
        self._flats: list[Flat] = []
        self._places: dict[torch.Tensor, tuple[Flat, Part]] = {}  # by parameter

    def add(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give places to the parameters that are compressed; neighbours get neighbouring places. Local.

        Raises ArgumentError if they can't be compressed so, as when PowerSGD's rank is above all shapes.
        """
        taken = [(name, each) for name, each in named if each.dtype in COMPRESSED and each.numel()]
        earlier = [part for flat in self._flats for part in flat.parts]
        try:
            check_parts(self.compress, [*earlier, *(Part(name, 0, tuple(each.shape)) for name, each in taken)])
        except OptionError as error:
            raise ArgumentError(str(error)) from None
        for dtype in dict.fromkeys(parameter.dtype for _, parameter in taken):
            parts: list[Part] = []
            flat = Flat(dtype, parts)
            for name, parameter in taken:
                if parameter.dtype == dtype:
                    parts.append(Part(name, parts[-1].stop if parts else 0, tuple(parameter.shape)))
                    self._places[parameter] = flat, parts[-1]
            self._flats.append(flat)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a parameter has a place."""
        return parameter in self._places

    def reduce(
        self, backend: AllReduce, gradients: Mapping[torch.Tensor, torch.Tensor], op: str, scales: Scales
    ) -> None:
        """Reduce gradients (by parameter) in place, by "sum" or "mean"; neighbours in one call. Collective."""
        for flat, start, stop, members in self._runs(gradients):
            array = flat.array(backend)
            memory = as_tensor(array[start:stop], flat.dtype)
            views = [
                (memory[part.start - start : part.stop - start].view(part.shape), gradient.detach())
                for part, gradient in members
            ]
            for view, gradient in views:
                view.copy_(gradient)
            if scales != (1.0, 1.0):
                memory.mul_(scales[0])
            backend(array[start:stop], op)
            if scales != (1.0, 1.0):
                memory.mul_(scales[1])
            for view, gradient in views:
                gradient.copy_(view)

    def _runs(
        self, gradients: Mapping[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[Flat, int, int, list[tuple[Part, torch.Tensor]]]]:
        """Yield contiguous slices of the memory: (flat, start, stop, the gradients in it)."""
        placed = [(*self._places[parameter], gradient) for parameter, gradient in gradients.items()]
        for flat in self._flats:
            run: list[tuple[Part, torch.Tensor]] = []
            for part, gradient in sorted(
                ((part, gradient) for here, part, gradient in placed if here is flat), key=lambda pair: pair[0].start
            ):
                if run and run[-1][0].stop != part.start:
                    yield flat, run[0][0].start, run[-1][0].stop, run
                    run = []
                run.append((part, gradient))
            if run:
                yield flat, run[0][0].start, run[-1][0].stop, run

    # The training state

    def _about(self, flat: Flat) -> dict[str, Any]:
        parameters = [[part.name, list(part.shape)] for part in flat.parts]
        return {
            "compression": compressions.shown(self.compress),
            "dtype": DTYPES[flat.dtype],
            "parameters": parameters,
        }

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of this rank's error feedback: arrays that any file format takes. Local."""
        found: dict[str, np.ndarray] = {}
        for number, flat in enumerate(self._flats):
            if held := flat.state():
                found[f"{number}/{ABOUT}"] = np.frombuffer(json.dumps(self._about(flat)).encode(), np.uint8).copy()
                found.update((f"{number}/{name}", array) for name, array in held.items())
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state`; state that it lacks becomes zero. Local.

        Raises ArgumentError, and changes nothing, if it is of another compression or other parameters.
        """
        held: list[dict[str, np.ndarray]] = [{} for _ in self._flats]
        for name, array in state.items():
            number, _, rest = str(name).partition("/")
            if not number.isdecimal() or int(number) >= len(held):
                raise ArgumentError(f"the state of a compression has {name!r}, which is not of this optimizer")
            held[int(number)][rest] = np.asarray(array)
        for flat, arrays in zip(self._flats, held, strict=True):
            self._check(flat, arrays)
        for flat, arrays in zip(self._flats, held, strict=True):
            flat.load_state({name: array for name, array in arrays.items() if name != ABOUT})

    def _check(self, flat: Flat, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise ArgumentError unless `arrays` are a state of `flat`, or none."""
        if not arrays:
            return
        expected = self._about(flat)
        try:
            found = json.loads(arrays[ABOUT].tobytes())
            different = next((key for key in expected if found[key] != expected[key]), None)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"this is not the state of a compression: {error!r}") from None
        if different is not None:
            theirs, ours = found[different], expected[different]
            if different == "parameters" and isinstance(theirs, list):
                pairs = [pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]]
                theirs, ours = pairs[0] if pairs else (f"{len(theirs)} of them", f"{len(ours)}")
            raise ArgumentError(
                f"the state of a compression is of another model or compression: its {different} are {theirs}, and "
                f"this optimizer's {ours}; load the state that compression_state() of the same optimizer has returned"
            )

    def reset(self) -> None:
        """Set the error feedback to zero, as in a new optimizer. Local."""
        self.load_state({})
