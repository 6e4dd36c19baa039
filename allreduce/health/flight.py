"""The flight recorder: keeps the last calls of this rank, and writes them to a file when a wait or the job fails.

ALLREDUCE_FLIGHT names a folder, in which each rank writes its own file. The rank whose wait is reported or has timed
out, or which ends the job, requests the files of all others by a status message, as it does for stacks (stacks.py).
`python -m allreduce doctor flight FOLDER` compares the files.
"""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from allreduce.errors import OptionError
from allreduce.files import replacing
from allreduce.notices import log
from allreduce.transport import processes
from allreduce.transport.wait import WaitRecord

FLIGHT = "ALLREDUCE_FLIGHT"
KEPT = 256  # calls of a rank
AGAIN_SECONDS = 1.0  # minimum interval between two files: many ranks may request one at about the same time
WRITE_SECONDS = 1.0  # how long a rank that ends the job waits for the files of the others
PATTERN = "flight-rank-{}.json"

# (user, count, call, begin, end): WaitRecord.user, WaitRecord.count, the call (its text is compared between ranks), and
# times of time.perf_counter(); end is 0.0 for a call that failed
Entry = tuple[str, int, object, float, float]
calls: deque[Entry] = deque(maxlen=KEPT)
record = calls.append
_BEGAN = time.time()
_times = {"written": -AGAIN_SECONDS}


class Recorded(NamedTuple):
    """A call in a file. begin, end: seconds since 1970; end is None for a call that failed or that still runs."""

    user: str
    number: int
    call: str
    begin: float
    end: float | None


def enabled() -> bool:
    """Return whether the calls are to be written. Local."""
    return bool(os.environ.get(FLIGHT))


def first_line(text: str) -> str:
    """Return the line of an error's text that names the error: the first one, or the one after a traceback."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")] or [""]
    return lines[-1 if lines[0].startswith("Traceback") else 0]


def dump(why: str, running: Iterable[WaitRecord], last: bool = False) -> None:
    """Write this rank's calls to its file, in place of an older one, unless that was just done. Local.

    running: records of waits; those in a call are written as its running calls. last: write in any case.
    """
    now = time.monotonic()
    if not enabled() or (now - _times["written"] < AGAIN_SECONDS and not last):
        return
    _times["written"] = now
    folder = os.environ[FLIGHT]
    rank, size = processes.here()
    since_1970 = time.time() - time.perf_counter()
    unfinished = [(wait, call) for wait in running if (call := wait.call) is not None]
    unfinished = [(wait, getattr(call, "call", call)) for wait, call in unfinished]  # as the engine records it
    entries = [*calls, *((wait.user, wait.count, call, wait.begun, 0.0) for wait, call in unfinished)]
    about = {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": _BEGAN,
        "time": time.time(),
        "why": first_line(why),
        "full": len(calls) == KEPT,
        "calls": [
            Recorded(user, count, str(call), begin + since_1970, end + since_1970 if end else None)
            for user, count, call, begin, end in entries
        ],
    }
    try:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, PATTERN.format(rank))
        if os.path.islink(path):
            os.unlink(path)  # no link is followed: other users may write to the folder
        with replacing(path, "the flight record") as file:
            json.dump(about, file)
    except (OSError, OptionError) as error:
        log.warning("%s=%s: the last calls can't be written there: %s", FLIGHT, folder, error)
