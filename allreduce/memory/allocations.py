"""The one table of a backend's memory: the allocation in which an array lies, its place there, and its state."""

import re
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays.gpu import is_gpu_array
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.arrays.parts import Part
from allreduce.arrays.workspace import zeros
from allreduce.errors import OptionError

_STATE = re.compile(
    r"(?P<number>[0-9]{1,9})/(?P<kind>residual|calls|factor/(?P<start>[0-9]{1,18})/(?P<rows>[0-9]{1,18})x"
    r"(?P<columns>[0-9]{1,18}))"
)
MOST_PLACES = 64  # of arrays, which are kept


@dataclass(eq=False)
class Allocation:
    """An array whose memory the table knows.

    begin: its address. owner: the object whose memory it is. number: counts the arrays of the table, the same on all
    ranks. ranks: the number of the node's ranks that have mapped the memory, in which each has a row of pages; 0: the
    memory is this rank's alone. keeps: whether a compression keeps state for it.

    parts: the parameters of a model in it. residual: the error feedback of each element, made at its first use. calls:
    the number of calls with a slice, by its first element. factors: of the matrices of PowerSGD, by first element, rows
    and columns. agreed: the slices (first element, length) of whose factors the ranks have agreed since.
    """

    begin: int
    length: int
    dtype: np.dtype
    owner: "weakref.ref[Any]"
    number: int
    ranks: int = 0
    keeps: bool = True
    parts: tuple[Part, ...] = ()
    signature: int = 0  # of the parts
    residual: np.ndarray | None = None
    calls: dict[int, int] = field(default_factory=dict)
    factors: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    agreed: set[tuple[int, int]] = field(default_factory=set)
    cut: dict[tuple[int, int], list[Part]] = field(default_factory=dict)  # the parts inside of slices

    @property
    def nbytes(self) -> int:
        return self.length * self.dtype.itemsize

    def describe(self, start: int, length: int, parts: Sequence[Part]) -> None:
        """Replace the parts of `length` elements from `start`; state that depends on the parts is forgotten."""
        end = start + length
        moved = [part._replace(start=part.start + start) for part in parts]
        kept = [part for part in self.parts if part.stop <= start or part.start >= end]
        described = tuple(sorted([*kept, *moved], key=lambda part: part.start))
        if described != self.parts:
            self.parts, self.signature = described, zlib.crc32(repr(described).encode())
            for held in (self.cut, self.factors, self.agreed):
                held.clear()

    def views(self, offset: int, array: np.ndarray) -> list[np.ndarray]:
        """Return an array like `array` in the memory of each rank of the node, at byte `offset` there. Local."""
        memory = self.owner()
        assert memory is not None  # this rank's array lies in it
        rows = memory.reshape(self.ranks, -1)
        return list(rows[:, offset : offset + array.nbytes].view(array.dtype))


class Slice(NamedTuple):
    """A slice of an array of the table, `length` elements from `start`."""

    entry: Allocation
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
        if place in self.entry.cut:
            return self.entry.cut[place]
        found = []
        for part in self.entry.parts:
            begin, end = max(part.start, self.start), min(part.stop, self.start + self.length)
            if begin < end or self.start <= part.start == part.stop < self.start + self.length:
                whole = (begin, end) == (part.start, part.stop)
                found.append(Part(part.name, begin - self.start, part.shape if whole else (end - begin,)))
        self.entry.cut[place] = found  # complete: another thread may read it
        return found

    def count_call(self) -> int:
        """Return how many calls have reduced this slice before, and count one more."""
        before = self.entry.calls.get(self.start, 0)
        self.entry.calls[self.start] = before + 1
        return before


class Allocations:
    """The arrays from `allocate` of one backend, and the arrays that `describe` names, numbered in the order in which
    they were added. The order is the same on all ranks.

    An array stays in the table as long as its memory exists. Another thread may free memory at any time, so the table
    is only changed by single operations of a dict.

    shared: the arrays that the ranks of the node share, by the id of the owner of their memory, the `base` of slices.
    count: the number of the last one. Set it back, on all ranks, if only some could add an array.
    """

    def __init__(self) -> None:
        self.shared: dict[int, Allocation] = {}
        self._entries: dict[int, Allocation] = {}  # by number
        self.count = 0
        # where arrays lie in shared memory, by the array's id: a training reduces the same arrays in each step
        self._places: dict[int, tuple[weakref.ref[Any], Allocation, int]] = {}

    def add(self, array: Any, keeps: bool = True, ranks: int = 0) -> Allocation:
        """Add a 1-D array, and return its entry; see Allocation. Local; the same on all ranks."""
        owner = array if getattr(array, "base", None) is None else array.base
        self.count += 1
        entry = Allocation(address(array), array.size, array.dtype, weakref.ref(owner), self.count, ranks, keeps)
        for each in list(self._entries.values()):
            if each.begin < entry.begin + entry.nbytes and entry.begin < each.begin + each.nbytes:  # of freed memory
                self._entries.pop(each.number, None)
        self._entries[entry.number] = entry
        if ranks:
            self.shared[id(owner)] = entry
        weakref.finalize(owner, self._drop, id(owner), entry).atexit = False
        return entry

    def describe(self, array: Any, parts: Sequence[Part] = ()) -> None:
        """Set the parameters in a 1-D array, or in a slice of one of the table; add the array if it is new. Local; the
        same on all ranks. Raises OptionError if the parts overlap, or lie outside of the array."""
        _check_parts(parts, array.size)
        found = self.at(array) if array.size else None
        entry, offset = found or (self.add(array), 0)
        if entry.dtype != array.dtype or offset % entry.dtype.itemsize:
            raise OptionError(f"the array of {array.dtype} lies in memory that was allocated for {entry.dtype}")
        entry.keeps = True
        entry.describe(offset // entry.dtype.itemsize, array.size, parts)

    def _drop(self, owner: int, entry: Allocation) -> None:
        if self._entries.get(entry.number) is entry:  # its number may be another array's, if `allocate` failed
            self._entries.pop(entry.number, None)
        if self.shared.get(owner) is entry:
            self.shared.pop(owner, None)

    def at(self, buffer: Any) -> tuple[Allocation, int] | None:
        """Return the array in whose memory `buffer` lies, and the byte of this array at which `buffer` begins; None if
        there is none. Local."""
        begin = address(buffer)
        usual = self.shared.get(id(buffer.base)) if isinstance(buffer, np.ndarray) else None  # one look-up
        for entry in list(self._entries.values()) if usual is None else (usual,):
            if entry.begin <= begin and begin + buffer.nbytes <= entry.begin + entry.nbytes:
                return entry, begin - entry.begin
        return None

    def memory_of(self, buffer: Any) -> int:
        """Return ALLOCATED for a slice of memory that the ranks of the node share, GPU for an array there, else
        UNREGISTERED. Local."""
        base = getattr(buffer, "base", None)
        if id(base) in self.shared and buffer.size:
            return ALLOCATED
        if is_gpu_array(buffer):
            return GPU
        ordinary = type(base) is np.ndarray and base.flags.owndata  # a slice of an ordinary array
        if base is None or ordinary or not (isinstance(buffer, np.ndarray) and buffer.size and buffer.flags.forc):
            return UNREGISTERED
        found = self.at(buffer)
        return ALLOCATED if found is not None and found[0].ranks else UNREGISTERED

    def place(self, buffer: Any) -> tuple[int, int] | None:
        """Return the place of `buffer` in an array of the table, as numbers that the ranks compare, or None. Local. The
        first one stands for the array and its parameters, the second one is the byte at which `buffer` begins."""
        known = self._places.get(id(buffer))
        if known is None or known[0]() is not buffer:
            found = self.at(buffer) if buffer.size else None
            if found is None:
                return None
            known = weakref.ref(buffer), *found
            if found[0].ranks:  # the array's memory does not move: it has a base
                if len(self._places) >= MOST_PLACES:  # a program with ever new slices
                    self._places.clear()
                self._places[id(buffer)] = known
        return known[1].number + (known[1].signature << 32), known[2]

    def find(self, buffer: Any, scratch: bool = False) -> Slice | None:
        """Return `buffer` as a slice of an array for which state is kept, or None. Local. scratch: True: arrays without
        state count too."""
        found = self.at(buffer)
        if found is None or found[0].dtype != buffer.dtype or not (found[0].keeps or scratch):
            return None
        start, rest = divmod(found[1], buffer.dtype.itemsize)
        return None if rest else Slice(found[0], start, buffer.size)

    def close(self) -> None:
        """Treat all arrays as ordinary memory from now on. Their state can be read as long as they exist. Local."""
        self.shared.clear()

    # The training state

    def _kept(self, array: Any) -> list[Allocation]:
        """Return the entry of `array`, if state is kept for it; all such entries if `array` is None."""
        if array is None:
            return [entry for entry in list(self._entries.values()) if entry.keeps and entry.length]
        where = self.find(array)
        return [] if where is None else [where.entry]

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        """Return a copy of the error feedback, the call counts and the factors of one array, or of all. Local."""
        held: dict[str, np.ndarray] = {}
        for number, entry in enumerate(self._kept(array)):
            if entry.residual is not None:
                held[f"{number}/residual"] = entry.residual.copy()
            if entry.calls:
                held[f"{number}/calls"] = np.array(sorted(entry.calls.items()), np.int64)
            for (start, rows, columns), factor in entry.factors.items():
                held[f"{number}/factor/{start}/{rows}x{columns}"] = factor.copy()
        return held

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        """Load a result of `state` of an equal array, or of equal arrays; state that it lacks becomes zero. Local.

        Raises OptionError, and changes nothing, if it is of other arrays.
        """
        entries = self._kept(array)
        loads = [_load(entries, name, held) for name, held in state.items()]
        self.reset(array)
        for load in loads:
            load()

    def reset(self, array: Any = None) -> None:
        """Set the error feedback of one array, or of all, to zero; forget the call counts and the factors. Local."""
        for entry in self._kept(array):
            entry.residual = None
            for held in (entry.calls, entry.factors, entry.agreed):
                held.clear()


def _load(entries: Sequence[Allocation], name: str, array: np.ndarray) -> Callable[[], None]:
    """Return the function that loads an array of a state. Raises OptionError if it does not fit these entries."""
    found = _STATE.fullmatch(name)
    if found is not None and int(found["number"]) < len(entries):
        entry, same = entries[int(found["number"])], entries[int(found["number"])].dtype == array.dtype
        if found["kind"] == "calls" and (array.dtype.kind, array.shape[1:]) == ("i", (2,)):
            return lambda: entry.calls.update(array.tolist())
        if found["kind"] == "residual" and same and array.shape == (entry.length,):
            return lambda: np.copyto(Slice(entry, 0, entry.length).residual, array)
        if found["start"] is not None and same and array.ndim == 2:
            start, rows, columns = place = int(found["start"]), int(found["rows"]), int(found["columns"])
            if start + rows * columns <= entry.length and array.shape[1] == columns:
                return lambda: entry.factors.update({place: array.copy()})
    known = ", ".join(f"{at}, {each.dtype} of length {each.length}" for at, each in enumerate(entries))
    raise OptionError(
        f"the state of a compression has {name!r}, {array.dtype} of shape {array.shape}, which is not of "
        f"the arrays of this backend: {known or 'none'}"
    )


def address(array: Any) -> int:
    """Return the address of a NumPy or CuPy array's first element."""
    return array.data.ptr if is_gpu_array(array) else MPI.Get_address(array)


def _check_parts(parts: Sequence[Part], length: int) -> None:
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start < end or part.stop > length:
            raise OptionError(
                f"{part.name!r} is elements {part.start} to {part.stop - 1} of an array of {length}, which overlaps "
                "another part or the array's end"
            )
        end = part.stop
