"""Writes the Python stacks of all ranks to files during a long wait: they show what the missing ranks do.

ALLREDUCE_STALL_STACKS names a folder, in which each rank appends to its own file. The rank that reports a wait asks all
others for their stacks by a status message. A thread of each rank writes them, whatever the program does meanwhile. If
that thread can't run, because C code holds the GIL, a timer of faulthandler, which needs no GIL, writes them.
"""

import faulthandler
import os
import socket
import time
from typing import IO

from allreduce.notices import log
from allreduce.transport import processes

STACKS = "ALLREDUCE_STALL_STACKS"
AGAIN_SECONDS = 5.0  # minimum interval: several ranks request stacks at about the same time
ARM_SECONDS = 1.0  # how often the timer is restarted
LONGEST_SECONDS = 1e9  # no timer above that (decades): faulthandler refuses ten times as much

_files: dict[str, IO[str] | None] = {}
_times = {"dumped": -AGAIN_SECONDS, "armed": -ARM_SECONDS}


def enabled() -> bool:
    """Return whether stacks are to be written. Local."""
    return bool(os.environ.get(STACKS))


def file_pattern() -> str:
    """Return the path pattern of all ranks' files, for messages. Local."""
    return os.path.join(os.environ.get(STACKS, ""), "stacks-rank-*.txt")


def dump(why: str) -> None:
    """Append the stacks of all threads of this rank to its file, unless that was just done. Local."""
    now = time.monotonic()
    file = _file()
    if file is not None and now - _times["dumped"] >= AGAIN_SECONDS:
        _times["dumped"] = now
        try:
            _write(file, why)
        except OSError as error:  # a full disk, say; the wait continues
            faulthandler.cancel_dump_traceback_later()
            _disable(error)


def _write(file: IO[str], why: str) -> None:
    rank, size = processes.here()
    print(f"{time.ctime()}: rank {rank} of {size}, process {os.getpid()} on {socket.gethostname()}: {why}", file=file)
    faulthandler.dump_traceback(file)
    print(file=file, flush=True)


def restart_timer(seconds: float) -> None:
    """Restart the timer that writes the stacks after `seconds` and a little more. Local."""
    now = time.monotonic()
    file = _file()
    if file is not None and seconds < LONGEST_SECONDS and now - _times["armed"] >= ARM_SECONDS:
        _times["armed"] = now
        faulthandler.dump_traceback_later(seconds + 2 * ARM_SECONDS, file=file)


def stop() -> None:
    """Stop the timer, at exit. Local."""
    if _files:
        faulthandler.cancel_dump_traceback_later()


def _file() -> IO[str] | None:
    folder = os.environ.get(STACKS, "")
    if folder and folder not in _files:
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"stacks-rank-{processes.here()[0]}.txt")
            _files[folder] = open(path, "a", 1, opener=_no_link)  # noqa: SIM115, a timer may write to it until exit
        except OSError as error:
            _disable(error)
    return _files.get(folder)


def _no_link(path: str, flags: int) -> int:
    """Open a file, but do not follow a link: other users may write to the folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _disable(error: OSError) -> None:
    folder = os.environ.get(STACKS, "")
    log.warning("%s=%s: stacks can't be written there: %s", STACKS, folder, error)
    _files[folder] = None
