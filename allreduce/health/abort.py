"""Ends the whole job after an uncaught error on one rank; otherwise the others would wait for it for ever."""

import atexit
import contextlib
import functools
import os
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn, Protocol

from mpi4py import MPI

from allreduce.process import children
from allreduce.transport import ulfm
from allreduce.transport.processes import here

REPORT_SECONDS = 2.0  # how long ranks with an error wait for the one that reports it
ALIKE_SECONDS = 1.0  # how long ranks with an error wait for rank 0 if no rank knows which ranks have the error
ERROR_FILE = "ALLREDUCE_ERROR_FILE"  # a path: ranks append the error that ends the job (mpirun's text follows ours)
LIFE_FILE = "ALLREDUCE_LIFE_FILE"  # a path: each rank appends the begin and the end of its program
TRACEBACK = "ALLREDUCE_TRACEBACK"  # "full": print the frames inside the library too
LIBRARY = ("allreduce", "trainers")
TITLE = "Traceback (most recent call last):\n"
INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # threads that have called a collective
_leaving: list[Callable[[str], object]] = []
_ending: list[Callable[[int, str], object]] = []
_installed: list[Callable[..., None]] = []  # our excepthooks
_failure = [1]  # the exit code of errors


class Part(Protocol):
    """A topology of some ranks, whose errors do not end other parts."""

    closed: bool


_parts: "weakref.WeakSet[Part]" = weakref.WeakSet()


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
        text = "interrupted\n" if interrupted else traceback_of(error)
        if previous is not sys.__excepthook__ and not interrupted:
            previous(kind, error, trace)
            text = f"{kind.__name__}\n"
        write_down(_of_this_rank("interrupted\n" if interrupted else "".join(traceback.format_exception_only(error))))
        if part_alone:
            print_error(text)  # MPI_Finalize then waits for the other parts
        else:
            end_job(text, 130 if interrupted else exit_code_of(error), written=True)

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
    """Append the begin and the end of this program to the file in ALLREDUCE_LIFE_FILE, if set. Local, once.

    With ULFM, mpirun returns 0 also for a job whose ranks were all killed.
    """

    def ended() -> None:
        if not children.forked():
            _append(LIFE_FILE, "ended")

    _append(LIFE_FILE, "began")
    atexit.register(ended)


def traceback_of(error: BaseException) -> str:
    """Format a traceback as Python prints it, without repetitions and without frames of this library. Local.

    An error that a check has raised again on all ranks is printed once, unless it passed through code of more than one
    package, such as a callback. Frames inside this library are left out, unless ALLREDUCE_TRACEBACK asks for them or
    the error may be a bug of the library.
    """
    cause, chain = error.__cause__, True
    if cause is not None and (type(cause), str(cause)) == (type(error), str(error)):
        packages = [_package(frame) for frame, _ in traceback.walk_tb(cause.__traceback__)]
        chain = cause.__cause__ is not None or not {*packages} <= {*packages[:1], "allreduce"}
    shown = traceback.TracebackException.from_exception(error)
    left_out = 0 if os.environ.get(TRACEBACK) == "full" else _shorten(shown, error, chain)
    text = "".join(shown.format(chain=chain))
    if not left_out:
        return text
    note = f"  ({left_out} frames inside the library are left out; {TRACEBACK}=full shows them)\n"
    return text.replace(TITLE, TITLE + note, 1)


def _shorten(shown: traceback.TracebackException, error: BaseException, chain: bool) -> int:
    """Remove the frames of this library, and of code that it calls, from a traceback; return how many. Local.

    chain: also shorten the tracebacks of the error's causes.
    """
    left_out = 0
    context = None if error.__suppress_context__ else error.__context__
    for cause_shown, cause in ((shown.__cause__, error.__cause__), (shown.__context__, context)):
        if chain and cause_shown is not None and cause is not None:
            left_out += _shorten(cause_shown, cause, chain)
            break
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if len(frames) != len(shown.stack) or _may_be_our_bug(error):
        return left_out
    kept, within = [], False
    for frame, summary in zip(frames, shown.stack, strict=True):
        within = _inside(frame, within)
        if not within:
            kept.append(summary)
    left_out += len(frames) - len(kept)
    shown.stack[:] = kept
    return left_out


def _may_be_our_bug(error: BaseException) -> bool:
    """Return whether an error may be a bug of this library, so that its frames are needed.

    True if it is not a named error, and was raised in our code or in installed code that ours calls.
    """
    if type(error).__module__.partition(".")[0] in LIBRARY:
        return False
    seen = [error]
    while (cause := error.__cause__) is not None and not any(cause is other for other in seen):
        if (type(cause), str(cause)) != (type(error), str(error)):
            break
        error = cause  # a check has raised it again, on all ranks
        seen.append(error)
    within = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        within = _inside(frame, within)
    return within


def _inside(frame: FrameType, within: bool) -> bool:
    """Return whether a frame is of this library, or of installed code that it calls. within: whether its caller is."""
    if _package(frame) in LIBRARY:
        return True
    return within and frame.f_code.co_filename.startswith(("<frozen ", *INSTALLED))


def _package(frame: FrameType) -> str:
    """Return the top-level package of a frame's module; of `python -m package` too."""
    names = frame.f_globals
    return str(names.get("__package__") or names.get("__name__") or "").partition(".")[0]


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


def on_leaving(call: Callable[[str], object]) -> None:
    """Register a function that is called with the reason when this rank's program ends, before MPI does. Local."""
    _leaving.append(call)


def contain(part: "Part") -> None:
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


def write_down(text: str) -> None:
    """Append an error to the file in ALLREDUCE_ERROR_FILE, if set; see scripts/train.sh. Local."""
    _append(ERROR_FILE, text)


def _append(variable: str, text: str) -> None:
    """Append a line to the file that an environment variable names, if it is set."""
    if path := os.environ.get(variable):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(text.rstrip("\n") + "\n")


def _of_this_rank(text: str) -> str:
    rank, size = here()
    return f"rank {rank} of {size}: {text}"


def on_ending(call: Callable[[int, str], object]) -> None:
    """Register a function that is called when this rank ends the job: with the exit code and the error's text, from
    any thread. Local.
    """
    _ending.append(call)


def exit_quietly(code: int) -> NoReturn:
    """End this process without a message: another rank ends the job, and has reported why. From any thread."""
    with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream
        sys.stdout.flush()
    os._exit(code)


def end_job(text: str, code: int, written: bool = False) -> NoReturn:
    """Print `text`, with the rank, and end all ranks. From any thread. written: `text` is in ERROR_FILE already."""
    print_error(text)
    if not written:
        write_down(_of_this_rank(text))
    for call in _ending:
        try:
            call(code, text)
        except Exception as error:  # MPI's, say, of a rank that has just failed: the job must end all the same
            print_error(f"while it ended the job: {type(error).__name__}: {error}\n")
    time.sleep(0.5)  # MPICH's launcher drops output that it has not forwarded before the end
    if not ulfm.all_others_failed(MPI.COMM_WORLD):  # if the only living rank calls MPI_Abort, mpirun returns 0
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


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
