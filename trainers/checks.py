"""The checks of a training: whether gradients can be averaged, and whether the replicas are still equal in bits.

CheckGradients and CheckDivergence ask for them in a trainer's fit, check_gradients= and check_every= in a
MirroredOptimizer.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.errors import DivergenceError
from allreduce.transport import processes
from allreduce.transport.control import all_values, combine, known, together
from allreduce.transport.wait import wait_for
from trainers.errors import NotFiniteError

# Whether replicas are equal

DIVERGENCE_ANSWERS = ("raise", "copy")  # to replicas that differ
MAJORITY = "majority"
LEARNING_RATES = "learning rates"  # the name by which they are compared
DIVERGENCE_WAITS = "compare the replicas"
LACKING = -1  # the sum of an array that a rank lacks

Compared = Mapping[str, np.ndarray | str]  # what must be equal on all ranks, by name: host arrays, or texts


class Source:
    """Whose replica is copied when ranks differ. It stays the same process when ranks are lost and renumbered.

    given: "majority", or a rank of `comm`. rank: "majority", or the rank of that process in the newest communicator.
    """

    def __init__(self, given: str | int, comm: MPI.Comm) -> None:
        self.rank = given
        self.number = None if given == MAJORITY else processes.world_ranks(comm)[int(given)]  # in the job

    def move(self, comm: MPI.Comm) -> None:
        """Find the source in `comm`, the newest communicator; if it is lost, take the majority. Local."""
        if self.number is None:
            return
        ranks = processes.world_ranks(comm)
        if self.number in ranks:
            self.rank = ranks.index(self.number)
            return
        if comm.rank == 0:
            notices.log.warning(
                "allreduce: rank %d of the job is lost, whose replica was to be copied when replicas differ (source=); "
                "from now on it is that of the majority",
                self.number,
            )
        self.rank, self.number = MAJORITY, None


class Divergence:
    """What differs between ranks; the same on all of them.

    names: of what was compared. sums: of each rank (rows) and name (columns), int64. sides: each rank's first
        difference in words.
    """

    def __init__(self, names: list[str], sums: np.ndarray, sides: list[str]) -> None:
        self.names, self.sums, self.sides = names, sums, sides

    def root(self, source: str | int) -> int:
        """The rank whose replica is to be everyone's: `source`, or the first of the most that are equal."""
        if source != MAJORITY:
            return int(source)
        rows = [tuple(row) for row in self.sums.tolist()]
        return rows.index(max(rows, key=lambda row: (rows.count(row), -rows.index(row))))

    def differing(self, root: int) -> list[int]:
        """The ranks that differ from `root` in anything."""
        return np.flatnonzero((self.sums != self.sums[root]).any(axis=1)).tolist()

    def __str__(self) -> str:
        differ = np.flatnonzero((self.sums != self.sums[0]).any(axis=0))
        first = int(differ[0])
        values = self.sums[:, first].tolist()
        usual = max(values, key=lambda value: (values.count(value), value == values[0]))
        odd = [str(rank) for rank, value in enumerate(values) if value != usual]
        ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(odd)} differ{'s' * (len(odd) == 1)}"
        table = "\n".join(f"  rank {rank}: {self.names[first]}: {side}" for rank, side in enumerate(self.sides))
        return (
            f"the replicas are no longer equal: {ranks} from the others in {self.names[first]}, the first of "
            f"{differ.size} differences. Gradients, parameters or hyperparameters were changed on some ranks only:\n"
            f"{table}"
        )


def check_equal(
    comm: MPI.Intracomm,
    read: Callable[[], Compared],
    on_divergence: str,
    source: str | int,
    copy: Callable[[int], object],
    when: str = "",
) -> bool:
    """Compare the replicas of all ranks; make them equal again where they differ, or raise. Collective.

    read: gives this rank's arrays. on_divergence: "raise" or "copy". source: whose replica is copied: "majority" or a
    rank. copy: gives all ranks the replica of this rank. when: begins the text of the error and of the warning.
    Returns True when replicas were copied. Raises DivergenceError on all ranks.
    """
    found = compare(comm, together(comm, read))
    if found is None:
        return False
    if on_divergence == "raise":
        raise known(DivergenceError(f"{when}{found}"), comm)
    root = found.root(source)
    copy(root)
    if comm.rank == 0:
        ranks = ", ".join(map(str, found.differing(root)))
        text = "allreduce: %s%s\n  copied again to rank %s: the replica of rank %d"
        notices.log.warning(text, when, found, ranks, root)
    return True


def compare(comm: MPI.Intracomm, held: Compared) -> Divergence | None:
    """What differs between the ranks; None when nothing does. Collective.

    A name that a rank lacks differs there. Costs one reading of all arrays (a CRC, 4 GB/s here) and a message of
    16 bytes; more only when ranks differ.
    """
    own = {name: zlib.crc32(_memory(value)) for name, value in held.items()}
    whole = zlib.crc32(repr(sorted(own.items())).encode())
    low = np.array([whole, -whole], np.int64)  # the minimum of -x is minus the maximum: one message gives both
    wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, low, MPI.MIN), DIVERGENCE_WAITS)
    if low[0] == -low[1]:
        return None
    ranks = all_values(comm, own, DIVERGENCE_WAITS)
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    sums = np.array([[rank.get(name, LACKING) for name in names] for rank in ranks], np.int64)
    first = names[int(np.flatnonzero((sums != sums[0]).any(axis=0))[0])]
    side = _side(held[first], own[first]) if first in held else "has none"
    return Divergence(names, sums, all_values(comm, side, DIVERGENCE_WAITS))


def refusal(every: Any, on_divergence: Any, source: Any, ranks: int | None) -> str:
    """What is wrong with such options; "" for nothing. ranks: their number, None where it is not known."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        return f"every must be an integer >= 1, got {every!r}"
    if on_divergence not in DIVERGENCE_ANSWERS:
        return f'on_divergence={on_divergence!r} is unknown; use "raise" or "copy"'
    rank = isinstance(source, int) and not isinstance(source, bool)
    if source != MAJORITY and not (rank and source >= 0 and (ranks is None or source < ranks)):
        known = "" if ranks is None else f", 0 to {ranks - 1}"
        return f'source must be "majority", or a rank{known}, got {source!r}'
    return ""


def _memory(value: np.ndarray | str) -> Any:
    if isinstance(value, str):
        return value.encode()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _side(value: np.ndarray | str, crc: int) -> str:
    """A rank's value, in words."""
    if isinstance(value, str):
        return value
    text = f"crc {crc:08x}"
    if value.dtype.kind != "f":
        return text
    with np.errstate(all="ignore"):
        return f"{text}, norm {float(np.linalg.norm(value.astype(np.float64)))!r}"


# Whether gradients can be averaged

ANSWERS = ("raise", "skip")  # to gradients that can't be averaged
BLOCK = 1 << 18  # elements that are read together, where one dot product of all is not enough
WAITS = "hear whether all gradients are numbers"
ADVICE = "look at its rows of the batch, scale the features, or lower the learning rate"
FINITE = [0, 0, 0, -1, 0]  # what a rank tells that has found nothing


class Span(NamedTuple):
    """The gradients of one parameter: elements [start, start + size) of a GradientArray."""

    name: str
    start: int
    size: int


class GradientArray(NamedTuple):
    """Gradients in a 1-D array, or the sparse gradient of a table. sent: the dtype in which they go to other ranks."""

    spans: Sequence[Span]
    dtype: np.dtype
    sent: np.dtype

    def name(self, element: int) -> str:
        """The parameter of an element, and which of its elements it is."""
        span = next(each for each in self.spans if each.start <= element < each.start + each.size)
        return f"{span.name} (element {element - span.start})"


def table(name: str, size: int, dtype: np.dtype) -> GradientArray:
    """A table with sparse gradients, of this many elements. Its rows are sent as they are."""
    return GradientArray([Span(name, 0, size)], dtype, dtype)


class Problem(NamedTuple):
    """Why gradients can't be averaged, and what the user can do about it."""

    text: str
    advice: str


class GradientCheck:
    """Sees whether the gradients of a step can be averaged: they are numbers, and their sum is.

    on_bad: "raise": all ranks raise a NotFiniteError. "skip": all ranks leave out the step. arrays: of all gradients.

    In each step a rank calls `begin`, `look` or `look_at_rows` for each of its arrays, and `finish` with all ranks.

    finite: whether all gradients of this rank that it has looked at can be averaged. norm: of these gradients. row: how
    many are NaN, infinite, and finite but too large for the dtype in which they are sent; then the first of these:
    number of its span over all arrays, number of the element.
    """

    def __init__(self, on_bad: str, arrays: Sequence[GradientArray]) -> None:
        self.on_bad, self.arrays = on_bad, arrays
        self.left_out = False  # all ranks leave out this step
        self._spans = [span for array in arrays for span in array.spans]
        self._first_spans = list(itertools.accumulate((len(array.spans) for array in arrays), initial=0))
        self._most = [math.inf if array.dtype == array.sent else largest(array.sent) for array in arrays]
        self._sent = min((array.sent for array in arrays), key=largest)
        self.begin()

    def begin(self) -> None:
        """A step begins. Local."""
        self._squares, self.row, self.left_out = 0.0, list(FINITE), False

    @property
    def finite(self) -> bool:
        return self.row[:3] == FINITE[:3]

    @property
    def norm(self) -> float:
        return math.sqrt(self._squares) if self.finite else 0.0

    def look(self, number: int, gradients: Any) -> None:
        """Look at this rank's gradients of the array with this number, on the host or a GPU. Local."""
        most = self._most[number]
        squares = _squares(gradients)
        if not squares < most * most:
            squares = self._count(number, gradients, self.arrays[number].spans)
        self._squares += squares

    def look_at_rows(self, number: int, indices: Any, values: Any) -> None:
        """Look at a sparse gradient: rows of a table, by their indices; its other rows are zeros. Local."""
        flat, clean = values.reshape(-1), self.finite
        squares = _squares(flat)
        if not squares < math.inf:
            squares = self._count(number, flat, [Span("", 0, values.size)])
            if clean and not self.finite:
                self.row[4] = element_of(indices, values, self.row[4])
        self._squares += squares

    def _count(self, number: int, gradients: Any, spans: Sequence[Span]) -> float:
        """Count what can't be averaged; returns the sum of the squares of the rest, in float64."""
        squares, row, most = 0.0, self.row, self._most[number]
        for at, (_, start, size) in enumerate(spans, self._first_spans[number]):
            for begin in range(start, start + size, BLOCK):
                block = _wide(gradients[begin : min(begin + BLOCK, start + size)])
                good = np.isfinite(block) & (np.abs(block) <= most)
                if good.all():
                    squares += float(np.dot(block, block))
                    continue
                if self.finite:
                    row[3:] = at, begin - start + int(np.argmin(good))
                nan, infinite = int(np.isnan(block).sum()), int(np.isinf(block).sum())
                row[0] += nan
                row[1] += infinite
                row[2] += int((~good).sum()) - nan - infinite
        return squares

    def finish(
        self, comm: MPI.Intracomm, overflowing: Callable[[int], int], when: str = "", may_leave_out: bool = True
    ) -> bool:
        """All ranks have looked at their gradients: raise, or leave the step out, if these can't be averaged.

        Collective; costs a message of 16 bytes. Returns `left_out`.

        overflowing: for the number of an array, the first element whose sum over the ranks is none (see `overflow`),
            -1 for no element; collective. Called where that may be, which costs a second reading of the gradients.
        when: begins the text. may_leave_out: False for a step that can't be left out.
        """
        sums = np.array([self.norm, not self.finite])
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, sums), WAITS)
        problem = None
        if sums[1]:
            rows = np.empty((comm.size, len(FINITE)), np.int64)
            wait_for(comm, comm.Iallgather(np.array(self.row, np.int64), rows), WAITS)
            problem = self.describe(rows.tolist())
        elif not sums[0] < largest(self._sent) / 2:
            problem = self._overflow(float(sums[0]), overflowing)
        if problem is None:
            return False
        if self.on_bad == "raise" or not may_leave_out:
            raise known(NotFiniteError(f"{when}{problem.text}: {problem.advice}"), comm)
        self.left_out = True
        if comm.rank == 0:
            notices.log.warning("allreduce: %s%s; no rank takes this step", when, problem.text)
        return True

    def _overflow(self, norms: float, overflowing: Callable[[int], int]) -> Problem | None:
        """The first sum that overflows. norms: the sum of those of all ranks. Collective."""
        for number, array in enumerate(self.arrays):
            if not norms < largest(array.sent) / 2 and (at := overflowing(number)) >= 0:
                where = f"{array.name(at)}, and every rank's own are numbers: they are too large for {array.sent}"
                same = array.dtype == array.sent
                advice = "lower the learning rate, or clip" if same else _advice(array.sent)
                return Problem(f"the sum of gradients overflows in {where}", advice)
        return None

    def describe(self, rows: Sequence[Sequence[int]]) -> Problem:
        """Name the ranks that have brought gradients that can't be averaged, and the parameters. rows: of all ranks."""
        texts = []
        for rank, (nan, infinite, large, span, element) in enumerate(rows):
            if nan or infinite or large:
                where = f"the first in {self._spans[span].name} (element {element})"
                texts.append(f"rank {rank} has brought {_counted(nan, infinite, large, self._sent)}, {where}")
        if any(row[2] for row in rows):
            return Problem(f"gradients can't be averaged: {'; '.join(texts)}", _advice(self._sent))
        return Problem(f"gradients are no numbers: {'; '.join(texts)}", ADVICE)


def overflow(comm: MPI.Intracomm, gradients: Any, length: int, dtype: np.dtype) -> int:
    """The first element whose sum over the ranks may be no number, though each rank's gradient is; -1 for none.

    Collective. It adds up all gradients in float64, by absolute value, since the order in which a backend adds them
    decides whether large ones that cancel overflow.

    gradients: None on ranks that have none. dtype: of the sums, in which gradients are sent. Rounding each of them to
        it may make the sum larger.
    """
    bound = largest(dtype) * (1 - float(ml_dtypes.finfo(dtype).eps))
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        sums = np.zeros(end - begin) if gradients is None else np.abs(_wide(gradients[begin:end]))
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, sums), WAITS)
        over = np.flatnonzero(sums > bound)
        if over.size:
            return begin + int(over[0])
    return -1


def overflowed(comm: MPI.Intracomm, averages: Any, element: Callable[[int], int]) -> int:
    """The first element that is no number in the averages of any rank; -1 for none. Collective.

    averages: what this rank has of them, 1-D. element: the number of one of these elements in the whole array.
    """
    bad = np.flatnonzero(~np.isfinite(_on_host(averages)))
    none = np.iinfo(np.int64).max
    first = combine(comm, np.array([element(int(bad[0])) if bad.size else none]), WAITS, MPI.MIN)[0]
    return -1 if first == none else int(first)


def element_of(indices: Any, values: Any, at: int) -> int:
    """The element of a table that is element `at` of these rows of it."""
    row, column = divmod(at, values.size // len(values))
    return int(indices[row]) * (values.size // len(values)) + column


def largest(dtype: np.dtype) -> float:
    """The largest number of a floating dtype, bfloat16 too."""
    return float(ml_dtypes.finfo(dtype).max)


def _advice(sent: np.dtype) -> str:
    other = 'take compress="bfloat16"' if sent == dtypes.FLOAT16 else "leave out compress"
    return f"they are sent as {sent} (compress): {other}, scale the features, or lower the learning rate"


def _counted(nan: int, infinite: int, large: int, sent: np.dtype) -> str:
    parts = [f"{number} {what}" for number, what in ((nan, "NaN"), (infinite, "infinite")) if number]
    text = f"{' and '.join(parts)} gradient{'s' * (nan + infinite > 1)}" if parts else ""
    if large:
        text += f" and {large}" if parts else f"{large} gradient{'s' * (large > 1)}"
        text += f" too large for {sent}"
    return text


def _squares(gradients: Any) -> float:
    """The sum of the squares; no number when a gradient is none, or when their squares are too large."""
    if dtypes.is_half(gradients.dtype):
        wide = (gradients[at : at + BLOCK].astype(np.float32) for at in range(0, len(gradients), BLOCK))
        return float(sum(float(block.dot(block)) for block in wide))
    with np.errstate(all="ignore"):
        return float(gradients.dot(gradients))


def _wide(block: Any) -> np.ndarray:
    """A block on the host, in float64."""
    return _on_host(block).astype(np.float64)


def _on_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array
