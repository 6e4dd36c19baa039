"""The notes of a rank: a line for each event, written at once, so that a killed rank's notes are complete."""

import json
import os
import time
from pathlib import Path
from typing import Any

from allreduce.topology import Topology
from allreduce.transport import processes

STOP = "stop"  # the file that ends a soak


class Notes:
    """The notes of one rank in a folder; `add` may be called from any thread."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._file = os.open(path_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def add(self, what: str, **more: Any) -> None:
        """Write a note. what: "pid", "step" (step, ranks), "call" (name, ranks), "fault" (number) or "end"."""
        line = json.dumps({"what": what, "time": time.monotonic(), **more}) + "\n"
        os.write(self._file, line.encode())

    def step(self, number: int, topology: Topology) -> None:
        """Note that a step is finished, on the ranks of this topology. Also a named point, in every program."""
        self.add("step", step=number, ranks=members(topology))


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"notes.{rank}"


def read(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the notes of a rank; [] if it never began. An incomplete last line is left out."""
    path = path_of(folder, rank)
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def members(topology: Topology) -> list[int]:
    """Return the ranks of the job's first processes in a topology; a process that was started later is not counted."""
    return [rank for rank in processes.world_ranks(topology.world) if rank >= 0]
