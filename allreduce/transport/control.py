"""Control messages: agreements, which raise an error on all ranks or on none, and exchanges of small values.

Control messages have separate communicators, which carry no data. Values are sent as JSON, because a pickle could run
code of the sender.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from mpi4py import MPI

from allreduce.errors import AllReduceError, DisagreementError
from allreduce.notices import log
from allreduce.transport import processes
from allreduce.transport.tables import table
from allreduce.transport.wait import NamedCall, record_of, wait_for

ResultT = TypeVar("ResultT")
ErrorT = TypeVar("ErrorT", bound=BaseException)

AGREED_VALUES = 8  # of every agreement: messages of different agreements match, and all ranks get the table
LONE_SECONDS = 60.0  # how long a rank with an error waits for the others
LARGEST_VALUES = 1 << 30  # bytes of JSON that are accepted from other ranks
SHORT_BYTES, TABLE_BYTES = 256, 1 << 16  # the largest value, and table of all ranks' values, that one message holds


def raise_together(comm: MPI.Comm, error: Exception | None) -> None:
    """Raise on every rank if any rank passes an error. Collective.

    All ranks raise the error of the lowest such rank; its text names the rank. Without an error the cost is one small
    all-reduce.
    """
    found = np.array([error is not None], dtype=np.int64)
    wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, found, MPI.SUM), "check whether any rank has an error")
    if found[0]:
        _raise_difference(comm, "exchange errors", error)


def together(comm: MPI.Comm, step: Callable[[], ResultT]) -> ResultT:
    """Call `step` and return its result; an error that it raises on some ranks is raised on all ranks. Collective."""
    result, error = None, None
    try:
        result = step()
    except Exception as met:  # of any type: the other ranks must not wait for this one
        error = met
    raise_together(comm, error)
    return cast(ResultT, result)


def agree(comm: MPI.Comm, values: Sequence[int], text: str, error: Exception | None) -> None:
    """Return if all ranks pass equal `values` and no error; otherwise raise the same error on all ranks. Collective.

    values: at most AGREED_VALUES. text: this rank's call in words, for the table of a DisagreementError. An agreement
        costs one small all-reduce; only a failed one exchanges text.
    """
    row = [error is not None, *values, *[0] * (AGREED_VALUES - len(values))]
    mine = [*row, *[-each for each in row]]  # the minimum of -x is minus the maximum
    low = np.array(mine, np.int64)
    try:
        limit = LONE_SECONDS if error else math.inf
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, low, MPI.MIN), text, limit)
    except AllReduceError as ended:
        if error is None:
            raise
        raise error from ended  # this rank's error; the other ranks take no part in the agreement
    if error is not None or low.tolist() != mine:
        _raise_difference(comm, text, error)


def _raise_difference(comm: MPI.Comm, text: str, error: Exception | None) -> NoReturn:
    """Raise on all ranks the error of the lowest rank that has one, otherwise a DisagreementError. Collective."""
    record = record_of(comm)
    if record is not None and record.call is not None:
        # all ranks are here, so the watcher must not end the waits of some of them because their calls differ
        record.begin(NamedCall(text))
    calls = all_values(comm, [text, _portable(error)], text)
    errors = [met for _, met in calls]
    rank = next((rank for rank, met in enumerate(errors) if met), None)
    if rank is None:
        raise disagreement(comm, [words for words, _ in calls])
    module, name, shown = errors[rank]
    alike, kind = errors.count(errors[rank]) == len(errors), _found(module, name)
    first = kind(shown if alike else f"rank {rank}: {shown}")
    if error is not None and alike and type(error) is kind:
        first = error  # with its traceback
    on_all_ranks(first, comm)
    first.reporter = processes.world_ranks(comm)[rank]  # type: ignore[attr-defined]  # its traceback shows the cause
    raise first from (first.__cause__ if first is error else error)


def disagreement(comm: MPI.Comm, calls: Sequence[str]) -> DisagreementError:
    """Return the error of ranks in different calls, which all ranks of `comm` raise. calls: in words, by rank."""
    return on_all_ranks(different_calls(table(calls)), comm)


def different_calls(rows: str) -> DisagreementError:
    """Return the error of ranks in different calls. rows: the ranks and their calls, a few lines."""
    return DisagreementError(f"the ranks disagree about this call; it must be the same on all of them:\n{rows}")


def on_all_ranks(error: ErrorT, comm: MPI.Comm) -> ErrorT:
    """Mark `error` as one that all ranks of `comm` raise, by its attribute `ranks`, and return it. Local."""
    error.ranks = processes.world_ranks(comm)  # type: ignore[attr-defined]
    return error


def everywhere(error: BaseException, comm: MPI.Comm) -> bool:
    """Return whether all ranks of `comm` raise this error, so that they stay in step. Local."""
    return set(processes.world_ranks(comm)) <= set(getattr(error, "ranks", None) or ())


def all_values(comm: MPI.Comm, value: Any, what: str) -> list[Any]:
    """Return every rank's `value`, by rank. Collective. value: JSON-serializable; tuples become lists.

    It takes one all-reduce of a table in which each rank fills its own row, and another one if a value is long: Open
    MPI's non-blocking all-gather would connect all pairs of ranks.
    """
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    room = min(SHORT_BYTES, TABLE_BYTES // comm.size)
    rows = np.zeros(comm.size, [("length", np.int64), ("text", np.uint8, (room,))])
    rows["length"][comm.rank] = mine.size
    if mine.size <= room:
        rows["text"][comm.rank, : mine.size] = mine
    combine(comm, rows.view(np.uint8), what)
    lengths = rows["length"]
    if lengths.max() <= room:
        return [json.loads(row["text"][: row["length"]].tobytes()) for row in rows]
    nbytes = int(lengths.sum())
    if nbytes > LARGEST_VALUES:
        raise on_all_ranks(AllReduceError(f"{what}: values of {nbytes} bytes; at most {LARGEST_VALUES} are sent"), comm)
    ends = np.cumsum(lengths)
    everyone = np.zeros(ends[-1], np.uint8)
    everyone[ends[comm.rank] - mine.size : ends[comm.rank]] = mine
    combine(comm, everyone, what)
    return [json.loads(text.tobytes()) for text in np.split(everyone, ends[:-1])]


def root_value(comm: MPI.Comm, value: Any, what: str, root: int = 0) -> Any:
    """Return rank `root`'s `value` on all ranks. Collective. value: see all_values(); ignored on other ranks."""
    return all_values(comm, value if comm.rank == root else None, what)[root]


def combine(comm: MPI.Comm, numbers: np.ndarray, what: str, op: MPI.Op = MPI.SUM) -> np.ndarray:
    """All-reduce a small array in place, and return it. Collective. op: the sum by default."""
    if comm.size > 1:
        wait_for(comm, comm.Iallreduce(MPI.IN_PLACE, numbers, op), what)
    return numbers


def on_all(comm: MPI.Comm, true: bool, what: str) -> bool:
    """Return whether `true` is True on all ranks. Collective."""
    return bool(combine(comm, np.array([true], np.uint8), what, MPI.MIN)[0])


def _portable(error: Exception | None) -> tuple[str, str, str] | None:
    """Convert an exception to values from which any rank can build it: its type's module and name, and its text."""
    if error is None:
        return None
    kind = type(error)
    try:
        if _found(kind.__module__, kind.__qualname__) is kind and isinstance(kind(str(error)), kind):
            return kind.__module__, kind.__qualname__, str(error)
    except Exception:  # UnicodeDecodeError, for example, takes more arguments than a text
        log.debug("%s can't be made from a text", kind)
    return AllReduceError.__module__, AllReduceError.__qualname__, f"{kind.__name__}: {error}"


def _found(module: str, name: str) -> type[Exception]:
    """Return an exception type if this rank has imported it; otherwise AllReduceError."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else AllReduceError
