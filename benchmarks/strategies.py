"""Which strategy of training suits? The same network, data and epochs under all, with and without a slow rank.

    mpirun -n 5 python -m benchmarks.strategies --json out.json --plot out.png

A row takes a fixed time on every rank (--row-us), as if each had a processor of its own; the rest of it is slept. So
the strategies differ by who waits for whom and by what travels, also where ranks outnumber cores. The slow rank is
rank 1, a worker under every strategy. Ranks are simulated nodes of one unless --ranks-per-node says otherwise: what
they exchange travels in messages, which are counted (an MPI_Allreduce as a ring would send it).
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from typing import Any

from allreduce.errors import OptionError
from allreduce.machine import identify
from allreduce.topology import Topology
from allreduce.transport.control import known
from benchmarks.lib import cli, outputs, plot
from benchmarks.lib.strategy_runs import SLOW_RANK, VARIANTS, Bench, Outcome, Variant, lineup
from trainers import datasets

KEEPS_SPEED = 1.25  # times the time with equal ranks
SAME_ACCURACY = 0.02
HALF = 0.6
LEVEL = 1.05  # times the fastest one's time: as fast as that


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each run; the runs with a slow rank follow the others."""
    head = f"{'':<25}{'s/epoch':>8}{'updates/s':>11}{'samples/s':>11}{'accuracy':>10}{'behind':>8}{'dropped':>9}"
    lines = [f"# {head}{'MB/epoch':>10}{'MB/s':>8}  busiest"]
    for slow in (False, True):
        some = [each for each in outcomes if each.slow == slow]
        if some:
            lines.append(f"# {'one slow rank' if slow else 'equal ranks'}")
        lines += [row(each) for each in some]
    return lines


def row(outcome: Outcome) -> str:
    behind = f"{outcome.mean_staleness:.1f}" if outcome.staleness else "-"
    return (
        f"  {outcome.variant:<25}{outcome.seconds:>8.3f}{outcome.updates_per_second:>11.0f}"
        f"{outcome.samples_per_second:>11.0f}{outcome.accuracy:>10.4f}{behind:>8}{outcome.dropped:>9}"
        f"{outcome.megabytes:>10.1f}{outcome.megabytes / outcome.seconds:>8.1f}  rank {outcome.busiest}"
    )


def findings(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each claim of which the runs are there."""
    by_name = {(each.variant, each.slow): each for each in outcomes}
    lines = []
    for claim in (_fastest, _spare, _steps, _accuracy, _bytes):
        lines += claim(by_name)
    return lines


Runs = dict[tuple[str, bool], Outcome]


def _verdict(shown: bool, claim: str, figures: str) -> str:
    return f"{'Shown' if shown else 'Refuted'}: {claim} ({figures})"


def _fastest(runs: Runs) -> list[str]:
    equal = sorted((each for each in runs.values() if not each.slow), key=lambda each: -each.samples_per_second)
    mirrored = runs.get(("mirrored", False))
    if len(equal) < 2 or mirrored is None:
        return []
    figures = ", ".join(f"{each.variant} {each.samples_per_second:.0f}" for each in equal[:3])
    shown = mirrored.samples_per_second * LEVEL >= equal[0].samples_per_second
    claim = "with equal ranks nothing is faster than mirrored, by more than 5 %"
    return [_verdict(shown, claim, f"samples/s: {figures}")]


def _spare(runs: Runs) -> list[str]:
    ratios = _ratios(runs)
    if not {"mirrored", "1 spare replica"} <= ratios.keys():
        return []
    spare, mirrored = ratios["1 spare replica"], ratios["mirrored"]
    figures = f"an epoch takes {spare:.2f} times as long with a slow rank; mirrored {mirrored:.2f} times"
    shown = spare <= KEEPS_SPEED and spare < mirrored
    return [_verdict(shown, "spare replicas keep their speed with a slow rank", figures)]


def _steps(runs: Runs) -> list[str]:
    slow = sorted((each for each in runs.values() if each.slow), key=lambda each: -each.updates_per_second)
    if not any("async" in each.variant for each in slow) or len(slow) < 2:
        return []
    figures = ", ".join(f"{each.variant} {each.updates_per_second:.0f}" for each in slow[:4])
    return [_verdict("async" in slow[0].variant, "with a slow rank async does most steps", f"updates/s: {figures}")]


def _accuracy(runs: Runs) -> list[str]:
    lines = []
    for slow in (False, True):
        mirrored, scaled = runs.get(("mirrored", slow)), runs.get(("1 server, async, scale", slow))
        if mirrored and scaled:
            figures = f"{scaled.accuracy:.4f}, mirrored {mirrored.accuracy:.4f}"
            kept = runs.get(("1 server, async", slow))
            figures += f'; stale="keep" {kept.accuracy:.4f}' if kept else ""
            where = "with a slow rank" if slow else "with equal ranks"
            shown = scaled.accuracy >= mirrored.accuracy - SAME_ACCURACY
            lines.append(_verdict(shown, f'{where} async reaches the accuracy with stale="scale"', figures))
    return lines


def _bytes(runs: Runs) -> list[str]:
    lines = []
    for kind in ("sync", "async"):
        one, two = runs.get((f"1 server, {kind}", False)), runs.get((f"2 servers, {kind}", False))
        if one and two:
            shares = one.megabytes / one.workers, two.megabytes / two.workers
            figures = (
                f"{kind}: {shares[0]:.1f} and {shares[1]:.1f} MB an epoch and worker; an epoch takes "
                f"{one.seconds:.3f} s with {one.workers} workers and {two.seconds:.3f} s with {two.workers}"
            )
            claim = "two servers halve the bytes through the busiest rank"
            lines.append(_verdict(shares[1] <= HALF * shares[0], claim, figures))
    return lines


def _ratios(runs: Runs) -> dict[str, float]:
    """By variant, how much longer an epoch takes with a slow rank."""
    return {
        name: each.seconds / runs[name, False].seconds
        for (name, slow), each in runs.items()
        if slow and (name, False) in runs
    }


EQUAL, SLOW = "#1f77b4", "#d62728"
PANELS = (
    ("seconds an epoch", lambda each: each.seconds, "{:.2f}"),
    ("updates a second", lambda each: each.updates_per_second, "{:.0f}"),
    ("accuracy on test data", lambda each: each.accuracy, "{:.3f}"),
    ("MB an epoch through the busiest rank", lambda each: each.megabytes, "{:.1f}"),
    ("mean updates behind", lambda each: each.mean_staleness, "{:.1f}"),
)


def draw(outcomes: Sequence[Outcome], title: str, kind: str = "png") -> bytes:
    """The picture as the content of a file of a kind: "png", "svg", "pdf"."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(each.variant for each in outcomes))
    figure = Figure(figsize=(15, 2.2 + 0.85 * len(names)), layout="constrained")
    axes = figure.subplots(2, 3, sharey=True).flat
    for axis, (label, value, text) in zip(axes, PANELS, strict=False):
        _bars(axis, outcomes, names, value, text)
        axis.set_title(label, fontsize=11)
    _histogram(axes[len(PANELS)], outcomes, names)
    figure.suptitle(title, fontsize=12)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return plot.content(figure, kind)


def _bars(axis: Any, outcomes: Sequence[Outcome], names: list[str], value: Any, text: str) -> None:
    for slow, colour, label in ((False, EQUAL, "equal ranks"), (True, SLOW, "one slow rank")):
        some = [each for each in outcomes if each.slow == slow]
        places = [names.index(each.variant) + (0.2 if slow else -0.2) for each in some]
        bars = axis.barh(places, [value(each) for each in some], 0.38, color=colour, label=label)
        axis.bar_label(bars, [text.format(value(each)) for each in some], padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.margins(x=0.18)
    axis.set_axisbelow(True)
    axis.grid(True, axis="x", alpha=0.3)


def _histogram(axis: Any, outcomes: Sequence[Outcome], names: list[str]) -> None:
    """How many gradients were so many updates behind, as a band of squares for each run."""
    most = max([len(each.staleness) for each in outcomes] or [0])
    for each in outcomes:
        place = names.index(each.variant) + (0.2 if each.slow else -0.2)
        total = max([*each.staleness, 1])
        for behind, count in enumerate(each.staleness):
            colour = SLOW if each.slow else EQUAL
            axis.barh(place, 0.95, 0.38, left=behind - 0.475, color=colour, alpha=count / total, linewidth=0)
    axis.set_xlim(-0.6, max(most, 1) - 0.4)
    axis.set_title("updates behind: the darker, the more gradients", fontsize=11)


PROGRAM = "benchmarks.strategies"


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(PROGRAM, __doc__)
    add = parser.add_argument
    cli.add_some(parser, "--only", [each.name for each in VARIANTS], ";")
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
    cli.add_json_option(parser)
    return parser


def _run(topology: Topology, args: argparse.Namespace) -> int:
    screen = outputs.Screen(topology.world, args.json, {"--plot": args.plot})
    if args.plot and (problem := plot.missing(args.plot)):
        raise known(OptionError(problem), topology.world)
    variants = lineup(args.only, topology.size)
    if not variants:
        raise known(OptionError("too few ranks for any of these: start 2 or more"), topology.world)
    outcomes = _measure(topology, args, variants, screen)
    screen.say("#", *table(outcomes), "#", *findings(outcomes))
    options = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
    machine = {"machine": platform.machine(), "mpi": identify()["mpi"]}
    sizes = {"ranks": topology.size, "nodes": topology.nodes, "cores": topology.cores}
    runs = [each.as_dict() for each in outcomes]
    screen.put({**sizes, **machine, "options": options, "runs": runs, "findings": findings(outcomes)})
    if args.plot and topology.rank == 0:
        title = (
            f"{args.data}, {args.hidden} hidden units, batch {args.batch_size}, {args.epochs} epochs, "
            f"{topology.size} ranks; {args.row_us:g} us a row, {args.slow_factor:g} times that on the slow rank"
        )
        outputs.write(args.plot, draw(outcomes, title, plot.kind_of(args.plot)))
    return 0


def _measure(
    topology: Topology, args: argparse.Namespace, variants: list[Variant], screen: outputs.Screen
) -> list[Outcome]:
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


main = cli.command(_parser, _run)

if __name__ == "__main__":
    sys.exit(main())
