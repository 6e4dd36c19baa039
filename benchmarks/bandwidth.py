"""Bandwidth and latency of every backend, side by side, in the form of nccl-tests.

mpirun -n 4 python -m benchmarks.bandwidth
mpirun -n 4 python -m benchmarks.bandwidth -b 1K -e 64M -f 4 --backends shared,ring,native --peers gloo
mpirun -n 4 python -m benchmarks.bandwidth --json run.json --html report.html --plot busbw.png
"""

import argparse
import datetime
import shlex
import sys
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce import Topology
from allreduce.arrays import dtypes
from allreduce.errors import AllReduceError, OptionError
from allreduce.transport.control import raise_together, root_value
from allreduce.wrappers.compressed import SHORT
from benchmarks.lib import cli, machine, outputs, plot, report, sizes, table
from benchmarks.lib.contenders import ALL, PEERS, Contender, gather
from benchmarks.lib.results import Result, Run, summarize, to_csv, to_json
from benchmarks.lib.timing import Cell, Checker, Plan, measure
from benchmarks.lib.verdict import advice, verdict, wrong_results

PROGRAM = "benchmarks.bandwidth"
BUDGET = 60.0
EPILOG = """\
output: a line for each size, with the fastest backend for arrays from the backend's allocate() and for foreign ones
(the program's own), and one sentence of advice. Everything is in --json, --csv and --html, and printed by --verbose.

--verbose: a line for each size and backend, with the columns of nccl-tests, so that scripts which read its output read
this one. All reductions are in place: the columns of out-of-place are of foreign arrays, those of in-place of arrays
from allocate(), which peers have not. Then backend, and min and p99 of both; at the end who wins in which range.

time: before each iteration every rank writes its array and waits in a barrier; an iteration takes as long as its
slowest rank; the median over the iterations is shown. The backends take turns (A B C A B C ...), so that a machine
that drifts hits all of them. algbw = size / time, busbw = algbw x 2(n-1)/n.
#wrong: elements that differ from the result in float64, on all ranks, after the timing. Exit code 1 if there are any.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on all ranks; the exit code."""
    given = sys.argv[1:] if argv is None else argv
    return cli.run(_parser(), given, lambda world, args: _run(world.world, args, given))


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(PROGRAM, __doc__, EPILOG)
    add = parser.add_argument
    add("-b", "--minbytes", type=cli.size, default=8, metavar="SIZE", help="smallest size (default 8); K, M, G work")
    add("-e", "--maxbytes", type=cli.size, default=128 << 20, metavar="SIZE", help="largest size (default 128M)")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("-f", "--stepfactor", type=cli.at_least(1.01, float), default=2.0, metavar="F", help="default 2")
    step.add_argument("-i", "--stepbytes", type=cli.size, metavar="SIZE", help="a fixed step between sizes instead")
    add(
        "-d",
        "--datatype",
        type=cli.dtype,
        default="float",
        metavar="TYPE",
        help="float, double, half, bfloat16, int32, int64 (default float)",
    )
    add("-o", "--op", type=cli.op, default="sum", metavar="OP", help="sum, avg (or mean), max, min, prod (default sum)")
    add(
        "--compress",
        choices=SHORT,
        help="have all backends send float and double as 16 bits; results may be rounded then",
    )
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="0: don't verify results (default 1)")
    add(
        "--backends",
        type=cli.names,
        default=[ALL],
        metavar="A,B",
        help=f"all (that work here), or some of {', '.join(allreduce.NAMES)}",
    )
    add(
        "--peers", type=cli.names, default=[], metavar="A,B", help=f"other software to compare with: {', '.join(PEERS)}"
    )
    cli.add_measuring_options(parser, f"{BUDGET:g}")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="print a line for each backend, and who wins in which range of sizes",
    )
    add("--json", metavar="FILE", help="everything, for benchmarks.compare and benchmarks.scaling")
    add("-F", "--csv", "--output_file", metavar="FILE", help="a line for each size, backend and kind of memory")
    add("--plot", metavar="FILE", help="a picture (.png, .svg, .pdf); needs matplotlib")
    add("--html", metavar="FILE", help="a page with interactive charts, in one file; needs plotly")
    return parser


def _run(comm: MPI.Intracomm, args: argparse.Namespace, argv: Sequence[str]) -> int:
    _check_outputs(comm, args)
    cli.checked_op(comm, args.op, args.datatype)
    wanted = _sizes(comm, args)
    everything = ALL in args.backends
    names = list(allreduce.NAMES) if everything else args.backends
    with Topology(comm, ranks_per_node=args.ranks_per_node) as topology:
        contenders, skipped = gather(
            topology, names, args.peers, args.datatype, args.op, optional=everything, compress=args.compress
        )
        cells = _cells(topology, contenders, wanted[-1], args.datatype, skipped, everything)
        run = Run(
            machine=machine.describe(args.peers),
            node_sizes=list(topology.node_sizes),
            simulated=topology.simulated,
            dtype=str(args.datatype),
            op=args.op,
            date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            command=f"mpirun -n {comm.size} python -m {PROGRAM} {shlex.join(argv)}".rstrip(),
            skipped=skipped,
        )
        _measure_all(comm, args, run, cells, wanted)
        for contender in contenders:
            contender.close()
    if comm.rank == 0:
        said = verdict(run) if args.verbose else wrong_results(run)
        print(table.footer(run), *(f"# {line}" for line in (*said, advice(run))), sep="\n", flush=True)
    _write(comm, args, run)
    return 1 if any(result.wrong for result in run.results) else 0


def _check_outputs(comm: MPI.Intracomm, args: argparse.Namespace) -> None:
    """Refuse what can't be written, before anything is measured. Collective."""
    outputs.check(comm, {"--json": args.json, "--csv": args.csv, "--plot": args.plot, "--html": args.html})
    problem = plot.missing(args.plot) if args.plot and comm.rank == 0 else None
    if args.html and comm.rank == 0:
        problem = problem or report.missing()
    problem = root_value(comm, problem, "check the outputs")
    raise_together(comm, OptionError(problem) if problem else None)


def _sizes(comm: MPI.Intracomm, args: argparse.Namespace) -> list[int]:
    if args.stepbytes == 0:
        raise_together(comm, OptionError("-i 0: give a step of at least one byte"))
    swept = sizes.sweep(args.minbytes, args.maxbytes, args.stepfactor, args.stepbytes)
    wanted = sizes.whole(swept, args.datatype.itemsize)
    if not wanted:
        told = f"-b {args.minbytes} -e {args.maxbytes}: no size between them holds an element of {args.datatype}"
        raise_together(comm, OptionError(f"{told}; -e must be at least -b and {args.datatype.itemsize}"))
    return wanted


def _cells(
    topology: Topology,
    contenders: list[Contender],
    largest: int,
    dtype: np.dtype,
    skipped: dict[str, str],
    everything: bool,
) -> list[Cell]:
    """An array for each contender from its allocate(), and one foreign array that all use in turn. Collective.

    Who can't allocate is left out, with the reason in `skipped`, unless it was asked for by name.
    """
    count = largest // dtype.itemsize
    arrays = 1 + sum(contender.allocate is not None for contender in contenders)
    machine.check_memory(topology.world, arrays * largest)
    foreign = np.zeros(count, dtype)
    cells = []
    for contender in list(contenders):
        mine = [Cell(contender.name, "foreign", contender.call, foreign)]
        try:
            if contender.allocate is not None:
                mine.append(Cell(contender.name, "allocated", contender.call, contender.allocate(count, dtype)))
        except AllReduceError as error:
            if not everything:
                raise
            skipped[contender.name] = str(error)
            contenders.remove(contender)
            contender.close()
            continue
        cells += mine
    return cells


def _measure_all(comm: MPI.Intracomm, args: argparse.Namespace, run: Run, cells: list[Cell], wanted: list[int]) -> None:
    """Measure size by size, printing rows as they come. Collective."""
    from tqdm import tqdm

    plan = Plan((args.budget or BUDGET) / len(wanted), args.iters, args.warmup_iters)
    rounded_to = dtypes.parse(args.compress or args.datatype)
    checker = Checker(comm, rounded_to, args.op) if args.check else None
    leading = comm.rank == 0
    if leading:
        backends = list(dict.fromkeys(cell.backend for cell in cells))
        print(table.header(run) if args.verbose else table.short_header(run, backends), flush=True)
    for size in tqdm(wanted, unit="size", file=sys.stderr, disable=None if leading else True, leave=False):
        count = size // args.datatype.itemsize
        times, wrong = measure(comm, cells, count, plan, checker)
        found = [
            summarize(cell.backend, cell.memory, count, args.datatype.itemsize, comm.size, seconds, bad)
            for cell, seconds, bad in zip(cells, times, wrong, strict=True)
        ]
        run.results += found
        for line in _rows(run, found, args.verbose) if leading else ():
            tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def _rows(run: Run, found: list[Result], verbose: bool) -> list[str]:
    """The lines about one size."""
    if not verbose:
        return [table.short_row(found)]
    backends = dict.fromkeys(each.backend for each in found)
    return [table.row(run, [each for each in found if each.backend == backend]) for backend in backends]


def _write(comm: MPI.Intracomm, args: argparse.Namespace, run: Run) -> None:
    """Write the files that were asked for, on rank 0. Collective."""
    contents: dict[str, Callable[[], str | bytes]] = {  # what can be read again comes first
        "json": lambda: to_json(run, verdict(run), advice(run)),
        "csv": lambda: to_csv(run),
        "plot": lambda: plot.draw(run, plot.kind_of(args.plot)),
        "html": lambda: report.page(run, verdict(run), advice(run)),
    }

    failures = []
    for option, content in contents.items() if comm.rank == 0 else ():
        path = getattr(args, option)
        try:
            if path:
                outputs.write(path, content())
        except Exception as failed:  # whatever it is, the others are written, and the ranks don't wait for rank 0
            failures.append(f"--{option} {path} was not written: {type(failed).__name__}: {failed}")
    raise_together(comm, OptionError("; ".join(failures)) if failures else None)


if __name__ == "__main__":
    sys.exit(main())
