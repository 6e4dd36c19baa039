"""Which strategy of training suits? The same network, data and epochs under all, with and without a slow rank.

    mpirun -n 5 python -m benchmarks.strategies --json out.json --plot out.png

A row takes a fixed time on every rank (--row-us), as if each had a processor of its own; the rest of it is slept. So
the strategies differ by who waits for whom and by what travels, also where ranks outnumber cores. The slow rank is
rank 1, a worker under every strategy. Ranks are simulated nodes of one unless --ranks-per-node says otherwise: what
they exchange travels in messages, which are counted (an MPI_Allreduce as a ring would send it).
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from allreduce.errors import OptionError
from allreduce.topology import Topology
from allreduce.transport.control import known
from benchmarks import cli
from benchmarks.comparing.findings import findings, row, table
from benchmarks.comparing.runs import SLOW_RANK, VARIANTS, Bench, Outcome, Variant, lineup
from benchmarks.showing import outputs, plot
from trainers import datasets

PROGRAM = "benchmarks.strategies"


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(PROGRAM, __doc__)
    add = parser.add_argument
    known = "; ".join(each.name for each in VARIANTS)
    add("--only", type=_variants, default=[], metavar="A;B", help=f"some of: {known} (default: all that fit the ranks)")
    add("--data", default="digits", metavar="SET", help=f"{' or '.join(datasets.NAMES)}, or files (default: digits)")
    add("--epochs", type=cli.at_least(1), default=10, metavar="N", help="(default: 10)")
    add("--batch-size", type=cli.at_least(1), default=100, metavar="N", help="global (default: 100)")
    add("--hidden", default="256,128", metavar="N,N", help="sizes of the hidden layers (default: 256,128)")
    add("--seed", type=cli.at_least(0), default=0, metavar="N", help="(default: 0)")
    add(
        "--repeats", type=cli.at_least(1), default=1, metavar="N",
        help="run everything N times, in turns, and keep the fastest run of each (default: 1)",
    )  # fmt: skip
    add("--row-us", type=cli.at_least(0, float), default=500, metavar="US", help="time of a row (default: 500 us)")
    add(
        "--slow-factor", type=cli.at_least(0, float), default=5, metavar="X",
        help="so many times as long does a row take on the slow rank; 0: no runs with one (default: 5)",
    )  # fmt: skip
    add(
        "--ranks-per-node", type=cli.at_least(0), default=1, metavar="N",
        help="simulate nodes of N ranks; 0: the nodes as they are (default: 1)",
    )  # fmt: skip
    add("--plot", metavar="FILE", help="draw the comparison (.png, .svg, .pdf)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON, to stdout without FILE")
    return parser


def _variants(text: str) -> list[str]:
    names = [each.strip() for each in text.split(";") if each.strip()]
    for name in names:
        if name not in [each.name for each in VARIANTS]:
            raise argparse.ArgumentTypeError(f"{name!r} is none of: {'; '.join(each.name for each in VARIANTS)}")
    return names


class _Screen:
    """Rank 0's output; with JSON on stdout it goes to stderr."""

    def __init__(self, shown: bool, stream: Any) -> None:
        self._shown, self._stream = shown, stream

    def say(self, text: str) -> None:
        if self._shown:
            print(text, file=self._stream, flush=True)


def _run(topology: Topology, args: argparse.Namespace) -> int:
    outputs.check(topology.world, {"--json": None if args.json == "-" else args.json, "--plot": args.plot})
    if args.plot and (problem := plot.missing(args.plot)):
        raise known(OptionError(problem), topology.world)
    variants = lineup(args.only, topology.size)
    if not variants:
        raise known(OptionError("too few ranks for any of these: start 2 or more"), topology.world)
    screen = _Screen(topology.rank == 0, sys.stderr if args.json == "-" else sys.stdout)
    outcomes = _measure(topology, args, variants, screen)
    screen.say("#")
    for line in [*table(outcomes), "#", *findings(outcomes)]:
        screen.say(line)
    if topology.rank == 0:
        _write(topology, args, outcomes)
    return 0


def _measure(topology: Topology, args: argparse.Namespace, variants: list[Variant], screen: _Screen) -> list[Outcome]:
    bench = Bench(topology, args)
    slows = (False, True) if args.slow_factor and topology.size > SLOW_RANK else (False,)
    screen.say(
        f"# {topology}; {args.epochs} epochs of {args.data}, batch {args.batch_size}, {args.hidden} hidden units"
    )
    screen.say(f"# a row takes {args.row_us:g} us, on the slow rank {args.slow_factor:g} times as long")
    left_out = [each.name for each in lineup(args.only, 1 << 20) if each not in variants]
    if left_out:
        screen.say(f"# too few ranks for: {', '.join(left_out)}")
    cases = [(variant, slow) for slow in slows for variant in variants]
    best: dict[tuple[Variant, bool], Outcome] = {}
    for number, (variant, slow) in enumerate(args.repeats * cases, 1):
        outcome = bench.run(variant, slow)
        screen.say(f"# {number}/{args.repeats * len(cases)}{' slow' if slow else ''}:{row(outcome)}")
        fastest = best.setdefault((variant, slow), outcome)
        best[variant, slow] = min(fastest, outcome, key=lambda each: each.seconds)
    return list(best.values())


def _write(topology: Topology, args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    if args.json:
        options = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
        machine = {
            "ranks": topology.size,
            "nodes": topology.nodes,
            "cores": topology.cores,
            "machine": platform.machine(),
            "mpi": MPI.Get_library_version().split(",")[0].strip("\0"),
        }
        runs = [each.as_dict() for each in outcomes]
        text = json.dumps({**machine, "options": options, "runs": runs, "findings": findings(outcomes)}, indent=1)
        outputs.put(args.json, text)
    if args.plot:
        from benchmarks.comparing import picture

        title = (
            f"{args.data}, {args.hidden} hidden units, batch {args.batch_size}, {args.epochs} epochs, "
            f"{topology.size} ranks; {args.row_us:g} us a row, {args.slow_factor:g} times that on the slow rank"
        )
        outputs.write(args.plot, picture.draw(outcomes, title, args.plot.rpartition(".")[2].lower()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code. Collective."""
    with Topology() as topology:
        args = cli.parse_together(_parser(), argv, topology.world)
        return cli.run_together(PROGRAM, topology.world, lambda: _run(topology, args))


if __name__ == "__main__":
    sys.exit(main())
