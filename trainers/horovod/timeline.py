"""Horovod's timeline: records how long the calls of rank 0 waited and ran, for chrome://tracing or Perfetto."""

import atexit
import json
import os
import time
from collections.abc import Callable
from typing import Any

from allreduce.files import replacing, writable
from trainers.horovod.errors import ArgumentError


class Timeline:
    """Events of named calls, one row a name: NEGOTIATE_... until all ranks have submitted the call, then the call."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self.path, self.mark_cycles = path, mark_cycles
        self._begin, self._since_epoch = time.perf_counter(), time.time()
        self._rows: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []

    def add(self, name: str, submitted: float, begin: float) -> None:
        """Record a call that began at `begin` and has ended now. Times are of time.perf_counter()."""
        row = self._rows.setdefault(name, len(self._rows) + 1)
        kind = name.partition(".")[0].upper()
        end = time.perf_counter()
        if self.mark_cycles:
            self._events.append({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": self._us(begin)})
        for event, first, last in ((f"NEGOTIATE_{kind}", submitted, begin), (kind, begin, end)):
            span = {"ts": self._us(first), "dur": round((last - first) * 1e6, 3)}
            self._events.append({"name": event, "ph": "X", "pid": 0, "tid": row, **span})

    def write(self) -> None:
        """Write the file, through a temporary file."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
            for name, row in self._rows.items()
        ]
        start = {"start_time_since_epoch_in_micros": int(self._since_epoch * 1e6)}
        about = {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0", **start}}
        with replacing(self.path, "the timeline") as file:
            json.dump([about, *names, *list(self._events)], file)

    def _us(self, moment: float) -> float:
        return round((moment - self._begin) * 1e6, 3)


_timeline: Timeline | None = None
VARIABLE = "HOROVOD_TIMELINE"  # the path of the file; "DYNAMIC" (Horovod's value): record only after start_timeline


def from_environment(rank: int) -> None:
    """If the environment names a file, record from now on until the end of the program. Local."""
    path = os.environ.get(VARIABLE, "DYNAMIC")
    if path != "DYNAMIC" and _timeline is None:
        start(path, rank)
        atexit.register(stop)


def start(file_path: str, rank: int, mark_cycles: bool = False) -> None:
    """Record the calls from now on, on rank 0. Local. Raises ArgumentError when the file can't be written."""
    global _timeline
    if rank == 0:
        if not writable(file_path):
            raise ArgumentError(f"the timeline can't be written to {file_path}: give a file in a folder that exists")
        _timeline = Timeline(os.path.abspath(file_path), mark_cycles)


def stop() -> None:
    """Write the file, if there is a recording. Local."""
    global _timeline
    recorded, _timeline = _timeline, None
    if recorded is not None:
        recorded.write()


def begin(name: str) -> Callable[[float], None] | None:
    """Record a submission. Returns a function to call with the call's begin time after it has ended, or None."""
    recording, submitted = _timeline, time.perf_counter()
    return None if recording is None else lambda begin: recording.add(name, submitted, begin)
