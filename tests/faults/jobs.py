"""Drives one job: starts it under mpirun, sends signals from outside, waits, and leaves nothing behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import launch
from tests.faults import notes
from tests.faults.plans import OUTSIDE, Fault, Plan

RANK = "tests.faults.rank"  # what each rank runs
CHECK_SECONDS = 0.001  # between two looks at a job whose ranks get signals; of other jobs:
IDLE_SECONDS = 0.05
STEP = re.compile(r'"step": (\d+),')
LINE = 100  # characters of a note that may have been half written; steps that are read twice do not matter
HALT_SECONDS = "3"  # the timeout of a job in which a rank is stopped for good
CLUSTER = launch.ROOT / "scripts" / "cluster_sim.sh"
SMALL = "64m"  # what containers often have


SIGNALS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "term": signal.SIGTERM, "halt": signal.SIGSTOP}


class Ended(NamedTuple):
    """The end of a job. code: None if it did not end in time. sent: the time of each fault from OUTSIDE, by its
    number."""

    code: int | None
    printed: str
    sent: dict[int, float]
    seconds: float


def run(plan: Plan, folder: Path, limit: float) -> Ended:
    """Run a plan's job with its notes in `folder`; it is killed when no rank has noted anything for `limit` seconds."""
    (folder / "plan.json").write_text(json.dumps(plan.as_dict(), indent=1))
    begin = time.monotonic()
    command = [*launcher(plan), sys.executable, "-m", RANK, str(folder)]
    stall = {"ALLREDUCE_STALL_SECONDS": os.environ.get("ALLREDUCE_STALL_SECONDS", "1")}
    if any(fault.kind == "halt" for fault in plan.faults):
        stall["ALLREDUCE_TIMEOUT_SECONDS"] = HALT_SECONDS
    if plan.hosts:
        stall["CLUSTER_SIM_MPIRUN"] = "--with-ft ulfm"
        stall["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
        command[: command.index(sys.executable)] = [str(CLUSTER), "+".join(map(str, plan.hosts)), "1gbit", "--"]
    with (
        open(folder / "output", "wb") as output,
        launch.started(command, output, subprocess.STDOUT, stall) as job,
    ):
        sent = _watch(job, plan, folder, limit)
        code = job.poll()
        if code is None:
            _ask(plan, folder)
    printed = (folder / "output").read_text(errors="replace")
    return Ended(code, printed, sent, time.monotonic() - begin)


def launcher(plan: Plan) -> list[str]:
    """Return the launcher: Open MPI's mpirun beside this Python or on PATH, with ULFM if the plan continues after
    failures."""
    beside = Path(sys.executable).with_name("mpirun")
    name = str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"
    surviving = ["--with-ft", "ulfm"] if plan.goes_on else []
    command = [name, *surviving, "--oversubscribe", "--bind-to", "none", "-n", str(plan.ranks)]
    if any(fault.kind == "shm" for fault in plan.faults):
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'mount -t tmpfs -o size={SMALL} tmpfs /dev/shm && exec "$@"',
            "sh",
            *command,
        ]
    return command


def _watch(job: "subprocess.Popen[bytes]", plan: Plan, folder: Path, limit: float) -> dict[int, float]:
    """Send each signal from outside at its instant; returns when the job has ended, or hangs."""
    noted, since = 0, time.monotonic()
    newest = Newest(plan, folder)
    outside = [(number, fault) for number, fault in enumerate(plan.faults) if fault.point == OUTSIDE]
    coming = {number: _signals(fault, folder, newest) for number, fault in outside}
    sent: dict[int, float] = {}
    while job.poll() is None and time.monotonic() - since < limit:
        if (size := sum(path.stat().st_size for path in folder.glob("notes.*"))) != noted:
            noted, since = size, time.monotonic()
            newest.read()
        for number, signals in coming.items():
            if (found := next(signals, None)) is not None:
                sent.setdefault(number, time.monotonic())
                _send(*found)
        time.sleep(CHECK_SECONDS if coming else IDLE_SECONDS)
    return sent


class Newest:
    """The newest step that any rank has noted; -1 before. A standby rank notes none."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._paths = [notes.path_of(folder, rank) for rank in range(plan.ranks)]
        self._read = dict.fromkeys(self._paths, 0)
        self.step = -1

    def read(self) -> None:
        """Read the notes written since the last call."""
        for path in filter(Path.exists, self._paths):
            with path.open() as file:
                file.seek(self._read[path])
                steps = STEP.findall(file.read())
                self._read[path] = max(0, file.tell() - LINE)
            self.step = max(self.step, *map(int, steps), self.step)


def _signals(fault: Fault, folder: Path, newest: Newest) -> Iterator[tuple[int, signal.Signals] | None]:
    """Yield None until the instant of a signal; then the process that gets it, and the signal."""
    while newest.step < fault.turn:
        yield None
    found = pids(folder, fault.rank)
    for number, delay in _series(fault):
        instant = time.monotonic() + delay
        while time.monotonic() < instant:
            yield None
        for pid in found:
            yield pid, number


def _series(fault: Fault) -> list[tuple[signal.Signals, float]]:
    """Return the signals of a fault from OUTSIDE, each with the seconds to wait before it."""
    if fault.kind == "stop":
        return [(signal.SIGSTOP, 0), (signal.SIGCONT, fault.delay)]
    return [(SIGNALS[fault.kind], fault.delay)]


def pids(folder: Path, rank: int) -> list[int]:
    """Return the process of a rank, if it has begun. In a PID namespace it has another number, which its notes have."""
    noted = [note["pid"] for note in notes.read(folder, rank) if note["what"] == "pid"]
    return [outer for inner in noted for outer in _outer(inner, folder)] if noted else []


def _outer(pid: int, folder: Path) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            here = re.search(rf"^NSpid:.*\b{pid}$", status.read_text(), re.MULTILINE)
            if here and str(folder) in status.with_name("cmdline").read_text():
                found.append(int(status.parent.name))
    return found


def _ask(plan: Plan, folder: Path) -> None:
    """Make every rank of a hanging job print its stacks."""
    for rank in range(plan.ranks):
        for pid in pids(folder, rank):
            _send(pid, signal.SIGUSR2)
    time.sleep(1)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
