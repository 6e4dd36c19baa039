"""What does a step of the sharded update cost more when each slice is kept twice?

    mpirun --with-ft ulfm -n 2 python -m benchmarks.copies

A NumpyNetwork of 10 M parameters with Adam is trained with copies=1 and with copies=2, in turn. The time of a step is
that from its begin to the begin of the next, the slowest rank's. --framework torch trains a module instead.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.transport import ulfm
from benchmarks.checkpoint import CLASSES, FEATURES, replica_of
from benchmarks.lib import cli, outputs
from trainers import MirroredTrainer
from trainers.watching.callback import Callback

PROGRAM = "benchmarks.copies"
COPIES = (1, 2)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--parameters", type=cli.at_least(0.01, float), default=10.0, metavar="M", help="millions (default: 10)")
    add("--batch", type=cli.at_least(1), default=128, metavar="N", help="rows per rank (default: 128)")
    add("--steps", type=cli.at_least(3), default=10, metavar="N", help="of a turn (default: 10)")
    add("--turns", type=cli.at_least(1), default=6, metavar="N", help="of each (default: 6)")
    add("--framework", choices=["numpy", "torch"], default="numpy", help="(default: numpy)")
    add("--allreduce", choices=allreduce.NAMES, default="auto", metavar="NAME", help="(default: auto)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON, to stdout without FILE")
    return parser


class Begins(Callback):
    """When each step began."""

    reads_batches = False

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


def measure(topology: allreduce.Topology, options: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of the steps by the number of copies. Collective."""
    batch = options.batch * topology.size
    x = np.random.default_rng(0).standard_normal((options.steps * batch, FEATURES), np.float32)
    y = np.arange(len(x)) % CLASSES
    sides = {
        copies: MirroredTrainer(replica_of(options), options.allreduce, topology, update="sharded", copies=copies)
        for copies in COPIES
    }
    seconds: dict[int, list[float]] = {copies: [] for copies in COPIES}
    for _ in range(options.turns):
        for copies, trainer in sides.items():
            begins = Begins()
            trainer.fit(x, y, 1, batch, callbacks=[begins], progress=False, shuffle=False)
            times = np.diff(begins.times)[1:]
            topology.world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
            seconds[copies] += times.tolist()
    for trainer in sides.values():
        trainer.close()
    return seconds


def table(seconds: dict[int, list[float]]) -> str:
    lines = [f"{'copies':<8}{'steps':>6}{'median ms':>11}{'min':>9}{'/ one copy':>12}"]
    for copies, each in seconds.items():
        ratio = statistics.median(each) / statistics.median(seconds[1])
        lines.append(
            f"{copies:<8}{len(each):>6}{1e3 * statistics.median(each):>11.1f}{1e3 * min(each):>9.1f}{ratio:>12.2f}"
        )
    return "\n".join(lines)


def _run(topology: allreduce.Topology, options: argparse.Namespace) -> int:
    outputs.check(topology.world, {"--json": None if options.json == "-" else options.json})
    seconds = measure(topology, options)
    if topology.rank == 0:
        where = sys.stderr if options.json == "-" else sys.stdout
        what = "" if ulfm.in_force() else "; no second copies are kept: mpirun --with-ft ulfm"
        print(f"{topology}: {options.framework}, {options.parameters:g} M parameters, Adam{what}", file=where)
        print(table(seconds), file=where, flush=True)
        outputs.put(options.json, json.dumps({**vars(options), "ranks": topology.size, "seconds": seconds}, indent=1))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code. Collective."""
    with allreduce.Topology() as topology:
        options = cli.parse_together(_parser(), argv, topology.world)
        return cli.run_together(PROGRAM, topology.world, lambda: _run(topology, options))


if __name__ == "__main__":
    sys.exit(main())
