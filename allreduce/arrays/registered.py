"""Registered arrays: the error feedback, shapes and call counts that a compressing backend keeps for its memory."""

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays.gpu import is_gpu_array
from allreduce.arrays.workspace import zeros
from allreduce.errors import OptionError

_STATE = re.compile(
    r"(?P<number>[0-9]{1,9})/(?P<kind>residual|calls|factor/(?P<start>[0-9]{1,18})/(?P<rows>[0-9]{1,18})x"
    r"(?P<columns>[0-9]{1,18}))"
)
RESIDUAL = "/residual"  # the end of the names of residuals in a state


class Part(NamedTuple):
    """One parameter of a model in a 1-D array: elements `start` to `stop - 1`, an array of `shape` in C order."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + int(np.prod(self.shape, dtype=int))


class Registered(NamedTuple):
    """A registered array, as `register` of another registry takes it. base: the owner of its memory. number: of its
    registration, which the other registry takes over."""

    begin: int
    size: int
    dtype: np.dtype
    base: Any
    number: int


@dataclass
class Entry:
    """A registered array. begin: its address. owner: of its memory. number: counts registrations, the same on all
    ranks. residual: the error feedback of each element, made at its first use.

    calls: the number of calls with a slice, by its first element. factors: of the matrices of PowerSGD, by first
    element, rows and columns. settled: the slices (first element, length) that were reduced since the state was
    loaded.
    """

    begin: int
    length: int
    dtype: np.dtype
    owner: "weakref.ref[Any]"
    number: int
    parts: tuple[Part, ...] = ()
    residual: np.ndarray | None = None
    calls: dict[int, int] = field(default_factory=dict)
    factors: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    settled: set[tuple[int, int]] = field(default_factory=set)
    cut: dict[tuple[int, int], list[Part]] = field(default_factory=dict)  # the parts inside of slices

    def forget(self) -> None:
        """Set the state to that of a new array."""
        self.residual = None
        for held in (self.calls, self.factors, self.settled):
            held.clear()


class Slice(NamedTuple):
    """A slice of a registered array, `length` elements from `start`."""

    entry: Entry
    start: int
    length: int

    @property
    def residual(self) -> np.ndarray:
        """The error feedback of these elements, a view: the values that earlier calls have not sent. Zeros at first."""
        entry = self.entry
        if entry.residual is None:
            entry.residual = zeros(entry.length, entry.dtype)
        return entry.residual[self.start : self.start + self.length]

    @property
    def parts(self) -> list[Part]:
        """The parts inside of this slice, with positions in it; a part that is cut is 1-D."""
        place = self.start, self.length
        if place not in self.entry.cut:
            self.entry.cut[place] = self._cut()
        return self.entry.cut[place]

    def _cut(self) -> list[Part]:
        found = []
        for part in self.entry.parts:
            begin, end = max(part.start, self.start), min(part.stop, self.start + self.length)
            if begin < end or self.start <= part.start == part.stop < self.start + self.length:
                whole = (begin, end) == (part.start, part.stop)
                found.append(Part(part.name, begin - self.start, part.shape if whole else (end - begin,)))
        return found

    def count_call(self) -> int:
        """Return how many calls have reduced this slice before, and count one more."""
        before = self.entry.calls.get(self.start, 0)
        self.entry.calls[self.start] = before + 1
        return before

    def settle(self) -> bool:
        """Return whether this is the first call with this slice since the state was loaded. Local."""
        place = self.start, self.length
        first = place not in self.entry.settled
        self.entry.settled.add(place)
        return first

    def hand_over(self, buffer: np.ndarray, kept: slice = slice(0, 0)) -> None:
        """Add the error feedback of the elements outside of `kept` to `buffer`, and set it to zero. Local.

        For elements whose errors this rank does not send otherwise. It has errors of such elements after a job with
        other ranks, nodes or slices.
        """
        if self.entry.residual is None:
            return
        for part in (slice(0, kept.start), slice(kept.stop, self.length)):
            buffer[part] += self.residual[part]
            self.residual[part] = 0


class Registry:
    """The registered arrays of a backend, in the order of their registration, which is the same on all ranks.

    Another thread may free an array's memory at any time, so entries are only changed by single operations of a dict.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Entry] = {}
        self._registrations = 0

    @property
    def _entries(self) -> list[Entry]:
        return list(self._by_id.values())

    def register(self, array: Any, parts: Sequence[Part] = ()) -> Registered:
        """Register a 1-D array from `allocate`, or replace the parts of a registered array or slice. Local.

        Returns the array as another registry takes it. An array stays registered as long as its memory exists. Raises
        OptionError if the parts overlap, or lie outside of the array.
        """
        _check_parts(parts, array.size)
        where, owner = self.find(array), array if getattr(array, "base", None) is None else array.base
        if where is None:
            number = array.number if isinstance(array, Registered) else self._registrations + 1
            self._registrations = number
            entry = Entry(address(array), array.size, array.dtype, weakref.ref(owner), number, tuple(parts))
            for each in self._entries:
                if _overlap(each, entry):  # of freed memory
                    self._drop(each)
            self._by_id[id(entry)] = entry
            weakref.finalize(owner, self._drop, entry).atexit = False
        else:
            self._describe(where, parts)
            number = where.entry.number
        return Registered(address(array), array.size, array.dtype, owner, number)

    def _describe(self, where: Slice, parts: Sequence[Part]) -> None:
        """Replace the parts of a registered array or slice."""
        begin, end, entry = where.start, where.start + where.length, where.entry
        moved = [part._replace(start=part.start + begin) for part in parts]
        kept = [part for part in entry.parts if part.stop <= begin or part.start >= end]
        described = tuple(sorted([*kept, *moved], key=lambda part: part.start))
        if described != entry.parts:
            entry.parts = described
            for held in (entry.cut, entry.factors, entry.settled):
                held.clear()

    def _drop(self, entry: Entry) -> None:
        self._by_id.pop(id(entry), None)

    def arrays(self, array: Any = None) -> list[tuple[Registered, tuple[Part, ...]]]:
        """Return the registered arrays and their parts, in the order of their numbers in `state`. Local.

        array: only this one, or none if it is not registered.
        """
        held = [(entry, owner) for entry in self._entries_of(array) if (owner := entry.owner()) is not None]
        memories = [Registered(entry.begin, entry.length, entry.dtype, owner, entry.number) for entry, owner in held]
        return [(memory, entry.parts) for memory, (entry, _) in zip(memories, held, strict=True)]

    def find(self, buffer: Any, begin: int | None = None) -> Slice | None:
        """Return the slice of a registered array that `buffer` is, or None. Local.

        begin: the address of the array that `buffer` is a copy of.
        """
        begin, itemsize = address(buffer) if begin is None else begin, buffer.dtype.itemsize
        for entry in self._entries:
            start, rest = divmod(begin - entry.begin, itemsize)
            inside = start >= 0 and start + buffer.size <= entry.length
            if inside and rest == 0 and entry.dtype == buffer.dtype:
                return Slice(entry, start, buffer.size)
        return None

    # The training state

    def _entries_of(self, array: Any) -> list[Entry]:
        """Return the entry of `array`, if it is registered; all entries if `array` is None."""
        if array is None:
            return self._entries
        where = self.find(array)
        return [] if where is None else [where.entry]

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        """Return a copy of the error feedback, the call counts and the factors of one array, or of all. Local."""
        held: dict[str, np.ndarray] = {}
        for number, entry in enumerate(self._entries_of(array)):
            if entry.residual is not None:
                held[f"{number}{RESIDUAL}"] = entry.residual.copy()
            if entry.calls:
                held[f"{number}/calls"] = np.array(sorted(entry.calls.items()), np.int64)
            for (start, rows, columns), factor in entry.factors.items():
                held[f"{number}/factor/{start}/{rows}x{columns}"] = factor.copy()
        return held

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        """Load a result of `state` of an equal array, or of equal arrays; state that it lacks becomes zero. Local.

        Raises OptionError, and changes nothing, if it is of other arrays.
        """
        checked = self.check_state(state, array)
        self.reset(array)
        for name, held in state.items():
            entry, kind, place = checked[name]
            if kind == "residual":
                Slice(entry, 0, entry.length).residual[...] = held
            elif kind == "calls":
                entry.calls.update((int(start), int(count)) for start, count in held)
            elif place is not None:
                entry.factors[place] = held.copy()

    def check_state(
        self, state: Mapping[str, np.ndarray], array: Any = None
    ) -> dict[str, tuple[Entry, str, tuple[int, int, int] | None]]:
        """Return the entry, the kind and the matrix of each array of a state. Local. Raises OptionError if it is of
        other arrays."""
        entries, checked = self._entries_of(array), {}
        for name, held in state.items():
            found = _find_state(entries, name, held)
            if found is None:
                known = ", ".join(f"{at}, {each.dtype} of length {each.length}" for at, each in enumerate(entries))
                raise OptionError(
                    f"the state of a compression has {name!r}, {held.dtype} of shape {held.shape}, which is not of "
                    f"the arrays of this backend: {known or 'none'}"
                )
            checked[name] = found
        return checked

    def reset(self, array: Any = None) -> None:
        """Set the error feedback of one array, or of all, to zero; forget the call counts and the factors. Local."""
        for entry in self._entries_of(array):
            entry.forget()


def _find_state(
    entries: Sequence[Entry], name: str, array: np.ndarray
) -> tuple[Entry, str, tuple[int, int, int] | None] | None:
    """Return the entry, the kind and the matrix of an array of a state; None if it does not fit these entries."""
    found = _STATE.fullmatch(name)
    if found is None or int(found["number"]) >= len(entries):
        return None
    entry = entries[int(found["number"])]
    kind = found["kind"].partition("/")[0]
    if kind == "calls":
        return (entry, kind, None) if (array.dtype.kind, array.shape[1:]) == ("i", (2,)) else None
    if array.dtype != entry.dtype:
        return None
    if kind == "residual":
        return (entry, kind, None) if array.shape == (entry.length,) else None
    start, rows, columns = (int(found[each]) for each in ("start", "rows", "columns"))
    inside = start + rows * columns <= entry.length and array.ndim == 2 and array.shape[1] == columns
    return (entry, kind, (start, rows, columns)) if inside else None


def divide(states: Sequence[Mapping[str, np.ndarray]], ranks: int) -> list[dict[str, np.ndarray]]:
    """Return the states of backends for another number of ranks: each residual of the old ranks goes to one new rank.

    states: of every old rank. The sum of all residuals, which the next sums contain, does not change. Local.
    """
    divided = []
    for rank in range(ranks):
        mine = {name: array for name, array in states[0].items() if not name.endswith(RESIDUAL)}
        for name in sorted({name for state in states for name in state if name.endswith(RESIDUAL)}):
            held = [state[name] for state in states if name in state]
            if taken := [state[name] for state in states[rank::ranks] if name in state]:
                mine[name] = np.sum(taken, axis=0, dtype=held[0].dtype)
        divided.append(mine)
    return divided


def address(array: Any) -> int:
    """Return the address of a NumPy or CuPy array's first element."""
    if isinstance(array, Registered):
        return array.begin
    return array.data.ptr if is_gpu_array(array) else array.ctypes.data


def _overlap(one: Entry, other: Entry) -> bool:
    ends = [entry.begin + entry.length * entry.dtype.itemsize for entry in (one, other)]
    return one.begin < ends[1] and other.begin < ends[0]


def _check_parts(parts: Sequence[Part], length: int) -> None:
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start < end or part.stop > length:
            raise OptionError(
                f"{part.name!r} is elements {part.start} to {part.stop - 1} of an array of {length}, which overlaps "
                "another part or the array's end"
            )
        end = part.stop
