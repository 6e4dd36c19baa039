"""The Python stacks of all ranks in files, when a wait takes long: they show what a rank does that has not come.

ALLREDUCE_STALL_STACKS names a folder, in which each rank appends to a file of its own. A rank whose wait is reported
asks all others for their stacks by a status message. A thread of each writes them, whatever the program does meanwhile.
Where that thread can't run, because C code holds Python's lock, a timer of faulthandler, which needs no lock, does it.
"""

import faulthandler
import os
import socket
import time
from typing import IO

from allreduce.notices import log
from allreduce.transport import processes

STACKS = "ALLREDUCE_STALL_STACKS"
AGAIN_SECONDS = 5.0  # several ranks ask at about the same time
ARM_SECONDS = 1.0  # how often the timer is put off
LONGEST_SECONDS = 1e9  # from here on, which is decades, there is no timer; it refuses ten times as many

_files: dict[str, IO[str] | None] = {}
_times = {"dumped": -AGAIN_SECONDS, "armed": -ARM_SECONDS}


def wanted() -> bool:
    """Whether stacks are to be written."""
    return bool(os.environ.get(STACKS))


def place() -> str:
    """The files of all ranks, for people."""
    return os.path.join(os.environ.get(STACKS, ""), "stacks-rank-*.txt")


def dump(why: str) -> None:
    """Append the stacks of all threads of this rank to its file; nothing where that was just done. Local."""
    now = time.monotonic()
    file = _file()
    if file is not None and now - _times["dumped"] >= AGAIN_SECONDS:
        _times["dumped"] = now
        try:
            _write(file, why)
        except OSError as error:  # a full disk; the wait goes on
            faulthandler.cancel_dump_traceback_later()
            _give_up(error)


def _write(file: IO[str], why: str) -> None:
    rank, size = processes.here()
    print(f"{time.ctime()}: rank {rank} of {size}, process {os.getpid()} on {socket.gethostname()}: {why}", file=file)
    faulthandler.dump_traceback(file)
    print(file=file, flush=True)


def put_off(seconds: float) -> None:
    """Have the stacks written after so many seconds unless this is called again before. Local."""
    now = time.monotonic()
    file = _file()
    if file is not None and seconds < LONGEST_SECONDS and now - _times["armed"] >= ARM_SECONDS:
        _times["armed"] = now
        faulthandler.dump_traceback_later(seconds + 2 * ARM_SECONDS, file=file)


def stop() -> None:
    """The program ends. Local."""
    if _files:
        faulthandler.cancel_dump_traceback_later()


def _file() -> IO[str] | None:
    folder = os.environ.get(STACKS, "")
    if folder and folder not in _files:
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"stacks-rank-{processes.here()[0]}.txt")
            _files[folder] = open(path, "a", 1, opener=_no_link)  # noqa: SIM115, a timer may write there to the end
        except OSError as error:
            _give_up(error)
    return _files.get(folder)


def _no_link(path: str, flags: int) -> int:
    """Open a file, but none that a link leads to: the folder may be everybody's."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _give_up(error: OSError) -> None:
    folder = os.environ.get(STACKS, "")
    log.warning("%s=%s: stacks can't be written there: %s", STACKS, folder, error)
    _files[folder] = None
