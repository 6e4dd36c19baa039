"""Checks during training: whether gradients can be averaged, whether the ranks train on the same data, and whether all
replicas still have the same bits.

The callbacks CheckGradients and CheckDivergence use them, and MirroredOptimizer(transforms=).
"""

import itertools
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.arrays.gpu import on_host
from allreduce.backend import AllReduce
from allreduce.errors import DivergenceError
from allreduce.transport import tables
from allreduce.transport.control import all_values, combine, on_all_ranks, together
from allreduce.transport.wait import wait_for
from trainers.errors import NotFiniteError

# Whether replicas are equal

LEARNING_RATES = "learning rates"  # the name of the learning rates in a comparison
COMPARE = "compare the replicas"
LACKING = -1  # stands for the checksum of an array that a rank does not have

Compared = Mapping[str, np.ndarray | str]  # name -> what must be equal on all ranks: host array or text


def check_equal(comm: MPI.Intracomm, read: Callable[[], Compared], when: str = "") -> None:
    """Raise DivergenceError on all ranks if replicas differ. Collective.

    read: returns this rank's arrays; all ranks raise its error. when: prefix of the error.
    """
    if text := compare(comm, together(comm, read)):
        raise on_all_ranks(DivergenceError(f"{when}{text}"), comm)


def compare(comm: MPI.Intracomm, held: Compared) -> str:
    """Compare arrays over all ranks. Returns the ranks that differ, and in what, as text; "" if all are equal.
    Collective.

    An array that a rank does not have counts as different. Costs one reading of all arrays (a CRC, some 4 GB/s) and
    a message of 16 bytes; more only if ranks differ.
    """
    own = {name: zlib.crc32(_memory(value)) for name, value in held.items()}
    whole = zlib.crc32(repr(sorted(own.items())).encode())
    low = np.array([whole, -whole], np.int64)  # the minimum of -x is minus the maximum: one message gives both
    wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, low, MPI.MIN), COMPARE)
    if low[0] == -low[1]:
        return ""
    ranks = all_values(comm, own, COMPARE)
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    differ = [name for name in names if len({rank.get(name, LACKING) for rank in ranks}) > 1]
    first = differ[0]
    value = _value_text(held[first], own[first]) if first in held else "has none"
    return _divergence_text(differ, [rank.get(first, LACKING) for rank in ranks], all_values(comm, value, COMPARE))


def _divergence_text(differ: Sequence[str], sums: Sequence[int], values: Sequence[str]) -> str:
    """Return the text of a DivergenceError. differ: the names of the arrays that differ. sums, values: of each rank,
    the CRC-32 of the first of them, and its value as text."""
    usual = max(sums, key=lambda each: (sums.count(each), each == sums[0]))
    odd = [rank for rank, each in enumerate(sums) if each != usual]
    ranks = f"{tables.listed(odd)} differ{'s' * (len(odd) == 1)}"
    rows = tables.table([f"{differ[0]}: {value}" for value in values])
    more = f", the first of {len(differ)} differences" if len(differ) > 1 else ""
    return (
        f"the replicas are no longer equal: {ranks} from the others in {differ[0]}{more}. Gradients, "
        f"parameters or hyperparameters were changed on some ranks only:\n{rows}"
    )


def _memory(value: np.ndarray | str) -> Any:
    if isinstance(value, str):
        return value.encode()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _value_text(value: np.ndarray | str, crc: int) -> str:
    """Return a rank's value as text for the table of a Divergence."""
    if isinstance(value, str):
        return value
    text = f"crc {crc:08x}"
    if value.dtype.kind != "f":
        return text
    with np.errstate(all="ignore"):
        return f"{text}, norm {float(np.linalg.norm(value.astype(np.float64)))!r}"


COUNTERS = "num_batches_tracked"  # of PyTorch's batch norm: used by no computation, unless momentum is None


def changed_alone(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> str:
    """Return why a training is not exact: the first array that a micro-batch has changed on this rank alone; or "".

    before, after: results of Replica.local_state, the state that each rank has of its own. Local.
    """
    for name, array in before.items():
        follows = name.startswith("random") or name.endswith(COUNTERS)
        if not follows and not np.array_equal(array, after[name], equal_nan=array.dtype.kind == "f"):
            return (
                f"Exact: {name} changes in training on each rank, and is not averaged, so the training "
                "would depend on the ranks; leave out Exact, or that part of the model"
            )
    return ""


# Whether all ranks train on the same data

SAME_DATA = "ALLREDUCE_SAME_DATA"  # "allow" silences the warning
LEAST_LENGTH = 64  # shorter arrays are not compared
EQUAL = 3  # the warning needs this many different arrays, each equal on all ranks
MOST_STEPS = 8  # steps that are compared at most
SAMPLES = 4096  # elements of an array that are compared
SAME_DATA_TEXT = (
    "the first gradients that were averaged are equal on all ranks, bit for bit: the ranks seem to train on the same "
    "batches, which takes as long as one rank alone, for the same result. Give each rank its share of the data: "
    "sampler=DistributedSampler(dataset) for a DataLoader, or x[rank::size]; shares of different size are weighted by "
    f"`rows` of MirroredOptimizer ({SAME_DATA}=allow silences this warning)"
)


class SameData:
    """Compares the gradients of the first steps, and warns if they are equal on all ranks.

    A program was made data-parallel, but each rank still loads all data. The averages are right then, and the training
    takes as long as on one rank. The first gradients that differ between ranks end the comparison.
    """

    def __init__(self, backend: AllReduce) -> None:
        self._backend = backend
        self._left = MOST_STEPS if backend.size > 1 else 0
        self._equal: set[int] = set()  # hashes of the arrays that were equal on all ranks

    def compare(self, gradients: Any) -> None:
        """Compare one 1-D array of a step, before it is averaged. Collective."""
        if not self._left or gradients.size < LEAST_LENGTH:
            return
        self._left -= 1
        content = on_host(gradients[:: max(1, gradients.size // SAMPLES)]).tobytes()
        mine = zlib.crc32(content)
        varied = content != content[: gradients.itemsize] * (len(content) // gradients.itemsize)
        numbers = np.array([mine, -mine, varied], np.int64)
        self._backend(numbers, "min", lossless=True)  # the minimum of -x is minus the maximum
        low, minus_high, all_varied = numbers.tolist()
        if low != -minus_high:
            self._left = 0
        elif all_varied:
            self._equal.add(low)
        if len(self._equal) == EQUAL:
            self._left = 0
            if os.environ.get(SAME_DATA) != "allow":
                notices.once(self._backend.rank, SAME_DATA_TEXT)


# Whether gradients can be averaged

ANSWERS = ("raise", "skip")  # what happens if gradients can't be averaged
BLOCK = 1 << 18  # elements that are checked together, if the dot product of all is not finite
CHECK_GRADIENTS = "learn whether all gradients are finite"
ADVICE = "look at that rank's rows of the batch, scale the features, or lower the learning rate"
FINITE = [0, 0, 0, -1, 0]  # `GradientCheck.row` of a rank that has found nothing


class Span(NamedTuple):
    """The gradients of one parameter: elements [start, start + size) of a GradientArray."""

    name: str
    start: int
    size: int


class GradientArray(NamedTuple):
    """Gradients in a 1-D array, or the sparse gradient of a table. sent: the dtype in which they are sent."""

    spans: Sequence[Span]
    dtype: np.dtype
    sent: np.dtype

    def name(self, element: int) -> str:
        """Return the name of the parameter that holds `element`, and the index of the element in it."""
        span = next(each for each in self.spans if each.start <= element < each.start + each.size)
        return f"{span.name} (element {element - span.start})"


def table(name: str, size: int, dtype: np.dtype) -> GradientArray:
    """Return the GradientArray of a table of `size` elements with sparse gradients, whose rows are sent in `dtype`."""
    return GradientArray([Span(name, 0, size)], dtype, dtype)


class Problem(NamedTuple):
    """The reason why gradients can't be averaged, and advice for the user."""

    text: str
    advice: str


class GradientCheck:
    """Checks that the gradients of a step can be averaged: each is finite, and so is their sum. In each step a rank
    calls `begin`; `check_array` or `check_rows` for each of its arrays; `finish`, with all ranks.

    on_bad: "raise": all ranks raise a NotFiniteError. "skip": all ranks leave out the step. arrays: of this rank's
    gradients.

    finite: whether this rank's gradients so far can be averaged. norm: their 2-norm, 0 if not finite. row: the numbers
        of NaN, of infinite elements, and of elements too large for the dtype in which they are sent; the span of the
        first such element, and its index there.
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
        """Begin a step: forget the results of the previous one. Local."""
        self._squares, self.row, self.left_out = 0.0, list(FINITE), False

    @property
    def finite(self) -> bool:
        return self.row[:3] == FINITE[:3]

    @property
    def norm(self) -> float:
        return math.sqrt(self._squares) if self.finite else 0.0

    @np.errstate(all="ignore")  # an overflow could raise on this rank alone, and the others would wait
    def check_array(self, number: int, gradients: Any) -> None:
        """Check this rank's gradients of array `number`; 1-D, on the host or a GPU. Local."""
        most = self._most[number]
        squares = _squares(gradients)
        if not squares < most * most:
            squares = self._count(number, gradients, self.arrays[number].spans)
        self._squares += squares

    @np.errstate(all="ignore")
    def check_rows(self, number: int, indices: Any, values: Any) -> None:
        """Check a sparse gradient of array `number`: `values` are the rows `indices` of a table. Local."""
        flat, clean = values.reshape(-1), self.finite
        squares = _squares(flat)
        if not squares < math.inf:
            squares = self._count(number, flat, [Span("", 0, values.size)])
            if clean and not self.finite:
                self.row[4] = element_of(indices, values, self.row[4])
        self._squares += squares

    def _count(self, number: int, gradients: Any, spans: Sequence[Span]) -> float:
        """Count the elements that can't be averaged in `row`; returns the sum of squares of all other blocks."""
        squares, row, most = 0.0, self.row, self._most[number]
        for at, (_, start, size) in enumerate(spans, self._first_spans[number]):
            for begin in range(start, start + size, BLOCK):
                block = on_host(gradients[begin : min(begin + BLOCK, start + size)]).astype(np.float64)
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
        """Combine the checks of all ranks: if a gradient can't be averaged, raise or leave the step out. Collective: a
        message of 16 bytes. Returns `left_out`.

        overflowing: overflowing(number) returns the first element of array `number` whose sum over the ranks overflows,
            or -1 (see `overflow`); collective, called only if an overflow is possible.
        when: prefix of the error and the warning. may_leave_out: False for a step that can't be left out.
        """
        sums = np.array([self.norm, not self.finite])
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, sums), CHECK_GRADIENTS)
        problem = None
        if sums[1]:
            rows = np.empty((comm.size, len(FINITE)), np.int64)
            wait_for(comm, comm.Iallgather(np.array(self.row, np.int64), rows), CHECK_GRADIENTS)
            problem = self.describe(rows.tolist())
        elif not sums[0] < largest(self._sent) / 2:
            problem = self._overflow(float(sums[0]), overflowing)
        if problem is None:
            return False
        if self.on_bad == "raise" or not may_leave_out:
            raise on_all_ranks(NotFiniteError(f"{when}{problem.text}: {problem.advice}"), comm)
        self.left_out = True
        if comm.rank == 0:
            notices.log.warning("allreduce: %s%s; no rank takes this step", when, problem.text)
        return True

    def _overflow(self, norms: float, overflowing: Callable[[int], int]) -> Problem | None:
        """Return the Problem of the first sum that overflows, or None. norms: the sum over the ranks. Collective."""
        for number, array in enumerate(self.arrays):
            if not norms < largest(array.sent) / 2 and (at := overflowing(number)) >= 0:
                where = f"{array.name(at)}, although each rank's gradients are finite: too large for {array.sent}"
                same = array.dtype == array.sent
                advice = "lower the learning rate, or clip" if same else _advice(array.sent)
                return Problem(f"the sum of gradients overflows in {where}", advice)
        return None

    def describe(self, rows: Sequence[Sequence[int]]) -> Problem:
        """Name the ranks whose gradients can't be averaged, and the parameters. rows: `row` of every rank."""
        texts = []
        for rank, (nan, infinite, large, span, element) in enumerate(rows):
            if nan or infinite or large:
                where = f"the first in {self._spans[span].name} (element {element})"
                texts.append(f"rank {rank} has {_counted(nan, infinite, large, self._sent)}, {where}")
        if any(row[2] for row in rows):
            return Problem(f"gradients can't be averaged: {'; '.join(texts)}", _advice(self._sent))
        return Problem(f"gradients are not finite: {'; '.join(texts)}", ADVICE)


def overflow(comm: MPI.Intracomm, gradients: Any, length: int, dtype: np.dtype) -> int:
    """Return the first element whose sum over the ranks may overflow although each rank's gradient is finite; -1 if
    there is none.

    Collective. It sums absolute values, in float64, because whether large gradients of opposite sign overflow depends
    on the order in which a backend adds them.

    gradients: 1-D; None on ranks without gradients. dtype: in which gradients are sent and summed; the bound allows for
        rounding to it.
    """
    bound = largest(dtype) * (1 - float(ml_dtypes.finfo(dtype).eps))
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        sums = np.zeros(end - begin) if gradients is None else np.abs(on_host(gradients[begin:end]).astype(np.float64))
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, sums), CHECK_GRADIENTS)
        over = np.flatnonzero(sums > bound)
        if over.size:
            return begin + int(over[0])
    return -1


def overflowed(comm: MPI.Intracomm, averages: Any, element: Callable[[int], int]) -> int:
    """Return the first element that is not finite in any rank's averages; -1 if there is none. Collective.

    averages: this rank's part of the averages, 1-D. element: maps an index in it to the index in the whole array.
    """
    bad = np.flatnonzero(~np.isfinite(on_host(averages)))
    none = np.iinfo(np.int64).max
    first = combine(comm, np.array([element(int(bad[0])) if bad.size else none]), CHECK_GRADIENTS, MPI.MIN)[0]
    return -1 if first == none else int(first)


def element_of(indices: Any, values: Any, at: int) -> int:
    """Return the index in the flattened table of element `at` of the flattened `values`."""
    row, column = divmod(at, values.size // len(values))
    return int(indices[row]) * (values.size // len(values)) + column


def largest(dtype: np.dtype) -> float:
    """Return the largest finite number of a floating-point dtype, bfloat16 included."""
    return float(ml_dtypes.finfo(dtype).max)


def _advice(sent: np.dtype) -> str:
    other = 'use compress="bfloat16"' if sent == dtypes.FLOAT16 else "leave out compress"
    return f"they are sent as {sent} (compress): {other}, scale the features, or lower the learning rate"


def _counted(nan: int, infinite: int, large: int, sent: np.dtype) -> str:
    parts = [f"{number} {what}" for number, what in ((nan, "NaN"), (infinite, "infinite")) if number]
    text = f"{' and '.join(parts)} gradient{'s' * (nan + infinite > 1)}" if parts else ""
    if large:
        text += f" and {large}" if parts else f"{large} gradient{'s' * (large > 1)}"
        text += f" too large for {sent}"
    return text


def _squares(gradients: Any) -> float:
    """Return the sum of squares; not finite if a gradient is not finite, or if the sum overflows."""
    if dtypes.is_half(gradients.dtype):
        wide = (gradients[at : at + BLOCK].astype(np.float32) for at in range(0, len(gradients), BLOCK))
        return float(sum(float(block.dot(block)) for block in wide))
    return float(gradients.dot(gradients))
