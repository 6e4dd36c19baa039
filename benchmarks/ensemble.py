"""Measures how punctual the answers of an ensemble are while ranks are stopped (SIGSTOP), and when they help again.

    mpirun -n 5 python -m benchmarks.ensemble --stop 3 --calls 1000 --deadline 0.05

Every rank has one member. The ranks of --stop stop, rank 0 makes --calls predictions with a deadline, one after the
other, and lets the ranks continue. An answer is in time if it comes by the deadline + 20 ms. The exit code is 1 if an
answer is late or lacks a member that was not stopped, or if a continued rank is still missing in the last answer.
Without --stop no rank is stopped. All ranks must run on one host.
"""

import argparse
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from allreduce import Topology
from allreduce.errors import OptionError
from allreduce.process import proc
from allreduce.transport.control import all_values, raise_together
from benchmarks.lib import cli
from benchmarks.lib.outputs import Screen
from trainers import EnsembleTrainer, NumpyNetwork
from trainers.apps.ensemble.timely import Prediction
from trainers.errors import DeadlineExceededError

ALLOWED = 0.020  # seconds after the deadline
WARM = 20  # calls before the ranks are stopped
AFTER = 100  # calls after they continue
WARM_DEADLINE = 10.0
FEATURES, CLASSES = 64, 10


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--stop",
        type=cli.several(cli.at_least(1)),
        default=[],
        metavar="R,R,...",
        help="ranks to stop, not rank 0 (default: none)",
    )
    add("--calls", type=cli.at_least(1), default=1000, metavar="N", help="(default: 1000)")
    add("--deadline", type=cli.at_least(0.001, float), default=0.05, metavar="SECONDS", help="(default: 0.05)")
    add("--rows", type=cli.at_least(1), default=32, metavar="N", help="rows of a call (default: 32)")
    add("--hidden", type=cli.at_least(1), default=32, metavar="N", help="units of a member (default: 32)")
    cli.add_json_option(parser)


class Calls:
    """Predictions of an ensemble by a deadline, and how they went on rank 0.

    seconds: of each call. members: the members that have voted in each.
    """

    def __init__(self, ensemble: EnsembleTrainer, x: np.ndarray) -> None:
        self._ensemble, self._x = ensemble, x
        self.seconds: list[float] = []
        self.members: list[tuple[int, ...]] = []

    def make(self, count: int, deadline: float) -> None:
        """Every rank makes these calls."""
        for _ in range(count):
            begin = time.perf_counter()
            try:
                found: Prediction | None = self._ensemble.predict(self._x, deadline=deadline)
            except DeadlineExceededError:  # not even rank 0 has voted
                found = None
            self.seconds.append(time.perf_counter() - begin)
            self.members.append(found.members if found else ())


def measure(topology: Topology, options: argparse.Namespace, pids: list[int]) -> dict[str, Any]:
    """Return the results on rank 0. Collective. pids: of the ranks."""
    stopped = [pids[rank] for rank in options.stop if topology.rank == 0]
    x = np.random.default_rng(0).random((options.rows, FEATURES), np.float32)
    with EnsembleTrainer(
        lambda seed: NumpyNetwork([FEATURES, options.hidden, CLASSES], seed=seed), topology.size, topology=topology
    ) as ensemble:
        Calls(ensemble, x).make(WARM, WARM_DEADLINE)
        during, after = Calls(ensemble, x), Calls(ensemble, x)
        if topology.rank in options.stop:
            os.kill(os.getpid(), signal.SIGSTOP)  # before the first call: a rank may be several calls ahead of rank 0
        while not all(map(_is_stopped, stopped)):
            time.sleep(0.001)
        try:
            during.make(options.calls, options.deadline)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        after.make(AFTER, options.deadline)
    return _result(during, after, topology.size, options)


def _result(during: Calls, after: Calls, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    milliseconds = np.array(during.seconds) * 1e3
    living = {*range(ranks)} - {*options.stop}
    whole = [len(members) == ranks for members in after.members]
    first = next((number for number, each in enumerate(whole, 1) if each), None)
    return {
        "calls": len(milliseconds),
        "in_time": int((milliseconds <= (options.deadline + ALLOWED) * 1e3).sum()),
        "complete": sum(living <= {*members} for members in during.members),
        **{f"p{each}_ms": round(float(np.percentile(milliseconds, each)), 2) for each in (50, 99)},
        "max_ms": round(float(milliseconds.max()), 2),
        "calls_until_whole": first,
        "seconds_until_whole": None if first is None else round(sum(after.seconds[:first]), 3),
        "whole_at_the_end": whole[-1],
    }


def _is_stopped(pid: int) -> bool:
    stat = proc.stat(pid)
    return stat is not None and stat.state == "T"


def _run(topology: Topology, options: argparse.Namespace, screen: Screen) -> int:
    everyone = all_values(topology.world, [os.getpid(), os.uname().nodename], "learn the processes of the ranks")
    text = ""
    if options.stop and max(options.stop) >= topology.size:
        text = f"--stop {max(options.stop)}: this job has {topology.size} ranks, 0 to {topology.size - 1}"
    elif len({host for _, host in everyone}) > 1:
        text = "rank 0 stops processes of its own host only: start all ranks on one host"
    raise_together(topology.world, OptionError(text) if text else None)
    found = measure(topology, options, [pid for pid, _ in everyone])
    if topology.rank:
        return all_values(topology.world, 0, "learn the exit code")[0]
    names = ", ".join(map(str, options.stop)) or "none"
    screen.say(
        f"{topology.size} ranks, stopped: {names}; {found['calls']} calls with a deadline of {options.deadline:g} s",
        f"in time (deadline + {ALLOWED * 1e3:.0f} ms): {found['in_time']} of {found['calls']}; with the votes of all "
        f"other members: {found['complete']}",
        f"p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms, max {found['max_ms']} ms",
        f"after SIGCONT all members vote from call {found['calls_until_whole']} on, after "
        f"{found['seconds_until_whole']} s",
    )
    screen.write_record({"command": screen.command, "ranks": topology.size, **vars(options), **found})
    bad = found["in_time"] < found["calls"] or found["complete"] < found["calls"] or not found["whole_at_the_end"]
    return all_values(topology.world, int(bad), "learn the exit code")[0]


main = cli.command("benchmarks.ensemble", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
