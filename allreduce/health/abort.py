"""Ends the whole job after an uncaught error on one rank; otherwise the others would wait for it for ever."""

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from allreduce.process import children
from allreduce.transport import liveness, ulfm
from allreduce.transport.processes import here

REPORT_SECONDS = 2.0  # how long ranks with an error wait for the one that reports it
TELL_SECONDS = 1.0  # how long a rank that ends the job waits until the ranks know whose programs have ended
LOOK_SECONDS = 1.0  # between two searches for processes that have ended
ALIKE_SECONDS = 1.0  # how long ranks with an error wait for rank 0 if no rank knows which ranks have the error
JOB_LOG = "ALLREDUCE_JOB_LOG"  # a path: ranks append the begin and end of their program, and the job's error

_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # threads that have called a collective
_leaving: list[Callable[[str], object]] = []
_ending: list[Callable[[int, str], object]] = []
_installed: list[Callable[..., None]] = []  # our excepthooks
_waits: list[bool] = []  # not empty: this rank waits for the end of the others
_parts: "weakref.WeakSet[Any]" = weakref.WeakSet()  # topologies of some ranks, whose errors do not end other parts
_failure = [1]  # the exit code of errors
on_leaving = _leaving.append  # registers a function, called with the reason before MPI ends with this rank's program
on_ending = _ending.append  # registers a function, called with exit code and text, in any thread, to end the job


def install() -> None:
    """Install hooks: an uncaught exception prints its traceback, with the rank, and ends the whole job. Local.

    Called when `allreduce` is imported, and for each Topology. An excepthook that the program set before a call runs
    first; one that it sets after the last call is detected at exit. An exception in a thread ends the job if the thread
    has called a collective. A rank that ends without an exception tells the others (`on_leaving`). Interactive sessions
    and jobs of one rank are left alone.
    """
    if hasattr(sys, "ps1") or not MPI.Is_initialized() or here()[1] == 1:
        return
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # again: it must run before the functions of modules imported since, which wait for ranks
    if sys.excepthook in _installed:
        return
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if children.forked() or MPI.Is_finalized():
            previous(kind, error, trace)
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        part_alone = in_part() and not interrupted
        if part_alone and not _reports(error):
            return
        wait_for_reporter(error)
        line = "interrupted\n" if interrupted else "".join(traceback.format_exception_only(error))
        text = line if interrupted else report(error)
        if previous is not sys.__excepthook__ and not interrupted:
            previous(kind, error, trace)
            text = line
        log_job(line)
        if part_alone:
            print_error(text)  # MPI_Finalize then waits for the other parts
        else:
            end_job(text, 130 if interrupted else exit_code_of(error), logged=True)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        previous_thread(args)
        if (
            args.thread in _threads
            and not (children.forked() or MPI.Is_finalized())
            and args.exc_type is not SystemExit
        ):
            name = args.thread.name if args.thread else "?"
            end_job(
                f"{args.exc_type.__name__} in thread {name!r}, which other ranks may wait for\n", exit_code_of(None)
            )

    sys.excepthook, threading.excepthook = hook, thread_hook
    children.record_exit_codes()
    _installed.append(hook)


@functools.cache
def record_lifetime() -> None:
    """Append the begin and the end of this program to the job log, if there is one. Local, once.

    With ULFM, mpirun returns 0 also for a job whose ranks were all killed.
    """

    def ended() -> None:
        if not children.forked():
            log_job("ended")

    log_job(f"began as process {os.getpid()}")
    atexit.register(ended)


def report(error: BaseException) -> str:
    """Format the whole traceback of an error; its last line, which names the error, begins with this rank. Local."""
    text, last = "".join(traceback.format_exception(error)), "".join(traceback.format_exception_only(error))
    return text.removesuffix(last) + _of_this_rank(last)


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a job that this error ends: that of a rank whose leaving has caused it, else 1.

    `set_error_exit_code` replaces the 1. Local.
    """
    while error is not None:
        code = getattr(error, "job_code", None)
        if isinstance(code, int):
            return code
        error = error.__cause__
    return _failure[0]


def set_error_exit_code(code: int) -> None:
    """Make errors end the job with this exit code. For programs in which the exit code 1 has a meaning. Local."""
    _failure[:] = [code]


def register_thread() -> None:
    """Register the current thread as one that calls collectives: an uncaught error in it ends the job. Local."""
    _threads.add(threading.current_thread())


def contain(part: Any) -> None:
    """Make an uncaught exception end this rank's program but not the job, until `part` is closed. Local."""
    _parts.add(part)


def in_part() -> bool:
    """Return whether an uncaught exception ends this rank's program only, not the job. Local."""
    return any(not part.closed for part in _parts)


def wait_for_reporter(error: BaseException) -> None:
    """Return at once on the rank that reports an error; sleep on others that have it, so that its report comes first.

    If no rank knows which ranks have the error, all may have it (a missing file): they give rank 0 time to report it.
    """
    if not _reports(error):
        time.sleep(REPORT_SECONDS)
    elif getattr(error, "ranks", None) is None and here()[0] > 0:
        time.sleep(ALIKE_SECONDS)


def _reports(error: BaseException) -> bool:
    """Return whether this rank reports an error: its `reporter` does, else the lowest rank that has it. Local."""
    ranks = range(here()[1]) if isinstance(error, KeyboardInterrupt) else getattr(error, "ranks", None)
    reporter = getattr(error, "reporter", None)
    if reporter is None:
        reporter = min(ranks) if ranks else here()[0]
    return here()[0] == reporter


def print_error(text: str) -> None:
    """Print an error's text to stderr, prefixed with the rank, after the program's output. Local."""
    with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream: the job must end all the same
        sys.stdout.flush()
    # Not sys.stderr: torch.distributed wraps the hook, and prints text written to sys.stderr too late.
    stderr = sys.__stderr__ or sys.stderr
    with contextlib.suppress(OSError, ValueError):
        stderr.write(_of_this_rank(text))
        stderr.flush()


def log_job(text: str) -> None:
    """Append a text, with the rank, to the job log, the file in ALLREDUCE_JOB_LOG, if set. Local."""
    if path := os.environ.get(JOB_LOG):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(_of_this_rank(text).rstrip("\n") + "\n")


def _of_this_rank(text: str) -> str:
    return f"rank {here()[0]} of {here()[1]}: {text}"


def without_rank(text: str) -> str:
    """Return a text without the name of this rank in front of it. Local."""
    return text.removeprefix(_of_this_rank(""))


def exit_quietly(code: int) -> NoReturn:
    """End this process without a message: another rank ends the job, and has reported why. From any thread."""
    _agree_on_end(code)
    _exit(code)


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream
        sys.stdout.flush()
    os._exit(code)


def end_job(text: str, code: int, logged: bool = False) -> NoReturn:
    """Print `text`, with the rank, and end all ranks. From any thread. logged: the job log has the error already."""
    print_error(text)
    if not logged:
        log_job(text)
    for call in _ending:
        try:
            call(code, text)
        except Exception as error:  # MPI's, say, of a rank that has just failed: the job must end all the same
            print_error(f"while it ended the job: {type(error).__name__}: {error}\n")
    if not ulfm.in_force():
        time.sleep(0.5)  # MPICH's launcher drops output that it has not forwarded before the end
    # With ULFM, mpirun returns 0 if the only living rank calls MPI_Abort, and may hang if ranks wait in MPI_Finalize.
    if not _agree_on_end(code):
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _agree_on_end(code: int) -> int:
    """Under ULFM, agree with the other ranks how the job ends, and return its exit code. code: 0 if this rank's program
    has ended well; it then waits for the others. Otherwise returns 0 if a rank does not come in time."""
    begin = looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        now = time.monotonic()
        if code and now - begin > TELL_SECONDS:
            raise TimeoutError
        if now - looked > LOOK_SECONDS:
            looked = now
            liveness.look()

    try:
        return ulfm.agree_on_end(MPI.COMM_WORLD, code, look) if ulfm.in_force() else 0
    except (MPI.Exception, TimeoutError):
        return 0


@functools.cache
def wait_at_end() -> None:
    """Under ULFM, make this rank wait for the end of the others before MPI_Finalize, which the program may call. Local,
    once. All living ranks of the job call it, or none does: a rank in MPI_Finalize does not answer the others.
    """
    if ulfm.in_force():
        _waits.append(True)
        # MPI_Finalize deletes the attribute
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_wait_for_end), True)


def _wait_for_end(*_: object) -> None:
    if _waits:
        _waits.clear()
        if code := _agree_on_end(0):
            _exit(code)


def _at_exit() -> None:
    """At exit: end the job if an exception has bypassed our hook; else tell the others that this program has ended."""
    if MPI.Is_finalized() or children.forked():
        return
    died = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if died is not None and sys.excepthook not in _installed and here()[1] > 1 and not in_part():
        wait_for_reporter(died)
        end_job(f"{type(died).__name__}: {died}\n", exit_code_of(died))
    for call in _leaving:
        call("it has ended its program" if died is None else f"{type(died).__name__}: {died}")
    _wait_for_end()
