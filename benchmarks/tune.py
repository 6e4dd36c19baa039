"""Measures all backends on this machine, and writes the decision table that the backend "auto" uses.

    mpirun -n 4 python -m benchmarks.tune

Every backend is measured with the code of benchmarks.bandwidth, on foreign arrays (ordinary arrays of the program) and
on arrays from auto's allocate(). The fastest backend of each range of sizes is written to a JSON file in the user's
cache folder, where allreduce.create("auto") finds it. A table has an entry for each topology, dtype and kind of memory;
entries of other topologies are kept. "auto" uses the table only on machines with the same CPU model, number of cores
and MPI library. The table is written after each dtype; --resume continues a run that was stopped.
"""

import argparse
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce import Topology
from allreduce.backends import auto
from allreduce.backends.decision_table import (
    ENVIRONMENT,
    Entries,
    Key,
    Step,
    TableError,
    default_path,
    dumps,
    loads,
    read_text,
    topology_key,
)
from allreduce.errors import OptionError, UnavailableError
from allreduce.machine import identify
from allreduce.registry import BACKENDS
from allreduce.transport.control import raise_together, root_value, together
from benchmarks.lib import cli, machine, outputs, sizes
from benchmarks.lib.advice import ranges
from benchmarks.lib.contenders import Contender, gather
from benchmarks.lib.outputs import Screen
from benchmarks.lib.timing import Cell, Checker, Plan, measure_size

ResultT = TypeVar("ResultT")
SIZES = [1 << power for power in range(8, 27)]  # 256 B to 64 MiB
QUICK_SIZES = [1 << power for power in range(10, 25, 2)]  # 1 KiB to 16 MiB
DTYPES = ("float32", "float64", "float16", "bfloat16")
BUDGET, QUICK_BUDGET = 90.0, 8.0
SELECTABLE = tuple(name for name in allreduce.NAMES if name not in ("auto", "nccl"))  # nccl: for CuPy arrays only
LEAD = 1.05  # a table changes to another backend only if that is faster by more than this factor


def table_steps(times: dict[int, dict[str, float]]) -> list[Step]:
    """Return the ranges of sizes and their fastest backends; they end at the geometric mean of two measured sizes.

    times: size in bytes -> backend -> time, in any unit.
    """
    spans = ranges(times, LEAD)
    ends = [int(math.sqrt(left.last * right.first)) for left, right in pairwise(spans)]
    return [Step(end, span.backend) for end, span in zip([*ends, None], spans, strict=True)]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--output",
        metavar="FILE",
        help=f"default {default_path()}; pass another path to auto by {ENVIRONMENT}=FILE or table=FILE",
    )
    add("--sizes", type=_sizes, metavar="A,B", help="sizes to measure, such as 1K,64K,1M (default 256 B to 64M by 2)")
    add("--dtypes", type=_dtypes, metavar="A,B", help=f"default {','.join(DTYPES)}")
    add("-o", "--op", type=cli.op, default="sum", metavar="OP", help="default sum")
    cli.add_some(parser, "--backends", SELECTABLE, about="backends to select from")
    add("--resume", action="store_true", help="leave out dtypes that the table already has for this topology")
    add("--quick", action="store_true", help="float32 only, 8 sizes up to 16M, some seconds; rough")
    cli.add_measuring_options(parser, f"{BUDGET:g}, with --quick {QUICK_BUDGET:g}")


def _sizes(text: str) -> list[int]:
    return sorted({cli.size(part) for part in cli.names(text)})


def _dtypes(text: str) -> list[np.dtype]:
    return [cli.dtype(part) for part in cli.names(text)]


def _run(world: Topology, args: argparse.Namespace, screen: Screen) -> int:
    comm = world.world
    if comm.size == 1:
        raise_together(
            comm, OptionError("one rank has nothing to reduce; start as many ranks as your jobs have: mpirun -n 4")
        )
    path, found = _table_path(comm, args.output), Entries()
    kept = _existing(comm, path)
    dtypes = args.dtypes or _dtypes("float32" if args.quick else ",".join(DTYPES))
    wanted = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    seconds = args.budget or (QUICK_BUDGET if args.quick else BUDGET)
    plan = Plan(seconds / len(dtypes) / len(wanted), args.iters, args.warmup_iters)
    for dtype in dtypes:
        cli.checked_op(comm, args.op, dtype)
        if not sizes.whole(wanted, dtype.itemsize):
            raise_together(comm, OptionError(f"--sizes: none holds an element of {dtype} ({dtype.itemsize} bytes)"))
    machine.check_memory(comm, 2 * wanted[-1])
    with Topology(comm, ranks_per_node=args.ranks_per_node) as topology:
        if args.resume:
            dtypes = _not_measured(topology, dtypes, kept, screen)
        lineups = [_lineup(topology, args, dtype) for dtype in dtypes]  # check all dtypes before the first measurement
        total = sum(len(sizes.whole(wanted, dtype.itemsize)) for dtype in dtypes)
        _estimate(total, plan, screen)
        with screen.bar(total) as bar:
            for dtype, (contenders, skipped) in zip(dtypes, lineups, strict=True):
                screen.say(f"# {topology}, {dtype}, {args.op}: {', '.join(each.name for each in contenders)}")
                spans = sizes.whole(wanted, dtype.itemsize)
                cells, lacking = _cells(topology, contenders, spans[-1] // dtype.itemsize, dtype)
                without = {**skipped, **({"arrays from allocate()": lacking} if lacking else {})}
                for name, why in without.items():
                    screen.say(f"#   without {name}: {why}")
                checker = Checker(comm, dtype, args.op)
                entries = _entries(topology, contenders, cells, spans, plan, checker, bar.update)
                for key, chosen in entries.items():
                    screen.say(f"#   {key.memory}: {_words(chosen)}")
                found.update(entries)
                _write(comm, path, {**kept, **found})
    screen.say(f"# wrote {path}: {len(found)} entries measured, {len(set(kept) - set(found))} kept")
    return 0


def _estimate(measurements: int, plan: Plan, screen: Screen) -> None:
    if measurements:
        seconds = measurements * plan.seconds
        about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        estimate = "" if plan.iterations else f", about {about}"
        screen.say(f"# {measurements} measurements{estimate}; results are saved after each dtype")


def _not_measured(topology: Topology, dtypes: list[np.dtype], kept: Entries, screen: Screen) -> list[np.dtype]:
    """Return the dtypes that the table does not have for this topology. Collective."""
    here = [key.dtype for key in kept if key[:2] == topology_key(topology)]
    known = root_value(topology.world, here, "learn what was measured already")
    left = [dtype for dtype in dtypes if str(dtype) not in known]
    measured = ", ".join(str(dtype) for dtype in dtypes if dtype not in left) or "none"
    screen.say(f"# measured already for {topology}: {measured}")
    return left


def _table_path(comm: MPI.Intracomm, output: str | None) -> Path:
    """Return the path of the table; creates the folder of the default path. Collective."""
    path = Path(output) if output else default_path()

    def make() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            problem = outputs.unwritable(str(path))
        except OSError as failed:
            problem = f"{path.parent} can't be created ({failed.strerror})"
        if problem:
            raise OptionError(f"{problem}; give another place by --output")

    if not output:
        _on_first(comm, make)
    return path


def _existing(comm: MPI.Intracomm, path: Path) -> Entries:
    """Return the entries of the table at `path`, on rank 0. OptionError if the file is not a table. Collective."""

    def read() -> Entries:
        try:
            return loads(read_text(path), identify(), BACKENDS) if path.exists() else {}
        except (OSError, TableError, UnicodeDecodeError) as failed:
            raise OptionError(f"{path} would be overwritten: {failed}; remove it or give another --output") from None

    return _on_first(comm, read) or {}


def _write(comm: MPI.Intracomm, path: Path, entries: Entries) -> None:
    """Write the table, on rank 0. Collective."""

    def write() -> None:
        try:
            outputs.write(path, dumps(entries))
        except OSError as failed:
            raise OptionError(f"{path} was not written: {failed.strerror or failed}") from None

    _on_first(comm, write)


def _on_first(comm: MPI.Intracomm, step: Callable[[], ResultT]) -> ResultT | None:
    """Call `step` on rank 0; its error is raised on all ranks. Returns its result on rank 0, else None. Collective."""
    return together(comm, lambda: step() if comm.rank == 0 else None)


def _lineup(topology: Topology, args: argparse.Namespace, dtype: np.dtype) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders for one dtype, and {name: reason} of the backends that are left out. Collective."""
    everything = len(args.backends) == len(SELECTABLE)
    asked = args.dtypes is not None
    return gather(topology, args.backends, [], dtype, args.op, optional=everything, dtype_asked=asked)


def _entries(
    topology: Topology,
    contenders: list[Contender],
    cells: list[Cell],
    wanted: list[int],
    plan: Plan,
    checker: Checker,
    advance: Callable[[], object],
) -> Entries:
    """Measure the entries for the dtype of the cells. Closes the contenders. Collective.

    advance: called after each size.
    """
    dtype = cells[0].array.dtype
    times: dict[str, dict[int, dict[str, float]]] = {}
    for size in wanted:
        for each in measure_size(topology.world, cells, size, plan, checker):
            if each.wrong:
                problem = f"{each.backend} has {each.wrong} wrong elements ({each.memory} {dtype}, {sizes.show(size)})"
                raise_together(topology.world, OptionError(f"{problem}; leave it out by --backends"))
            times.setdefault(each.memory, {}).setdefault(size, {})[each.backend] = each.time_us
        advance()
    for contender in contenders:
        contender.close()
    return {Key(*topology_key(topology), str(dtype), memory): table_steps(each) for memory, each in times.items()}


def _cells(
    topology: Topology, contenders: list[Contender], count: int, dtype: np.dtype
) -> tuple[list[Cell], str | None]:
    """Return a cell for every contender on an ordinary array, and on an array from auto's allocate(). Collective.

    The second value is the reason if there is no array from allocate(), else None.
    """
    foreign = np.zeros(count, dtype)
    cells = [Cell(each.name, "foreign", each.call, foreign) for each in contenders]
    known = next((each for each in contenders if each.name == auto.allocator(topology)), None)
    reason = f"{auto.allocator(topology)} allocates them, and is not measured"
    if known is not None and known.allocate is not None:
        try:
            allocated = known.allocate(count, dtype)
            return cells + [Cell(each.name, "allocated", each.call, allocated) for each in contenders], None
        except UnavailableError as error:
            reason = str(error)
    return cells, reason


def _words(chosen: list[Step]) -> str:
    parts = []
    for step in chosen:
        bound = "above" if step.up_to is None else f"up to {sizes.show(step.up_to)}"
        parts.append(f"{step.backend} {bound}" if len(chosen) > 1 else f"{step.backend} at all sizes")
    return ", ".join(parts)


main = cli.command("benchmarks.tune", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
