"""Microseconds of a short call in this library's ways, beside mpi4py's own Allreduce: in a loop, and with cold caches.

mpirun -n 2 python -m benchmarks.latency
mpirun -n 4 python -m benchmarks.latency -b 8 -e 1M -f 4 --backend native
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import allreduce
from allreduce import Topology
from allreduce.machine import identify
from benchmarks.lib import cli, peers, sizes, timing
from benchmarks.lib.columns import columns
from benchmarks.lib.outputs import Screen
from benchmarks.lib.results import COLD

EPILOG = """\
mpi4py: comm.Allreduce(IN_PLACE, array). bound: a function from reduce.bind. allocated: reduce(array, op="sum"), with an
array from allocate(). foreign: the same with an array of the program. loop: one call after the other; the ways take
turns. cold: each call after other work, which fills the caches, and a barrier. Medians of the slowest rank's times.
"""
NATIVE, DTYPE = "mpi4py", np.dtype(np.float32)
LEAST_CALLS, MOST_CALLS, LOOP_SECONDS = 20, 1000, 0.02  # of a turn in a loop
COLD_SECONDS = 1.0  # for a size


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    cli.add_sizes(parser, "32", "1M")
    add("-f", "--stepfactor", type=cli.at_least(1.01, float), default=8.0, metavar="F", help="default 8")
    add("--backend", choices=allreduce.NAMES, default="auto", metavar="NAME", help="default auto")
    add("--turns", type=cli.at_least(1), default=15, metavar="N", help="loops of each way (default 15)")
    cli.add_json_option(parser)


def _ways(backend: allreduce.AllReduce, native: peers.Contender, count: int) -> dict[str, Callable[[], object]]:
    """Return the calls, each on an array of zeros of its own. Collective."""
    allocated = backend.allocate(count, DTYPE)
    return {
        NATIVE: partial(native.call, np.zeros(count, DTYPE)),
        "bound": backend.bind(allocated, "sum"),
        "allocated": partial(backend, allocated, op="sum"),
        "foreign": partial(backend, np.zeros(count, DTYPE), op="sum"),
    }


def _loop(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _calls(topology: Topology, ways: dict[str, Callable[[], object]]) -> int:
    """Return how many calls of the slowest way take LOOP_SECONDS. Collective."""
    seconds = np.zeros(len(ways))
    for row, call in enumerate(ways.values()):
        _loop(call, LEAST_CALLS)
        begin = time.perf_counter()
        _loop(call, LEAST_CALLS)
        seconds[row] = (time.perf_counter() - begin) / LEAST_CALLS
    return int(min(max(LOOP_SECONDS / timing.slowest(topology.world, seconds).max(), LEAST_CALLS), MOST_CALLS))


def _alone(call: Callable[[], object], _: np.ndarray) -> None:
    call()


def _run(topology: Topology, args: argparse.Namespace, screen: Screen) -> int:
    screen.say(f"# {topology}; {args.backend}, float32, sum; {identify()}")
    native, found = peers.mpi4py(topology, "sum", DTYPE, 0), []
    with allreduce.create(args.backend, topology) as backend:
        for size in cli.swept(topology.world, args, DTYPE):
            ways = _ways(backend, native, size // DTYPE.itemsize)
            calls = _calls(topology, ways)
            loops = {name: partial(_loop, call, calls) for name, call in ways.items()}
            hot = timing.take_turns(topology.world, loops, args.turns, 2, screen)
            cells = [timing.Cell(name, COLD, partial(_alone, call), np.zeros(1)) for name, call in ways.items()]
            cold, _ = timing.measure(topology.world, cells, 1, timing.Plan(COLD_SECONDS), None)
            for name, seconds in zip(ways, 1e6 * np.median(cold, axis=1), strict=True):
                loop = 1e6 * median(hot[name]) / calls
                found.append({"size": size, "way": name, "loop_us": loop, "cold_us": float(seconds)})
    native.close()
    screen.say(*columns(["size", "way", "loop us", "- mpi4py", "/ mpi4py", "cold us", "/ mpi4py"], _rows(found)))
    screen.write_record({"ranks": topology.size, "backend": args.backend, "results": found})
    return 0


def _rows(found: list[dict[str, Any]]) -> list[list[str]]:
    bare = {each["size"]: each for each in found if each["way"] == NATIVE}
    rows = []
    for each in found:
        beside, loop, cold = bare[each["size"]], each["loop_us"], each["cold_us"]
        over = f"{loop - beside['loop_us']:+.2f}", f"{loop / beside['loop_us']:.2f}"
        show = sizes.show(each["size"])
        rows.append([show, each["way"], f"{loop:.2f}", *over, f"{cold:.2f}", f"{cold / beside['cold_us']:.2f}"])
    return rows


main = cli.command("benchmarks.latency", __doc__, add_options, _run, EPILOG)

if __name__ == "__main__":
    sys.exit(main())
