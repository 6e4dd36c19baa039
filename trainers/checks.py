"""Whether replicas still are replicas: the bits of what must be equal on all ranks, compared by their sums."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.transport import processes
from allreduce.transport.control import all_values
from allreduce.transport.wait import wait_for

DIVERGENCE_ANSWERS = ("raise", "copy")  # what may be done about ranks that differ
MAJORITY = "majority"
LEARNING_RATES = "learning rates"  # the name by which they are compared
DIVERGENCE_WAITS = "compare the replicas"
LACKING = -1  # the sum of what a rank has none of


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


def compare(comm: MPI.Intracomm, held: Mapping[str, np.ndarray | str]) -> Divergence | None:
    """What differs between the ranks; None when nothing does. Collective.

    held: what must be equal by name: contiguous arrays on the host, or texts. A name that a rank lacks differs there.
    Costs one reading of all arrays (a CRC, 4 GB/s here) and a message of 16 bytes; more only when ranks differ.
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


ANSWERS = ("raise", "skip")  # what may be done about gradients that are no numbers
BLOCK = 1 << 18  # elements that are looked at together, where they can't be in one go
WAITS = "hear whether all gradients are numbers"
ADVICE = "look at its rows of the batch, scale the features, or lower the learning rate"
COLUMNS = 5  # of a rank's row of findings


class Place(NamedTuple):
    """The gradients of one parameter: elements [start, start + size) of what is looked at."""

    name: str
    start: int
    size: int


class Problem(NamedTuple):
    """Why gradients can't be averaged, and what to do about it."""

    text: str
    advice: str


class Findings:
    """What a rank has found in its gradients. norm: means something only while all gradients can be averaged.

    nan, infinite, large: how many are that; large ones are finite, and too large for the dtype in which they are sent.
    """

    def __init__(self) -> None:
        self.squares = 0.0
        self.nan = self.infinite = self.large = 0
        self.place, self.element = -1, 0  # of the first that can't be averaged

    def add(self, gradients: Any, places: Sequence[Place], first: int = 0, most: float = math.inf) -> None:
        """Look at a 1-D array, on the host or a GPU.

        places: of its parameters, of which `first` is the number. most: the largest number that can be sent.
        """
        squares = _squares(gradients)
        if not squares < most * most:
            squares = self._look(gradients, places, first, most)
        self.squares += squares

    def add_rows(self, table: Place, number: int, indices: Any, values: Any) -> None:
        """Look at a sparse gradient, of the parameter `table` of this number: some of its rows, the others are zeros.

        indices: the numbers of the rows. values: the rows, (len(indices), ...).
        """
        clean = self.finite
        self.add(values.reshape(-1), [Place(table.name, 0, values.size)], number)
        if clean and not self.finite:
            width = values.size // len(values)
            row, column = divmod(self.element, width)
            self.element = int(indices[row]) * width + column

    @property
    def finite(self) -> bool:
        """Whether all gradients can be averaged."""
        return not (self.nan or self.infinite or self.large)

    @property
    def norm(self) -> float:
        return float(np.sqrt(self.squares))

    def _look(self, gradients: Any, places: Sequence[Place], first: int, most: float) -> float:
        """Count what can't be averaged; the sum of squares, in float64."""
        squares = 0.0
        for number, (_, start, size) in enumerate(places, first):
            for begin in range(start, start + size, BLOCK):
                block = _wide(gradients[begin : min(begin + BLOCK, start + size)])
                good = np.isfinite(block) & (np.abs(block) <= most)
                if good.all():
                    squares += float(np.dot(block, block))
                    continue
                if self.finite:
                    self.place, self.element = number, begin - start + int(np.argmin(good))
                nan, infinite = int(np.isnan(block).sum()), int(np.isinf(block).sum())
                self.nan += nan
                self.infinite += infinite
                self.large += int((~good).sum()) - nan - infinite
        return squares

    def row(self) -> np.ndarray:
        return np.array([self.nan, self.infinite, self.large, self.place, self.element], np.int64)


def exchange(comm: MPI.Intracomm, own: Findings) -> tuple[np.ndarray | None, float]:
    """Returns the findings of all ranks, a row each, or None when all gradients can be averaged; and the sum of the
    norms. Collective."""
    sums = np.array([own.norm if own.finite else 0.0, not own.finite])
    wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, sums), WAITS)
    if not sums[1]:
        return None, float(sums[0])
    rows = np.empty((comm.size, COLUMNS), np.int64)
    wait_for(comm, comm.Iallgather(own.row(), rows), WAITS)
    return rows, float(sums[0])


def told(rows: np.ndarray, places: Sequence[Place], sent: np.dtype) -> Problem:
    """Which ranks have brought gradients that can't be averaged, and of which parameters.

    rows: of all ranks. sent: the dtype in which gradients are sent.
    """
    texts = []
    for rank, (nan, infinite, large, place, element) in enumerate(rows.tolist()):
        if nan or infinite or large:
            where = f"the first in {places[place].name} (element {element})"
            texts.append(f"rank {rank} has brought {_count(nan, infinite, large, sent)}, {where}")
    if rows[:, 2].any():
        return Problem(f"gradients can't be averaged: {'; '.join(texts)}", _advice(sent))
    return Problem(f"gradients are no numbers: {'; '.join(texts)}", ADVICE)


def most(own: np.dtype, sent: np.dtype) -> float:
    """The largest gradient of dtype `own` that is still finite after the conversion to `sent`."""
    return math.inf if own == sent else largest(sent)


def may_overflow(norms: float, dtype: np.dtype) -> bool:
    """Whether sums of gradients, of which the ranks' norms have this sum, may leave the range of the dtype."""
    return not norms < largest(dtype) / 2


def largest(dtype: np.dtype) -> float:
    """The largest number of a floating dtype, bfloat16 too."""
    return float(ml_dtypes.finfo(dtype).max)


def overflowing(comm: MPI.Intracomm, gradients: Any, places: Sequence[Place], length: int, dtype: np.dtype) -> str:
    """The parameter whose gradients are numbers on all ranks and whose sum may be none; "" for none. Collective.

    gradients: None on ranks that have none. Takes its time: every gradient is added up in float64, by absolute value.
    dtype: of the sums, in which gradients are sent; rounding each of them to it may make the sum larger.
    """
    bound = largest(dtype) * (1 - float(ml_dtypes.finfo(dtype).eps))
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        sums = np.zeros(end - begin) if gradients is None else np.abs(_wide(gradients[begin:end]))
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, sums), WAITS)
        over = np.flatnonzero(sums > bound)
        if over.size:
            at = begin + int(over[0])
            place = next(each for each in places if each.start <= at < each.start + each.size)
            return f"{place.name} (element {at - place.start})"
    return ""


def overflow_told(where: str, own: np.dtype, sent: np.dtype) -> Problem:
    """own: the dtype of the gradients. sent: in which they are sent."""
    text = f"the sum of gradients overflows in {where}, and every rank's own are numbers: they are too large for {sent}"
    return Problem(text, "lower the learning rate, or clip" if own == sent else _advice(sent))


def _advice(sent: np.dtype) -> str:
    other = 'take compress="bfloat16"' if sent == dtypes.FLOAT16 else "leave out compress"
    return f"they are sent as {sent} (compress): {other}, scale the features, or lower the learning rate"


def _count(nan: int, infinite: int, large: int, sent: np.dtype) -> str:
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
    host = block.get() if hasattr(block, "get") else block
    return host.astype(np.float64)
