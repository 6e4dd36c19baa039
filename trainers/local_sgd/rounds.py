"""Rounds of local SGD: inner steps of every rank on its own, then one outer step on the ranks' averaged change.

    delta = start - parameters        start: the parameters after the last outer step, with the same bits on all ranks
    delta = sum over the ranks of weight * delta / sum of weights        weight: the inner steps of a rank in the round
    start = outer optimizer's step(start, delta)
    parameters = start

`trainers.options.average` names the papers. Nothing here knows a framework: arrays are of NumPy or CuPy, or tensors.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.arrays.chunks import chunk
from allreduce.arrays.dtypes import BFLOAT16
from allreduce.transport.control import combine, raise_together
from trainers.options.average import AVERAGE, LocalSGD, OuterSGD
from trainers.state.sharded import Flat

BLOCK = 1 << 16  # elements that an outer step updates at a time: its arrays fit the cache
COUNT = "count the inner steps of a round"
NUMBERS = "numbers"  # the entry of a state that holds its counts


def run_here(work: Callable[[], object], name: str) -> None:
    """Run the average of a round in this thread."""
    work()


class Part(NamedTuple):
    """A block of a fragment: views of equal length. outer: the outer optimizer of these elements."""

    parameters: Any
    start: Any
    momentum: Any
    delta: Any
    outer: OuterSGD

    def form(self) -> None:
        """Write this rank's change into `delta`. Local."""
        self.delta[...] = self.start
        delta = self.delta
        delta -= self.parameters

    def apply(self, changed: bool) -> None:
        """Apply the averaged change in `delta`, which is overwritten. changed: whether there is one. Local."""
        if changed:
            self.outer.step(self.start, self.momentum, self.delta)
        self.parameters[...] = self.start


class Fragment:
    """A slice of the parameters with rounds of its own. span: its elements. weight: this rank's inner steps in the
    round. total: the weights of all ranks in the last average."""

    def __init__(self, span: slice, parts: list[Part]) -> None:
        self.span, self.parts = span, parts
        self.weight = self.total = 0.0


class Rounds:
    """The rounds of one replica. After each inner step call `count_step`, and `finish` if a fragment is `due`.

    options: valid. comm: for the counts, used where the reductions run. arrays: this rank's parameters, 1-D, one after
        the other as long as `memory`. averaged: the number of elements at the end that are averaged without the outer
        optimizer (statistics of batch norm).
    backend: averages. memory: 1-D memory for the changes, float32 or float64, which the backend has allocated.
    run: run(work, name) runs the work after all earlier work, in one order on all ranks, and returns at its end.

    start, delta: as in the module's docstring; momentum: of the outer optimizer, or None. Arrays of all elements.
    done: the number of outer steps, the same on all ranks. active: the number of
    ranks that took part in the last average with `active=True`. error: an error of this rank; the next average raises
    it on all ranks instead. steps: the mean over the ranks of the inner steps that were averaged.
    begun: whether steps were counted since all ranks had the same parameters.
    """

    def __init__(
        self,
        options: LocalSGD,
        comm: MPI.Intracomm,
        arrays: Sequence[Any],
        backend: Callable[[Any, str], object],
        memory: Flat,
        run: Callable[[Callable[[], object], str], object] = run_here,
        averaged: int = 0,
    ) -> None:
        self.options, self.delta = options, memory.tensor
        self.start: Any = _zeros_like(self.delta)
        self.momentum: Any = _zeros_like(self.delta) if options.outer_sgd.momentum else None
        self._comm, self._arrays, self._backend, self._memory, self._run = comm, arrays, backend, memory, run
        length = len(self.delta)
        self.fragments = [
            self._fragment(chunk(length, options.fragments, at), length - averaged) for at in range(options.fragments)
        ]
        self.done = self.active = 0
        self.steps = 0.0
        self.error: Exception | None = None
        self._position = self._next = 0  # inner steps since the last outer step; the next fragment
        self.begun = False
        self.restart()

    def _fragment(self, span: slice, trained: int) -> Fragment:
        """Return the fragment of these elements. trained: the number of elements with the outer optimizer."""
        parts, at = [], 0
        for array in self._arrays:
            for start, stop in _blocks(at, at + len(array), span, trained):
                here, own = slice(start, stop), slice(start - at, stop - at)
                outer = self.options.outer_sgd if start < trained else AVERAGE
                momentum = self.momentum[here] if outer.momentum else None
                parts.append(Part(array[own], self.start[here], momentum, self.delta[here], outer))
            at += len(array)
        return Fragment(span, parts)

    # Inner steps

    @property
    def left(self) -> int:
        """The number of inner steps until a fragment is due."""
        return self.options.interval - self._position

    @property
    def due(self) -> bool:
        """Whether it is time to call `finish`."""
        return self.left <= 0

    def count_step(self, weight: float = 1.0) -> None:
        """Count an inner step. Local. weight: 0 if this rank has taken no step."""
        self.begun = True
        self._position += 1
        for fragment in self.fragments:
            fragment.weight += weight

    def discount(self, steps: int) -> None:
        """Take back the last `steps` inner steps, all of weight 0. Local, the same on all ranks."""
        self._position -= steps

    # Outer steps

    def finish(self, active: bool = True) -> None:
        """Take the outer step of the next fragment. Collective. active: see the class."""
        self._end([self.fragments[self._next]], active)
        self._next = (self._next + 1) % len(self.fragments)
        self._position = 0
        self.begun = len(self.fragments) > 1

    def end(self, active: bool = True) -> None:
        """End the round early: afterwards all ranks have the same parameters, and a new round begins. Collective."""
        self._end(self.fragments, active)
        self._position = self._next = 0
        self.begun = False

    def _end(self, fragments: list[Fragment], active: bool) -> None:
        """Average the changes of fragments, and apply the averages. After an error the steps are still to be averaged.
        Collective."""
        for fragment in fragments:
            for part in fragment.parts:
                part.form()
        error, self.error = self.error, None
        work = partial(self._average, fragments, active, error)
        self._run(work, f"averages the parameters, after {self.done} outer steps")
        for fragment in fragments:
            self.steps += fragment.total / self._comm.size / len(self.fragments)
            for part in fragment.parts:
                part.apply(fragment.total > 0)
            fragment.weight = 0.0
        self.done += any(fragment.total > 0 for fragment in fragments)

    def _average(self, fragments: list[Fragment], active: bool, error: Exception | None) -> None:
        """Average the changes of fragments, weighted. Collective, by `run`."""
        weights = [fragment.weight for fragment in fragments]
        sums = combine(self._comm, np.array([*weights, active, error is not None], np.float64), COUNT)
        if sums[-1]:
            raise_together(self._comm, error)
        self.active = int(sums[-2])
        for fragment, total in zip(fragments, sums.tolist(), strict=False):
            fragment.total = total
            if not total:
                continue
            delta, factor = self.delta[fragment.span], fragment.weight * self._comm.size / total
            if factor == 0:
                delta[...] = 0  # a multiplication by 0 would keep NaN
            elif factor != 1:
                delta *= factor
            part = self._memory.part(fragment.span.start, fragment.span.stop)
            part.run_on_array(partial(self._backend, part.array, "mean"))

    # State

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of this rank's part of a round that has begun, for `load_state`; {} if none has. Local."""
        if not self.begun:
            return {}
        numbers = [self._position, self._next, self.done, self.steps, *(each.weight for each in self.fragments)]
        copies = {name: _copied(array) for name, array in self._arrays_by_name().items()}
        return copies | {NUMBERS: np.array([self._digest, *numbers], np.float64)}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on in the middle of a round, whose `state` is of this rank; do nothing if it is of other options. Local.
        Raises KeyError or ValueError."""
        digest, position, following, done, steps, *weights = state[NUMBERS].tolist()
        if digest != self._digest:
            return
        for name, array in self._arrays_by_name().items():
            gpu.write(array, state[name])
        self._position, self._next, self.done, self.steps = int(position), int(following), int(done), steps
        for fragment, weight in zip(self.fragments, weights, strict=True):
            fragment.weight = weight
        self.begun = True

    def _arrays_by_name(self) -> dict[str, Any]:
        found = {f"parameters {number}": array for number, array in enumerate(self._arrays)}
        own = {"start": self.start, "momentum": self.momentum}
        return found | {name: array for name, array in own.items() if array is not None}

    @property
    def _digest(self) -> int:
        return zlib.crc32(repr(self.options).encode())

    def restart(self) -> None:
        """Begin a round at the present parameters, which must be the same on all ranks. Local. The outer momentum
        stays."""
        for fragment in self.fragments:
            fragment.weight = 0.0
            for part in fragment.parts:
                part.start[...] = part.parameters
        self._position = self._next = 0
        self.begun, self.error = False, None

    def rewind(self) -> None:
        """Set the parameters to those after the last outer step. Local; `restart` follows."""
        for fragment in self.fragments:
            for part in fragment.parts:
                part.parameters[...] = part.start

    def load(self, momentum: Any, done: int) -> None:
        """Set the outer momentum, a 1-D array or None (zeros), and the number of outer steps. Local."""
        if self.momentum is not None:
            gpu.write(self.momentum, 0 if momentum is None else momentum)
        self.done = done


def _zeros_like(array: Any) -> Any:
    found = array - array
    found[...] = 0  # where `array` has NaN
    return found


def _copied(array: Any) -> np.ndarray:
    """Return a copy as files can have it: in NumPy's memory, bfloat16 as float32."""
    array = gpu.on_host(array)
    return np.array(array, np.float32 if array.dtype == BFLOAT16 else array.dtype)


def _blocks(start: int, stop: int, span: slice, trained: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the blocks of elements `start` to `stop` that lie in `span`, cut at `trained` too."""
    first, last = max(start, span.start), min(stop, span.stop)
    while first < last:
        end = min(first + BLOCK, last)
        if first < trained < end:
            end = trained
        yield first, end
        first = end
