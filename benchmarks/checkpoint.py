"""Measures the cost of a checkpoint: in the step that starts it, and in the steps while a thread writes it.

    mpirun -n 2 python -m benchmarks.checkpoint --json out.json

Trains a NumpyNetwork of 10 M parameters with Adam and a checkpoint every --every steps. The time of a step is from its
beginning to the beginning of the next step, on the slowest rank. The step that starts a checkpoint copies the state and
passes it to a thread of rank 0. While the thread writes, it uses part of a core, which slows the following steps if no
core is free.
"""

import argparse
import os
import sys
import tempfile
from typing import Any

import numpy as np
from tqdm import tqdm

from allreduce import Topology
from allreduce.transport.control import root_value, together
from benchmarks.lib import cli, timing
from benchmarks.lib.outputs import Screen
from benchmarks.lib.sizes import layers
from trainers import Checkpoint, MirroredTrainer, NumpyNetwork
from trainers.files import checkpoint as files
from trainers.options.average import UPDATES

FEATURES, CLASSES = 512, 10
PLAIN, WRITES, DURING = "no checkpoint", "the step that writes", "while it is written"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parameters", type=cli.at_least(0.01, float), default=10.0, metavar="M", help="millions (default: 10)")
    add("--batch", type=cli.at_least(1), default=128, metavar="N", help="rows per rank (default: 128)")
    add("--steps", type=cli.at_least(4), default=100, metavar="N", help="(default: 100)")
    add("--every", type=cli.at_least(2), default=20, metavar="N", help="steps between checkpoints (default: 20)")
    add("--update", choices=UPDATES, default="replicated", help="(default: replicated)")
    add("--folder", metavar="DIR", help="where rank 0 writes (default: a temporary folder here)")
    cli.add_json_option(parser)


class Steps(timing.Clock):
    """Records when each step begins and, on rank 0, whether a checkpoint is being written at that time."""

    def __init__(self, folder: str, every: int, bar: tqdm) -> None:
        self._folder, self._every, self._bar = folder, every, bar
        self.writing: list[bool] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        begun = batch - batch % self._every  # the number of steps at the last checkpoint
        path = files.path_of(self._folder, begun)
        self.writing.append(bool(begun) and self.trainer.rank == 0 and not os.path.exists(path))
        self._bar.update()
        super().on_train_batch_begin(batch, logs)


def measure(topology: Topology, options: argparse.Namespace, folder: str, screen: Screen) -> dict[str, Any]:
    """Return the seconds of each kind of step, and the size of a checkpoint. Collective."""
    replica = NumpyNetwork(layers(options.parameters * 1e6, FEATURES, CLASSES), optimizer="adam")
    batch = options.batch * topology.size
    x = np.random.default_rng(0).standard_normal((options.steps * batch, FEATURES), np.float32)
    y = np.arange(len(x)) % CLASSES
    with (
        MirroredTrainer(replica, "auto", topology, update=options.update) as trainer,
        screen.bar(options.steps, "step") as bar,
    ):
        steps = Steps(folder, options.every, bar)
        given = Checkpoint(folder, f"{options.every} steps", keep=2)
        trainer.fit(x, y, 1, batch, checkpoint=given, callbacks=[steps], progress=False, shuffle=False)
    times = timing.slowest(topology.world, np.diff(steps.begins))
    writing = timing.slowest(topology.world, np.array(steps.writing[:-1], np.int64))
    writes = (np.arange(1, len(times) + 1) % options.every) == 0
    warm = np.arange(len(times)) >= 3
    kinds = {PLAIN: warm & ~writes & (writing == 0), WRITES: writes, DURING: warm & ~writes & (writing == 1)}
    size = os.path.getsize(files.paths(folder)[0]) if topology.rank == 0 else 0
    return {
        "parameters": replica.gradient_length,
        "bytes": root_value(topology.world, size, "learn the size of a checkpoint"),
        "seconds": {name: times[chosen].tolist() for name, chosen in kinds.items()},
    }


def _run(topology: Topology, options: argparse.Namespace, screen: Screen) -> int:
    with tempfile.TemporaryDirectory(dir=options.folder or ".", prefix="checkpoints-") as own:
        folder = root_value(topology.world, own, "learn the folder")
        result = measure(topology, options, folder, screen)
        together(topology.world, lambda: None)  # no rank removes its folder before all ranks are done
    what = f"{options.update}, {result['parameters'] / 1e6:.1f} M parameters, Adam"
    screen.say(
        f"{topology}: {what}, {options.batch} rows per rank",
        f"a checkpoint of {result['bytes'] / 1e6:.0f} MB every {options.every} steps",
        timing.table(result["seconds"], PLAIN),
    )
    screen.write_record({**vars(options), "ranks": topology.size, "nodes": topology.nodes, **result})
    return 0


main = cli.command("benchmarks.checkpoint", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
