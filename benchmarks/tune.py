"""Measure once, so that "auto" decides by measurement: writes this machine's decision table.

    mpirun -n 4 python -m benchmarks.tune

Every backend is measured with the code of benchmarks.bandwidth, on foreign arrays and on arrays from auto's
allocate(); the fastest of each range of sizes goes into a JSON file in the user's cache folder, where
allreduce.create("auto") finds it. A table has an entry for each topology, dtype and kind of memory; those for
other topologies are kept. It counts on machines of the same CPU model, cores and MPI library only.

The table is written after each dtype, so a run that is stopped loses one dtype at most; the same command with
--resume goes on.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

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
from allreduce.errors import AllReduceError, OptionError, UnavailableError
from allreduce.machine import identify
from allreduce.notices import on_terminal
from allreduce.registry import BACKENDS
from allreduce.transport.control import raise_together, root_value
from benchmarks.lib import cli, machine, outputs, sizes
from benchmarks.lib.contenders import ALL, Contender, gather
from benchmarks.lib.timing import Cell, Checker, Plan, measure
from benchmarks.lib.verdict import ranges


class Progress:
    """Of sizes that are measured one after another: an estimate at the begin, a bar on a terminal, lines that stay.

    shown: false on all ranks but one. sizes: how many, for each dtype. plan: says what one of them may take.
    """

    def __init__(self, shown: bool, sizes: Sequence[int], plan: Plan) -> None:
        self._shown, count = shown, sum(sizes)
        if count:
            seconds = count * plan.seconds
            about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
            estimate = "" if plan.iterations else f", about {about}"
            self.say(f"# {count} measurements{estimate}; what is measured is kept after each dtype")
        hidden = not (shown and count and on_terminal())
        self._bar = tqdm(total=count, unit="size", leave=False, ncols=80, file=sys.stderr, disable=hidden)
        self.close = self._bar.close

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        if self._shown:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def advance(self, what: str) -> None:
        """One size is measured."""
        self._bar.set_description(what, refresh=False)
        self._bar.update()


PROGRAM = "benchmarks.tune"
SIZES = [1 << power for power in range(8, 27)]  # 256 B to 64 MiB
QUICK_SIZES = [1 << power for power in range(10, 25, 2)]  # 1 KiB to 16 MiB
DTYPES = ("float32", "float64", "float16", "bfloat16")
BUDGET, QUICK_BUDGET = 90.0, 8.0
NEVER_CHOSEN = {"auto": "is who will choose", "nccl": "is chosen for CuPy arrays, and for nothing else"}
LEAD = 1.05  # another backend takes over only where it is faster by more than this


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks; the exit code."""
    return cli.run(_parser(), argv, lambda world, args: _run(world.world, args))


def steps(times: dict[int, dict[str, float]]) -> list[Step]:
    """Ranges of sizes from times (size in bytes -> backend -> any unit), which end half-way between two sizes."""
    spans = ranges(times, LEAD)
    ends = [int(math.sqrt(left.last * right.first)) for left, right in pairwise(spans)]
    return [Step(end, span.backend) for end, span in zip([*ends, None], spans, strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--output", metavar="FILE", help=f"default {default_path()}; tell auto by {ENVIRONMENT}=FILE or table=FILE")
    add("--sizes", type=_sizes, metavar="A,B", help="sizes to measure, such as 1K,64K,1M (default 256 B to 64M by 2)")
    add("--dtypes", type=_dtypes, metavar="A,B", help=f"default {','.join(DTYPES)}")
    add("-o", "--op", type=cli.op, default="sum", metavar="OP", help="default sum")
    add("--backends", type=cli.names, default=[ALL], metavar="A,B", help="those to choose from (default all)")
    add("--resume", action="store_true", help="leave out dtypes that the table has already for this topology")
    add("--quick", action="store_true", help="float32 only, 8 sizes up to 16M, some seconds; rough")
    cli.add_measuring_options(parser, f"{BUDGET:g}, with --quick {QUICK_BUDGET:g}")
    return parser


def _sizes(text: str) -> list[int]:
    return sorted({cli.size(part) for part in cli.names(text)})


def _dtypes(text: str) -> list[np.dtype]:
    return [cli.dtype(part) for part in cli.names(text)]


def _run(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    if comm.size == 1:
        raise_together(
            comm, OptionError("one rank has nothing to reduce; start as many as your jobs have: mpirun -n 4")
        )
    for name, why in NEVER_CHOSEN.items():
        if name in args.backends:
            raise_together(comm, OptionError(f"--backends {name}: it {why}; name those to choose from"))
    path = Path(args.output) if args.output else default_path()
    _prepare(comm, path, bool(args.output))
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
    found: Entries = {}
    with Topology(comm, ranks_per_node=args.ranks_per_node) as topology:
        if args.resume:
            dtypes = _left_out(topology, dtypes, kept)
        lineups = [_lineup(topology, args, dtype) for dtype in dtypes]  # refused now, or not at all
        progress = Progress(comm.rank == 0, [len(sizes.whole(wanted, dtype.itemsize)) for dtype in dtypes], plan)
        for dtype, (contenders, skipped) in zip(dtypes, lineups, strict=True):
            progress.say(f"# {topology}, {dtype}, {args.op}: {', '.join(each.name for each in contenders)}")
            for name, why in skipped.items():
                progress.say(f"#   without {name}: {why}")
            checker = Checker(comm, dtype, args.op)
            spans = sizes.whole(wanted, dtype.itemsize)
            found.update(_entries(topology, dtype, contenders, spans, plan, checker, progress))
            _write(comm, path, {**kept, **found})
        progress.close()
    if comm.rank == 0:
        print(f"# wrote {path}: {len(found)} entries measured, {len(set(kept) - set(found))} kept", flush=True)
    return 0


def _left_out(topology: Topology, dtypes: list[np.dtype], kept: Entries) -> list[np.dtype]:
    """The dtypes that the table does not have for this topology. Collective."""
    here = [key.dtype for key in kept if key[:2] == topology_key(topology)]
    known = root_value(topology.world, here, "learn what was measured already")
    left = [dtype for dtype in dtypes if str(dtype) not in known]
    if topology.rank == 0:
        measured = ", ".join(str(dtype) for dtype in dtypes if dtype not in left) or "none"
        print(f"# measured already for {topology}: {measured}", flush=True)
    return left


def _write(comm: MPI.Intracomm, path: Path, entries: Entries) -> None:
    """Replace the table by rank 0. Collective."""
    error = None
    if comm.rank == 0:
        try:
            outputs.write(path, dumps(entries))
        except OSError as failed:
            error = OptionError(f"{path} was not written: {failed.strerror or failed}")
    raise_together(comm, error)


def _prepare(comm: MPI.Intracomm, path: Path, given: bool) -> None:
    """See that the table can be written; its folder is made only where it is the default one. Collective."""
    error: AllReduceError | None = None
    if comm.rank == 0 and not given:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as failed:
            error = OptionError(f"{path.parent} can't be made ({failed.strerror}); give another place by --output")
    raise_together(comm, error)
    outputs.check(comm, {"--output": str(path)})


def _existing(comm: MPI.Intracomm, path: Path) -> Entries:
    """What the table at `path` already holds; other files are not overwritten. Collective."""
    entries: Entries = {}
    error: AllReduceError | None = None
    if comm.rank == 0 and path.exists():
        try:
            entries = loads(read_text(path), identify(), BACKENDS)
        except (OSError, TableError, UnicodeDecodeError) as failed:
            error = OptionError(f"{path} is in the way: {failed}; remove it or give another --output")
    raise_together(comm, error)
    return entries


def _lineup(topology: Topology, args: argparse.Namespace, dtype: np.dtype) -> tuple[list[Contender], dict[str, str]]:
    """Those to choose from for one dtype, and who can't take part and why. Collective."""
    everything = ALL in args.backends
    names = [name for name in allreduce.NAMES if name not in NEVER_CHOSEN] if everything else args.backends
    return gather(topology, names, [], dtype, args.op, optional=everything, dtype_asked=args.dtypes is not None)


def _entries(
    topology: Topology,
    dtype: np.dtype,
    contenders: list[Contender],
    wanted: list[int],
    plan: Plan,
    checker: Checker,
    progress: Progress,
) -> Entries:
    """The measured entries for one dtype. Collective; closes the contenders."""
    cells, lacking = _cells(topology, contenders, wanted[-1] // dtype.itemsize, dtype)
    if lacking:
        progress.say(f"#   without arrays from allocate(): {lacking}")
    times: dict[str, dict[int, dict[str, float]]] = {}
    for size in wanted:
        seconds, wrong = measure(topology.world, cells, size // dtype.itemsize, plan, checker)
        for cell, row, bad in zip(cells, seconds, wrong, strict=True):
            if bad:
                told = f"{cell.backend} made {bad} elements wrong ({cell.memory} {dtype}, {sizes.show(size)})"
                raise_together(topology.world, OptionError(f"{told}; leave it out by --backends"))
            times.setdefault(cell.memory, {}).setdefault(size, {})[cell.backend] = float(np.median(row))
        progress.advance(f"{dtype}, {sizes.show(size)}")
    for contender in contenders:
        contender.close()
    found = {Key(*topology_key(topology), str(dtype), memory): steps(each) for memory, each in times.items()}
    for key, chosen in found.items():
        progress.say(f"#   {key.memory}: {_words(chosen)}")
    return found


def _cells(
    topology: Topology, contenders: list[Contender], count: int, dtype: np.dtype
) -> tuple[list[Cell], str | None]:
    """Foreign arrays, and one array as auto's allocate() gives it, which only one backend knows. Collective.

    The second value says why there is no array from allocate().
    """
    foreign = np.zeros(count, dtype)
    cells = [Cell(each.name, "foreign", each.call, foreign) for each in contenders]
    known = next((each for each in contenders if each.name == auto.home(topology)), None)
    reason = f"{auto.home(topology)} gives them, and does not take part"
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


if __name__ == "__main__":
    sys.exit(main())
