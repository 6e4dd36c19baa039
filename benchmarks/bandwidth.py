"""Bandwidth and latency of every backend, side by side, in the form of nccl-tests.

mpirun -n 4 python -m benchmarks.bandwidth
mpirun -n 4 python -m benchmarks.bandwidth -b 1K -e 64M -f 4 --backends shared,ring,native --peers gloo
mpirun -n 2 python -m benchmarks.bandwidth -b 4K -e 64M -f 8 --backends auto --peers --cold --plot peers.svg
mpirun -n 4 python -m benchmarks.bandwidth --json run.json --html report.html --plot busbw.png
"""

import argparse
import datetime
import sys
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce import Topology
from allreduce.arrays import dtypes
from allreduce.arrays.compression import Half
from allreduce.errors import OptionError
from allreduce.transport.control import raise_together, root_value, together
from benchmarks.lib import cli, limits, machine, outputs, plot, report, table
from benchmarks.lib.advice import advice, wrong_results
from benchmarks.lib.contenders import gather
from benchmarks.lib.outputs import Screen
from benchmarks.lib.peers import PEERS, Contender
from benchmarks.lib.results import COLD, FileError, Run, from_json, load, merge, to_csv, to_json
from benchmarks.lib.timing import Cell, Checker, Plan, measure_size

BUDGET = 60.0
EPILOG = """\
output: a line for each size, with the fastest backend for arrays from the backend's allocate() and for foreign arrays
(ordinary arrays of the program), and one sentence of advice. limit: its part of the bus bandwidth that memory (measured
by copying) or network (by sending) allow. --json, --csv and --html hold all results; --verbose prints them.

--verbose: a line for each size and backend, with the columns of nccl-tests, so that scripts for its output can read
this output. All reductions are in place: the out-of-place columns are for foreign arrays, the in-place columns for
arrays from allocate(), which peers do not have. Further columns: backend, min and p99 of both. The advice comes last.

time: before each iteration every rank writes its array and waits in a barrier. The time of an iteration is that of its
slowest rank; the median over the iterations is shown. The backends take turns, in an order drawn anew for each round,
so that a drifting machine affects all of them alike. algbw = size / time, busbw = algbw x 2(n-1)/n.
The picture of --plot and --html has the limit of memory (measured by copying) or network (by sending).
#wrong: elements that differ from the result in float64, on all ranks, after the timing. Exit code 1 if there are any.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    cli.add_sizes(parser, "8", "128M")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("-f", "--stepfactor", type=cli.at_least(1.01, float), default=2.0, metavar="F", help="default 2")
    step.add_argument("-i", "--stepbytes", type=cli.size, metavar="SIZE", help="instead: a fixed step between sizes")
    add(
        "-d",
        "--datatype",
        type=cli.dtype,
        default="float",
        metavar="TYPE",
        help="float, double, half, bfloat16, int32, int64 (default float)",
    )
    add("-o", "--op", type=cli.op, default="sum", metavar="OP", help="sum, avg (or mean), max, min, prod (default sum)")
    add("--compress", choices=Half.NAMES, help="let all backends send float and double as 16 bits; results are rounded")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="0: don't verify results (default 1)")
    cli.add_some(parser, "--backends", allreduce.NAMES, about="those that work here")
    cli.add_some(parser, "--peers", PEERS, default=[], about="other software; --peers: the installed ones")
    add("--cold", action="store_true", help="also measure each call after a pause that walks 8 MiB: with cold caches")
    add("--also", nargs="+", default=[], metavar="RUN", help="--json of jobs with another MPI library")
    cli.add_measuring_options(parser, f"{BUDGET:g}")
    add("-v", "--verbose", action="store_true", help="print a line for each size and backend")
    add("--json", metavar="FILE", help="everything, for benchmarks.compare and benchmarks.scaling")
    add("-F", "--csv", "--output_file", metavar="FILE", help="a line for each size, backend and kind of memory")
    add("--plot", metavar="FILE", help="a picture (.png, .svg, .pdf); needs matplotlib")
    add("--html", metavar="FILE", help="a page with the picture and all times, in one file; needs matplotlib")


def _run(world: Topology, args: argparse.Namespace, screen: Screen) -> int:
    comm = world.world
    cli.checked_op(comm, args.op, args.datatype)
    if args.stepbytes == 0:
        raise_together(comm, OptionError("-i 0: give a step of at least one byte"))
    wanted = cli.swept(comm, args, args.datatype, args.stepbytes)
    with Topology(comm, ranks_per_node=args.ranks_per_node) as topology:
        run = Run(
            machine={**machine.describe(args.peers), **limits.measure(topology)},
            node_sizes=list(topology.node_sizes),
            simulated=topology.simulated,
            dtype=str(args.datatype),
            op=args.op,
            date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            command=screen.command,
            compress=args.compress,
        )
        others = _others(comm, args.also, run.calls())
        usable = set(allreduce.available(topology)) & set(args.backends)
        machine.check_memory(comm, (1 + len(usable)) * wanted[-1])
        count = wanted[-1] // args.datatype.itemsize
        every = ((args.backends, allreduce.NAMES), (args.peers, PEERS))
        optional = [name for some, known in every for name in some if len(some) == len(known)]
        contenders, run.skipped = gather(
            topology, args.backends, args.peers, count, args.datatype, args.op,
            optional=optional, compress=args.compress,
        )  # fmt: skip
        _measure(comm, args, run, contenders, wanted, screen)
        for contender in contenders:
            contender.close()
    advised = advice(run)
    screen.say(table.footer(run), *(f"# {line}" for line in (*wrong_results(run), advised)))
    merge(run, others)
    if args.peers or args.cold or others:
        screen.say(*table.comparison(run))
    _write(comm, args, run, advised)
    return 1 if any(result.wrong for result in run.results) else 0


def _cells(contenders: list[Contender], foreign: np.ndarray, cold: bool) -> list[Cell]:
    """Return the calls to time. foreign: of this size; a slice of a long array may be in huge pages, and faster."""
    return [
        Cell(each.name, memory + when, each.call, array)
        for each in contenders
        for memory, array in (
            ("foreign", foreign if each.foreign is None else each.foreign),
            ("allocated", each.array),
        )
        for when in ("", COLD)[: 1 + cold]
        if array is not None
    ]


def _measure(
    comm: MPI.Intracomm,
    args: argparse.Namespace,
    run: Run,
    contenders: list[Contender],
    wanted: list[int],
    screen: Screen,
) -> None:
    """Measure size by size, and print each row when it is measured. Collective."""
    plan = Plan((args.budget or BUDGET) / len(wanted), args.iters, args.warmup_iters)
    rounded_to = dtypes.parse(args.compress or args.datatype)
    checker = Checker(comm, rounded_to, args.op) if args.check else None
    backends = [each.name for each in contenders]
    screen.say(table.header(run) if args.verbose else table.short_header(run, backends))
    with screen.bar(len(wanted)) as bar:
        for size in wanted:
            cells = _cells(contenders, np.zeros(size // args.datatype.itemsize, args.datatype), args.cold)
            found = measure_size(comm, cells, size, plan, checker)
            run.results += found
            if args.verbose:
                screen.say(*(table.row(run, [each for each in found if each.backend == name]) for name in backends))
            else:
                screen.say(table.short_row(run, found))
            bar.update()


def _others(comm: MPI.Intracomm, paths: list[str], calls: str) -> list[Run]:
    """Return the runs of --also, which rank 0 reads. Collective. Raises OptionError if they are not of these calls."""

    def read() -> list[str]:
        try:
            runs = [load(path) for path in paths]
        except FileError as error:
            raise OptionError(f"--also: {error}") from None
        for run, path in zip(runs, paths, strict=True):
            if run.calls() != calls:
                raise OptionError(f"--also {path}: it has {run.calls()}, and this run {calls}")
        return [to_json(run) for run in runs]

    texts = together(comm, lambda: read() if comm.rank == 0 else [])
    return [from_json(text) for text in root_value(comm, texts, "share the runs of --also")]


def _write(comm: MPI.Intracomm, args: argparse.Namespace, run: Run, advised: str) -> None:
    """Write the files that the options name, on rank 0. Collective."""
    contents: dict[str, Callable[[], str | bytes]] = {  # first the files from which the others can be made again
        "json": lambda: to_json(run, advised),
        "csv": lambda: to_csv(run),
        "plot": lambda: plot.draw(run, plot.kind_of(args.plot)),
        "html": lambda: report.page(run),
    }

    failures = []
    for option, content in contents.items() if comm.rank == 0 else ():
        path = getattr(args, option)
        try:
            if path:
                outputs.write(path, content())
        except Exception as failed:  # any exception: write the other files, then raise on all ranks
            failures.append(f"--{option} {path} was not written: {type(failed).__name__}: {failed}")
    raise_together(comm, OptionError("; ".join(failures)) if failures else None)


main = cli.command("benchmarks.bandwidth", __doc__, add_options, _run, EPILOG)

if __name__ == "__main__":
    sys.exit(main())
