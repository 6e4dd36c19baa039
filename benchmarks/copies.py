"""What does a step of the sharded update cost more when each slice is kept twice?

    mpirun --with-ft ulfm -n 2 python -m benchmarks.copies

A NumpyNetwork of 10 M parameters with Adam is trained with copies=1 and with copies=2, in turn. The time of a step is
that from its begin to the begin of the next, the slowest rank's. --framework torch trains a module instead.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np

import allreduce
from allreduce.transport import ulfm
from benchmarks.checkpoint import replica_of, rows_of
from benchmarks.lib import cli, outputs, timing
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
    cli.add_json_option(parser)
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
    x, y = rows_of(options, topology.size)
    sides = {
        copies: MirroredTrainer(replica_of(options), options.allreduce, topology, update="sharded", copies=copies)
        for copies in COPIES
    }
    seconds: dict[int, list[float]] = {copies: [] for copies in COPIES}
    for _ in range(options.turns):
        for copies, trainer in sides.items():
            begins = Begins()
            trainer.fit(x, y, 1, batch, callbacks=[begins], progress=False, shuffle=False)
            seconds[copies] += timing.slowest(topology.world, np.diff(begins.times)[1:]).tolist()
    for trainer in sides.values():
        trainer.close()
    return seconds


def _run(topology: allreduce.Topology, options: argparse.Namespace) -> int:
    screen = outputs.Screen(topology.world, options.json)
    seconds = measure(topology, options)
    what = "" if ulfm.in_force() else "; no second copies are kept: mpirun --with-ft ulfm"
    names = {copies: f"copies={copies}" for copies in COPIES}
    screen.say(f"{topology}: {options.framework}, {options.parameters:g} M parameters, Adam{what}")
    screen.say(timing.table({names[copies]: each for copies, each in seconds.items()}, names[1]))
    screen.put({**vars(options), "ranks": topology.size, "seconds": seconds})
    return 0


main = cli.command(_parser, _run)

if __name__ == "__main__":
    sys.exit(main())
