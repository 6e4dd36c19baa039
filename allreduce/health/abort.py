"""The end of the whole job: an error of one rank alone would leave all others waiting for it for ever."""

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

TOLD_SECONDS = 2.0  # a rank waits so long for the lowest rank with the same error to report it
ALIKE_SECONDS = 1.0  # the same, for rank 0, when no rank knows which ranks have the error
ERROR_FILE = "ALLREDUCE_ERROR_FILE"  # names a file for the error that ends the job: mpirun's own text follows ours
LIFE_FILE = "ALLREDUCE_LIFE_FILE"  # names a file for the begin and the end of each rank's program
TRACEBACK = "ALLREDUCE_TRACEBACK"  # "full": also the frames inside of the library
LIBRARY = ("allreduce", "trainers")
TITLE = "Traceback (most recent call last):\n"
INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # threads that have called a collective
_leaving: list[Callable[[str], object]] = []
_ending: list[Callable[[int], object]] = []
_installed: list[bool] = []
_failure = [1]  # the exit code of errors


class Part(Protocol):
    """A topology of some ranks, whose errors do not end other parts."""

    closed: bool


_parts: "weakref.WeakSet[Part]" = weakref.WeakSet()


def install() -> None:
    """From now on an uncaught exception prints its traceback, with the rank, and ends the whole job. Local.

    A hook that the program has set prints before; one that it sets later is noticed when the program ends. Exceptions
    in threads end the job when the thread has called a collective. A rank that ends without an exception tells the
    others (`on_leaving`). Interactive sessions are left alone.
    """
    if _installed or hasattr(sys, "ps1"):
        return
    _installed.append(True)
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if children.forked() or MPI.Is_finalized():
            previous(kind, error, trace)
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        part_alone = in_part() and not interrupted
        if part_alone and not _tells(error):
            return
        leave_to_teller(error)
        text = "interrupted\n" if interrupted else traceback_of(error)
        if previous is not sys.__excepthook__ and not interrupted:
            previous(kind, error, trace)
            text = f"{kind.__name__}\n"
        write_down(_of_this_rank("interrupted\n" if interrupted else "".join(traceback.format_exception_only(error))))
        if part_alone:
            say(text)  # and the end of MPI waits for the other parts
        else:
            end_job(text, 130 if interrupted else code_of(error), written=True)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        previous_thread(args)
        if (
            args.thread in _threads
            and not (children.forked() or MPI.Is_finalized())
            and args.exc_type is not SystemExit
        ):
            name = args.thread.name if args.thread else "?"
            end_job(f"{args.exc_type.__name__} in thread {name!r}, which other ranks may wait for\n", code_of(None))

    sys.excepthook, threading.excepthook = hook, thread_hook
    children.note_exit_codes()
    atexit.register(_at_exit, hook)


@functools.cache
def note_life() -> None:
    """Note in the file that the environment names, if it does, that this program has begun, and its end. Local, once.

    mpirun of a job with ULFM whose ranks were all killed returns 0, as it does for a job that has ended well.
    """

    def ended() -> None:
        if not children.forked():
            _append(LIFE_FILE, "ended")

    _append(LIFE_FILE, "began")
    atexit.register(ended)


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it, without repetitions and without frames of this library.

    An error that a check has raised again on all ranks is printed once, unless it passed through other code than one
    package's, such as a callback. Frames inside of this library are left out, unless the environment asks for them or
    the error comes from a mistake of the library.
    """
    cause, chain = error.__cause__, True
    if cause is not None and (type(cause), str(cause)) == (type(error), str(error)):
        packages = [_package(frame) for frame, _ in traceback.walk_tb(cause.__traceback__)]
        chain = cause.__cause__ is not None or not {*packages} <= {*packages[:1], "allreduce"}
    told = traceback.TracebackException.from_exception(error)
    left_out = 0 if os.environ.get(TRACEBACK) == "full" else _shorten(told, error, chain)
    text = "".join(told.format(chain=chain))
    if not left_out:
        return text
    note = f"  ({left_out} frames inside of the library are left out; {TRACEBACK}=full shows them)\n"
    return text.replace(TITLE, TITLE + note, 1)


def _shorten(told: traceback.TracebackException, error: BaseException, chain: bool) -> int:
    """Take the frames of this library, and of what it calls, out of an error's traceback; returns how many they were.

    chain: out of those of the errors that it comes from, too.
    """
    left_out = 0
    context = None if error.__suppress_context__ else error.__context__
    for cause_told, cause in ((told.__cause__, error.__cause__), (told.__context__, context)):
        if chain and cause_told is not None and cause is not None:
            left_out += _shorten(cause_told, cause, chain)
            break
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if len(frames) != len(told.stack) or _of_the_library(error):
        return left_out
    kept, within = [], False
    for frame, summary in zip(frames, told.stack, strict=True):
        within = _inside(frame, within)
        if not within:
            kept.append(summary)
    left_out += len(frames) - len(kept)
    told.stack[:] = kept
    return left_out


def _of_the_library(error: BaseException) -> bool:
    """Whether an error may be a mistake of this library, whose frames are needed then.

    That is an error that is none of our named errors, and that our code has raised, or installed code that ours calls.
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
    """Whether a frame is this library's, or of installed code that it calls. within: this of the frame before."""
    if _package(frame) in LIBRARY:
        return True
    return within and frame.f_code.co_filename.startswith(("<frozen ", *INSTALLED))


def _package(frame: FrameType) -> str:
    """The first package of the module that a frame belongs to; of `python -m package` too."""
    names = frame.f_globals
    return str(names.get("__package__") or names.get("__name__") or "").partition(".")[0]


def code_of(error: BaseException | None) -> int:
    """The exit code of a job that ends by this error: that of the rank whose leaving has caused it, else 1.

    `fail_with` replaces the 1.
    """
    while error is not None:
        code = getattr(error, "job_code", None)
        if isinstance(code, int):
            return code
        error = error.__cause__
    return _failure[0]


def fail_with(code: int) -> None:
    """From now on errors end the job with this exit code. For programs in which 1 has a meaning. Local."""
    _failure[:] = [code]


def communicates() -> None:
    """Note that the current thread calls collectives, so that other ranks may wait for it."""
    _threads.add(threading.current_thread())


def on_leaving(tell: Callable[[str], object]) -> None:
    """Have `tell` called with the reason when this rank's program ends, before MPI does."""
    _leaving.append(tell)


def contain(part: "Part") -> None:
    """From now on an uncaught exception ends this rank's program but not the job, until `part` is closed. Local."""
    _parts.add(part)


def in_part() -> bool:
    """Whether an uncaught exception leaves the other parts alone."""
    return any(not part.closed for part in _parts)


def leave_to_teller(error: BaseException) -> None:
    """Return at once on the one rank that reports an error; other ranks that have it wait for the job to end.

    Where no rank knows which ranks have it, all may (a missing file): the others give rank 0 the time to report it.
    """
    if not _tells(error):
        time.sleep(TOLD_SECONDS)
    elif getattr(error, "ranks", None) is None and here()[0] > 0:
        time.sleep(ALIKE_SECONDS)


def _tells(error: BaseException) -> bool:
    """Whether this rank reports an error: the rank that brought it, else the lowest that has it."""
    ranks = range(here()[1]) if isinstance(error, KeyboardInterrupt) else getattr(error, "ranks", None)
    teller = getattr(error, "teller", None)
    if teller is None:
        teller = min(ranks) if ranks else here()[0]
    return here()[0] == teller


def say(text: str) -> None:
    """Print an error's text, with the rank, behind what the program has printed."""
    with contextlib.suppress(OSError, ValueError):  # its reader has ended, or it is closed: the job must end
        sys.stdout.flush()
    # Not sys.stderr: torch.distributed wraps the hook and prints what it wrote there afterwards, too late.
    stderr = sys.__stderr__ or sys.stderr
    with contextlib.suppress(OSError, ValueError):
        stderr.write(_of_this_rank(text))
        stderr.flush()


def write_down(text: str) -> None:
    """Add an error to the file that the environment names, if it does; see scripts/train.sh."""
    _append(ERROR_FILE, text)


def _append(variable: str, text: str) -> None:
    """Add lines to the file that an environment variable names, if it does."""
    if path := os.environ.get(variable):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(text.rstrip("\n") + "\n")


def _of_this_rank(text: str) -> str:
    rank, size = here()
    return f"rank {rank} of {size}: {text}"


def on_ending(tell: Callable[[int], object]) -> None:
    """Have `tell` called with the exit code when this rank ends the job, from any thread."""
    _ending.append(tell)


def follow(code: int) -> NoReturn:
    """End this process: another rank ends the job, and has reported why. From any thread."""
    with contextlib.suppress(OSError, ValueError):  # its reader has ended, or it is closed
        sys.stdout.flush()
    os._exit(code)


def end_job(text: str, code: int, written: bool = False) -> NoReturn:
    """Print why, with the rank, and end all ranks. From any thread. written: the error is in ERROR_FILE already."""
    say(text)
    if not written:
        write_down(_of_this_rank(text))
    for tell in _ending:
        tell(code)
    time.sleep(0.5)  # MPICH's launcher drops output that it has not passed on before the end
    if not ulfm.all_others_failed(MPI.COMM_WORLD):  # for MPI_Abort of the last living rank Open MPI's mpirun returns 0
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _at_exit(hook: object) -> None:
    """The program ends on this rank: by an exception that our hook did not see, or so that others must know."""
    if MPI.Is_finalized() or children.forked():
        return
    died = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if died is not None and sys.excepthook is not hook and here()[1] > 1 and not in_part():
        leave_to_teller(died)
        end_job(f"{type(died).__name__}: {died}\n", code_of(died))
    for tell in _leaving:
        tell("it has ended its program" if died is None else f"{type(died).__name__}: {died}")
