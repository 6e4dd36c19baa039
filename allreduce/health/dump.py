"""The dump of a rank: where it waits, the stacks of its threads and its last calls, in a file in ALLREDUCE_DUMP.

- All ranks write one when a wait is reported or ends in an error, when an error ends the job, and at SIGUSR1. The rank
  that reports the wait or ends the job asks the others for their dumps by a status message.
- A thread of each rank writes it, whatever the program does meanwhile, unless C code holds the GIL.
- At SIGUSR1 a rank also prints where it waits and its stacks, with or without a folder, and continues. faulthandler
  prints the stack of the main thread at once; a thread, which a byte from Python's own signal handler wakes, prints the
  rest. It holds the GIL, because stacks that change while they are read would crash the program.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO, TextIO

from allreduce.health import abort
from allreduce.notices import log
from allreduce.process import children
from allreduce.transport import processes
from allreduce.transport.wait import DescribedCall, WaitRecord

DUMP = "ALLREDUCE_DUMP"
PATTERN = "dump-rank-{}.txt"
KEPT = 256  # calls of a rank
SHOWN = 8  # waits of a rank in a text
MOST_BYTES = 1 << 24  # of a file; a longer one is begun again
AGAIN_SECONDS = 1.0  # minimum interval between two dumps: many ranks may ask at about the same time
WRITE_SECONDS = 1.0  # how long a rank that ends the job waits for the dumps of the others

# (user, count, call, begin, end): WaitRecord.user, WaitRecord.count, the call, and times of time.perf_counter(); end is
# 0.0 for a call that failed
Entry = tuple[str, int, object, float, float]
calls: deque[Entry] = deque(maxlen=KEPT)
record = calls.append
_files: dict[str, IO[str] | None] = {}  # by folder
_dumped = [-AGAIN_SECONDS]  # the time of the last dump
_sockets: list[int] = []  # both ends of a pair, open until exit


sources: list[Callable[[], Iterable[WaitRecord]]] = []  # return the records of waits that a dump shows


# The file


def enabled() -> bool:
    """Return whether dumps are to be written. Local."""
    return bool(os.environ.get(DUMP))


def files() -> str:
    """Return the path pattern of all ranks' files, for messages. Local."""
    return os.path.join(os.environ.get(DUMP, ""), PATTERN.format("*"))


def write(why: str, last: bool = False) -> None:
    """Append a dump to this rank's file, unless one was just written. Local, from any thread.

    last: write it in any case.
    """
    now = time.monotonic()
    file = _file()
    if file is None or (now - _dumped[0] < AGAIN_SECONDS and not last):
        return
    _dumped[0] = now
    rank, size = processes.here()
    where = f"rank {rank} of {size}, process {os.getpid()} on {socket.gethostname()}"
    try:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            file.truncate(0)
        file.write(f"{time.ctime()}: {where}: {error_line(why)}\n  {status()}\n")
        file.flush()
        faulthandler.dump_traceback(file)
        file.write(f"The last calls of rank {rank}:\n{_last_calls()}\n")
        file.flush()
    except (OSError, ValueError) as error:  # a full disk, say, or a file that is closed at exit; the wait continues
        _disable(error)


def _last_calls() -> str:
    """Return the last calls of this rank, and those that run, in lines. The call of a user (WaitRecord.user) that has
    one number is the same call on all its ranks."""
    running = [(wait.user, wait.count, getattr(call, "call", call), wait.begun, 0.0) for wait, call in _running()]
    since_1970 = time.time() - time.perf_counter()
    lines = []
    for user, count, call, begin, end in [*calls, *running]:
        began = begin + since_1970
        ended = f"{1e3 * (end - begin):.3f} ms" if end else "did not end"
        at = f"{time.strftime('%H:%M:%S', time.gmtime(began))}.{int(began % 1 * 1e6):06d} UTC"
        lines.append(f"  {at}, {ended}: call {count} of {user}: {call}\n")
    return "".join(lines)


def error_line(text: str) -> str:
    """Return the line of an error's text that names the error: the first one, or the one behind a traceback."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")] or [""]
    return abort.without_rank(lines[-1 if lines[0].startswith("Traceback") else 0])


def _running() -> list[tuple[WaitRecord, DescribedCall]]:
    """Return the waits that have not ended, and their calls, the longest wait first."""
    waits = [(wait, call) for source in sources for wait in source() if (call := wait.call) is not None]
    return sorted(waits, key=lambda pair: pair[0].begun)


def status() -> str:
    """Return where this rank waits, or its last call, as text. Local, from any thread."""
    now, last = time.perf_counter(), f"; its last call: {calls[-1][2]}" if calls else ""
    waits = [
        f"has waited {now - wait.begun:.1f} s in {call} (call number {wait.count})" for wait, call in _running()[:SHOWN]
    ]
    return "\n  ".join(waits) or f"this rank waits for no other rank{last}"


def _file() -> IO[str] | None:
    folder = os.environ.get(DUMP, "")
    if folder and folder not in _files:
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, PATTERN.format(processes.here()[0]))
            # open until exit; a call may have any name
            _files[folder] = open(path, "a", encoding="utf-8", errors="replace", opener=_no_link)  # noqa: SIM115
        except OSError as error:
            _disable(error)
    return _files.get(folder)


def _no_link(path: str, flags: int) -> int:
    """Open a file, but do not follow a link: other users may write to the folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _disable(error: Exception) -> None:
    folder = os.environ.get(DUMP, "")
    log.warning("%s=%s: no dump can be written there: %s", DUMP, folder, error)
    _files[folder] = None


# The signal


def install() -> None:
    """Make SIGUSR1 print where this rank waits, and write a dump. Local, once.

    A handler that the program has set, or sets later, stays.
    """
    _file()  # now: the program may change its folder
    free = hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    main = threading.current_thread() is threading.main_thread()
    stderr = sys.__stderr__
    if _sockets or not free or not main or stderr is None:
        return
    try:
        stderr.fileno()
    except (OSError, ValueError):  # closed
        return
    reader, writer = (end.detach() for end in socket.socketpair())
    os.set_blocking(writer, False)
    _sockets.extend((reader, writer))
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous != -1:  # an asyncio loop, say, receives all signals: then only faulthandler prints
        signal.set_wakeup_fd(previous)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=False, chain=True)
    threading.Thread(target=_listen, args=(reader, stderr), name="allreduce signals", daemon=True).start()
    os.register_at_fork(after_in_child=_detach_in_child)


def _listen(reader: int, stderr: TextIO) -> None:
    while received := os.read(reader, 64):
        if signal.SIGUSR1 in received and not children.forked():
            abort.print_error(f"process {os.getpid()} on {socket.gethostname()}:\n  {status()}\n")
            faulthandler.dump_traceback(stderr)
            write("SIGUSR1", last=True)


def _detach_in_child() -> None:
    """In a forked child: remove the wakeup descriptor, which would wake the parent's thread."""
    previous = signal.set_wakeup_fd(-1)
    if previous not in (-1, _sockets[1]):
        signal.set_wakeup_fd(previous)
