"""A soak: one long training, of which a rank is killed now and then. Does it go on, and does anything grow?

The ranks of a job are killed at random, with --mtbf seconds between two kills on average. Standby ranks replace the
first ones; then the job continues on fewer ranks. When its last rank was killed, it is started again from its newest
checkpoint. What a loss costs is measured by the short runs: see judging. A rank of it:

    python -m tests.faults.soak FOLDER
"""

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from allreduce import Topology
from allreduce.elastic import standby
from tests import launch
from tests.faults import jobs, notes
from tests.faults.notes import STOP, Notes
from tests.faults.plans import Plan
from tests.faults.programs import model
from trainers import Checkpoint, MirroredTrainer
from trainers.watching.callback import Callback

SPARES = 2
LOOK_SECONDS = 0.05  # also between two notes of a rank
APART_SECONDS = 2.0  # between two kills at least: a standby rank has the state by then
END_SECONDS = 60.0  # for the end of a job that is told to stop
BATCH, REPEATS = 240, 1000  # rows; how often an epoch has all rows
EPOCHS = 10**9  # more than it can do before it is told to stop
EVERY = "10 seconds"  # between two checkpoints
PAGE_MIB = resource.getpagesize() / 2**20


def main(options: argparse.Namespace) -> int:
    """Run a soak, and print what it has found. Returns 1 if a job ended that should have gone on, or if the ranks had
    different bits at the end."""
    chance, until = random.Random(options.seed), time.monotonic() + options.hours * 3600
    kills, why, found = 0, "", list[list[list[dict[str, Any]]]]()  # the notes of each job, of each rank
    with tempfile.TemporaryDirectory(prefix="soak", ignore_cleanup_errors=True) as name:
        while time.monotonic() < until and not why:
            folder = Path(name) / str(len(found))
            folder.mkdir()
            killed, why = _attempt(folder, options, until, chance)
            kills += killed
            found.append([notes.read(folder, rank) for rank in range(options.most_ranks)])
            print(f"job {len(found)}: {killed} kills {why}", flush=True)
    at = [[note for note in mine if note["what"] == "at"] for each in found for mine in each]
    oldest = max(filter(None, at), key=_age)
    ends = {tuple(note["hashes"]) for mine in found[-1] for note in mine if note.get("hashes")}
    bits = {value for hashes in ends for value in hashes}
    print(f"{kills} kills in {len(found)} jobs")
    print(f"the oldest process: {_age(oldest):.0f} s, {len({tuple(note['ranks']) for note in oldest}) - 1} recoveries")
    for what, title in (("memory", "its memory, MiB"), ("files", "its open descriptors")):
        first, last = oldest[len(oldest) // 10][what], oldest[-1][what]  # the first after a tenth of its life
        print(f"{title}: {first:.0f}, at its end {last:.0f}")
    print("the bits at the end differ" if len(bits) > 1 else "the bits at the end are equal")
    return 1 if why or len(bits) > 1 else 0


def _age(mine: list[dict[str, Any]]) -> float:
    return float(mine[-1]["time"] - mine[0]["time"])


def _attempt(folder: Path, options: argparse.Namespace, until: float, chance: random.Random) -> tuple[int, str]:
    """Run one job until its last rank was killed, or until a time. Returns the number of kills, and why the job has
    ended, if it should not have. chance: draws the kills."""
    command = [*jobs.launcher(Plan(0, options.most_ranks)), sys.executable, "-m", __name__, str(folder)]
    with (
        open(folder / "output", "wb") as output,
        launch.started(command, output, subprocess.STDOUT) as job,
    ):
        killed, why = _drive(job, folder, options, until, chance)
    if why:
        print((folder / "output").read_text(errors="replace")[-3000:])
    return killed, why


def _drive(
    job: "subprocess.Popen[bytes]", folder: Path, options: argparse.Namespace, until: float, chance: random.Random
) -> tuple[int, str]:
    left, noted, size = set(range(options.most_ranks)), time.monotonic(), 0
    due = noted + chance.expovariate(1 / options.mtbf)
    while left:
        now = time.monotonic()
        if now > until:
            (folder / STOP).touch()
        grown = sum(path.stat().st_size for path in folder.glob("notes.*"))
        noted, size = (now, grown) if grown != size else (noted, size)
        killed = options.most_ranks - len(left)
        if (code := job.poll()) is not None:
            return killed, "" if (folder / STOP).exists() and code == 0 else f"ended with exit code {code}"
        if now - noted > options.limit:
            return killed, f"no rank has finished a step for {options.limit:.0f} s"
        if due < now < until and any('"at"' in path.read_text() for path in folder.glob("notes.*")):
            rank = chance.choice(sorted(left))
            os.kill(jobs.pids(folder, rank)[0], signal.SIGKILL)
            left.discard(rank)
            due = now + APART_SECONDS + chance.expovariate(1 / options.mtbf)
        time.sleep(LOOK_SECONDS)
    job.wait(END_SECONDS)
    return options.most_ranks, ""


class Notice(Callback):
    """Notes the ranks, the memory and the descriptors, at times and after each failure; stops the training."""

    reads_batches = False

    def __init__(self, mine: Notes, stop: Path) -> None:
        self._notes, self._stop = mine, stop
        self._noted, self._topology = 0.0, None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now, topology = time.monotonic(), self.trainer.topology
        if now - self._noted < LOOK_SECONDS and topology is self._topology:
            return
        self._noted, self._topology = now, topology
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB
        files = len(os.listdir("/proc/self/fd"))
        self._notes.add("at", ranks=notes.members(topology), memory=memory, files=files)
        self.trainer.stop_training = self._stop.exists()


def train(folder: Path) -> None:
    """Train on this rank, with standby ranks and checkpoints, until it is told to stop."""
    topology = Topology()
    mine = Notes(folder, topology.rank)
    mine.add("pid", pid=os.getpid())
    ranks = standby.elastic_world(topology, SPARES)
    if ranks is None:
        return
    x, y = (np.tile(rows, (REPEATS, *[1] * (rows.ndim - 1))) for rows in model.rows()[:2])
    kept = Checkpoint(str(folder.parent / "checkpoints"), EVERY)
    options: dict[str, Any] = {"callbacks": [Notice(mine, folder / STOP)], "progress": False}
    with MirroredTrainer(model.replica(Plan(0, 1)), "auto", ranks, on_failure="continue") as trainer:
        trainer.fit(x, y, EPOCHS, BATCH, checkpoint=kept, resume=True, **options)
        mine.add("end", hashes=trainer.parameters_sha256())
    trainer.topology.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
