"""Named errors, and the agreement that raises them on every rank.

An error on one rank alone is the classic hang of collective code: that rank leaves, the others wait
for it. So a rank that finds something wrong does not raise at once; it tells the others in `agree` or
`raise_together`, and all of them raise the same error. What is raised outside of such an agreement
ends the whole job, by the hook that `abort_on_uncaught` installs.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, TypeVar, cast

import numpy as np
from mpi4py import MPI

from allreduce.notices import log

ResultT = TypeVar("ResultT")

# A rank that waits this long for the others to come to an agreement says so; one that has an error to tell
# them ends the job.
STALL_SECONDS = float(os.environ.get("ALLREDUCE_STALL_SECONDS", 30))
AGREED_VALUES = 8  # all agreements are of one size, so that ranks that came to different ones get a table too


class AllReduceError(Exception):
    """Base of all errors that this library raises.

    `everywhere` is true when every rank raised this same error, so that one report of it is enough.
    """

    everywhere = False


class DisagreementError(AllReduceError):
    """The ranks called the same collective with different lengths, dtypes, operations or memory."""


class NotAnArrayError(AllReduceError, TypeError):
    """Something other than a writable NumPy or CuPy array was passed."""


class NotContiguousError(AllReduceError, ValueError):
    """The array has gaps between its elements, so it can't be reduced in place."""


class UnsupportedDtypeError(AllReduceError, TypeError):
    """The backend can't reduce elements of this dtype."""


class UnsupportedOpError(AllReduceError, ValueError):
    """The operation is unknown, or has no meaning for this dtype (the mean of integers)."""


class ClosedError(AllReduceError, RuntimeError):
    """The backend or topology was used after `close()`."""


class UnknownBackendError(AllReduceError, ValueError):
    """No backend has this name."""


class UnavailableError(AllReduceError, RuntimeError):
    """The backend can't work here; the message names what is missing."""


class OptionError(AllReduceError, ValueError):
    """An option of a backend or a topology has a value that makes no sense."""


class ChildError(AllReduceError, RuntimeError):
    """A child process, which is no rank, called what needs MPI."""


def raise_together(comm: MPI.Comm, error: Exception | None) -> None:
    """Raise on every rank when at least one rank brings an error. Collective.

    Every rank raises the error of the lowest rank that has one, with that rank named in its text;
    without any error the cost is one small all-reduce.
    """
    found = np.array([error is not None], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.SUM)
    if found[0]:
        raise _first_error(comm.allgather(_portable(error))) from error


def together(comm: MPI.Comm, step: Callable[[], ResultT]) -> ResultT:
    """What `step` returns on each rank; an error that it meets on some ranks is raised on all. Collective."""
    result, error = None, None
    try:
        result = step()
    except Exception as met:  # whatever it is, the other ranks must not wait for this one
        error = met
    raise_together(comm, error)
    return cast(ResultT, result)


def agree(comm: MPI.Comm, values: Sequence[int], row: str, error: Exception | None) -> None:
    """Return when all ranks bring equal `values` and no error; otherwise raise on all of them. Collective.

    values: at most AGREED_VALUES. row: this rank's side in words, its line in the table of a
    DisagreementError. An agreement costs one small all-reduce; only a failed one exchanges text.

    A rank with an error to which the others don't come, because they have no reason to, ends the job.
    """
    mine = np.zeros(AGREED_VALUES + 1, dtype=np.int64)
    mine[: len(values) + 1] = [error is not None, *values]
    low = np.concatenate([mine, -mine])  # the minimum of -x is minus the maximum: one message gives both
    _wait(comm.Iallreduce(MPI.IN_PLACE, low, MPI.MIN), comm, row, error)
    if np.array_equal(low[: mine.size], -low[mine.size :]) and low[0] == 0:
        return
    sides: list[tuple[str, tuple[type[Exception], str] | None]] = comm.allgather((row, _portable(error)))
    if any(side_error is not None for _, side_error in sides):
        raise _first_error([side_error for _, side_error in sides]) from error
    table = "\n".join(f"  rank {rank}: {side_row}" for rank, (side_row, _) in enumerate(sides))
    raise _everywhere(
        DisagreementError(f"the ranks disagree about this call; it must be the same on all of them:\n{table}")
    )


def _wait(request: MPI.Request, comm: MPI.Comm, row: str, error: Exception | None) -> None:
    """Wait for an agreement without hiding a stall, and not for ever when this rank has an error to tell."""
    begin = time.monotonic()
    pause, warned = 0.0, False
    while not request.Test():
        waited = time.monotonic() - begin
        if waited > 0.001:
            pause = min(pause + 1e-5, 0.01)
            time.sleep(pause)
        if error is not None and waited > STALL_SECONDS:
            # Raising would leave the ranks out of step for good, should the program catch it and go on.
            _end_job(f"{type(error).__name__}: {error}\n(on this rank alone; the others are in another call)\n", 1)
        if waited > STALL_SECONDS and not warned:
            warned = True
            log.warning(
                "rank %d has waited %.0f s for the other ranks to agree on: %s. They are late, or they called "
                'with a signature that they had used before; create(..., check="always") tells which',
                comm.rank,
                waited,
                row,
            )


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """An exception as something that any rank can build again: its type and its text."""
    if error is None:
        return None
    kind = type(error)
    try:
        importable = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
        if importable and isinstance(kind(str(error)), kind):
            return kind, str(error)
    except Exception:  # UnicodeDecodeError and the like want more arguments than a text
        log.debug("%s can't be made from a text", kind)
    return AllReduceError, f"{kind.__name__}: {error}"


def _first_error(errors: Sequence[tuple[type[Exception], str] | None]) -> Exception:
    rank, first = next((rank, error) for rank, error in enumerate(errors) if error is not None)
    kind, text = first
    return _everywhere(kind(text if all(error == first for error in errors) else f"rank {rank}: {text}"))


def _everywhere(error: Exception) -> Exception:
    error.everywhere = True  # type: ignore[attr-defined]  # errors of other packages are agreed on as well
    return error


def abort_on_uncaught(world: MPI.Intracomm) -> None:
    """From now on an uncaught exception prints its traceback, with the rank, and ends the whole job.

    Without it, the rank that raised would leave and all others would wait for it for ever. A hook that the
    program has set prints in its own way before. Interactive sessions are left alone, and so is
    sys.exit() on one rank, which is no exception to Python.

    world: MPI.COMM_WORLD; a communicator that the program may free can't end the job.
    """
    previous = sys.excepthook
    if hasattr(sys, "ps1") or getattr(previous, "aborts", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if MPI.Is_finalized():
            previous(kind, error, trace)
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        if world.rank and (interrupted or getattr(error, "everywhere", False)):
            time.sleep(2)  # rank 0 tells it for all; the job ends while we sleep
        text = "interrupted\n" if interrupted else "".join(traceback.format_exception(kind, error, trace))
        if previous is not sys.__excepthook__ and not interrupted:
            previous(kind, error, trace)
            text = f"{kind.__name__}\n"
        _end_job(text, 130 if interrupted else 1)

    hook.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    _world.append(world)


_world: list[MPI.Intracomm] = []  # what _end_job aborts, set with the hook


def _end_job(text: str, code: int) -> NoReturn:
    """Say why, with the rank, and end all ranks."""
    world = _world[0] if _world else MPI.COMM_SELF
    sys.stdout.flush()
    # Not sys.stderr: torch.distributed wraps the hook and prints what it wrote there afterwards, too late.
    stderr = sys.__stderr__ or sys.stderr
    stderr.write(f"rank {world.rank} of {world.size}: {text}")
    stderr.flush()
    time.sleep(0.5)  # MPICH's launcher drops what it has not passed on when it hears of the end
    world.Abort(code)
    raise SystemExit(code)
