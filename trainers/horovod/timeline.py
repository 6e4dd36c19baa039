"""Horovod's timeline: when the calls of rank 0 ran, for chrome://tracing or Perfetto."""

import atexit
import json
import os
import time
from typing import Any

from allreduce.errors import OptionError
from allreduce.files import replacing, writable

VARIABLE = "HOROVOD_TIMELINE"  # the path of the file; "DYNAMIC" (Horovod's value): record only after start_timeline
_recording: tuple[str, list[dict[str, Any]]] | None = None  # the path, and an event for each call


def from_environment(rank: int) -> None:
    """If the environment names a file, record from now on until the end of the program. Local."""
    path = os.environ.get(VARIABLE, "DYNAMIC")
    if path != "DYNAMIC" and _recording is None:
        start(path, rank)
        atexit.register(stop)


def start(file_path: str, rank: int) -> None:
    """Record the calls from now on, on rank 0. Local. Raises OptionError when the file can't be written."""
    global _recording
    if rank == 0:
        if not writable(file_path):
            raise OptionError(f"the timeline can't be written to {file_path}: give a file in a folder that exists")
        _recording = os.path.abspath(file_path), []


def note(name: str, begin: float) -> None:
    """Record a call that has ended now, if there is a recording. begin: of time.perf_counter()."""
    recording = _recording  # another thread may stop it
    if recording is not None:
        span = {"ts": round(begin * 1e6, 3), "dur": round((time.perf_counter() - begin) * 1e6, 3)}
        recording[1].append({"name": name, "ph": "X", "pid": 0, "tid": 0, **span})


def stop() -> None:
    """Write the file, through a temporary file, if there is a recording. Local."""
    global _recording
    recorded, _recording = _recording, None
    if recorded is not None:
        with replacing(recorded[0], "the timeline") as file:
            json.dump(recorded[1], file)
