"""Measures the constants of this machine's cost formulas, by which the backend "auto" selects algorithms.

    mpirun -n 4 python -m benchmarks.tune

Without a file "auto" measures them in some milliseconds, in each run. This command takes longer and writes them to a
JSON file in the user's cache folder, where allreduce.create("auto") finds it. So each run selects the same algorithms.
A file has an entry for each topology; entries of other topologies are kept. "auto" uses the file only on machines with
the same CPU model, number of cores and MPI library.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from allreduce import Topology
from allreduce.errors import OptionError
from allreduce.files import ContentError
from allreduce.transport.control import raise_together, together
from allreduce.tuning.constants import ENVIRONMENT, Entries, default_path, dumps, key_of, read
from allreduce.tuning.measuring import measure
from benchmarks.lib import cli, outputs
from benchmarks.lib.outputs import Screen

TRIES = 300


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--output",
        metavar="FILE",
        help=f"default {default_path()}; pass another path to auto by {ENVIRONMENT}=FILE or table=FILE",
    )
    add("-n", "--iters", type=cli.at_least(1), default=TRIES, metavar="N", help=f"times of each constant ({TRIES})")
    add("--ranks-per-node", type=cli.nodes, metavar="R", help="simulate nodes of R ranks (or of 3,1 ranks)")


def _run(world: Topology, args: argparse.Namespace, screen: Screen) -> int:
    comm = world.world
    if comm.size == 1:
        raise_together(
            comm, OptionError("one rank has nothing to reduce; start as many ranks as your jobs have: mpirun -n 4")
        )
    path = Path(args.output or default_path())

    def on_first(step: Callable[[], Entries | None]) -> Entries | None:
        return together(comm, lambda: step() if comm.rank == 0 else None)

    kept = on_first(partial(_existing, path)) or {}
    with Topology(comm, ranks_per_node=args.ranks_per_node) as topology:
        screen.say(f"# {topology}: the medians of {args.iters} times")
        machine = measure(topology, args.iters)
        for name, value in asdict(machine).items():
            screen.say(f"#   {name:<14}{value:.3g}")
        on_first(partial(_write, path, {**kept, key_of(topology): machine}))
        others = set(kept) - {key_of(topology)}
    screen.say(f"# wrote {path}: 1 entry measured, {len(others)} kept")
    return 0


def _existing(path: Path) -> Entries:
    """Return the entries of the file; creates its folder. Raises OptionError if it can't be written or is another file.

    Local."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = outputs.unwritable(str(path))
    except OSError as failed:
        problem = f"{path.parent} can't be created ({failed.strerror})"
    if problem:
        raise OptionError(f"{problem}; give another place by --output")
    try:
        return read(path) if path.exists() else {}
    except (OSError, ContentError) as failed:
        raise OptionError(f"{path} would be overwritten: {failed}; remove it or give another --output") from None


def _write(path: Path, entries: Entries) -> None:
    try:
        outputs.write(path, dumps(entries))
    except OSError as failed:
        raise OptionError(f"{path} was not written: {failed.strerror or failed}") from None


main = cli.command("benchmarks.tune", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
